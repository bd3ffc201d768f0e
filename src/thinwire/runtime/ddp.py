"""The adapter to DistributedDataParallel: ``attach`` for people, ``comm_hook`` for torch's own convention."""
# Annotations stay objects here: DDP compares those of a hook with its own types, and refuses strings.

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.core.method import Averager, Method, Owner
from thinwire.registry import Recipe
from thinwire.runtime.buckets import Bucket, Part
from thinwire.runtime.synchronizer import Synchronizer
from thinwire.runtime.transport import Transport


def attach(
    ddp: DistributedDataParallel,
    method: str | Recipe | Method | Owner | Averager,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    messages: int | None = None,
) -> Synchronizer:
    """Average ``ddp``'s gradients by ``method`` from now on; every rank calls this, before the first backward.

    ``method`` is a spec such as ``"acp:rank=4"``, a method object, or an optimizer that owns its exchange. With
    ``optimizer``, methods whose errors follow the learning rate find it there. An optimizer that averages something
    else, such as parameters, makes backward silent, as ``no_sync`` does. ``messages`` is into how many a step's
    exchange is cut, at most; by default the number follows from measured latency and rate.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"attach needs a DistributedDataParallel model, not {type(ddp).__name__}")
    sync, problem = None, None
    try:
        _check(ddp)
        if ddp._comm_hooks or not ddp.require_backward_grad_sync:
            raise ValueError("this model has a communication hook already: attach once, and before any other")
        if ddp._has_rebuilt_buckets or any(p.grad is not None for p in ddp.module.parameters()):
            raise ValueError("attach before the first backward: this model has gradients already")
        sync = Synchronizer(method, optimizer, seed, messages)
    except ValueError as error:
        problem = error
    _bind(ddp, sync, problem)
    assert sync is not None
    if sync.averager is None:
        ddp.register_comm_hook(sync, comm_hook)
    else:
        # the second is the broadcast of buffers before a forward: rank 0's would replace those of a resumed run
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
    return sync


def comm_hook(
    state: Synchronizer,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch exports it at run time only
) -> torch.futures.Future[torch.Tensor]:
    """``ddp.register_comm_hook(Synchronizer("acp:rank=4"), comm_hook)``"""
    if not state.bound:
        if state.averager is not None:
            raise ValueError(f"{type(state.averager).__name__} needs no hook: call thinwire.attach(ddp, optimizer)")
        ddp = _owner_of(state)
        _check(ddp)
        _bind(ddp, state, None)
    parts = [
        Part(state.ledger.names[parameter], parameter, grad)
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
    return state.reduce(Bucket(bucket.index(), parts, bucket.buffer(), bucket.is_last()))


def _owner_of(state: Synchronizer) -> DistributedDataParallel:
    # torch tells a hook neither the model nor the names of its parameters. Without them the state could only be kept
    # by position, and a resumed or re-bucketed run would mix up its residuals.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel) and any(s is state for _, s in candidate._comm_hooks):
            found: DistributedDataParallel = candidate
            return found
    raise ValueError("this synchronizer is not registered with a DistributedDataParallel model")


def _check(ddp: DistributedDataParallel) -> None:
    trainable = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("this model has no trainable parameters")
    for name, parameter in trainable.items():
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name!r} is {parameter.dtype}: only real floating point can be exchanged")
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"module {name!r} has sparse gradients: make it with sparse=False")


def _bind(ddp: DistributedDataParallel, sync: Synchronizer | None, problem: ValueError | None) -> None:
    """Compare notes with the other ranks, so that all attach or none does."""
    device = next(ddp.module.parameters()).device
    transport = Transport(ddp.process_group, device)
    every = ddp.module.named_parameters()
    card = {
        "problem": str(problem) if problem else "",
        "method": sync.identity() if sync else "",
        "parameters": [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in every],
    }
    cards = transport.gather_objects(card)
    if problem is not None:
        raise problem
    _compare(cards)
    assert sync is not None
    may_be_absent = ddp.find_unused_parameters or ddp.static_graph
    sync.bind(transport, ddp.module, may_be_absent, averages_buffers=ddp.broadcast_buffers)


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
