"""What a method is: a state for each tensor, and a generator that reduces the tensor over the workers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.core.requests import AllReduce, Exchange
from thinwire.core.value import Sum, Value, settled

State = tuple[Any, ...]
"""A NamedTuple of tensors, numbers and further states: passed in and out, never hidden on ``self``."""


class Reduced(NamedTuple):
    """The outcome of one reduction."""

    mean: Value
    """What all workers agree on, bit for bit; under gossip, this worker's part of an agreement."""
    sent: Value
    """What this worker contributed; its mean over the workers is what ``mean`` carries of this step's input."""


class Context(NamedTuple):
    """Where and when a reduction runs."""

    step: int = 0
    name: str = ""
    rank: int = 0
    world: int = 1
    seed: int = 0
    lr: float | None = None
    """This step's learning rate, where it is known."""
    last_lr: float | None = None
    """The learning rate of the last step that had one above zero."""
    dtype: torch.dtype | None = None
    """The gradient's own type, where it is narrower than the one that methods compute in."""
    keep: bool = False
    """Whether who asks for the reduction reads ``x`` after it, if the method ``keeps`` it."""

    @property
    def lr_ratio(self) -> float:
        """eta_{t-1} / eta_t: what turns an error in last step's units into this step's."""
        return self.last_lr / self.lr if self.lr and self.last_lr else 1.0

    def key(self, salt: str = "") -> int:
        """56 bits that depend on (seed, name, salt) alone: alike on every worker and after a resume."""
        digest = hashlib.blake2b(f"{self.seed}/{self.name}/{salt}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big")

    def randn(self, *shape: int, like: Tensor, salt: str = "") -> Tensor:
        """Normal numbers that depend on the key alone."""
        if like.is_meta:
            return like.new_empty(shape)
        return torch.randn(*shape, generator=self._generator(salt)).to(like)

    def rand(self, *shape: int, like: Tensor, salt: str = "") -> Tensor:
        """Uniform numbers in [0, 1), new at each step but alike on every worker, in float64."""
        if like.is_meta:
            return like.new_empty(shape, dtype=torch.float64)
        drawn = torch.rand(*shape, generator=self._generator(f"{self.step}/{salt}"), dtype=torch.float64)
        return drawn.to(like.device)

    def _generator(self, salt: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.key(salt))


