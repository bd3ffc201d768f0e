"""The charts of a comparison as PNG files, light and dark, drawn by a browser as in the report.

thinwire compare ... --json out.json
python -m benchmarks.pictures out.json FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from thinwire.report import charts
from thinwire.report.page import picture

WIDTH, MARGIN = 1000, 16


def browser(parser: argparse.ArgumentParser) -> str:
    """One to draw with, or an error of the command line."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        parser.error("there is no chromium to draw with")
    return found


def shoot(chromium: str, svg: str, path: Path, dark: bool) -> None:
    across, down = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups())
    height = int((WIDTH - 2 * MARGIN) * down / across) + 2 * MARGIN
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "chart.html"
        page.write_text(picture(svg), encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
        flags += [f"--window-size={WIDTH},{height}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        flags += [f"--user-data-dir={folder}/profile", f"--screenshot={path}"]
        subprocess.run([chromium, *flags, page.as_uri()], check=True, stderr=subprocess.DEVNULL, timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    chromium = browser(parser)
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
            shoot(chromium, svg, path, dark)
            print(path)


if __name__ == "__main__":
    main()
