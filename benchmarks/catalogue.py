"""docs/methods.md, from the docstrings and what ``benchmarks.methods`` has measured, and its picture.

    python -m benchmarks.catalogue [--text]

``--text`` writes the page alone, for which no browser is needed.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.methods import ROWS
from benchmarks.pictures import shoot_all
from benchmarks.placing import placed
from thinwire import spec as grammar
from thinwire.cli.methods import field_docs
from thinwire.optim import OPTIMIZERS
from thinwire.registry import METHODS
from thinwire.report.words import readable, times
from thinwire.workloads import load

DOCS = Path(__file__).parent.parent / "docs"
MEASURED = DOCS / "measured.json"
LABELS = ("Bytes", "Use", "Avoid")
FAMILIES = {
    "dense": ("dense", "fp16", "bf16", "adam"),
    "low rank": ("powersgd", "acp"),
    "1 bit": ("dist-ef", "dist-ef-block", "dist-ef-sgdm", "sign-mv", "ef-sign", "apm"),
    "quantised": ("qsgd", "dq"),
    "sparse": ("topk", "randk", "dgc", "gtopk"),
    "sketched": ("sketch", "gs"),
    "parameters averaged": ("slowmo", "local-sgd", "bmuf", "gossip"),
    "variance reduced": ("root-sgd",),
}
HEAD = """# Methods

Written by `python -m benchmarks.catalogue` from the docstrings of `src/thinwire/methods/` and `src/thinwire/optim/`,
and from [measured.json](measured.json). A method is given to `thinwire.attach`, or to the command line, by its name and
options: `acp:rank=8`. An optimizer is attached itself; on the command line it is `apm`, or `apm+acp:rank=16` for
another exchange than its default.

**Bytes** are what one worker sends in a step, past every warm-up, for d numbers in fp32 and W workers; options stand by
their names. A ring's all-reduce of N bytes sends 2(W-1)/W N, an all-gather (W-1) N. Tensors that a method leaves out,
such as biases, go dense and are not in the formula. A test holds every formula against `thinwire.price`, which counts
them too.

In the equations mean_i is the mean over workers, g_i a worker's gradient, e_i its error, x the parameters, eta or lr
the learning rate; `out` is what the optimizer gets for a gradient.
"""
MEASUREMENT = """## Measured

`python -m benchmarks.methods`: a byte-level GPT of {parameters:,} parameters on Python's standard library
(`{workload}`), {workers} workers over gloo, {steps} steps. Of two learning rates, a factor of 2 apart,
the one with the lower loss on seed 0 is taken, or else the rate of the method named beside it, which need not be its
best: such a row may do better than it shows. What is shown is one run on seed 1. Bytes are a step's, over the last
{late}. SGD has Nesterov momentum 0.9, or the method's own if any. Gradients are clipped to a norm of 1; what a method
with momentum of its own hands over, to 1 / (1 - 0.9) times that; votes, not at all. The rates of `root-sgd` and the
ratio of `randk` were changed after a look at their losses.

One short run of a small model places the methods roughly and is no verdict on any: it has no room for long warm-ups,
its tensors are small, and small differences of loss mean nothing. [results.md](results.md) has longer runs of the main
methods, over several seeds.

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="pictures/methods-dark.png">
  <img alt="All methods by bytes a step and final validation loss" src="pictures/methods-light.png">
