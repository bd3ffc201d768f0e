"""``thinwire methods``: what there is, from the docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from thinwire import spec as grammar
from thinwire.core.combine import Rule
from thinwire.optim import OPTIMIZERS
from thinwire.registry import METHODS
from thinwire.workloads.optimizers import BASES, WRAPPERS, bases_of


@click.command()
def methods() -> None:
    """List the methods and optimizers with their options.

    \b
    Examples:
      thinwire methods
      thinwire train acp:rank=4,after=100          # 100 dense steps first
      thinwire train apm:warmup_steps=200+acp:rank=16
    """
    console = Console()
    console.print(_table("Methods: how gradients are averaged", METHODS))
    console.print(_table("Optimizers: alone, or as optimizer+method", {**OPTIMIZERS, **BASES}))
    common = Table(title="Options of every method", title_justify="left", show_header=False)
    common.add_row("after", "Steps of dense warm-up before the method starts.")
    for name, doc in field_docs(Rule).items():
        common.add_row(name, f"{doc} Tensors left out go dense, in the same collectives.")
    console.print(common)


def _table(title: str, rows: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("name", "what it does", "options"):
        table.add_column(column, overflow="fold")
    for name, cls in rows.items():
        docs = field_docs(cls)
        defaults = grammar.options_of(cls)
        if name in WRAPPERS:
            defaults = {"base": "|".join(bases_of(name))} | defaults
        options = [f"[bold]{key}[/]={default!s} {docs.get(key, '')}".rstrip() for key, default in defaults.items()]
        table.add_row(f"[bold]{name}[/]", inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0], "\n".join(options))
    return table


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of its bases, or a class's own lines ``option: text``."""
    docs = dict(re.findall(r"^\s*(\w+): (.+)$", cls.__doc__ or "", re.MULTILINE))
    for base in reversed(cls.__mro__):
        if "__annotations__" not in vars(base) or base.__module__.partition(".")[0] != __package__.partition(".")[0]:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = getattr(getattr(below, "value", None), "value", None)
                if isinstance(below, ast.Expr) and isinstance(text, str):
                    docs[field.target.id] = " ".join(text.split())
    return docs
