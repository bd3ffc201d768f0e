"""The collectives of ``torch.distributed`` as requests want them, on a process group of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.lockstep import Collective, bytes_sent, cut
from thinwire.runtime.hops import Hops

PROBES = (1 << 16, 1 << 19)
"""Bytes of the collectives by which latency and rate are measured."""
TRIES = 3
"""The first one also makes the connections."""
CLEARLY, LONG = 0.8, 0.01
"""What going straight takes of a ring's time, at most, and what that is in seconds, at least, to be worth a thread."""
PATIENCE = 3.0
"""Seconds that the store has to answer a worker that fails."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way."""

    work: Any
    answer: Tensor

    def when_done(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` on some thread once it has ended, well or badly."""
        self.work.get_future().add_done_callback(lambda _: notify())

    def result(self) -> Tensor:
        """The answer, ordered after the collective on the current stream; raises what went wrong."""
        self.work.wait()
        return self.answer


class _Together:
    """Several works as one. gloo tells of a message's end only to a thread that waits for it."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        self._future: Future[None] = Future()
        threading.Thread(target=self._run, name="thinwire swap", daemon=True).start()

    def get_future(self) -> Future[None]:
        return self._future

    def wait(self) -> None:
        self._future.result()

    def _run(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)


class Transport:
    """Issues collectives on a group that only its engine uses, so nothing else can come between them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """``group`` is the one that training uses; every member of it must call this."""
        self.device = device
        self.straight = 0.0
        """Bytes of a message up to which workers send to each other without going round a ring; see ``measure``."""
        self._options: dict[str, Any] = {
            "ranks": dist.get_process_group_ranks(group),
            "timeout": group._get_backend(device).options._timeout,
            "backend": dist.get_backend_config(group),
            "use_local_synchronization": True,
            "group_desc": "thinwire",
        }
        # DDP and users issue collectives on `group` from other threads: sharing it would make their order a race.
        self._group = dist.new_group(**self._options)
        self._second_group: dist.ProcessGroup | None = None
        self._hops: Hops | None = None
        self.rank = dist.get_rank(self._group)
        self.world = dist.get_world_size(self._group)
        self.share = 1.0 / self.world
        """What a worker's numbers are multiplied by before they are added up: a sum could overflow in 16 bits."""
        self._store = self._group.get_group_store()

    def start(self, collective: Collective) -> Pending:
        """An all-reduce adds up."""
        buffer, straight = collective.buffer, collective.bytes_sent(self.world) <= self.straight
        if collective.op == "all_reduce":
            if straight and self._hops is not None:
                return Pending(*self._hops.all_reduce(buffer))
            return Pending(dist.all_reduce(buffer, group=self._group, async_op=True), buffer)
        if collective.op == "all_gather":
            answer = buffer.new_empty((self.world, *buffer.shape))
            if straight:  # the same bytes, in one hop
                work = dist.all_to_all_single(answer, buffer.repeat(self.world, 1), group=self._group, async_op=True)
            else:
                work = dist.all_gather_single(answer.view(-1), buffer, group=self._group, async_op=True)
            return Pending(work, answer)
        if collective.op == "swap":
            return self._swap(collective)
        assert collective.op == "all_to_all"
        answer = torch.empty_like(buffer)
        return Pending(dist.all_to_all_single(answer, buffer, group=self._group, async_op=True), answer)

    def _swap(self, collective: Collective) -> Pending:
        """All messages at once, so that no worker's wait depends on the order of another's."""
        answer = collective.buffer.new_empty(sum(collective.receives.values()))
        group = self._group
        incoming = cut(answer, collective.receives).items()
        outgoing = cut(collective.buffer, collective.sends).items()
        calls = [dist.P2POp(dist.irecv, part, group=group, group_peer=peer) for peer, part in incoming]
        calls += [dist.P2POp(dist.isend, part, group=group, group_peer=peer) for peer, part in outgoing]
        works = dist.batch_isend_irecv(calls) if calls else []
        # NCCL makes one work of the batch, with a future
        return Pending(works[0] if works and self.device.type == "cuda" else _Together(works), answer)

    def measure(self, size: float) -> tuple[float, float]:
        """The same of an all-reduce as it is done from now on.

        Where gloo's ring is not the fastest for a step of ``size`` bytes, its messages go ``straight`` from now on.
        """
        latency, per_byte = self.line()
        # NCCL chooses for itself, two have no ring, and where it is quick noise would choose
        if self.device.type == "cuda" or self.world <= 2 or latency < LONG:
            return latency, per_byte
        hop, hop_per_byte = self.line("all_to_all")
        if 2 * hop + size * hop_per_byte >= CLEARLY * (latency + size * per_byte):
            return latency, per_byte
        self._second_group = dist.new_group(**self._options)
        self._hops = Hops(self._group, self._second_group)
        self.straight = 2 * size  # steps may differ, but a dense warm-up would gain nothing and need more memory
        return 2 * hop, hop_per_byte

    def line(self, op: str = "all_reduce") -> tuple[float, float]:
        """The seconds of a collective's latency, and of each byte that a worker sends in it; alike on all ranks.

        Through two sizes: one that is not small already has all the turns that a collective may take.

        Of several tries the quickest, since what else runs on the machines can only add; of all ranks the slowest.
        """
        gathered = self.gather_objects([self._seconds(op, size) for size in (4, *PROBES)])
        least, small, large = (max(times) for times in zip(*gathered, strict=True))
        sent = [bytes_sent(op, size, self.world) for size in PROBES]
        seconds_per_byte = max(0.0, large - small) / (sent[1] - sent[0])
        return max(least, small - seconds_per_byte * sent[0]), seconds_per_byte

    def _seconds(self, op: str, size: int) -> float:
        """Of a collective of so many bytes."""
        tries = []
        for _ in range(TRIES):
            buffer = torch.zeros(self.world, max(1, size // 4 // self.world), device=self.device)
            if buffer.is_cuda:
                torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            self.start(Collective(op, buffer if op == "all_to_all" else buffer.view(-1))).result()
            if buffer.is_cuda:
                torch.cuda.synchronize(self.device)
            tries.append(time.perf_counter() - start)
        return min(tries)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Everybody's ``mine``, by rank."""
        everybody: list[Any] = [None] * self.world
        dist.all_gather_object(everybody, mine, group=self._group)
        return everybody

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's."""
        for tensor in tensors:
            dist.broadcast(tensor, group=self._group, group_src=0)

    def close(self) -> None:
        """Let go of the group: with its last holder gloo's threads end, before the interpreter does."""
        if hops := self.__dict__.pop("_hops", None):
            hops.close()
        for name in ("_group", "_second_group"):
            self.__dict__.pop(name, None)

    def report_failure(self, message: str) -> str:
        """Leave the reason where the others look for it, then break off, so that nobody waits for this worker.

        Returns the reason that came first, here or elsewhere, as far as this worker can learn it.
        """
        reasons = [message]
        # a store behind a dead link neither answers nor fails, and has no timeout for that
        asking = threading.Thread(target=self._leave_reason, args=(reasons,), daemon=True)
        asking.start()
        asking.join(PATIENCE)
        for group in filter(None, (self._group, self._second_group)):
            group.abort()
            # gloo closes its connections, by which the others know, only when nobody holds the group any more
            dist.destroy_process_group(group)
        self.close()
        return reasons[-1]

    def _leave_reason(self, reasons: list[str]) -> None:
        try:
            if self._store.check(["failure"]):
                reasons.append(self._store.get("failure").decode())
            else:
                self._store.set("failure", reasons[0])
        except RuntimeError:  # the store's own host is gone
            pass