</picture>
"""


def notes(cls: type) -> dict[str, str]:
    """The lines ``Bytes:``, ``Use:`` and ``Avoid:`` of a class."""
    found = re.findall(r"^(\w+): (.+(?:\n +.+)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    return {label: " ".join(text.split()) for label, text in found if label in LABELS}


def formula(cls: type) -> str:
    """Of the bytes, without what is said about it."""
    return notes(cls)["Bytes"].partition(",")[0]


def page(measured: dict[str, Any]) -> str:
    settings = {key: value for key, value in measured.items() if key != "rows"}
    parameters = sum(p.numel() for p in load(settings["workload"], None, 0).model.parameters())
    parts = [HEAD, MEASUREMENT.format(parameters=parameters, **settings), *_table(measured)]
    for title, rows in (("Methods", METHODS), ("Optimizers", OPTIMIZERS)):
        parts.append(f"\n## {title}\n")
        for module, group in itertools.groupby(rows.items(), lambda row: sys.modules[row[1].__module__]):
            parts += _section(module.__doc__ or "", dict(group), measured["rows"])
    return "\n".join(parts)


def _table(measured: dict[str, Any]) -> Iterator[str]:
    yield "| | trained with | rate | bytes a step | less than dense | validation loss |\n|---|---|---|---|---|---|"
    rows, like = measured["rows"], {row.name: row.like for row in ROWS}
    for name, row in sorted(rows.items(), key=lambda item: item[1]["bytes"], reverse=True):
        label = f"[`{name}`](#{_anchor(name)})" if name in METHODS or name in OPTIMIZERS else f"`{name}`"
        less, rate = (
            times(row["dense"] / row["bytes"]),
            f"{row['lr']:g}" + (f", `{like[name]}`'s" if like[name] else ""),
        )
        yield f"| {label} | `{row['spec']}` | {rate} | {readable(row['bytes'])} | {less} | {row['loss']:.3f} |"


def _anchor(name: str) -> str:
    """Of the heading that the name stands in."""
    rows = METHODS if name in METHODS else OPTIMIZERS
    together = [other for other, cls in rows.items() if cls.__module__ == rows[name].__module__]
    return "-".join(together)


def _section(doc: str, group: dict[str, Any], rows: dict[str, Any]) -> Iterator[str]:
    yield f"### {' '.join(f'`{name}`' for name in group)}\n"
    yield _markdown(doc)
    for name, cls in group.items():
        said = notes(cls)
        yield f"\n**`{name}`**: {_prose((inspect.getdoc(cls) or '').split(chr(10) * 2)[0])}\n"
        yield f"- Bytes: `{formula(cls)}`{_prose(said['Bytes'].removeprefix(formula(cls)))}"
        yield f"- Use: {_prose(said['Use'])}"
        yield f"- Avoid: {_prose(said['Avoid'])}"
        yield f"- Measured: {_measured(rows[name], rows)}"
        docs = field_docs(cls)
        for option, default in grammar.options_of(cls).items():
            yield f"- `{option}={default}`: {_prose(docs.get(option, ''))}"
    yield ""


def _measured(row: dict[str, Any], rows: dict[str, Any]) -> str:
    reference = "adam" if row["spec"].startswith("apm") else "dense"
    against = f"{'Adam' if reference == 'adam' else 'dense'} {rows[reference]['loss']:.3f}"
    less = f"{times(row['dense'] / row['bytes'])} less than dense"
    return f"{readable(row['bytes'])} a step, {less}; loss {row['loss']:.3f}, {against} (`{row['spec']}`)"


def _markdown(doc: str) -> str:
    """Indented lines as they stand, the rest as prose."""
    parts = []
    for code, lines in itertools.groupby(doc.splitlines(), lambda line: line.startswith("    ") if line else None):
        text = "\n".join(lines)
        if code is not None:
            parts.append(f"```text\n{inspect.cleandoc(text)}\n```" if code else _prose(text))
    return "\n\n".join(parts).replace("Departure:", "**Departure:**")


def _prose(text: str) -> str:
    """Nothing in it is taken for markup but the names in back-ticks."""
    quoted = text.replace("``", "`").split("`")
    return "`".join(part if i % 2 else re.sub(r"(?<!\w)_|[*~<]", r"\\\g<0>", part) for i, part in enumerate(quoted))


def picture(measured: dict[str, Any]) -> str:
    family = {name: number for number, names in enumerate(FAMILIES.values()) for name in names}
    points = [(name, row["bytes"], row["loss"], family[name]) for name, row in measured["rows"].items()]
    return placed(points, list(FAMILIES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="store_true")
    args = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    (DOCS / "methods.md").write_text(page(measured))
    if not args.text:
        shoot_all({"methods": picture(measured)}, DOCS / "pictures")


if __name__ == "__main__":
    main()
