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
from pathlib import Path

from thinwire.report import charts
from thinwire.report.page import picture

WIDTH, MARGIN = 1000, 16
SCALE = 2
BARS = 200
"""Room in the window's height that a browser may keep for bars of its own, even where it shows none."""


def shoot(browser: str, svg: str, path: Path, dark: bool) -> None:
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
        subprocess.run([browser, *flags, page.as_uri()], check=True, stderr=subprocess.DEVNULL, timeout=60)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        parser.error("there is no chromium to draw with")
    runs = json.loads(args.comparison.read_text())["runs"]
    drawn = {
        "steps": charts.step_times(runs),
        "loss-time": charts.losses(runs, "seconds"),
        "loss-bytes": charts.losses(runs, "bytes"),
        "timelines": charts.timelines(runs),
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        for dark in (False, True):
            path = args.folder / f"{name}-{'dark' if dark else 'light'}.png"
            shoot(browser, svg, path, dark)
            print(path)


if __name__ == "__main__":
    main()
