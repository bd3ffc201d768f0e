"""One thread per synchronizer that runs its exchanges and issues its collectives.

Order is a rule, not a race: buckets go in the order in which they were submitted, which is the same on every rank. One
or more of them travel together as a message; where one message ends and the next begins depends only on the sizes of
what they ask for. All rounds of a message go before the first of the next; where it has only one, the next follows at
once, and fills the gaps that it leaves on the wire. While a message is under way the buckets of the next one are
compressed as they arrive, up to their first requests, and held until their turn comes.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
import traceback
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.core.lockstep import Collective, Lockstep, requested_bytes
from thinwire.core.requests import Exchange
from thinwire.core.value import Value
from thinwire.errors import ExchangeError
from thinwire.runtime.messages import Plan
from thinwire.runtime.telemetry import Telemetry
from thinwire.runtime.transport import Pending, Transport

Results = list[tuple[Value, Any]]
TOGETHER = 2
"""Messages under way: gloo works on two at a time, and more would only hold memory."""
TURNS = 2
"""Steps after which a method asks for as much again: some take turns."""
KNOWN = 3
"""Steps after which it is known how long backward takes: the first ones make buckets, and much else."""


@dataclass(slots=True, eq=False)
class Job:
    """One bucket's exchange: how it starts, where its outcome goes, and who is told when it is there."""

    label: str
    start: Callable[[], list[Exchange[tuple[Value, Any]]]]
    finish: Callable[[Results], None]
    release: Callable[[], None]
    fail: Callable[[ExchangeError], None]
    tensors: Sequence[Tensor]
    """The memory that the job reads and writes."""
    last: bool
    """Whether it is the last of its step."""
    one_round: bool = False
    """Whether that is known of its exchange, on every rank alike."""
    closes: bool | None = None
    """Whether its message ends with it; None where that follows from sizes."""
    ready: Any = None

    def __post_init__(self) -> None:
        if self.tensors and self.tensors[0].is_cuda:
            self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.ready.record()


@dataclass(slots=True, eq=False)
class Message:
    """Buckets that travel together."""

    lockstep: Lockstep[tuple[Value, Any]]
    jobs: list[tuple[Job, int]] = field(default_factory=list)
    """With the number of exchanges of each."""
    full: bool = False
    collectives: list[Collective] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    remaining: int = 0
    issued: float = 0.0

    @property
    def label(self) -> str:
        first, more = self.jobs[0][0].label, len(self.jobs) - 1
        return f"{first} and {more} more" if more else first

    @property
    def one_round(self) -> bool:
        return all(job.one_round for job, _ in self.jobs)


@dataclass(frozen=True, slots=True)
class _Answered:
    """The event that one collective of a message has ended."""

    message: Message