class Method:
    """A way to average one tensor over the workers. Subclasses are frozen dataclasses of hyper-parameters."""

    __slots__ = ()
    adds: ClassVar[bool] = False
    """Whether ``reduce`` takes a ``Sum`` too, adds in passing, and shows a bad number of it in what it sends."""
    widens: ClassVar[bool] = False
    """Whether ``reduce`` takes numbers of 16 bits too, and widens them in passing."""

    @property
    def unmade(self) -> bool:
        """Whether a ``Sum`` is left unmade, from request to error."""
        return False

    def keeps(self, x: Tensor, ctx: Context) -> bool:
        """Whether ``reduce`` leaves ``x`` as it is given, where ``ctx.keep`` asks for it."""
        return False

    @property
    def whole(self) -> bool:
        """Whether it takes the whole gradient as one vector, rather than one tensor at a time."""
        return False

    def joins(self, x: Tensor, ctx: Context) -> bool:
        """Whether ``x`` may travel as one with others, by the method that ``joined`` gives."""
        return False

    def joined(self) -> Method:
        """The method as it is for tensors that join."""
        return self

    def pieces(self, ctx: Context) -> int:
        """How many a tensor is cut into, where each number's answer depends on that number alone; else 0."""
        return 0

    def init(self, x: Tensor, ctx: Context) -> State:
        """The state that a tensor like ``x`` starts from."""
        return ()

    def reduce(self, x: Tensor, state: Any, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        """Average ``x`` over the workers, by yielding requests.

        The memory of ``x`` is the method's to overwrite. That of ``state`` is too, but only once the mean is known
        to be finite: a step that is not leaves no trace.
        """
        raise TypeError(f"{type(self).__name__} does not define reduce()")

    def withheld(self, x: Tensor, state: Any, ctx: Context) -> Tensor:
        """This worker's part of what is not applied yet; its mean over workers is all that is owed."""
        return torch.zeros_like(x)

    def refund(self, state: Any, amount: Tensor) -> State:
        """The state after ``amount``, a part of the last mean, was not applied: it is owed again."""
        return state  # type: ignore[no-any-return]

    def resize(self, x: Tensor, states: Sequence[Any], ctx: Context) -> State:
        """My state in a new world, from those of all workers of the old one. Replicated state is any one's."""
        return states[0]  # type: ignore[no-any-return]

    def bare(self) -> Method:
        """The method as it is past its warm-up, for a tensor that it takes."""
        return self

    def dense(self) -> Method:
        """How a tensor that this method does not take travels uncompressed in the same collectives."""
        return Dense()


@dataclass(frozen=True, slots=True)
class Dense(Method):
    """S-SGD: the plain mean."""

    adds: ClassVar[bool] = True
    own: bool = False
    """In the gradient's own type; else in the one that methods compute in, to travel with their tensors."""

    def pieces(self, ctx: Context) -> int:
        return 1

    def reduce(self, x: Tensor | Sum, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        x = settled(x)
        own = x.to(ctx.dtype) if self.own and ctx.dtype else x
        mean = yield AllReduce(own)
        return Reduced(mean.to(x.dtype), sent=own.to(x.dtype)), state


class Task(NamedTuple):
    """What a server has to do with its chunk of one tensor: a = ratio * error + the mean of what it received."""

    received: Any
    columns: int
    error: Tensor
    ratio: float


class Compressor(Protocol):
    """Encodes and decodes without communication: a batch of vectors at a time, each with the same bits as alone.

    A vector is cut into independent rows of ``columns`` numbers, one for each worker that is to have it; the last rows
    may be short or empty. A payload's tensors have a row for each of them, in the same shape on every worker.
    """

    unmade: ClassVar[bool]
    """Whether ``encode`` leaves a sum unmade, and ``add`` takes one whose error is ``out``."""
    fused: ClassVar[bool]
    """Whether it is ``Fused`` too."""

    def encode(self, batch: Sequence[tuple[Tensor | Sum, int, int]]) -> Sequence[Any]:
        """The payloads of (x, rows, columns), x of any shape, with d numbers, at most rows * columns."""

    def decode(self, batch: Sequence[tuple[Any, int, Tensor]]) -> None:
        """(payload, columns, out): out = C(x), out (d,)"""

    def add(self, batch: Sequence[tuple[Any, int, Any, float, Tensor, bool]]) -> None:
        """(payload, columns, base, alpha, out, stacked): out = base + alpha C(x), which may be the same memory.

        ``stacked``: a row is not a part of a vector but a worker's whole one, and they are added in their order.
        """

    def finite(self, batch: Sequence[Any]) -> Sequence[bool]:
        """Of payloads: whether C(x) is."""


class Fused(Protocol):
    """A compressor that does in one pass over memory what else takes several; a, of a server, is ``Task``'s sum."""

    def settle(self, batch: Sequence[tuple[Any, Any, int, Sum]]) -> None:
        """(sent, mean, columns, p), of two payloads and an unmade p: p's error = p - C(sent), and p's x = C(mean)"""

    def serve(self, batch: Sequence[Task]) -> Sequence[Any]:
        """C(a), as the one row that it is"""

    def settle_served(self, batch: Sequence[tuple[Task, Any]]) -> None:
        """(task, answer): the task's error = a - answer"""


@runtime_checkable
class Owner(Protocol):
    """An optimizer that owns its exchange: it says what leaves the worker, and how."""

    method: Method
    """How the outgoing tensors are averaged."""
    attached: bool
    """Set when a synchronizer has taken charge of the exchange."""
    exchanges_gradient: bool
    """Whether the errors are in gradient units, and follow the learning rate."""

    def outgoing(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """What to average in place of this worker's gradient; may reuse its memory."""


class Workers(Protocol):
    """All workers, as an optimizer sees them that decides itself what to average, and when."""

    def average(
        self, tensors: Mapping[Tensor, Tensor], exact: Sequence[Tensor] = (), method: Method | None = None
    ) -> dict[Tensor, Tensor]:
        """The means of ``tensors``, one for each parameter, by the optimizer's method; wait for them.

        ``exact`` are averaged too, in place and uncompressed, and so are the model's buffers. With a ``method`` that
        keeps no state the tensors alone are averaged, by that one.
        """

    def skip(self) -> None:
        """A step at which nothing is averaged."""

    def buffers(self) -> list[Tensor]:
        """Of the model, such as the running statistics of batch norm."""


@runtime_checkable
class Averager(Protocol):
    """An optimizer that steps on its worker's own gradients, and averages what it likes when it likes."""

    method: Method
    """How."""
    workers: Workers | None
    """Set when a synchronizer has taken charge of the exchange."""
