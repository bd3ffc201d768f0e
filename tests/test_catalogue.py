"""docs/methods.md: every method has its words, its formula is its price, and the page is what the code says."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
import torch

import thinwire as tw
from benchmarks import catalogue, methods, placing
from thinwire import spec as grammar
from thinwire.core.combine import After
from thinwire.optim import OPTIMIZERS
from thinwire.registry import METHODS
from thinwire.workloads.optimizers import WRAPPERS

EVERYTHING = {**METHODS, **OPTIMIZERS}
MEASURED = json.loads(catalogue.MEASURED.read_text())


def evaluated(formula, **names):
    """A formula with products written side by side: ``8 d (W-1)/W``."""
    tokens = re.findall(r"[\w.]+|\S", formula)
    out = []
    for before, token in itertools.pairwise(["+", *tokens]):
        called = before in ("sqrt", "log2", "ceil")
        product = re.match(r"[\w.)]", before) and re.match(r"[\w.(]", token) and not called
        out.append("*" * bool(product) + token)
    functions = {"sqrt": math.sqrt, "log2": math.log2, "ceil": math.ceil}
    return eval("".join(out), {"__builtins__": {}}, functions | names)


def test_formulas_are_read_as_they_are_written():
    assert evaluated("8 d (W-1)/W", d=5, W=4) == 30
    assert evaluated("(8 + 1/8) ratio d ceil(log2(W))", d=100, W=5, ratio=0.5) == 8.125 * 50 * 3
    assert evaluated("2 (W-1)/W (d/8 + 4 W)", d=16, W=2) == 10


def sent(name, side, world):
    """Bytes a step, from the price list."""
    shapes = {"w": (side, side)}
    if name in METHODS:
        return sum(size for _, size in tw.price(name, shapes, world))
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = OPTIMIZERS[name](torch.optim.SGD(parameters) if name in WRAPPERS else parameters)
    method = optimizer.method.inner if isinstance(optimizer.method, After) else optimizer.method
    return sum(size for _, size in tw.price(method, shapes, world)) / getattr(optimizer, "period", 1)


@pytest.mark.parametrize("world", [3, 4, 8])
@pytest.mark.parametrize("side", [512, 1024])
@pytest.mark.parametrize("name", EVERYTHING)
def test_the_formula_is_the_price(name, side, world):
    options = {key: value for key, value in grammar.options_of(EVERYTHING[name]).items() if type(value) in (int, float)}
    formula = catalogue.formula(EVERYTHING[name])
    assert evaluated(formula, d=side**2, W=world, **options) == pytest.approx(sent(name, side, world), rel=0.005), (
        formula
    )


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_row_says_when_to_use_it_and_has_been_measured(name):
    said = catalogue.notes(EVERYTHING[name])
    assert list(said) == list(catalogue.LABELS)
    assert all(text.endswith(".") for label, text in said.items() if label != "Bytes")
    row = MEASURED["rows"][name]
    assert math.isfinite(row["loss"]) and row["bytes"] > 0
    assert row["seed"] != 0, "rates are chosen on seed 0"


def test_what_was_measured_is_what_the_command_measures():
    assert {row.name: row.spec for row in methods.ROWS} == {n: row["spec"] for n, row in MEASURED["rows"].items()}
    settings = {"workload": methods.WORKLOAD, "workers": methods.WORKERS, "steps": methods.STEPS}
    assert settings | {"late": methods.LATE} == {key: value for key, value in MEASURED.items() if key != "rows"}


def test_the_page_is_what_the_generator_writes():
    assert (catalogue.DOCS / "methods.md").read_text() == catalogue.page(MEASURED), "python -m benchmarks.catalogue"


def test_links_inside_the_page_lead_somewhere():
    page = catalogue.page(MEASURED)
    headings = {
        re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", page, re.M)
    }
    assert set(re.findall(r"\]\(#(.+?)\)", page)) <= headings
    for path in re.findall(r"(?:\]\(|src(?:set)?=\")([^#)\"]+)", page):
        assert (catalogue.DOCS / path).exists(), path


def test_every_method_has_its_own_place_in_the_picture():
    svg = catalogue.picture(MEASURED)
    assert set(re.findall(r'data-method="(.+?)"', svg)) == MEASURED["rows"].keys() >= EVERYTHING.keys()


@pytest.mark.parametrize("crowd", [1, 12, 30])
def test_no_label_lies_on_another_or_on_a_point(crowd):
    generator = torch.Generator().manual_seed(crowd)
    places = [(400 + 80 * x, 300 + 30 * y) for x, y in torch.rand(crowd, 2, generator=generator).tolist()]
    boxes = placing.labels(["dist-ef-sgdm"] * crowd, places)
    for a, b in itertools.combinations(boxes, 2):
        assert not a.meets(b)
    for box in boxes:
        assert box.inside()
        assert not any(box.x < x < box.x + box.width and box.y < y < box.y + box.height for x, y in places)
