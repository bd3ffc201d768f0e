"""One line for people."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.core.method import Averager, Method, Owner
from thinwire.registry import Recipe
from thinwire.runtime.backward import Backward
from thinwire.runtime.binding import bind
from thinwire.runtime.ddp import comm_hook
from thinwire.runtime.synchronizer import Synchronizer


def attach(
    model: nn.Module,
    method: str | Recipe | Method | Owner | Averager,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    messages: int | None = None,
) -> Synchronizer:
    """Average ``model``'s gradients by ``method`` from now on; every rank calls this, before the first backward.

    ``model`` is a module that no other wraps, which starts from rank 0's parameters and buffers and is spared a copy
    of every gradient, or a ``DistributedDataParallel``, which goes on to see to unused parameters and buffers.
    ``method`` is a spec such as ``"acp:rank=4"``, a method object, or an optimizer that owns its exchange. With
    ``optimizer``, methods whose errors follow the learning rate find it there. An optimizer that averages something
    else, such as parameters, makes backward silent, as ``no_sync`` does. ``messages`` is into how many a step's
    exchange is cut, at most; by default the number follows from measured latency and rate.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"attach needs a module, not {type(model).__name__}")
    if not dist.is_initialized():
        raise ValueError("attach needs a process group: call torch.distributed.init_process_group first")
    sync, problem = None, None
    try:
        if _has_hook(model):
            raise ValueError("this model has a communication hook already: attach once, and before any other")
        if getattr(model, "_has_rebuilt_buckets", False) or any(p.grad is not None for p in model.parameters()):
            raise ValueError("attach before the first backward: this model has gradients already")
        sync = Synchronizer(method, optimizer, seed, messages)
    except ValueError as error:
        problem = error
    bind(model, sync, problem)
    assert sync is not None
    if not isinstance(model, DistributedDataParallel):
        if sync.averager is None:
            Backward(model, sync)
    elif sync.averager is None:
        model.register_comm_hook(sync, comm_hook)
    else:
        # the second is the broadcast of buffers before a forward: rank 0's would replace those of a resumed run
        model.require_backward_grad_sync = model.require_forward_param_sync = False
    return sync


def _has_hook(model: nn.Module) -> bool:
    if isinstance(model, DistributedDataParallel):
        return bool(model._comm_hooks) or not model.require_backward_grad_sync
    hooks = (hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values())
    functions = (hook.func if isinstance(hook, partial) else hook for hook in hooks)
    return any(isinstance(getattr(function, "__self__", None), Backward) for function in functions)
