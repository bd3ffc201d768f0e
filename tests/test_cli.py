"""The command line, run as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = ["--workload", "lm:layers=1,width=32,head=16,context=32,batch=4", "--workers", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("thin wires carry little, so say little, and say it well. " * 400)
    return path


def thinwire(*arguments, timeout=120, **env):
    command = [sys.executable, "-m", "thinwire", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=os.environ | env | {"COLUMNS": "120"}
    )


def figures(path):
    return json.loads(Path(path).read_text())


def test_methods_lists_every_row_with_its_options():
    done = thinwire("methods")
    assert done.returncode == 0
    for word in ("dense", "powersgd", "acp", "dist-ef-block", "rank", "momentum", "apm", "warmup_steps", "min_saving"):
        assert word in done.stdout


@pytest.mark.parametrize("command", [[], ["train"], ["methods"]])
def test_help_ends_with_examples(command):
    done = thinwire(*command, "--help")
    assert done.returncode == 0
    assert "thinwire train" in done.stdout.split("Examples:")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["acpp"], ["acpp", "acp"]),
        (["acp:rnk=2"], ["rnk", "rank"]),
        (["acp:rank=0"], ["rank", "at least 1"]),
        (["adam+acpp"], ["acpp"]),
        (["adm+acp"], ["adm", "adam"]),
        (["apm:warmup_steps=0"], ["warmup_steps"]),
        (["slowmo:period=0"], ["period", "at least 1"]),
        (["slowmo:base=adm"], ["adm", "adam"]),
        (["slowmo:base=sgd,betas=0.9/0.9"], ["betas", "momentum", "slow_momentum"]),
        (["slowmo+dist-ef-block:momentum=0.9"], ["momentum", "of its own"]),
        (["root-sgd:burn_in=0"], ["burn_in", "at least 1"]),
        (["gossip:topology=star"], ["topology", "ring", "exponential"]),
        (["gossip:base=gossip"], ["base", "gossip", "adam, sgd"]),
        (["gossip+acp"], ["neighbours", "+acp"]),
        (["slowmo:base=gossip,topolgy=ring"], ["topolgy", "topology", "slow_momentum", "betas"]),
        (["acp", "--workers", "0"], ["workers", "at least 1"]),
        (["acp", "--steps", "0"], ["steps"]),
        (["acp", "--lr", "-1"], ["lr"]),
        (["acp", "--workload", "ml"], ["ml", "lm"]),
        (["acp", "--data", "nowhere.txt"], ["nowhere.txt"]),
        (["acp", "--resume", "nowhere"], ["nowhere", "checkpoint"]),
        (["acp", "--json", "nowhere/out.json"], ["nowhere"]),
        (["acp", "--nonsense"], ["nonsense"]),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_code_two(arguments, words):
    done = thinwire("train", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words)


def test_an_empty_data_file(tmp_path):
    (tmp_path / "empty.txt").touch()
    done = thinwire("train", "acp", "--data", tmp_path / "empty.txt")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "empty" in done.stderr


def test_a_run_reports_loss_bytes_and_time(tmp_path, text):
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    done = thinwire("train", "acp:rank=2", *TINY, "--data", text, "--steps", 30, "--json", out, "--trace", trace)
    assert done.returncode == 0, done.stderr
    for word in ("validation loss", "less", "compute", "compress", "exposed communication"):
        assert word in done.stdout
    result = figures(out)
    assert result["val_loss"] < 5 and result["losses"][-1] < result["losses"][0]
    assert result["dense_bytes_per_step"] > 2 * result["bytes_per_step"]
    parts = result["compute_ms"] + result["compress_ms"] + result["exposed_ms"]
    assert parts == pytest.approx(result["step_ms"], rel=0.01) or result["compute_ms"] == 0
    events = figures(trace)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1}
    assert {"forward", "backward", "optimizer"} <= {e["name"] for e in spans}
    assert any(e["name"].startswith("all_reduce") and e["args"]["bytes_sent"] > 0 for e in spans)


@pytest.mark.parametrize("method", ["apm:warmup_steps=4", "apm:warmup_steps=4+acp:rank=2", "dist-ef-sgdm", "sgd+fp16"])
def test_every_form_of_method_trains(tmp_path, text, method):
    out = tmp_path / "out.json"
    done = thinwire("train", method, *TINY, "--data", text, "--steps", 8, "--json", out)
    assert done.returncode == 0, done.stderr
    result = figures(out)
    assert result["bytes_last_step"] < result["dense_bytes_per_step"]
    assert result["warm_up_over"]


@pytest.mark.parametrize(
    ("method", "saving"),
    [
        ("slowmo:period=4", 4),
        ("slowmo:period=4,base=sgd,momentum=0.5,slow_lr=0.9+acp:rank=2", 20),
        ("local-sgd:period=2,buffers=average+bf16", 3),
        ("bmuf:period=4,block_momentum=0.3,nesterov=true", 4),
        ("root-sgd:burn_in=2+acp:rank=2", 5),
        ("gossip:base=sgd,momentum=0.5", 1),
        ("slowmo:base=gossip,topology=exponential,period=4,betas=0.8/0.9", 1),
    ],
)
def test_local_steps_and_compression_multiply(tmp_path, text, method, saving):
    out = tmp_path / "out.json"
    done = thinwire("train", method, *TINY, "--data", text, "--steps", 22, "--json", out)
    assert done.returncode == 0, done.stderr
    result = figures(out)
    assert result["losses"][-1] < result["losses"][0]
    assert result["dense_bytes_per_step"] == pytest.approx(4 * result["parameters"], rel=1e-3)
    if "average" not in method:
        assert result["dense_bytes_per_step"] > 0.99 * saving * result["bytes_per_step"]
        assert result["bytes_last_step"] > 0


def test_a_warm_up_that_outlasts_the_run_is_mentioned(text):
    done = thinwire("train", "apm:warmup_steps=50", *TINY, "--data", text, "--steps", 3)
    assert done.returncode == 0
    assert "outlasted" in done.stdout


@pytest.mark.parametrize(
    "method",
    [
        "dist-ef-block:momentum=0.9",
        "apm:warmup_steps=6+acp:rank=2",
        "slowmo:period=7+acp:rank=2",
        "root-sgd:burn_in=3+acp:rank=2",
        "slowmo:base=gossip,period=7+acp:rank=2",
    ],
)
def test_killed_and_resumed_is_as_if_never_killed(tmp_path, text, method):
    """SIGKILL to every process in the middle; then resume from the last checkpoint."""
    common = ["train", method, *TINY, "--data", str(text), "--steps", "60", "--seed", "3"]
    whole = tmp_path / "whole.json"
    assert thinwire(*common, "--json", whole).returncode == 0

    saved = tmp_path / "saved"
    command = [sys.executable, "-m", "thinwire", *common, "--save", str(saved), "--save-every", "10"]
    run = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (saved / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert (saved / "latest").exists()
    step = int((saved / "latest").read_text().split()[0].removeprefix("step-"))

    resumed = tmp_path / "resumed.json"
    done = thinwire(*common, "--resume", saved, "--json", resumed)
    assert done.returncode == 0, done.stderr
    assert figures(resumed)["losses"] == figures(whole)["losses"][step:]
    assert figures(resumed)["val_loss"] == figures(whole)["val_loss"]


def test_resuming_what_does_not_fit(tmp_path, text):
    saved = tmp_path / "saved"
    common = [*TINY, "--data", text, "--steps", 6]
    assert thinwire("train", "acp:rank=2", *common, "--save", saved).returncode == 0
    other = thinwire("train", "acp:rank=4", *common, "--resume", saved)
    assert other.returncode == 2
    assert "acp:rank=2" in other.stderr and "acp:rank=4" in other.stderr and len(other.stderr.splitlines()) == 1

    more = thinwire("train", "acp:rank=2", *common[:2], "--workers", 3, *common[4:], "--resume", saved)
    assert more.returncode == 0, more.stderr
    assert "state of 2 workers loaded by 3" in more.stderr

    apart = tmp_path / "apart"
    assert thinwire("train", "gossip", *common[:2], "--workers", 4, *common[4:], "--save", apart).returncode == 0
    fewer = thinwire("train", "gossip", *common[:-1], 8, "--resume", apart)
    assert fewer.returncode == 0, fewer.stderr

    file = saved / (saved / "latest").read_text().split()[0] / "rank-0.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    torn = thinwire("train", "acp:rank=2", *common, "--resume", saved)
    assert torn.returncode == 2
    (line,) = torn.stderr.splitlines()
    assert "cannot read checkpoint" in line


def test_under_torchrun(tmp_path, text):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire"]
    command += ["train", "acp:rank=2", *TINY[:2], "--data", str(text), "--steps", "4", "--json", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert figures(out)["workers"] == 2
