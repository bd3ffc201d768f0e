"""A comparison as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from thinwire.report import charts, words
from thinwire.report.words import Run

LABELS = {
    "workload": "workload",
    "data": "data",
    "parameters": "parameters",
    "workers": "workers",
    "steps": "timed steps in a turn",
    "repeats": "turns of each method",
    "target_loss": "target loss",
    "lr": "learning rate",
    "seed": "seed",
    "cores": "cores of this machine",
    "torch": "torch",
    "thinwire": "thinwire",
}


def page(comparison: Mapping[str, Any]) -> str:
    """The report of what ``thinwire compare --json`` writes."""
    runs, setting = comparison["runs"], comparison["setting"]
    headline, *rest = words.verdict(runs, setting)
    return _fill(
        {
            "headline": escape(headline),
            "rest": escape(" ".join(rest)),
            "place": escape(f"{setting['workload']} on {words.place(setting)}"),
            "legend": "".join(_key(part, part) for part in ("compute", "compress", "exposed communication")),
            "steps": charts.step_times(runs),
            "time": charts.losses(runs, "seconds"),
            "bytes": charts.losses(runs, "bytes"),
            "timelines": charts.timelines(runs),
            "table": table(runs, setting),
            "notes": "".join(f"<p>{escape(note)}</p>" for note in words.notes(runs)),
            "setting": _setting(setting),
            "command": escape(setting["command"]),
        }
    )


def picture(svg: str) -> str:
    """One chart of the report on a page of its own."""
    style = _template().split("<style>")[1].split("</style>")[0]
    return f'<!doctype html><html><meta charset="utf-8"><style>{style}</style><body class="picture">{svg}</body></html>'


def table(runs: Sequence[Run], setting: Mapping[str, Any]) -> str:
    ddp, floor = words.first(runs, "ddp"), words.first(runs, "local")
    head = ["method", "step", "p10-p90, ms", "vs ddp", "vs local", "compute", "compress", "exposed"]
    head += ["wire", "payload", "loss", "val. loss"]
    if setting["target_loss"] is not None:
        head += [f"to {setting['target_loss']:g}", "bytes to it"]
    rows = [_row("th", head)]
    for run in runs:
        cells = [
            run["method"],
            words.duration(run["step_ms"]),
            f"{run['step_ms_p10']:.0f} to {run['step_ms_p90']:.0f}",
            words.times(ddp["step_ms"] / run["step_ms"]) if ddp else "-",
            words.times(run["step_ms"] / floor["step_ms"]) if floor else "-",
            *(words.duration(run[f"{part}_ms"]) for part in charts.PARTS),
            words.readable(run["wire_bytes_per_step"]),
            words.readable(run["payload_bytes_per_step"]),
            f"{run['train_loss']:.3f}",
            f"{run['val_loss']:.3f}",
        ]
        if setting["target_loss"] is not None:
            there = run["target_seconds"] is not None
            cells.append(words.duration(1e3 * run["target_seconds"]) if there else "not reached")
            cells.append(words.readable(run["target_bytes"]) if there else "-")
        rows.append(_row("td", cells, run["method"]))
    return f"<table>{''.join(rows)}</table>"


def _row(kind: str, cells: Iterable[str], method: str | None = None) -> str:
    mark = f' data-method="{escape(method)}"' if method else ""
    return f"<tr{mark}>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _key(style: str, word: str) -> str:
    return f'<span class="key"><i class="{style.split()[0]}"></i>{word}</span>'


def _setting(setting: Mapping[str, Any]) -> str:
    rows = [("network", words.place(setting))]
    rows += [(label, setting[name]) for name, label in LABELS.items() if setting[name] is not None]
    shown = ((label, f"{value:,}" if isinstance(value, int) else str(value)) for label, value in rows)
    return "".join(f"<dt>{label}</dt><dd>{escape(value)}</dd>" for label, value in shown)


def _template() -> str:
    return files("thinwire.report").joinpath("page.html").read_text(encoding="utf-8")


def _fill(slots: Mapping[str, str]) -> str:
    text = _template()
    for name, content in slots.items():
        text = text.replace("{{" + name + "}}", content)
    return text
