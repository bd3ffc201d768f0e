"""Training over a link that fails: it goes on right, or every rank says that it does not.

The link is cut by the host itself, at a step and not at a time: how long a start takes is the machine's to say.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.labs import needs_a_lab, output
from tests.test_cli import TINY, thinwire
from thinwire import lab
from thinwire.lab.permission import tools

pytestmark = needs_a_lab
OUTAGE = """
if [ $RANK = 1 ]; then (
    until [ -e "$SAVED/latest" ]; do sleep 0.1; done
    "$IP" link set eth0 down; sleep 3; "$IP" link set eth0 up; echo up again
) & fi
exec "$@"
"""


@pytest.mark.parametrize(("method", "rate"), [("sgd+dense", "2mbit"), ("sgd+dist-ef-block", "200kbit")])
def test_after_an_outage_of_three_seconds_training_goes_on_as_if_there_had_been_none(tmp_path, method, rate):
    (tmp_path / "text.txt").write_text("thin wires carry little, so say little, and say it well. " * 400)
    common = ["train", method, *TINY, "--data", str(tmp_path / "text.txt"), "--steps", "30"]
    undisturbed, figures, saved = tmp_path / "undisturbed.json", tmp_path / "out.json", tmp_path / "saved"
    assert thinwire(*common, "--json", undisturbed, OMP_NUM_THREADS="1").returncode == 0

    train = [sys.executable, "-m", "thinwire", *common, "--save", saved, "--save-every", "5", "--json", figures]
    command = ["sh", "-c", OUTAGE, "sh", *map(str, train)]
    code, said = output(lab.cluster(2, rate), command, OMP_NUM_THREADS="1", SAVED=str(saved), IP=tools()["ip"])
    assert code == 0, said
    assert "up again" in said[1]
    assert json.loads(figures.read_text())["losses"] == json.loads(undisturbed.read_text())["losses"]
    last = max(saved.glob("step-*"))
    first, second = (torch.load(path, weights_only=True)["model"] for path in last.iterdir())
    assert all(torch.equal(first[name], second[name]) for name in first)


LASTING = """
import datetime, os, subprocess, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import thinwire as tw
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
tw.attach(model, sys.argv[1])
for step in range(50):
    if step == 5 and dist.get_rank() == 2:
        subprocess.run([sys.argv[2], "link", "set", "eth0", "down"], check=True)
    start = time.monotonic()
    try:
        model(torch.randn(4, 64)).sum().backward()
    except Exception as error:
        print("error after", time.monotonic() - start, " ".join(str(error).split()), flush=True)
        time.sleep(15)  # nobody's end is to be what the others notice
        os._exit(0)
"""


@pytest.mark.parametrize("method", ["acp:rank=2", "dist-ef-block"])
def test_an_outage_that_lasts_is_an_error_on_every_rank_within_the_groups_timeout(method):
    code, said = output(lab.cluster(3, "5mbit"), [sys.executable, "-c", LASTING, method, tools()["ip"]])
    assert code == 0, said
    for lines in said:
        (error,) = (line for line in lines if line.startswith("error after"))
        assert float(error.split()[2]) < 15 + 10, "the group's timeout, and time to tell"
        assert "ExchangeError" in error and "bucket" in error and "rank" in error
