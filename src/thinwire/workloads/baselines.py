"""What thinwire is measured against: plain DDP, torch's own Power-SGD, no communication at all, or a mere barrier."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

from thinwire.core.lockstep import Collective
from thinwire.runtime.telemetry import Telemetry

ONE_BUCKET_MB = 1 << 20


class Baseline(Protocol):
    """A way to train without thinwire."""

    def wrap(self, model: nn.Module, telemetry: Telemetry) -> nn.Module:
        """The model that exchanges its gradients by itself; what it sends and waits is noted in ``telemetry``."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlainDDP:
    """DistributedDataParallel as torch ships it."""

    def wrap(self, model: nn.Module, telemetry: Telemetry) -> nn.Module:
        ddp = DistributedDataParallel(model)
        # DDP keeps the times of its own steps: no hook is needed, which would make it another DDP
        ddp._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
        world = dist.get_world_size()
        size = sum(Collective("all_reduce", p).bytes_sent(world) for p in model.parameters() if p.requires_grad)

        def note(*_: Any) -> None:
            telemetry.counters.bytes_sent += size
            telemetry.counters.bytes_dense += size
            log = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # of the step before
            if "backward_comm_time_end" in log:
                epoch = time.time() - time.perf_counter()
                marks = ("backward_comm_time_start", "backward_comm_time_end", "backward_compute_time_end")
                start, end, computed = (log[mark] / 1e9 - epoch for mark in marks)
                telemetry.span("wire", "all_reduce, all buckets", start, end, bytes_sent=size)
                telemetry.span("compute", "wait", computed, end)
                telemetry.counters.seconds_waiting += max(0.0, end - computed)
                telemetry.counters.seconds_exposed += max(0.0, end - computed)

        ddp.register_forward_hook(note)
        return ddp


@dataclass(frozen=True, kw_only=True)
class TorchPowerSGD:
    """torch's Power-SGD hook, in one bucket: with several it hangs on gloo."""

    rank: int = 4
    """Columns of the factors."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")

    def wrap(self, model: nn.Module, telemetry: Telemetry) -> nn.Module:
        ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = power.PowerSGDState(None, matrix_approximation_rank=self.rank, start_powerSGD_iter=2)
        # The hook starts its all-reduces where nobody else sees them, on gloo's threads too. Its module is given a
        # `dist` that notes when each one ran; without it there would be neither bytes nor a split of the waiting.
        metered = _Metered(telemetry)
        counters = telemetry.counters

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            start, before = time.perf_counter(), counters.seconds_communicating
            dense = Collective("all_reduce", bucket.buffer()).bytes_sent(dist.get_world_size())

            def done(future: torch.futures.Future[Tensor]) -> Tensor:
                now = time.perf_counter()
                counters.bytes_dense += dense
                counters.seconds_waiting += now - start
                counters.seconds_exposed += counters.seconds_communicating - before
                telemetry.span("compute", "wait", start, now)
                telemetry.span("compress", "factors", metered.since, now)
                return future.value()

            vars(power)["dist"] = metered  # several may take turns
            metered.since = start
            return power.powerSGD_hook(state, bucket).then(done)

        ddp.register_comm_hook(state, hook)
        return ddp


class _Metered:
    """``torch.distributed`` whose all-reduces are noted."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self.since = 0.0
        """When the last all-reduce ended, or the hook began."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, **options: Any) -> Any:
        telemetry, start, collective = self.telemetry, time.perf_counter(), Collective("all_reduce", tensor)
        telemetry.span("compress", "factors", self.since, start)
        work = dist.all_reduce(tensor, **options)

        def note(_: Any) -> None:
            self.since = now = time.perf_counter()
            telemetry.counters.seconds_communicating += now - start
            telemetry.communicated(collective, dist.get_world_size(), "factors", start, now)

        work.get_future().add_done_callback(note)
        return work


@dataclass(frozen=True, kw_only=True)
class Local:
    """No communication at all: the floor. Every worker trains alone, so its loss is no rival's."""

    def wrap(self, model: nn.Module, telemetry: Telemetry) -> nn.Module:
        return model


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """Trains alone, but waits for all others before each step: the floor of all that keep in step."""

    def wrap(self, model: nn.Module, telemetry: Telemetry) -> nn.Module:
        number = torch.zeros(1)

        def wait(module: nn.Module, _: Any) -> None:
            if module.training:  # rank 0 validates alone
                dist.all_reduce(number)

        model.register_forward_pre_hook(wait)
        return model


BASELINES: dict[str, type[PlainDDP] | type[TorchPowerSGD] | type[Local] | type[Barrier]] = {
    "ddp": PlainDDP,
    "torch-powersgd": TorchPowerSGD,
    "local": Local,
    "barrier": Barrier,
}
