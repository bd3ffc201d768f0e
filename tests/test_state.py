"""State by parameter name and rank: a resumed run is the uninterrupted one."""

from __future__ import annotations

import io
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.models import flat, mlp, train_step
from tests.rows import ROWS

OPTIMIZERS = {
    "apm": lambda p: tw.optim.APMSqueeze(p, lr=1e-2, warmup_steps=2),
    "apm+acp": lambda p: tw.optim.APMSqueeze(p, lr=1e-2, warmup_steps=2, exchange="acp:rank=2"),
    "apm auto": lambda p: tw.optim.APMSqueeze(p, lr=1e-2, betas=(0.9, 0.5)),
    "dist-ef-sgdm": lambda p: tw.optim.DistEFBlockSGDM(p, lr=0.1, weight_decay=1e-3),
}
BEFORE, AFTER = 4, 5


def build(spec, model=None, bucket_cap_mb=0.01):
    model = DDP(model or mlp(), bucket_cap_mb=bucket_cap_mb)
    if spec in OPTIMIZERS:
        optimizer = OPTIMIZERS[spec](model.parameters())
        return model, optimizer, tw.attach(model, optimizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return model, optimizer, tw.attach(model, spec, optimizer=optimizer)


def set_rate(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = optimizer.defaults["lr"] / (1 + step)  # so that errors which follow it are scaled


def run_steps(model, optimizer, rank, steps):
    for step in steps:
        set_rate(optimizer, step)
        train_step(model, optimizer, rank, step)


def packed(model, optimizer, sync):
    buffer = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "opt": optimizer.state_dict(), "sync": sync.state_dict()}, buffer)
    return buffer.getvalue()


def unpacked(saved):
    return torch.load(io.BytesIO(saved), weights_only=True)


def _uninterrupted(rank, _world, specs):
    out = {}
    for spec in specs:
        model, optimizer, sync = build(spec)
        run_steps(model, optimizer, rank, range(BEFORE))
        middle = packed(model, optimizer, sync)
        run_steps(model, optimizer, rank, range(BEFORE, BEFORE + AFTER))
        out[spec] = (middle, flat(model))
    return out


def _resumed(rank, _world, saved):
    out = {}
    for spec, middle in saved[rank].items():
        model, optimizer, sync = build(spec)
        content = unpacked(middle)
        model.module.load_state_dict(content["model"])
        optimizer.load_state_dict(content["opt"])
        sync.load_state_dict(content["sync"])
        run_steps(model, optimizer, rank, range(BEFORE, BEFORE + AFTER))
        out[spec] = flat(model)
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_resuming_in_new_processes_changes_nothing(world):
    """Bit for bit with two workers; with more, a fresh DDP's first buckets may sum in another order."""
    specs = [*(row.spec for row in ROWS), *OPTIMIZERS]
    through = workers.run(_uninterrupted, world, specs)
    saved = [{spec: middle for spec, (middle, _) in result.items()} for result in through]
    resumed = workers.run(_resumed, world, saved)
    for spec in specs:
        for whole, parts in zip(through, resumed, strict=True):
            if world == 2:
                assert torch.equal(whole[spec][1], parts[spec]), spec
            else:
                assert torch.allclose(whole[spec][1], parts[spec], rtol=1e-2, atol=2e-3), spec


def _same_buckets(rank, _world):
    """One bucket from the first step on: exact for any number of workers."""
    results = {}
    for spec in ("acp:rank=2", "powersgd:rank=2", "dist-ef-block:momentum=0.9", "apm"):
        model, optimizer, sync = build(spec, nn.Linear(32, 10, bias=False), 25)
        run_steps(model, optimizer, rank, range(BEFORE))
        content = unpacked(packed(model, optimizer, sync))
        run_steps(model, optimizer, rank, range(BEFORE, BEFORE + AFTER))
        again, optimizer, sync = build(spec, nn.Linear(32, 10, bias=False), 25)
        again.module.load_state_dict(content["model"])
        optimizer.load_state_dict(content["opt"])
        sync.load_state_dict(content["sync"])
        run_steps(again, optimizer, rank, range(BEFORE, BEFORE + AFTER))
        results[spec] = torch.equal(flat(model), flat(again))
    return results


def test_with_the_same_buckets_resuming_is_exact():
    for results in workers.run(_same_buckets, 3):
        assert all(results.values()), results


def _loses_without_state(rank, _world):
    model, optimizer, sync = build("acp:rank=2")
    run_steps(model, optimizer, rank, range(BEFORE))
    content = unpacked(packed(model, optimizer, sync))
    run_steps(model, optimizer, rank, range(BEFORE, BEFORE + 1))
    again, optimizer, _ = build("acp:rank=2")
    again.module.load_state_dict(content["model"])
    optimizer.load_state_dict(content["opt"])
    run_steps(again, optimizer, rank, range(BEFORE, BEFORE + 1))
    return torch.equal(flat(model), flat(again))


