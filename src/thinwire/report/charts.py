"""The charts of a comparison, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from thinwire.report import words
from thinwire.report.axes import Scale
from thinwire.report.svg import bar, drawing, line, tag, text
from thinwire.report.words import Run

PARTS = ("compute", "compress", "exposed")
LANES = ("compute", "compress", "wire")
HUES = 8
SMOOTH = 10
POINTS = 40
LETTER = 8.2
"""About the width of a letter of a label."""


def hue(runs: Sequence[Run], run: Run) -> str:
    """The style of a method's colour; baselines without thinwire's have their own."""
    if words.kind(run) in ("ddp", "local"):
        return words.kind(run)
    rivals = [one["method"] for one in runs if words.kind(one) not in ("ddp", "local")]
    return f"hue{rivals.index(run['method']) % HUES}"


def step_times(runs: Sequence[Run]) -> str:
    """A stacked bar for each method, with the spread of its steps and the floor."""
    left, right, top, row = 20 + 8.6 * max(len(r["method"]) for r in runs), 130.0, 8.0, 34.0
    width, height = 1000.0, top + row * len(runs) + 24
    x = Scale.of([0.0, *(max(r["step_ms"], r["step_ms_p90"]) for r in runs)], left, width - right)
    ddp, floor = words.first(runs, "ddp"), words.first(runs, "local")
    bottom = top + row * len(runs)
    drawn = [_grid(x, top, bottom, lambda ms: words.duration(ms) if ms else "0")]
    for number, run in enumerate(runs):
        y = top + row * number
        parts, at = [], 0.0
        for part in PARTS:
            ms = run[f"{part}_ms"]
            tip = f"{run['method']}: {part} {words.duration(ms)} of {words.duration(run['step_ms'])}"
            parts.append(bar(x(at), y + 7, x(at + ms) - x(at), 20, part, data_tip=tip, data_ms=ms))
            at += ms
        spread = f"{run['method']}: 8 of 10 steps take {words.duration(run['step_ms_p10'])} to "
        spread += words.duration(run["step_ms_p90"])
        low, high = x(run["step_ms_p10"]), x(run["step_ms_p90"])
        parts.append(line(low, y + 17, high, y + 17, "spread", data_tip=spread))
        parts.append(text(left - 12, y + 21, run["method"], "name", "end"))
        value = words.duration(run["step_ms"])
        if ddp and run is not ddp and run is not floor:
            value += f" · {words.times(ddp['step_ms'] / run['step_ms'])}"
        parts.append(text(max(high, x(at)) + 8, y + 21, value, "value"))
        drawn.append(tag("g", "".join(parts), data_method=run["method"]))
    if floor:
        at = x(floor["step_ms"])
        drawn.append(line(at, top, at, bottom, "floor", data_tip=f"floor: {words.duration(floor['step_ms'])}"))
    return drawing(width, height, "Step time by method", *drawn)


def losses(runs: Sequence[Run], over: str) -> str:
    """Smoothed training loss over ``seconds`` or ``bytes``. Who trains alone is left out."""
    shown = [run for run in runs if words.kind(run) not in words.ALONE]
    width, height, left, right, top, bottom = 560.0, 376.0, 40.0, 40.0, 8.0, 330.0
    word = words.readable if over == "bytes" else lambda s: words.duration(1e3 * s)
    curves = {run["method"]: list(_smoothed(run[over], run["losses"])) for run in shown}
    ends = [curve[-1][0] for curve in curves.values()]
    log = over == "bytes" or max(ends, default=1.0) > 4 * min(ends, default=1.0)
    points = [point for curve in curves.values() for point in curve]
    x = Scale.of([px for px, _ in points], left, width - right, log)
    y = Scale.of([py for _, py in points], bottom - 18, top)
    drawn = [_grid(x, top, bottom, word, 5), _levels(y, left, width - right)]
    placed: list[tuple[float, float, float]] = []
    for run in sorted(shown, key=lambda run: curves[run["method"]][-1][1]):
        name, curve = run["method"], curves[run["method"]]
        path = "M" + "L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in curve)
        marks = [tag("path", d=path, class_=f"curve {hue(runs, run)}")]
        for px, py in curve[:: -(-len(curve) // POINTS)] + curve[-1:]:
            tip = f"{name}: loss {py:.3f} after {word(px)}"
            marks.append(tag("circle", cx=x(px), cy=y(py), r=5, class_=f"point {hue(runs, run)}", data_tip=tip))
        size = LETTER * len(name)
        at = min(x(curve[-1][0]) + 7, width - size)
        level = _free(placed, at, size, y(curve[-1][1]) + 4, top, bottom)
        marks.append(text(at, level, name, f"label {hue(runs, run)}"))
        drawn.append(tag("g", "".join(marks), data_method=name))
    what = "bytes sent per worker" if over == "bytes" else "wall-clock of its own steps"
    drawn.append(text((left + width - right) / 2, height - 6, what + (", log scale" if log else ""), "axis", "middle"))
    return drawing(width, height, f"Training loss against {what}", *drawn)


def timelines(runs: Sequence[Run]) -> str:
    """One step of each method: what computes, what compresses and what is on the wire, each on its own scale."""
    left, right, lane, row, width = 66.0, 16.0, 16.0, 104.0, 1000.0
    drawn = []
    for number, run in enumerate(runs):
        top = row * number + 22
        end = max((span["end"] for span in run["timeline"]), default=1.0)
        x = Scale(0.0, end, left, width - right)
        parts = [
            text(left, top - 8, f"{run['method']}, {words.duration(end)}", "name"),
            _grid(x, top, top + 3 * lane, lambda ms: words.duration(ms) if ms else "0", 8),
        ]
        for place, name in enumerate(LANES):
            parts.append(text(left - 8, top + lane * place + 12, name, "axis", "end"))
            parts.append(bar(left, top + lane * place + 1, width - right - left, lane - 2, "lane"))
        for span in sorted(run["timeline"], key=lambda span: span["name"] == "wait"):
            parts.append(_span(run["method"], span, x, top, lane))
        drawn.append(tag("g", "".join(parts), data_timeline=run["method"]))
    return drawing(width, row * len(runs) - 8, "One step of each method", *drawn)


def _span(method: str, span: Mapping[str, Any], x: Scale, top: float, lane: float) -> str:
    place = LANES.index(span["lane"])
    start, size = x(span["start"]), x(span["end"]) - x(span["start"])
    tip = f"{method}: {span['name']}, {words.duration(span['end'] - span['start'])}"
    if "bytes_sent" in span:
        tip += f", {words.readable(span['bytes_sent'])}"
    style = "wait" if span["name"] == "wait" else f"{span['lane']} {span['name'] if place == 0 else ''}".strip()
    y = top + lane * place + 1
    drawn = bar(start, y, max(size, 0.8), lane - 2, style, data_tip=tip, data_span=span["name"])
    if place == 0 and size > LETTER * len(span["name"]) and span["name"] != "backward":
        drawn += text(start + 5, y + 10.5, span["name"], "inside")
    return drawn


def _smoothed(xs: Sequence[float], losses: Sequence[float]) -> Iterator[tuple[float, float]]:
    for end in range(1, len(losses) + 1):
        yield xs[end - 1], statistics.fmean(losses[max(0, end - SMOOTH) : end])


def _grid(x: Scale, top: float, bottom: float, word: Callable[[float], str], count: int = 6) -> str:
    ticks = x.ticks(count)
    lines = (line(x(tick), top, x(tick), bottom, "grid") for tick in ticks)
    return "".join([*lines, *(text(x(tick), bottom + 15, word(tick), "axis", "middle") for tick in ticks)])


def _levels(y: Scale, left: float, right: float) -> str:
    ticks = y.ticks(5)
    lines = (line(left, y(tick), right, y(tick), "grid") for tick in ticks)
    return "".join([*lines, *(text(left - 8, y(tick) + 4, f"{tick:.3g}", "axis", "end") for tick in ticks)])


def _free(
    placed: list[tuple[float, float, float]], x: float, size: float, y: float, top: float, bottom: float
) -> float:
    """The height nearest to ``y`` at which a label does not lie on another."""
    for away in range(0, 300, 2):
        for level in (y + away, y - away):
            clear = all(abs(level - py) >= 13 or x >= px + psize or px >= x + size for px, py, psize in placed)
            if clear and top + 8 <= level <= bottom:
                placed.append((x, level, size))
                return level
    return y
