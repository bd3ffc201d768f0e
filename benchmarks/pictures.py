"""The charts of a comparison as PNG files, light and dark, drawn by a browser as in the report.

thinwire compare ... --json out.json
python -m benchmarks.pictures out.json FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.report import charts
from thinwire.report.axes import Scale
from thinwire.report.page import picture
from thinwire.report.svg import drawing, line, tag, text

WIDTH, MARGIN = 1000, 16
SCALE = 2
BARS = 200
"""Room in the window's height that a browser may keep for bars of its own, even where it shows none."""
Points = Sequence[tuple[float, float]]


def browser() -> str:
    """One to draw with; without it the command ends here."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("there is no chromium to draw with")
    return found


def shoot(chromium: str, svg: str, path: Path, dark: bool) -> None:
    across, down = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups())
    height = int((WIDTH - 2 * MARGIN) * down / across) + 2 * MARGIN
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "chart.html"
        page.write_text(picture(svg), encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--force-device-scale-factor={SCALE}",
        ]
        flags += [f"--window-size={WIDTH},{height + BARS}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        flags += [f"--user-data-dir={folder}/profile", f"--screenshot={path}"]
        subprocess.run([chromium, *flags, page.as_uri()], check=True, stderr=subprocess.DEVNULL, timeout=60)
    path.write_bytes(top(path.read_bytes(), SCALE * height))


def top(png: bytes, rows: int) -> bytes:
    """The first rows of a picture: a row of PNG depends on none below it."""
    chunks, at = [], 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        chunks.append((kind, png[at + 8 : at + 8 + size]))
        at += 12 + size
    header = chunks[0][1]
    width, depth, colours = *struct.unpack(">I", header[:4]), *struct.unpack(">BB", header[8:10])
    assert depth == 8
    pixels = zlib.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT"))
    kept = pixels[: rows * (1 + width * {2: 3, 6: 4}[colours])]
    parts = {b"IHDR": header[:4] + struct.pack(">I", rows) + header[8:], b"IDAT": zlib.compress(kept, 9), b"IEND": b""}
    return png[:8] + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )


def plot(points: Mapping[str, Points], across: str, up: str, lines: Mapping[str, Points] | None = None) -> str:
    """Both scales by orders of magnitude: dots, and lines through them or through ``lines``, each named at its end."""
    width, height, left, right, top, bottom = 700.0, 360.0, 48.0, 230.0, 26.0, 310.0
    everything = [point for curves in (points, lines or {}) for curve in curves.values() for point in curve]
    x = Scale.of([px for px, _ in everything], left, width - right, log=True)
    low, high = min(py for _, py in everything), max(py for _, py in everything)
    y = Scale(low / 1.5, high * 1.2, bottom, top, log=True)
    drawn = []
    for tick in sorted({px for px, _ in everything}):
        drawn += [
            line(x(tick), top, x(tick), bottom, "grid"),
            text(x(tick), bottom + 15, _short(tick), "axis", "middle"),
        ]
    for tick in y.ticks(5):
        drawn += [
            line(left, y(tick), width - right, y(tick), "grid"),
            text(left - 8, y(tick) + 4, f"{tick:g}", "axis", "end"),
        ]
    levels: list[float] = []
    for number, (name, curve) in enumerate(points.items()):
        path = "M" + "L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in (lines or points)[name])
        drawn.append(tag("path", d=path, class_=f"curve hue{number}"))
        drawn += [
            tag("circle", cx=x(px), cy=y(py), r=4, class_=f"hue{number}", fill="currentColor") for px, py in curve
        ]
        level = y(curve[-1][1]) + 4
        while any(abs(level - other) < 14 for other in levels):
            level += 2
        levels.append(level)
        drawn.append(text(x(curve[-1][0]) + 10, level, name, f"label hue{number}"))
    drawn += [text((left + width - right) / 2, height - 12, across, "axis", "middle"), text(4.0, 12.0, up, "axis")]
    return drawing(width, height, f"{up} against {across}", *drawn)


def _short(value: float) -> str:
    return f"{value / 1e6:.0f} M" if value >= 1e6 else f"{value:g}"


def shoot_all(drawn: Mapping[str, str], folder: Path) -> None:
    """Each chart, light and dark."""
    chromium = browser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        for dark in (False, True):
            path = folder / f"{name}-{'dark' if dark else 'light'}.png"
            shoot(chromium, svg, path, dark)
            print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    runs = json.loads(args.comparison.read_text())["runs"]
    drawn = {
        "steps": charts.step_times(runs),
        "loss-time": charts.losses(runs, "seconds"),
        "loss-bytes": charts.losses(runs, "bytes"),
        "timelines": charts.timelines(runs),
    }
    shoot_all(drawn, args.folder)


if __name__ == "__main__":
    main()