class Engine:
    """Runs jobs in order on a thread of its own. ``submit`` returns at once."""

    def __init__(self, transport: Transport, telemetry: Telemetry, label: str, plan: Plan) -> None:
        """``plan``: where messages end."""
        self.transport = transport
        self.telemetry = telemetry
        self.plan = plan
        self.cuts = plan.cuts()
        self.error: ExchangeError | None = None
        self._label = label
        self._events: queue.SimpleQueue[Job | _Answered | None] = queue.SimpleQueue()
        self._arrived: deque[Job] = deque()
        self._sending: deque[Message] = deque()
        self._next = self._message()
        self._asked = 0
        self._asked_by_step = deque([plan.price] * TURNS, maxlen=TURNS)
        self._passed = 0
        self._begins = True
        self._until_known = KNOWN + 1 if plan.messages is None else 0
        self._first_gradient: float | None = None
        self._backward = 0.0
        self._at = ""
        self._last_submitted = 0.0
        self._compressed_before = 0.0
        self._last_heard = 0.0
        cuda = transport.device.type == "cuda"
        self._stream = torch.cuda.Stream(transport.device) if cuda else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="thinwire", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A step's first gradient is there. Without this, its first bucket is taken for that."""
        self._first_gradient = time.perf_counter()

    def submit(self, job: Job) -> None:
        if self.error is not None:
            raise self.error
        now = time.perf_counter()
        if self._first_gradient is None:
            self._first_gradient = now
        if job.last:
            self._backward, self._first_gradient = now - self._first_gradient, None
            self._last_submitted = now
            self._compressed_before = self.telemetry.counters.seconds_compressing
        self._events.put(job)

    def close(self) -> None:
        """End the thread. At interpreter exit it must not be caught inside torch's C++ code."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
            if not self._thread.is_alive():
                self.transport.close()

    def _run(self) -> None:
        with torch.no_grad(), self._on_stream():
            while True:
                # an answer goes before another bucket's compression
                compressible = bool(self._arrived) and not self._next.full
                if compressible and self._events.empty():
                    self._attempt(self._compress)
                    continue
                event = self._events.get()
                if event is None:
                    return
                if self.error is not None:
                    if isinstance(event, Job):
                        event.fail(self.error)
                elif isinstance(event, Job):
                    self._arrived.append(event)
                else:
                    event.message.remaining -= 1
                    self._attempt(self._go_on)
                del event  # or it would hold a step's gradients until the next one's come

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
            while self._next.full and self._may_issue():
                message, self._next = self._next, self._message()
                self._sending.append(message)
                self._at = message.label
                # packed no sooner: until now its gradients have lain where they are
                with self.telemetry.compressing(message.label):
                    message.collectives = message.lockstep.advance()
                self._issue(message)
                self._go_on()
        except Exception as error:
            self._fail(error)

    def _message(self) -> Message:
        return Message(Lockstep(share=self.transport.share))

    def _may_issue(self) -> bool:
        return len(self._sending) < TOGETHER and all(message.one_round for message in self._sending)

    def _compress(self) -> None:
        """Start the next bucket's exchanges, up to what they ask for first."""
        job, message = self._arrived.popleft(), self._next
        message.jobs.append((job, 0))
        self._at = job.label
        if self._begins:
            self._begins = False
            self._cut_anew()
        if job.ready is not None and self._stream is not None:
            self._stream.wait_event(job.ready)
            for tensor in job.tensors:
                tensor.record_stream(self._stream)
        with self.telemetry.compressing(job.label):
            exchanges = job.start()
            message.jobs[-1] = (job, len(exchanges))
            asked = requested_bytes(message.lockstep.add(exchanges), self.transport.world)
        self._asked += asked
        # a cut is passed by the bucket that ends nearer to it than the next one would, were that as large
        part = (self._asked + asked / 2) / max(1, self._asked_by_step[0])
        before, self._passed = self._passed, bisect_right(self.cuts.parts, part)
        # more than a method's turns may differ by: a dense warm-up
        ends = self._passed > before if job.closes is None else job.closes
        message.full = job.last or ends or self._asked >= TURNS * self.plan.price
        if job.last:
            self._asked_by_step.append(self._asked)
            self._asked = self._passed = 0
            self._begins = True
        if message.full and len(message.jobs) == len(job.tensors) == 1:
            message.lockstep.scratch = job.tensors[0]

    def _cut_anew(self) -> None:
        """Once it is known how long backward takes: before the same step on every rank, when nothing is under way."""
        if self._until_known:
            self._until_known -= 1
            if not self._until_known:
                self.cuts = self.plan.cuts(statistics.fmean(self.transport.gather_objects(self._backward)))

    def _go_on(self) -> None:
        """With the first message, and those after it, as far as they have their answers."""
        while self._sending and not self._sending[0].remaining:
            message = self._sending[0]
            self._at = message.label
            if not message.collectives:
                self._finish(self._sending.popleft())
                continue
            answers = self._collect(message)
            with self.telemetry.compressing(message.label):
                message.collectives = message.lockstep.advance(answers)
            self._issue(message)

    def _issue(self, message: Message) -> None:
        """Send the next round, if there is one."""
        message.issued = time.perf_counter()
        message.remaining = len(message.collectives)
        message.pending = [self.transport.start(c) for c in message.collectives]
        for pending in message.pending:
            pending.when_done(lambda: self._events.put(_Answered(message)))

    def _finish(self, message: Message) -> None:
        results, start = message.lockstep.results, 0
        for job, count in message.jobs:
            with self.telemetry.compressing(job.label):
                job.finish(results[start : start + count])
            start += count
            if job.last:
                self._account()
        for job, _ in message.jobs:
            job.release()

    def _collect(self, message: Message) -> list[Tensor]:
        answers = [pending.result() for pending in message.pending]
        # what the message before it was on the wire for is that one's time
        start, now = max(message.issued, self._last_heard), time.perf_counter()
        self._last_heard = now
        self.telemetry.counters.seconds_communicating += now - start
        for collective in message.collectives:
            self.telemetry.communicated(collective, self.transport.world, message.label, start, now)
        message.pending.clear()
        return answers

    def _account(self) -> None:
        counters = self.telemetry.counters
        counters.steps += 1
        now = time.perf_counter()
        waited = now - self._last_submitted
        self.telemetry.span("compute", "wait", self._last_submitted, now)
        computing = counters.seconds_compressing - self._compressed_before
        counters.seconds_waiting += waited
        counters.seconds_exposed += max(0.0, waited - computing)

    def _fail(self, error: Exception) -> None:
        """Tell every rank, then fail all jobs that are not finished."""
        messages = [*self._sending, self._next]
        jobs = [*(job for message in messages for job, _ in message.jobs), *self._arrived]
        where = f"{self._label}, {self._at}, rank {self.transport.rank}"
        # a work that anything still holds, be it a traceback's frame, would keep the group's connections open
        for message in messages:
            message.pending.clear()
        self._sending.clear()
        self._next = self._message()
        self._arrived.clear()
        traceback.clear_frames(error.__traceback__)
        reason = self.transport.report_failure(f"{where}: {type(error).__name__}: {error}")
        self.error = ExchangeError(reason)
        self.error.__cause__ = error
        for job in jobs:
            job.fail(self.error)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
