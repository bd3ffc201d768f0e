"""Small log-log charts side by side, drawn with the report's pieces and in its colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.report.axes import Scale
from thinwire.report.svg import drawing, line, tag, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, LEGEND = 1000.0, 270.0, 52.0, 12.0, 30.0, 48.0, 44.0
HUES = {"full precision": "ddp", "dist-ef": "hue0", "dist-ef-block": "hue2", "sign-mv": "hue1", "ef-sign": "hue3"}
APART = 10.0
"""Between the marks of methods at the same place."""
FLOOR = 1e-3
"""Of the vertical scale, as a share of its largest value."""


@dataclass(frozen=True)
class Panel:
    title: str
    axis: str
    xs: Sequence[int]
    curves: Mapping[str, Sequence[float]]
    slope: float | None = None
    """Of a dotted line for the eye, through the first curve's first point."""


def page(rows: Sequence[Sequence[Panel]]) -> str:
    names = dict.fromkeys(name for row in rows for panel in row for name in panel.curves)
    drawn = [_legend(list(names))]
    for place, row in enumerate(rows):
        top, width = LEGEND + HEIGHT * place, WIDTH / len(row)
        drawn += [_panel(panel, width * number, top, width) for number, panel in enumerate(row)]
    return drawing(WIDTH, LEGEND + HEIGHT * len(rows), "Rates", *drawn)


def _panel(panel: Panel, left: float, top: float, width: float) -> str:
    start, end, ceiling, floor = left + LEFT, left + width - RIGHT, top + TOP, top + HEIGHT - BOTTOM
    values = [value for curve in panel.curves.values() for value in curve]
    lowest = max(min(values), FLOOR * max(values))
    x = Scale(min(panel.xs) / 1.2, max(panel.xs) * 1.2, start, end, log=True)
    y = Scale(lowest / 1.3, max(values) * 1.3, floor, ceiling, log=True)
    drawn = [text(start, top + 18, panel.title, "name")]
    for tick in panel.xs if len(panel.xs) < 8 else x.ticks():
        drawn.append(line(x(tick), ceiling, x(tick), floor, "grid"))
        drawn.append(text(x(tick), floor + 16, f"{tick:g}", "axis", "middle"))
    for tick in y.ticks():
        drawn.append(line(start, y(tick), end, y(tick), "grid"))
        drawn.append(text(start - 8, y(tick) + 4, f"{tick:g}", "axis", "end"))
    drawn.append(text((start + end) / 2, floor + 34, panel.axis, "axis", "middle"))
    if panel.slope is not None:
        first, last = panel.xs[0], panel.xs[-1]
        height = next(iter(panel.curves.values()))[0]
        drawn.append(line(x(first), y(height), x(last), y(height * (last / first) ** panel.slope), "floor"))
        drawn.append(text(end - 4, ceiling + 14, "dotted: slope -1/2", "axis", "end"))
    for number, (name, curve) in enumerate(panel.curves.items()):
        places = [(x(px), y(max(py, lowest))) for px, py in zip(panel.xs, curve, strict=True)]
        if len(places) < 8:
            aside = APART * (number - (len(panel.curves) - 1) / 2)
            drawn += [_mark(name, px + aside, py) for px, py in places]
        else:
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
            drawn.append(tag("path", d=path, class_=f"curve {_hue(name)}"))
    return "".join(drawn)


def _mark(name: str, x: float, y: float) -> str:
    """A ring for a method with momentum, a disc without."""
    fill = "currentColor" if name == _method(name) else "none"
    return tag("circle", cx=x, cy=y, r=4, class_=_hue(name), fill=fill, stroke="currentColor", stroke_width=1.8)


def _legend(names: Sequence[str]) -> str:
    drawn, columns = [], math.ceil(len(names) / 2)
    for number, name in enumerate(names):
        x, y = LEFT + 6 + (number % columns) * (WIDTH - LEFT) / columns, 12 + 20 * (number // columns)
        drawn += [_mark(name, x, y), text(x + 14, y + 4, name)]
    return "".join(drawn)


def _method(name: str) -> str:
    return name.partition(",")[0]


def _hue(name: str) -> str:
    return HUES[_method(name)]
