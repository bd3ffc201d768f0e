"""The lab: hosts, links, output and ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.labs import PYTHON, needs_a_lab, output
from tests.test_cli import thinwire
from thinwire import lab
from thinwire.cli import main
from thinwire.lab import check, network, permission, runner
from thinwire.lab.links import Event, Link


def test_words_become_figures():
    made = lab.cluster(3, "100mbit,10kbit,1.5gbit", "5ms", "0.1%", events=["2s:all:rate=1mbit", "500ms:host1:down"])
    assert [link.rate for link in made.links] == [100e6, 10e3, 1.5e9]
    assert all(link.delay == pytest.approx(5e-3) and link.loss == pytest.approx(1e-3) for link in made.links)
    assert made.events == (Event(0.5, 1, "down"), Event(2.0, None, "rate", 1e6))
    assert lab.cluster(2, None).links == (Link(None),) * 2


def test_a_preset_gives_what_is_left_out():
    made = lab.cluster(2, "7mbit", preset="wan")
    assert made.links[0] == Link(7e6, lab.PRESETS["wan"].delay, lab.PRESETS["wan"].loss)


def test_events_add_up():
    made = lab.cluster(2, "100mbit", events=["1s:host1:rate=10mbit", "2s:host1:delay=20ms"])
    (_, _), (at, steps) = network.schedule(made)
    assert at == 2
    assert "rate 10000000bit" in steps[0].lines[0], "the delay's event brought the first rate back"
    assert steps[-1].tool == "switch" and steps[-1].lines[0].startswith("1 0.02 ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "100mbps", "--", "true"], ["100mbps", "mbit"]),
        (["--rate", "100", "--", "true"], ["100", "unit"]),
        (["--rate", "0mbit", "--", "true"], ["above 0", "0mbit"]),
        (["--rate", "-5mbit", "--", "true"], ["above 0", "-5mbit"]),
        (["--rate", "1bit", "--", "true"], ["1kbit"]),
        (["--rate", "1mbit,2mbit,3mbit", "--", "true"], ["3 values", "2 hosts"]),
        (["--delay", "5", "--", "true"], ["5", "ms"]),
        (["--delay", "-5ms", "--", "true"], ["delay", "-5ms"]),
        (["--loss", "100%", "--", "true"], ["loss", "100%"]),
        (["--preset", "hom", "--", "true"], ["hom", "home"]),
        (["--hosts", "0", "--", "true"], ["254", "not 0"]),
        (["--hosts", "255", "--", "true"], ["addresses", "255"]),
        (["--per-host", "0", "--", "true"], ["per-host", "at least 1"]),
        (["--event", "1s:host2:down", "--", "true"], ["host2", "host1"]),
        (["--event", "1s:all:rate=0mbit", "--", "true"], ["rate", "0mbit"]),
        (["--event", "1s:all:delay=99s", "--", "true"], ["delay", "99s"]),
        (["--event", "soon", "--", "true"], ["soon", "10s:host2:down"]),
        (["--", "no-such-command"], ["no-such-command"]),
        ([], ["no command"]),
        (["--check", "--", "true"], ["--check"]),
        (["--check", "--hosts", "1"], ["2 hosts"]),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_code_two(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thinwire", "lab", *arguments])
    monkeypatch.setattr(subprocess, "Popen", None)  # before anything is started
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert all(word in line for word in words)


def test_help_ends_with_examples():
    assert "thinwire lab --check" in thinwire("lab", "--help").stdout.split("Examples:")[1]


@needs_a_lab
def test_a_job_waits_for_a_switch_that_is_slow_to_start(tmp_path, monkeypatch):
    slow = tmp_path / "slow.py"
    slow.write_text(f"import runpy, time\ntime.sleep(1)\nrunpy.run_path({str(runner.SWITCH)!r}, run_name='__main__')\n")
    monkeypatch.setattr(runner, "SWITCH", slow)
    begun = time.monotonic()
    assert lab.missing() is None
    assert time.monotonic() - begun > 1


@needs_a_lab
def test_a_switch_that_cannot_listen_is_said_to_be_so(tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no packet sockets')")
    monkeypatch.setattr(runner, "SWITCH", broken)
    assert "no packet sockets the switch could not listen" in lab.missing()


@pytest.mark.parametrize("switch", permission.SWITCHES, ids=lambda switch: switch[0])
def test_what_forbids_a_lab_is_named_with_what_allows_it(tmp_path, switch):
    file, forbids, allows = switch
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(f"{forbids}\n")
    told = permission.explain("namespaces: Operation not permitted\n", tmp_path)
    assert allows in told and "Operation not permitted" in told and "\n" not in told


def test_without_iproute2_the_package_is_named(monkeypatch):
    monkeypatch.setattr(permission, "ADMIN", ())
    monkeypatch.setenv("PATH", "/nowhere")
    assert "iproute2" in (lab.missing() or "")
    with pytest.raises(ValueError, match="iproute2"):
        lab.run(lab.cluster(1, None), [sys.executable])


@needs_a_lab
@pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("setpriv")), reason="unshare and setpriv are not installed"
)
def test_where_namespaces_are_forbidden_one_line_says_so():
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    command = ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-m", "thinwire", "lab", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "not permitted" in line and "sysctl -w user.max_user_namespaces" in line


SURVEY = """
import json, os, socket, sys
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
interfaces = sorted(name for _, name in socket.if_nameindex())
print(json.dumps({
    **{name: os.environ[name] for name in names}, "interfaces": interfaces, "gloo": os.environ["GLOO_SOCKET_IFNAME"],
    "cwd": os.getcwd(), "own": os.environ["OWN"], "input": sys.stdin.read(),
    "cores": sorted(os.sched_getaffinity(0)),
    "host0": socket.gethostbyname("host0"), "back": socket.gethostbyaddr(os.environ["MASTER_ADDR"])[0],
}))
"""


@needs_a_lab
def test_every_process_is_told_what_torchrun_would_tell_it():
    code, said = output(lab.cluster(2, "10mbit", per_host=2), [*PYTHON, SURVEY], OWN="kept")
    assert code == 0
    facts = sorted((json.loads(line) for lines in said for line in lines), key=lambda fact: int(fact["RANK"]))
    assert [(f["RANK"], f["GROUP_RANK"], f["LOCAL_RANK"]) for f in facts] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
    ]
    for fact in facts:
        assert (fact["WORLD_SIZE"], fact["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert fact["cores"] == lab.runner.cores(int(fact["GROUP_RANK"]), 2)
        assert fact["interfaces"] == sorted(["lo", fact["gloo"]])
        assert fact["MASTER_ADDR"] == fact["host0"] and fact["back"] == "host0"
        assert (fact["cwd"], fact["own"], fact["input"]) == (os.getcwd(), "kept", "")


@pytest.mark.parametrize(
    ("hosts", "machine", "shares"),
    [
        (4, {0, 1}, [[0], [1], [0], [1]]),
        (2, {3, 5, 8, 9}, [[3, 5], [8, 9]]),
        (3, {0, 1}, [[0, 1], [0, 1], [0, 1]]),
        (2, {0, 1, 2}, [[0], [1]]),
    ],
)
def test_every_host_has_as_much_of_the_machine(hosts, machine, shares, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: machine)
    assert [lab.runner.cores(host, hosts) for host in range(hosts)] == shares


@needs_a_lab
def test_lines_are_prefixed_and_whole():
    speak = "printf 'rank %s\\nno newline' $RANK; printf '\\377\\n' >&2"
    done = thinwire("lab", "--hosts", 2, "--", "sh", "-c", speak)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(f"host{r} | {text}" for r in (0, 1) for text in (f"rank {r}", "no newline\ufffd"))


@needs_a_lab
def test_the_first_failure_is_the_result_and_ends_the_rest():
    script = 'trap "echo ending; exit 0" TERM; if [ $RANK = 1 ]; then sleep 0.5; exit 7; fi; sleep 60 & wait'
    start = time.monotonic()
    code, said = output(lab.cluster(3, None), ["sh", "-c", script])
    assert code == 7
    assert said == [["ending"], [], ["ending"]]
    assert time.monotonic() - start < 20


@needs_a_lab
def test_who_does_not_heed_is_killed():
    script = 'trap "" TERM; if [ $RANK = 1 ]; then kill -9 $$; fi; while true; do sleep 1; done'
    start = time.monotonic()
    assert output(lab.cluster(2, None), ["sh", "-c", script])[0] == 128 + signal.SIGKILL
    assert time.monotonic() - start < 20


@needs_a_lab
def test_a_listener_that_raises_ends_the_lab():
    def fail(_host, line):
        raise ArithmeticError(line)

    with pytest.raises(ArithmeticError, match="hello"):
        lab.run(lab.cluster(2, None), ["sh", "-c", "echo hello; sleep 60"], fail)


def ordinary():
    """An interpreter and the settings to run it as one who is not root."""
    if os.geteuid():
        return sys.executable, {}
    user = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        try:
            subprocess.run([python, "-c", f"open({lab.__file__!r})"], check=True, capture_output=True, **user)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python, user
    return None


@needs_a_lab
@pytest.mark.skipif(ordinary() is None, reason="an ordinary user may run no interpreter here, or not read the code")
def test_an_ordinary_user_can_run_it():
    python, user = ordinary()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
    probe = [python, "-I", "-S", str(Path(check.PROBE)), "0", "1", network.address(1), "0.5"]
    command = [python, "-m", "thinwire", "lab", "--rate", "20mbit", "--delay", "2ms", "--", *probe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env, **user)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" | ")[1].split() for line in done.stdout.splitlines())
    assert float(said["rtt"]) >= 4e-3
    assert 10e6 < float(said["rate"]) < 22e6
