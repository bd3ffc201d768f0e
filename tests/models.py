"""Models and training loops that several tests share."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw

SHAPES = {"w": (12, 20), "c": (6, 4, 3, 3), "b": (13,), "s": (), "one": (1,), "big": (40, 30)}
MANY_BUCKETS = 0.001


class Bag(nn.Module):
    """Parameters whose gradient is what forward is given: d/dp sum(p * g) = g."""

    def __init__(self, shapes=SHAPES, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())


def gradients(rank, step, shapes=SHAPES, dtype=torch.float32):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def bag_means(rank, spec, steps, bucket_cap_mb=MANY_BUCKETS, dtype=torch.float32, group=None):
    """Each step's averaged gradients under DDP."""
    model = DDP(Bag(dtype=dtype), bucket_cap_mb=bucket_cap_mb, process_group=group)
    tw.attach(model, spec)
    means = []
    for step in range(steps):
        model.zero_grad()
        model(gradients(rank, step, dtype=dtype)).backward()
        means.append(grads(model.module))
    return means


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batch(rank, step, size=8):
    g = torch.Generator().manual_seed(7 + 1000 * step + rank)
    return torch.randn(size, 32, generator=g), torch.randint(10, (size,), generator=g)


def train_step(model, optimizer, rank, step):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