def test_the_state_matters():
    """Without it the resumed run is another one: otherwise the tests above would show nothing."""
    assert workers.run(_loses_without_state, 2) == [False, False]


def withheld(sync):
    out = {}
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, state in sync.ledger.states.items():
        like = sync.ledger.template(name).zero_()
        out[name] = sync.method.withheld(like, state, sync.ledger.context(name, rank, world))
    return out


def _save_owing(rank, _world, spec):
    model, optimizer, sync = build(spec)
    run_steps(model, optimizer, rank, range(BEFORE))
    return sync.state_dict(), withheld(sync)


class _Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def _load_owing(rank, world, spec, dicts, as_list):
    records = _Records()
    logging.getLogger("thinwire").addHandler(records)
    model, optimizer, sync = build(spec)
    sync.load_state_dict(dicts if as_list else dicts[rank % len(dicts)])
    before = withheld(sync)
    run_steps(model, optimizer, rank, range(BEFORE, BEFORE + 2))
    return before, sync.state_dict()["step"], records.messages, flat(model)


@pytest.mark.parametrize(
    "spec",
    ["acp:rank=2", "powersgd:rank=2", "dist-ef-block:momentum=0.9", "dist-ef", "dgc:ratio=0.1", "gtopk:ratio=0.1"],
)
@pytest.mark.parametrize(("old", "new", "as_list"), [(4, 2, True), (2, 4, True), (2, 3, False), (3, 1, True)])
def test_another_number_of_workers_keeps_the_mean_of_what_is_owed(spec, old, new, as_list):
    saved = workers.run(_save_owing, old, spec)
    loaded = workers.run(_load_owing, new, spec, [d for d, _ in saved], as_list)
    for name in saved[0][1]:
        was = torch.stack([owed[name] for _, owed in saved]).mean(0)
        now = torch.stack([owed[name] for owed, *_ in loaded]).mean(0)
        assert was.abs().sum() > 0 or spec in ("acp:rank=2", "powersgd:rank=2")
        assert torch.allclose(was, now, atol=1e-6), name
    assert all(step == BEFORE + 2 for _, step, _, _ in loaded)
    assert all(torch.equal(loaded[0][3], other[3]) for other in loaded)
    assert f"state of {old} workers loaded by {new}" in " ".join(loaded[0][2])


def _refusals(rank, world):
    model, optimizer, sync = build("acp:rank=2")
    run_steps(model, optimizer, rank, range(BEFORE))
    good = sync.state_dict()
    before = {name: str(state) for name, state in sync.ledger.states.items()}
    other_method = build("acp:rank=3")[2]
    bigger = nn.Sequential(nn.Linear(32, 65), nn.ReLU(), nn.Linear(65, 10))
    other_model = build("acp:rank=2", bigger)[2]
    torn = {**good, "states": {**good["states"], "0.weight": {"error": torch.zeros(2, 2)}}}
    cases = {
        "another method": (other_method, good),
        "'0.weight' has shape [64, 32] in the state and [65, 32]": (other_model, good),
        "not the state": (sync, {"hello": 1}),
        "rank 1, and this is rank 0": (sync, {**good, "rank": 1 - rank} if rank == 0 else good),
        "'error' of '0.weight'": (sync, torn),
        "no state": (sync, []),
    }
    out = {}
    for words, (target, content) in cases.items():
        try:
            target.load_state_dict(content)
            out[words] = ""
        except ValueError as error:
            out[words] = str(error)
    unchanged = before == {name: str(state) for name, state in sync.ledger.states.items()}
    run_steps(model, optimizer, rank, range(BEFORE, BEFORE + 2))
    return out, unchanged


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    first, second = workers.run(_refusals, 2)
    for words, message in first[0].items():
        assert words in message
    assert first[1] and second[1]


def _missing_ranks(rank, _world, dicts):
    sync = build("acp:rank=2")[2]
    try:
        sync.load_state_dict(dicts[rank])
    except ValueError as error:
        return str(error)
    return ""


def test_a_part_of_the_old_ranks_is_not_enough():
    saved = workers.run(_save_owing, 3, "acp:rank=2")
    for message in workers.run(_missing_ranks, 2, [d for d, _ in saved]):
        assert "ranks [2] are missing" in message


def _load_before_register(rank, _world, dicts):
    model = DDP(mlp(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sync = tw.Synchronizer("acp:rank=2", optimizer=optimizer)
    sync.load_state_dict(dicts[rank])
    model.register_comm_hook(sync, tw.comm_hook)
    train_step(model, optimizer, rank, BEFORE)
    return sync.state_dict()["step"], sync.state_dict()["states"]["0.weight"]["inner.turn"]


def test_loading_before_registration():
    saved = workers.run(_save_owing, 2, "acp:rank=2")
    assert workers.run(_load_before_register, 2, [d for d, _ in saved]) == [(BEFORE + 1, BEFORE + 1)] * 2
