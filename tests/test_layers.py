"""Imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import thinwire

ROOT = Path(thinwire.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

MAY_IMPORT = {
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "methods": {"core", "kernels", "methods"},
    "registry": {"core", "methods", "spec", "registry"},
    "optim": {"core", "methods", "registry", "optim"},
    "runtime": {"core", "kernels", "registry", "errors", "runtime"},
    "lab": {"lab"},
    "simulation": {"core", "registry"},
    "workloads": {"core", "registry", "optim", "runtime", "spec", "workloads", "thinwire"},
    "cli": {"core", "registry", "optim", "spec", "errors", "workloads", "lab", "report", "cli"},
    "report": {"report"},
    "spec": set(),
    "errors": set(),
    "__main__": {"cli"},
}
MAY_DISTRIBUTE = {"runtime", "workloads", "cli"}


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_from_rooms_below_it(path):
    for name in imported(path):
        package, _, rest = name.partition(".")
        if package == "thinwire" and room(path) != "__init__":
            target = rest.partition(".")[0] or "thinwire"
            assert target in MAY_IMPORT[room(path)], name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_runtime_and_what_stands_on_it_know_of_processes(path):
    if room(path) not in MAY_DISTRIBUTE:
        assert not any(name.startswith("torch.distributed") for name in imported(path))


def test_every_file_of_a_method_names_its_paper():
    for path in (ROOT / "methods").glob("[a-z]*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert "arXiv" in docstring or path.stem in ("dense", "half"), path
        assert len(path.read_text().splitlines()) <= 120
