"""A synchronizer takes charge of a model: on all ranks, or on none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.runtime.synchronizer import Synchronizer
from thinwire.runtime.transport import Transport


def bind(model: nn.Module, sync: Synchronizer | None, problem: ValueError | None = None) -> None:
    """Compare notes with the other ranks first. ``problem``: what keeps this one from it."""
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    module = wrapped.module if wrapped else model
    try:
        _check(module)
    except ValueError as error:
        problem = problem or error
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    group = wrapped.process_group if wrapped else dist.group.WORLD
    assert group is not None
    transport = Transport(group, device)
    card = {
        "problem": str(problem) if problem else "",
        "method": sync.identity() if sync else "",
        "parameters": [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()],
    }
    cards = transport.gather_objects(card)
    if problem is not None:
        raise problem
    _compare(cards)
    assert sync is not None
    if wrapped:
        may_be_absent = wrapped.find_unused_parameters or wrapped.static_graph
        sync.bind(transport, module, may_be_absent, averages_buffers=wrapped.broadcast_buffers)
    else:
        transport.broadcast([*module.parameters(), *module.buffers()])
        sync.bind(transport, module, may_be_absent=False, averages_buffers=True)


def _check(module: nn.Module) -> None:
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("this model has no trainable parameters")
    for name, parameter in trainable.items():
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name!r} is {parameter.dtype}: only real floating point can be exchanged")
        if hasattr(parameter, "to_local") or getattr(parameter, "_is_flat_param", False):
            raise ValueError(f"parameter {name!r} is sharded: only models that every rank holds whole can be attached")
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(f"module {name!r} has sparse gradients: make it with sparse=False")


def _compare(cards: list[dict[str, Any]]) -> None:
    first = cards[0]
    for rank, card in enumerate(cards):
        if card["problem"]:
            raise ValueError(f"rank {rank} could not attach: {card['problem']}")
        if card["method"] != first["method"]:
            raise ValueError(f"rank 0 attaches {first['method']}, rank {rank} attaches {card['method']}")
        for mine, theirs in zip(first["parameters"], card["parameters"], strict=False):
            if mine != theirs:
                raise ValueError(f"the models differ: rank 0 has parameter {mine}, rank {rank} has {theirs}")
        if len(card["parameters"]) != len(first["parameters"]):
            raise ValueError(f"the models differ in their number of parameters on rank 0 and rank {rank}")
