"""The adapter to DistributedDataParallel, by torch's own convention."""
# Annotations stay objects here: DDP compares those of a hook with its own types, and refuses strings.

import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.runtime.binding import bind
from thinwire.runtime.buckets import Bucket, Part
from thinwire.runtime.synchronizer import Synchronizer


def comm_hook(
    state: Synchronizer,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch exports it at run time only
) -> torch.futures.Future[torch.Tensor]:
    """``ddp.register_comm_hook(Synchronizer("acp:rank=4"), comm_hook)``"""
    if not state.bound:
        if state.averager is not None:
            raise ValueError(f"{type(state.averager).__name__} needs no hook: call thinwire.attach(ddp, optimizer)")
        bind(_owner_of(state), state)
    parts = [
        Part(state.ledger.names[parameter], parameter, grad)
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
    return state.reduce(Bucket(bucket.index(), parts, [bucket.buffer()], bucket.is_last()))


def _owner_of(state: Synchronizer) -> DistributedDataParallel:
    # torch tells a hook neither the model nor the names of its parameters. Without them the state could only be kept
    # by position, and a resumed or re-bucketed run would mix up its residuals.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel) and any(s is state for _, s in candidate._comm_hooks):
            found: DistributedDataParallel = candidate
            return found
    raise ValueError("this synchronizer is not registered with a DistributedDataParallel model")
