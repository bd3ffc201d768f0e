from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _train(rank, world, spec):
    model = DDP(small(), bucket_cap_mb=0.01)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    if spec:
        tw.attach(model, spec, optimizer=opt)
    g = torch.Generator().manual_seed(rank)
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(8, 32, generator=g)).square().mean().backward()
        opt.step()
    return flat(model)


def test_dense_is_ddp_bit_for_bit():
    plain = workers.run(_train, 3, None)
    ours = workers.run(_train, 3, "dense")
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
