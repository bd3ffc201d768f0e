"""What the figures of a comparison say, in words: the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
BASELINES = ("ddp", "torch-powersgd", "local", "barrier")
ALONE = ("local", "barrier")
"""Those in which every worker trains alone."""
EVEN = 1.05
"""Times closer than this are called the same."""


def kind(run: Run) -> str:
    """``sgd+torch-powersgd:rank=4`` is a ``torch-powersgd``."""
    return str(run["method"]).rpartition("+")[2].partition(":")[0]


def first(runs: Sequence[Run], name: str) -> Run | None:
    return next((run for run in runs if kind(run) == name), None)


def readable(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def duration(ms: float) -> str:
    if ms < 9.95:
        return f"{ms:.2g} ms"
    return f"{ms:.0f} ms" if ms < 999.5 else f"{ms / 1000:.3g} s"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{ratio:.1f}x" if ratio < 99.5 else f"{ratio:.0f}x"


def over(run: Run, other: Run | None) -> float | None:
    """How many times the other's step this one's takes."""
    return run["step_ms"] / other["step_ms"] if other else None


def place(setting: Mapping[str, Any]) -> str:
    """``4 hosts at 100 Mb/s, 5 ms``, or the loopback of one machine."""
    if not setting["shaped"]:
        return f"unshaped loopback with {setting['workers']} workers"
    hosts = f"{setting['hosts']} hosts" + (f" of {setting['per_host']} workers" if setting["per_host"] > 1 else "")
    words = [hosts + (f" at {rate}" if (rate := _range(setting["rates"], _rate)) else " without a limit of rate")]
    if any(setting["delays"]):
        words.append(f"{_range(setting['delays'], lambda s: f'{1e3 * s:g} ms')} delay")
    if any(setting["losses"]):
        words.append(f"{_range(setting['losses'], lambda s: f'{100 * s:g} %')} loss")
    return ", ".join(words)


def _range(values: Iterable[float | None], word: Any) -> str:
    known = sorted({value for value in values if value is not None})
    if not known:
        return ""
    return word(known[0]) if len(known) == 1 else f"{word(known[0])} to {word(known[-1])}"


def _rate(bits: float) -> str:
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if bits >= size:
            return f"{bits / size:g} {unit}"
    return f"{bits:g} b/s"


def verdict(runs: Sequence[Run], setting: Mapping[str, Any]) -> list[str]:
    """Sentences, the most important first."""
    if setting["target_loss"] is not None:
        return _to_target(runs, setting)
    rivals = [run for run in runs if kind(run) not in ("ddp", *ALONE)]
    ddp, floor = first(runs, "ddp"), first(runs, "local")
    if not rivals:
        one = ddp or runs[0]
        return [f"On {place(setting)}, {one['method']} takes {duration(one['step_ms'])} a step."]
    best = min(rivals, key=lambda run: float(run["step_ms"]))
    sentences = [f"On {place(setting)}, {_against_ddp(best, ddp)}{_against_floor(best, floor, ddp)}."]
    if ddp:
        losers = [run["method"] for run in rivals if run is not best and run["step_ms"] > EVEN * ddp["step_ms"]]
        if losers:
            sentences.append(f"Slower than plain DDP here: {', '.join(losers)}.")
        ahead = best["train_loss"] - ddp["train_loss"]
        sentences.append(
            f"After the same {len(best['losses'])} steps its training loss is {best['train_loss']:.3f}, "
            f"DDP's {ddp['train_loss']:.3f} ({ahead:+.3f})."
        )
    return sentences


def _against_ddp(best: Run, ddp: Run | None) -> str:
    if ddp is None:
        return f"{best['method']} is the fastest, at {duration(best['step_ms'])} a step"
    speedup = ddp["step_ms"] / best["step_ms"]
    if speedup > EVEN:
        return f"{best['method']} steps {times(speedup)} faster than plain DDP"
    if speedup > 1 / EVEN:
        return f"no method beats plain DDP: the fastest, {best['method']}, is as fast"
    return f"no method beats plain DDP: the fastest, {best['method']}, takes {times(1 / speedup)} its time"


def _against_floor(best: Run, floor: Run | None, ddp: Run | None) -> str:
    if floor is None:
        return ""
    words = f", {times(best['step_ms'] / floor['step_ms'])} of the floor without communication"
    return words + (f" (DDP: {times(ddp['step_ms'] / floor['step_ms'])})" if ddp else "")


def _to_target(runs: Sequence[Run], setting: Mapping[str, Any]) -> list[str]:
    goal = f"a training loss of {setting['target_loss']:g}"
    there = [run for run in runs if run["target_seconds"] is not None and kind(run) not in ALONE]
    if not there:
        return [f"On {place(setting)}, no method reaches {goal} in {setting['steps'] * setting['repeats']} steps."]
    best = min(there, key=lambda run: float(run["target_seconds"]))
    sentence = f"On {place(setting)}, {best['method']} is first at {goal}: {duration(1e3 * best['target_seconds'])}"
    ddp = first(there, "ddp")
    if ddp and ddp is not best:
        sentence += f", {times(ddp['target_seconds'] / best['target_seconds'])} sooner than plain DDP"
    late = [run["method"] for run in runs if run["target_seconds"] is None and kind(run) not in ALONE]
    return [f"{sentence}.", *([f"Not there in the steps given: {', '.join(late)}."] if late else [])]


def notes(runs: Sequence[Run]) -> list[str]:
    """What a reader of the figures has to know of some of the methods."""
    said = []
    for run in runs:
        if not run["warmup_over"]:
            said.append(f"{run['method']}: the warm-up outlasted the run, so nothing was compressed.")
        elif run["warmup_steps"]:
            said.append(
                f"{run['method']}: {run['warmup_steps']} of {len(run['losses'])} steps were a dense warm-up of "
                f"{duration(run['warmup_step_ms'])} each, left out of the step time; with them the mean is "
                f"{duration(run['mean_step_ms'])}."
            )
    if first(runs, "local"):
        said.append("local: every worker trains alone. Its time is the floor; its loss is no rival's.")
    return said
