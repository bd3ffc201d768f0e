"""A trace of all ranks in the format of Chrome and Perfetto: a process for each rank, a thread for each track."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.runtime.telemetry import Span

TRACKS = ["compute", "compress", "wire"]


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Every rank calls this; rank 0 writes. Clocks are the machine's: ranks on several machines are not aligned."""
    everybody: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(list(spans), everybody)
    if everybody is None:
        return
    origin = min((span.start for rank in everybody for span in rank), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, own in enumerate(everybody):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for thread, track in enumerate(TRACKS):
            events.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": track}})
        for span in own:
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": TRACKS.index(span.track),
                    "name": span.name,
                    "ts": 1e6 * (span.start - origin),
                    "dur": 1e6 * (span.end - span.start),
                    "args": span.args,
                }
            )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
