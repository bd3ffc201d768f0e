"""One thread per synchronizer that runs its exchanges and issues its collectives.

Order is a rule, not a race: buckets go in the order in which they were submitted, which is the same on every rank, and
all rounds of a bucket go before the first of the next. While a bucket's collective is under way the next bucket, if it
has arrived, is compressed up to its first request; its collectives are issued when its turn comes.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.core.lockstep import Collective, Lockstep
from thinwire.core.value import Value
from thinwire.errors import ExchangeError
from thinwire.runtime.telemetry import Telemetry
from thinwire.runtime.transport import Pending, Transport

Results = list[tuple[Value, Any]]


class _Answered:
    """The event that one collective of the first job has ended."""


@dataclass(slots=True, eq=False)
class Job:
    """One bucket's exchange: how it starts, where its outcome goes, and who is told when it is there."""

    label: str
    start: Callable[[], Lockstep[tuple[Value, Any]]]
    finish: Callable[[Results], None]
    release: Callable[[], None]
    fail: Callable[[ExchangeError], None]
    tensors: Sequence[Tensor]
    """The memory that the job reads and writes."""
    last: bool
    """Whether it is the last of its step."""
    lockstep: Lockstep[tuple[Value, Any]] | None = None
    collectives: list[Collective] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    remaining: int = 0
    issued: float = 0.0
    ready: Any = None

    def __post_init__(self) -> None:
        if self.tensors and self.tensors[0].is_cuda:
            self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.ready.record()


class Engine:
    """Runs jobs in order on a thread of its own. ``submit`` returns at once."""

    def __init__(self, transport: Transport, telemetry: Telemetry, label: str) -> None:
        self.transport = transport
        self.telemetry = telemetry
        self.error: ExchangeError | None = None
        self._label = label
        self._events: queue.SimpleQueue[Job | _Answered | None] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._last_submitted = 0.0
        self._compressed_before = 0.0
        cuda = transport.device.type == "cuda"
        self._stream = torch.cuda.Stream(transport.device) if cuda else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="thinwire", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        if self.error is not None:
            raise self.error
        if job.last:
            self._last_submitted = time.perf_counter()
            self._compressed_before = self.telemetry.counters.seconds_compressing
        self._events.put(job)

    def close(self) -> None:
        """End the thread. At interpreter exit it must not be caught inside torch's C++ code."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        with torch.no_grad(), self._on_stream():
            while (event := self._events.get()) is not None:
                if self.error is not None:
                    if isinstance(event, Job):
                        event.fail(self.error)
                    continue
                current = event if isinstance(event, Job) else self._jobs[0]
                try:
                    if isinstance(event, Job):
                        self._arrived(event)
                    else:
                        self._answered()
                except Exception as error:
                    self._fail(current, error)

    def _arrived(self, job: Job) -> None:
        self._jobs.append(job)
        if len(self._jobs) <= 2:
            self._prepare(job)
        if len(self._jobs) == 1:
            self._issue(job)

    def _answered(self) -> None:
        job = self._jobs[0]
        job.remaining -= 1
        if job.remaining:
            return
        answers = self._collect(job)
        assert job.lockstep is not None
        with self.telemetry.compressing(job.label):
            job.collectives = job.lockstep.advance(answers)
        self._issue(job)

    def _prepare(self, job: Job) -> None:
        if job.lockstep is None:
            if job.ready is not None and self._stream is not None:
                self._stream.wait_event(job.ready)
                for tensor in job.tensors:
                    tensor.record_stream(self._stream)
            with self.telemetry.compressing(job.label):
                job.lockstep = job.start()
                job.collectives = job.lockstep.advance()

    def _issue(self, job: Job) -> None:
        """Send the job's next round, and use the wait to compress the next job; or finish it and go on."""
        while not job.collectives:
            assert job.lockstep is not None
            with self.telemetry.compressing(job.label):
                job.finish(job.lockstep.results)
            self._jobs.popleft()
            if job.last:
                self._account()
            job.release()
            if not self._jobs:
                return
            job = self._jobs[0]
            self._prepare(job)
        job.issued = time.perf_counter()
        job.remaining = len(job.collectives)
        job.pending = [self.transport.start(c) for c in job.collectives]
        for pending in job.pending:
            pending.when_done(lambda: self._events.put(_Answered()))
        if len(self._jobs) > 1:
            self._prepare(self._jobs[1])

    def _collect(self, job: Job) -> list[Tensor]:
        answers = [pending.result() for pending in job.pending]
        now = time.perf_counter()
        self.telemetry.counters.seconds_communicating += now - job.issued
        for collective in job.collectives:
            self.telemetry.communicated(collective, self.transport.world, job.label, job.issued, now)
        job.pending.clear()
        return answers

    def _account(self) -> None:
        counters = self.telemetry.counters
        counters.steps += 1
        waited = time.perf_counter() - self._last_submitted
        computing = counters.seconds_compressing - self._compressed_before
        counters.seconds_waiting += waited
        counters.seconds_exposed += max(0.0, waited - computing)

    def _fail(self, job: Job, error: Exception) -> None:
        """Tell every rank, then fail this job and all that wait behind it."""
        jobs = list(self._jobs) if job in self._jobs else [*self._jobs, job]
        self._jobs.clear()
        where = f"{self._label}, {job.label}, rank {self.transport.rank}"
        # a work that anything still holds, be it a traceback's frame, would keep the group's connections open
        for waiting in jobs:
            waiting.pending.clear()
        traceback.clear_frames(error.__traceback__)
        reason = self.transport.report_failure(f"{where}: {type(error).__name__}: {error}")
        self.error = ExchangeError(reason)
        self.error.__cause__ = error
        for waiting in jobs:
            waiting.fail(self.error)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
