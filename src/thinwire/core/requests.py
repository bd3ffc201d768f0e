"""What a method may ask of the network. A request is yielded; its answer is sent back into the generator."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

Payload = tuple[Tensor, ...]
"""What a compressor produced: a NamedTuple of tensors, so that its bytes are counted and never estimated."""

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The answer is the mean of ``tensor`` over the workers.

    A bucket's own gradient may be reduced in place, so ``x`` is not to be read after ``yield AllReduce(x)``.
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class AllGather(Generic[P]):
    """The answer is the payload with each tensor stacked over workers: ``(...)`` becomes ``(W, ...)``."""

    payload: P


@dataclass(frozen=True, slots=True)
class AllToAll(Generic[P]):
    """Each tensor is ``(W, ...)``; row ``i`` of the answer is what worker ``i`` had in my row."""

    payload: P


@dataclass(frozen=True, slots=True)
class Swap(Generic[P]):
    """Point to point: ``payload`` goes to worker ``to``; the answer is the like-shaped one from worker ``source``.

    None sends, or answers, nothing. All workers yield a swap in the same round, each naming the other end alike: also
    one that neither sends nor receives.
    """

    payload: P
    to: int | None
    source: int | None


@dataclass(frozen=True, slots=True)
class Batched:
    """No communication: the answer is what ``function`` makes of ``args``.

    All that come to the same function together are computed in one call. It takes a list of such ``args``, and gives a
    list of answers, each with the same bits as alone.
    """

    function: Callable[[list[Any]], Sequence[Any]]
    args: Any


Request = AllReduce | AllGather[Any] | AllToAll[Any] | Swap[Any]
R = TypeVar("R")
Exchange = Generator[Request | tuple[Request, ...] | Batched, Any, R]
"""A computation that talks to the other workers by yielding requests, and returns an ``R``."""
