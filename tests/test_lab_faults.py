"""Training over a link that fails: it goes on right, or every rank says that it does not."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch

from tests.labs import needs_a_lab, output
from tests.test_cli import TINY, thinwire
from thinwire import lab

pytestmark = needs_a_lab


@pytest.mark.parametrize("method", ["sgd+dense", "sgd+dist-ef-block"])
def test_after_an_outage_of_three_seconds_training_goes_on_as_if_there_had_been_none(tmp_path, method):
    (tmp_path / "text.txt").write_text("thin wires carry little, so say little, and say it well. " * 400)
    steps, rate = (30, "2mbit") if method == "sgd+dense" else (60, "200kbit")
    common = ["train", method, *TINY, "--data", str(tmp_path / "text.txt"), "--steps", str(steps)]
    undisturbed, start = tmp_path / "undisturbed.json", time.monotonic()
    assert thinwire(*common, "--json", undisturbed, OMP_NUM_THREADS="1").returncode == 0
    down = time.monotonic() - start + 1  # all have surely started by then, and at this rate are far from the end

    saved, figures = tmp_path / "saved", tmp_path / "out.json"
    command = [sys.executable, "-m", "thinwire", *common, "--save", str(saved), "--json", str(figures)]
    cluster = lab.cluster(2, rate, events=[f"{down:.1f}s:host1:down", f"{down + 3:.1f}s:host1:up"])
    code, said = output(cluster, command, OMP_NUM_THREADS="1")
    assert code == 0, said
    result = json.loads(figures.read_text())
    assert steps * (result["exposed_ms"] - result["step_ms"]) > 1500, "the mean has the outage, the median has not"
    assert result["losses"] == json.loads(undisturbed.read_text())["losses"]
    first, second = (torch.load(path, weights_only=True)["model"] for path in sorted(saved.glob("step-*/rank-*.pt")))
    assert all(torch.equal(first[name], second[name]) for name in first)


LASTING = """
import datetime, os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import thinwire as tw
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
tw.attach(model, sys.argv[1])
end = time.monotonic() + float(sys.argv[2])
goes_on = torch.ones(())
while goes_on:
    start = time.monotonic()
    try:
        model(torch.randn(4, 64)).sum().backward()
        dist.broadcast(goes_on.fill_(start < end), 0)
    except Exception as error:
        print("error after", time.monotonic() - start, " ".join(str(error).split()), flush=True)
        time.sleep(12)  # nobody's end is to be what the others notice
        break
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.parametrize("method", ["acp:rank=2", "dist-ef-block"])
def test_an_outage_that_lasts_is_an_error_on_every_rank_within_the_groups_timeout(method):
    command, start = [sys.executable, "-c", LASTING, method], time.monotonic()
    assert output(lab.cluster(3, "5mbit"), [*command, "0"]) == (0, [[], [], []])
    down = time.monotonic() - start + 2
    code, said = output(lab.cluster(3, "5mbit", events=[f"{down:.1f}s:host2:down"]), [*command, "60"])
    assert code == 0, said
    for lines in said:
        (error,) = (line for line in lines if line.startswith("error after"))
        assert float(error.split()[2]) < 8 + 8, "the group's timeout, and time to tell"
