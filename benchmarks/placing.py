"""A picture of methods by bytes and loss, in which no label lies on another or on a point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from thinwire.report.axes import Scale
from thinwire.report.svg import drawing, line, tag, text
from thinwire.report.words import readable

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000.0, 600.0, 48.0, 976.0, 40.0, 548.0
RADIUS, LETTER, TALL = 5.0, 7.8, 14.0


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and self.y < other.y + other.height and other.y < self.y + self.height

    def inside(self) -> bool:
        return self.x >= LEFT and self.x + self.width <= RIGHT and self.y >= TOP and self.y + self.height <= BOTTOM


def placed(points: Sequence[tuple[str, float, float, int]], families: Sequence[str]) -> str:
    """``points``: name, bytes, loss and the number of its family."""
    x = Scale.of([p[1] for p in points], LEFT + 40, RIGHT - 60, log=True)
    y = Scale.of([p[2] for p in points], BOTTOM - 24, TOP + 24)
    drawn = list(_axes(x, y))
    start = LEFT
    for number, family in enumerate(families):
        drawn.append(_dot(start + RADIUS, 16, number))
        drawn.append(text(start + 16, 20, family))
        start += 34 + 6.4 * len(family)
    places = [(x(size), y(loss)) for _, size, loss, _ in points]
    boxes = labels([name for name, *_ in points], places)
    for (name, _, _, number), (px, py), box in zip(points, places, boxes, strict=True):
        near = (min(max(px, box.x), box.x + box.width), min(max(py, box.y), box.y + box.height))
        label = text(box.x + 2, box.y + TALL - 3, name, f"label {_style(number)}")
        drawn.append(tag("g", label + line(px, py, *near, _style(number), stroke="currentColor"), data_method=name))
    drawn += [_dot(*place, number) for (*_, number), place in zip(points, places, strict=True)]
    return drawing(WIDTH, HEIGHT, "All methods by bytes a step and final validation loss", *drawn)


def labels(names: Sequence[str], places: Sequence[tuple[float, float]]) -> list[Box]:
    """A box for each name, as near to its place as it can be; the crowded ones choose first."""
    points = [Box(px - RADIUS - 1, py - RADIUS - 1, 2 * RADIUS + 2, 2 * RADIUS + 2) for px, py in places]
    found: dict[int, Box] = {}
    crowd = [sum(math.dist(place, other) < 80 for other in places) for place in places]
    for i in sorted(range(len(names)), key=lambda i: -crowd[i]):
        taken = [*found.values(), *points]
        found[i] = next(box for box in _around(*places[i], LETTER * len(names[i]) + 4) if _free(box, taken))
    return [found[i] for i in range(len(names))]


def _free(box: Box, taken: Sequence[Box]) -> bool:
    return box.inside() and not any(box.meets(other) for other in taken)


def _around(px: float, py: float, width: float) -> Iterator[Box]:
    """Right, left, above and below, then at all angles, further and further out."""
    for distance in range(8, 400, 4):
        for angle in (0, 180, 90, 270, *range(0, 360, 15)):
            cx, cy = px + distance * math.cos(math.radians(angle)), py - distance * math.sin(math.radians(angle))
            left = cx - width / 2 * (1 - math.cos(math.radians(angle)))
            top = cy - TALL / 2 * (1 + math.sin(math.radians(angle)))
            yield Box(left, top, width, TALL)


def _axes(x: Scale, y: Scale) -> Iterator[str]:
    for tick in x.ticks(8):
        yield line(x(tick), TOP, x(tick), BOTTOM, "grid")
        yield text(x(tick), BOTTOM + 16, readable(tick), "axis", "middle")
    for tick in y.ticks(8):
        yield line(LEFT, y(tick), RIGHT, y(tick), "grid")
        yield text(LEFT - 6, y(tick) + 4, f"{tick:.3g}", "axis", "end")
    yield text((LEFT + RIGHT) / 2, HEIGHT - 14, "bytes that a worker sends in a step, log scale", "axis", "middle")
    yield text(LEFT + 6, TOP + 12, "final validation loss", "axis")


def _dot(x: float, y: float, number: int) -> str:
    return tag("circle", cx=x, cy=y, r=RADIUS, class_=_style(number), fill="currentColor")


def _style(number: int) -> str:
    return f"hue{number}"
