"""Owns a method's states, by parameter name, and hands each bucket of gradients to the engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from thinwire.core import bundle
from thinwire.core.bundle import Given, Start
from thinwire.core.exchange import exchange
from thinwire.core.lockstep import Collective, bytes_sent
from thinwire.core.method import Averager, Context, Dense, Method, Owner, State
from thinwire.core.rehearsal import rehearse
from thinwire.core.requests import Exchange
from thinwire.core.value import Value, made, write_each
from thinwire.errors import ExchangeError
from thinwire.registry import Recipe, resolve
from thinwire.runtime.buckets import Bucket, Part, packed
from thinwire.runtime.engine import Engine, Job, Results
from thinwire.runtime.ledger import WHOLE, Ledger
from thinwire.runtime.messages import Cuts, Plan, plan
from thinwire.runtime.state import Snapshot, complete
from thinwire.runtime.telemetry import Telemetry
from thinwire.runtime.transport import Transport

log = logging.getLogger("thinwire")


class Synchronizer:
    """Averages gradients over the workers by ``method``: a spec, a method, or an optimizer that owns its exchange.

    Making one touches no process group. ``optimizer`` is asked for each parameter's learning rate, which errors may
    follow. ``messages`` is into how many a step's exchange is cut, at most: DDP's buckets are joined, never cut. By
    default it follows from the method's bytes and the latency and rate that are measured when the group is known.
    """

    def __init__(
        self,
        method: str | Recipe | Method | Owner | Averager,
        optimizer: torch.optim.Optimizer | None = None,
        seed: int = 0,
        messages: int | None = None,
    ) -> None:
        if messages is not None and messages < 1:
            raise ValueError(f"messages must be at least 1, not {messages}")
        self._owner: Owner | None = None
        self.averager: Averager | None = None
        """The optimizer that asks for every exchange itself, if it is one that does."""
        if isinstance(method, torch.optim.Optimizer):
            if not isinstance(method, Owner | Averager):
                raise ValueError(f"{type(method).__name__} does not own its exchange: attach a method instead")
            if optimizer not in (None, method):
                raise ValueError(f"{type(method).__name__} owns its exchange: it takes no other optimizer")
            if isinstance(method, Owner):
                self._owner, optimizer = method, method if method.exchanges_gradient else None
            else:
                self.averager, optimizer = method, None
        owner = self._owner or self.averager
        self.method = resolve(method if owner is None else owner.method)  # type: ignore[arg-type]
        self.telemetry = Telemetry()
        self.ledger = Ledger(self.method, seed)
        self._seed = seed
        self._messages = messages
        self._plan = Plan()
        self._optimizer = optimizer
        self._groups: dict[str, int] = {}
        self._engine: Engine | None = None
        self._agreed = False
        self._may_be_absent = False
        self._held: list[tuple[Bucket, Future[Any]]] = []
        self._to_load: Any = None
        self._module: nn.Module | None = None
        self._averages_buffers = False
        self.silent: bool | None = None
        """Whether backward exchanges nothing; None where that is for DDP to say."""

    @property
    def bound(self) -> bool:
        """Whether it has a model and a process group."""
        return self._engine is not None

    @property
    def cuts(self) -> Cuts:
        """Where a gradient had best be cut, as far as that is known by now."""
        assert self._engine is not None
        return self._engine.cuts

    def begin(self) -> None:
        """The first gradient of a step is there."""
        assert self._engine is not None
        self._engine.begin()

    def identity(self) -> str:
        """What must be alike on all workers."""
        by = f"{self.averager!r} by " if self.averager is not None else ""
        return f"{by}{self.method!r}, seed={self._seed}, messages={self._messages}"

    def bind(self, transport: Transport, module: nn.Module, may_be_absent: bool, averages_buffers: bool) -> None:
        """Take charge of ``module``'s gradients, or of what an optimizer averages in their place.

        ``may_be_absent``: a step may leave parameters unused. ``averages_buffers``: of the module, at every average.
        """
        self._module = module
        if isinstance(self.averager, torch.optim.Optimizer):
            self.ledger.adopt(module, {p for group in self.averager.param_groups for p in group["params"]})
            self.averager.workers = self
            self._averages_buffers = averages_buffers
            may_be_absent = False  # whatever it averages, it applies
        else:
            self.ledger.adopt(module)
        if self._optimizer is not None:
            # by number: an optimizer that loads a state makes new dicts of its groups
            groups = enumerate(self._optimizer.param_groups)
            number_of = {p: number for number, group in groups for p in group["params"]}
            self._groups = {name: number_of[p] for p, name in self.ledger.names.items() if p in number_of}
        if self._owner is not None:
            self._owner.attached = True
        self._may_be_absent = may_be_absent
        kinds = {(p.dtype, p.device) for p in self.ledger.names}
        for device in {device for _, device in kinds}:
            rehearse(self.method, sorted({dtype for dtype, d in kinds if d == device}, key=str), device)
        shapes = {name: parameter.shape for parameter, name in self.ledger.names.items()}
        self._plan = plan(self.method, shapes, transport, self._messages)
        self._engine = engine = Engine(transport, self.telemetry, repr(self.method), self._plan)
        weakref.finalize(self, engine.close)
        if self._to_load is not None:
            self.load_state_dict(self._to_load)
            self._to_load = None

    def reduce(self, bucket: Bucket) -> Future[Any]:
        """Start to average a bucket in place; the future holds its buffer, or raises. See ``submit``."""
        return self.submit(bucket).then(_unwrap)

    def average(
        self, tensors: Mapping[Tensor, Tensor], exact: Sequence[Tensor] = (), method: Method | None = None
    ) -> dict[Tensor, Tensor]:
        """The means of an optimizer's ``tensors``, by parameter; see ``Workers``. All ranks ask for the same."""
        with_buffers = self._averages_buffers and method is None
        plain = [*exact, *(b for b in self.buffers() if with_buffers and b.is_floating_point())]
        futures = [self._submit_exact(plain, last=not tensors)] if plain else []
        buckets = packed([Part(self.ledger.names[parameter], parameter, x) for parameter, x in tensors.items()])
        futures += [self.submit(bucket, method) for bucket in buckets]
        wait_for(futures)
        return {part.parameter: part.grad for bucket in buckets for part in bucket.parts}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up on each worker, to be exchanged with those of the next backward outside."""
        if self.silent is None:
            raise ValueError("nothing to silence: DistributedDataParallel has a no_sync of its own")
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def fail(self, reason: str) -> None:
        """Break off on all ranks, and raise."""
        assert self._engine is not None
        future: Future[Any] = Future()

        def start() -> list[Exchange[Any]]:
            raise ValueError(reason)

        self._engine.submit(Job("backward", start, lambda _: None, lambda: None, future.set_result, [], last=False))
        wait_for([future])

    def skip(self) -> None:
        """A step at which the optimizer averages nothing: dense would have sent every gradient."""
        world, counters = self._place()[1], self.telemetry.counters
        counters.steps += 1
        counters.bytes_dense += sum(Collective("all_reduce", p).bytes_sent(world) for p in self.ledger.names)

    def buffers(self) -> list[Tensor]:
        """Of the model."""
        return list(self._module.buffers()) if self._module is not None else []

    def submit(self, bucket: Bucket, method: Method | None = None) -> Future[Any]:
        """Start to average a bucket in place, for ``wait_for``. All ranks submit in the same order.

        ``method``, which keeps no state, in place of the synchronizer's own.
        """
        assert self._engine is not None
        device = bucket.memory[0].device
        future: Future[Any] = Future(devices=[device] if device.type == "cuda" else None)
        whole = self.method.whole and method is None
        self._held.append((bucket, future))
        if bucket.last or not whole:
            held, self._held = self._held, []
            self._engine.submit(self._whole_job(held) if whole else self._job(*held[0], method))
        self.ledger.step += bucket.last
        return future

    def _submit_exact(self, tensors: Sequence[Tensor], last: bool) -> Future[Any]:
        """The plain mean, in place."""
        assert self._engine is not None
        future: Future[Any] = Future(devices=[tensors[0].device] if tensors[0].is_cuda else None)
        ctx = self.ledger.context("", *self._place())

        def start() -> list[Exchange[tuple[Value, State]]]:
            return [exchange(Dense(), tensor, (), ctx) for tensor in tensors]

        def finish(results: Results) -> None:
            write_each([(tensor, mean) for tensor, (mean, _) in zip(tensors, results, strict=True)])

        def release() -> None:
            future.set_result(tensors[0])

        self._engine.submit(Job("exact means", start, finish, release, future.set_result, tensors, last))
        return future

    def stats(self) -> dict[str, Any]:
        """Counts and seconds of this worker since attach: steps, bytes, collectives, compressing, exposed ..."""
        return self.telemetry.stats()

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, by parameter name. What is withheld differs by rank: every rank saves its own."""
        return self.ledger.snapshot(*self._place()).to_dict()

    def load_state_dict(self, d: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's dict, or from the list of all ranks' dicts.

        The list is needed where the number of workers has changed and the ranks do not hold all dicts between them.
        Each worker then starts from the mean of what was withheld. Nothing changes if the state does not fit.
        """
        given = [Snapshot.from_dict(one) for one in (d if isinstance(d, Sequence) else [d])]
        if not given:
            raise ValueError("no state was given")
        if self._engine is None:
            self._to_load = d
            return
        for snapshot in given:
            self.ledger.check(snapshot)
        self.ledger.load(self._mine(given), *self._place())

    def _mine(self, given: list[Snapshot]) -> list[Snapshot]:
        """My own snapshot, or all of them if they are of another number of workers."""
        rank, world = self._place()
        old = given[0].world
        if old != world:
            assert self._engine is not None
            if len(given) == 1:
                given = self._engine.transport.gather_objects(given[0])
            given = complete(given)
            if rank == 0:
                log.warning("state of %d workers loaded by %d: each starts from the mean of the residuals", old, world)
            return given
        own = [snapshot for snapshot in given if snapshot.rank == rank]
        if not own:
            raise ValueError(f"this is the state of rank {given[0].rank}, and this is rank {rank}")
        return own

    def _job(self, bucket: Bucket, future: Future[Any], method: Method | None) -> Job:
        step = self.ledger.step
        parts = [part for part in bucket.parts if part.grad.numel()]
        contexts = self._contexts([(part.name, part) for part in parts])
        begun: list[Start] = []

        def start() -> list[Exchange[Any]]:
            self._agree(step)
            begun.append(self._start(parts, contexts, method))
            return begun[0].exchanges

        def finish(results: Results) -> None:
            outcomes = begun.pop().outcomes(results)
            write_each([(part.grad, mean) for part, (mean, _) in zip(parts, outcomes, strict=True)])
            for ctx, (_, state) in zip(contexts if method is None else (), outcomes, strict=False):
                self.ledger.keep(ctx, state)
            self._count(bucket)

        def release() -> None:
            future.set_result(bucket.memory[0])

        label = f"bucket {bucket.number} ({parts[0].name} ...)" if parts else f"bucket {bucket.number}"
        one_round = method is None and self._plan.one_round
        memory, last, closes = bucket.memory, bucket.last, bucket.closes
        return Job(label, start, finish, release, future.set_result, memory, last, one_round, closes)

    def _whole_job(self, held: list[tuple[Bucket, Future[Any]]]) -> Job:
        order = {name: i for i, name in enumerate(self.ledger.names.values())}
        parts = sorted((part for bucket, _ in held for part in bucket.parts), key=lambda p: order[p.name])
        (ctx,) = self._contexts([(WHOLE, parts[0])])

        def start() -> list[Exchange[tuple[Value, State]]]:
            self._agree(ctx.step)
            present = self._present(parts)
            vector = torch.cat([self._outgoing(part).flatten() for part in parts])
            sizes = [part.grad.numel() for part in parts]
            return [exchange(self.method, vector, self.ledger.state(ctx), ctx, present, sizes)]

        def finish(results: Results) -> None:
            mean, state = results[0]
            vector = made(mean, self.ledger.template(WHOLE))
            pieces = torch.split(vector, [part.grad.numel() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.grad.copy_(piece.view_as(part.grad))
            self.ledger.keep(ctx, state)
            for bucket, _ in held:
                self._count(bucket)

        def release() -> None:
            for bucket, future in held:
                future.set_result(bucket.memory[0])

        def fail(error: ExchangeError) -> None:
            for _, future in held:
                future.set_result(error)

        memory = [x for bucket, _ in held for x in bucket.memory]
        return Job("the whole gradient", start, finish, release, fail, memory, last=True)

    def _start(self, parts: Sequence[Part], contexts: Sequence[Context], method: Method | None) -> Start:
        pairs = list(zip(parts, contexts, strict=True))
        if method is not None:
            return bundle.start(method, [Given(part.grad, (), ctx) for part, ctx in pairs])
        given = [Given(self._outgoing(part), self.ledger.state(ctx), ctx) for part, ctx in pairs]
        if not self._may_be_absent:
            return bundle.start(self.method, given)
        present = [self._present([part]) for part in parts]
        exchanges = [exchange(self.method, *one, absent) for one, absent in zip(given, present, strict=True)]
        return Start(exchanges, [[i] for i in range(len(parts))])

    def _present(self, parts: Sequence[Part]) -> Tensor | None:
        """Where a parameter may be unused, DDP hands over zeros for it, and drops the answer if all ranks did."""
        return torch.stack([part.grad.any() for part in parts]) if self._may_be_absent else None

    def _outgoing(self, part: Part) -> Tensor:
        return part.grad if self._owner is None else self._owner.outgoing(part.parameter, part.grad)

    def _count(self, bucket: Bucket) -> None:
        size = sum(x.nbytes for x in bucket.memory)
        self.telemetry.counters.bytes_dense += bytes_sent("all_reduce", size, self._place()[1])

    def _agree(self, step: int) -> None:
        """Before the first exchange: the workers must stand at the same step, as they do if all or none resumed."""
        if not self._agreed:
            assert self._engine is not None
            steps = self._engine.transport.gather_objects(step)
            if len(set(steps)) > 1:
                raise ValueError(f"the workers stand at different steps: {steps}, by rank")
            self._agreed = True

    def _contexts(self, parts: Sequence[tuple[str, Part]]) -> list[Context]:
        """Of what is reduced under each name, by the learning rate of that part."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups] if self._optimizer is not None else []
        rank, world = self._place()
        found = []
        for name, part in parts:
            number = self._groups.get(part.name)
            lr = None if number is None else rates[number]
            found.append(self.ledger.context(name, rank, world, lr, part.grad.dtype))
        return found

    def _place(self) -> tuple[int, int]:
        if self._engine is None:
            raise ValueError("this synchronizer is not attached to a model yet")
        return self._engine.transport.rank, self._engine.transport.world


def wait_for(futures: Sequence[Future[Any]]) -> None:
    """Until the buckets are averaged; raises what went wrong."""
    for future in futures:
        future.wait()
        _unwrap(future)


def _unwrap(future: Future[Any]) -> Any:
    # DDP takes any value for a tensor: an error must be raised on the way to reach the caller of backward()
    value = future.value()
    if isinstance(value, ExchangeError):
        raise value
    return value
