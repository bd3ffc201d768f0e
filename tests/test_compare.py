"""``thinwire compare``: bad input, a run over loopback, a run towards a target, and the wire's own count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

import thinwire as tw
from thinwire import cli, lab, workloads
from thinwire.cli import launch
from thinwire.workloads.comparison import EVENT
from thinwire.workloads.contestant import SETTLING, SMOOTH

TINY = ["--workload", "lm:layers=1,width=32,head=16,context=32,batch=4", "--hosts", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("thin wires carry little, so say little, and say it well. " * 400)
    return path


def thinwire(*arguments, timeout=240):
    command = [sys.executable, "-m", "thinwire", "compare", *map(str, arguments)]
    env = os.environ | {"COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, done.stderr
    return done


def here(monkeypatch, *arguments):
    """The command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["thinwire", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["at least one method"]),
        (["ddp", "acpp"], ["acpp", "acp"]),
        (["ddpp"], ["ddpp", "ddp"]),
        (["ddp:rank=4"], ["rank"]),
        (["torch-powersgd:rank=0"], ["rank", "at least 1"]),
        (["adm+ddp"], ["adm", "adam"]),
        (["apm+ddp"], ["apm", "adam"]),
        (["ddp", "acp:rnk=4"], ["rnk", "rank"]),
        (["ddp", "acp", "ddp"], ["ddp", "twice"]),
        (["ddp", "--steps", "0"], ["steps", "at least 1"]),
        (["ddp", "--repeats", "0"], ["repeats", "at least 1"]),
        (["ddp", "--hosts", "0"], ["hosts"]),
        (["ddp", "--target-loss", "-1"], ["target_loss"]),
        (["ddp", "--lr", "nan"], ["lr"]),
        (["ddp", "--rate", "100mbot"], ["100mbot"]),
        (["ddp", "--rate", "0mbit"], ["rate"]),
        (["ddp", "--preset", "moon"], ["moon"]),
        (["ddp", "--workload", "lmm"], ["lmm", "lm"]),
        (["ddp", "--report", "nowhere/report.html"], ["nowhere"]),
        (["ddp", "--json", "nowhere/out.json"], ["nowhere"]),
        (["ddp", "--report", "."], ["folder"]),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_code_two_before_anything_starts(monkeypatch, capsys, arguments, words):
    def started(*_args, **_more):
        raise AssertionError("workers were started")

    monkeypatch.setattr(launch, "run", started)
    monkeypatch.setattr(lab, "run", started)
    assert here(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert all(word in line for word in words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_report_that_may_not_be_written(monkeypatch, capsys, tmp_path):
    tmp_path.chmod(0o500)
    assert here(monkeypatch, "ddp", "--report", tmp_path / "report.html") == 2
    assert "permission denied" in capsys.readouterr().err


def test_a_lab_that_is_not_permitted(monkeypatch, capsys):
    monkeypatch.setattr(lab, "missing", lambda: "namespaces are not permitted here")
    assert here(monkeypatch, "ddp", "--rate", "100mbit") == 2
    assert capsys.readouterr().err == "thinwire: namespaces are not permitted here\n"


def test_a_worker_that_fails_ends_the_comparison_with_its_reason(monkeypatch, capsys):
    def run(_command, _workers, on_line):
        on_line(1, "a line of its own")
        on_line(1, EVENT + json.dumps({"error": "rank 1: the method broke"}))
        on_line(0, EVENT + json.dumps({"error": "rank 0: connection closed"}))
        return 1

    monkeypatch.setattr(launch, "run", run)
    assert here(monkeypatch, "ddp", *TINY) == 1
    assert capsys.readouterr().err.splitlines() == ["a line of its own", "thinwire: rank 1: the method broke"]


METHODS = ["ddp", "local", "dense", "acp:rank=2", "torch-powersgd:rank=2", "apm:warmup_steps=6", "sgd+ddp"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("compared")
    options = ["--steps", 4, "--repeats", 2, "--data", text, "--json", folder / "out.json"]
    done = thinwire(*METHODS, *TINY, *options, "--report", folder / "report.html")
    return done, json.loads((folder / "out.json").read_text()), (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def runs(compared):
    return {run["method"]: run for run in compared[1]["runs"]}


def test_the_table_has_every_method_and_fits(compared):
    done, _, report = compared
    assert all(any(line.split()[:1] == [method] for line in done.stdout.splitlines()) for method in METHODS)
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "unshaped" in done.stdout
    assert report.startswith("<!doctype html>")


def test_every_run_has_its_figures(runs):
    assert list(runs) == METHODS
    for run in runs.values():
        assert len(run["losses"]) == len(run["seconds"]) == len(run["bytes"]) == 8
        assert all(a < b for a, b in pairwise(run["seconds"]))
        assert run["step_ms_p10"] <= run["step_ms"] <= run["step_ms_p90"]
        parts = run["compute_ms"] + run["compress_ms"] + run["exposed_ms"]
        assert parts == pytest.approx(run["step_ms"])
        assert {"forward", "backward", "optimizer"} <= {span["name"] for span in run["timeline"]}
        assert run["train_loss"] > 0 and run["val_loss"] > 0


def test_all_train_from_the_same_start_on_the_same_data(runs):
    assert runs["dense"]["losses"] == pytest.approx(runs["ddp"]["losses"], rel=1e-4)
    assert runs["local"]["losses"] != pytest.approx(runs["ddp"]["losses"], rel=1e-4)
    assert runs["sgd+ddp"]["losses"] != pytest.approx(runs["ddp"]["losses"], rel=1e-4)


def test_bytes_are_those_of_the_price_list(runs, compared):
    workload = workloads.load(TINY[1], None, 0)
    shapes = {name: p.shape for name, p in workload.model.named_parameters()}
    dense = sum(size for _, size in tw.price("dense", shapes, 2))
    assert runs["ddp"]["payload_bytes_per_step"] == runs["dense"]["payload_bytes_per_step"] == dense
    assert runs["local"]["payload_bytes_per_step"] == runs["local"]["exposed_ms"] == 0
    for method in ("acp:rank=2", "torch-powersgd:rank=2", "apm:warmup_steps=6"):
        assert 0 < runs[method]["payload_bytes_per_step"] < dense / 2
    assert compared[1]["setting"]["parameters"] == sum(p.numel() for p in workload.model.parameters())


def test_a_warm_up_is_told_apart(runs, compared):
    run = runs["apm:warmup_steps=6"]
    assert run["warmup_steps"] == 6 - SETTLING and run["warmup_over"] and run["warmup_step_ms"] > 0
    assert all(run["warmup_steps"] == 0 for name, run in runs.items() if not name.startswith("apm"))
    assert "dense warm-up" in compared[0].stdout


def test_baselines_show_their_communication(runs):
    for method in ("ddp", "torch-powersgd:rank=2", "acp:rank=2"):
        assert any(span["lane"] == "wire" and span["end"] > span["start"] for span in runs[method]["timeline"]), method
    theirs = runs["torch-powersgd:rank=2"]
    assert theirs["compress_ms"] > 0
    assert any(span["lane"] == "compress" for span in theirs["timeline"])


def test_a_method_that_communicates_now_and_then_is_timed_by_whole_periods(tmp_path, text):
    out = tmp_path / "out.json"
    options = ["--data", text, "--steps", 8, "--repeats", 1, "--json", out]
    thinwire("ddp", "local-sgd:period=4", "root-sgd:burn_in=2", "gossip", *TINY, *options)
    ddp, local, root, gossip = json.loads(out.read_text())["runs"]
    assert local["payload_bytes_per_step"] == pytest.approx(ddp["payload_bytes_per_step"] / 4, rel=1e-3)
    assert local["warmup_steps"] == 0
    assert local["step_ms"] == pytest.approx(1e3 * local["seconds"][-1] / 8, rel=1e-6), (
        "of two periods the median is the mean"
    )
    assert root["payload_bytes_per_step"] == pytest.approx(ddp["payload_bytes_per_step"], rel=1e-3)
    assert gossip["payload_bytes_per_step"] == pytest.approx(ddp["payload_bytes_per_step"], rel=1e-3)
    names = [span["name"] for span in root["timeline"] if span["lane"] == "compute"]
    assert names.count("forward") == names.count("backward") == 2


def test_towards_a_target_each_stops_when_it_is_there(tmp_path, text):
    out = tmp_path / "out.json"
    options = ["--steps", 60, "--repeats", 1, "--target-loss", 4.5, "--lr", 0.003, "--data", text, "--json", out]
    done = thinwire("ddp", "acp:rank=1", "sgd:momentum=0+ddp", *TINY, *options)
    ddp, _, slow = json.loads(out.read_text())["runs"]
    end = ddp["target_steps"]
    smoothed = [sum(ddp["losses"][i - SMOOTH : i]) / SMOOTH for i in range(SMOOTH, len(ddp["losses"]) + 1)]
    assert smoothed[end - SMOOTH] <= 4.5 and all(loss > 4.5 for loss in smoothed[: end - SMOOTH])
    assert len(ddp["losses"]) < min(60, end + SMOOTH)
    assert (ddp["target_seconds"], ddp["target_bytes"]) == (ddp["seconds"][end - 1], ddp["bytes"][end - 1])
    assert slow["target_seconds"] is None and len(slow["losses"]) == 60
    assert "not reached" in done.stdout


def test_the_wire_carries_what_the_meter_counts(tmp_path):
    """By the interface's own counter; loopback's counts whatever else this machine says to itself."""
    if reason := lab.missing():
        pytest.skip(f"no interface of its own: {reason}")
    out = tmp_path / "out.json"
    options = ["--workload", "mlp:width=512,layers=2,batch=4", "--hosts", 3, "--rate", "1gbit"]
    thinwire("ddp", "dense", "acp:rank=32", "local", *options, "--steps", 6, "--repeats", 1, "--json", out)
    *sending, alone = json.loads(out.read_text())["runs"]
    for run in sending:
        assert run["wire_bytes_per_step"] == pytest.approx(run["payload_bytes_per_step"], rel=0.1), run["method"]
        assert run["wire_bytes_per_step"] > run["payload_bytes_per_step"]
    assert alone["wire_bytes_per_step"] < 5_000
