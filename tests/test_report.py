"""What the report says and, in a real browser, what it shows."""

from __future__ import annotations

import copy
import math

import pytest

from tests.browser import ask
from thinwire.report import words
from thinwire.report.axes import Scale
from thinwire.report.page import page

SPEEDS = {"ddp": (100, 0, 900), "local": (100, 0, 0), "acp:rank=4": (100, 20, 30), "fp16": (110, 40, 950)}


def run(method, compute, compress, exposed, steps=30):
    step = float(compute + compress + exposed)
    sent = 1e6 * exposed / 900
    return {
        "method": method,
        "step_ms": step,
        "step_ms_p10": 0.9 * step,
        "step_ms_p90": 1.2 * step,
        "compute_ms": compute,
        "compress_ms": compress,
        "exposed_ms": exposed,
        "wire_bytes_per_step": 1.05 * sent,
        "payload_bytes_per_step": sent,
        "train_loss": 2.5,
        "val_loss": 2.6,
        "warmup_over": True,
        "warmup_steps": 0,
        "warmup_step_ms": None,
        "mean_step_ms": step,
        "losses": [5 * math.exp(-i / 20) for i in range(steps)],
        "seconds": [(i + 1) * step / 1e3 for i in range(steps)],
        "bytes": [(i + 1) * sent for i in range(steps)],
        "timeline": [
            {"lane": "compute", "name": "forward", "start": 0.0, "end": 0.4 * step},
            {"lane": "compute", "name": "backward", "start": 0.4 * step, "end": 0.9 * step},
            {"lane": "compress", "name": "bucket 0", "start": 0.5 * step, "end": 0.6 * step},
            {"lane": "wire", "name": "all_reduce bucket 0", "start": 0.6 * step, "end": 0.8 * step, "bytes_sent": 8},
            {"lane": "compute", "name": "wait", "start": 0.7 * step, "end": 0.9 * step},
            {"lane": "compute", "name": "optimizer", "start": 0.9 * step, "end": step},
        ],
    }


SETTING = {
    "workload": "lm",
    "data": None,
    "parameters": 7_000_000,
    "steps": 10,
    "repeats": 3,
    "lr": None,
    "seed": 0,
    "target_loss": None,
    "shaped": True,
    "hosts": 4,
    "per_host": 1,
    "workers": 4,
    "rates": [1e8] * 4,
    "delays": [0.0] * 4,
    "losses": [0.0] * 4,
    "cores": 2,
    "torch": "2",
    "thinwire": "0",
    "command": "thinwire compare 'a <b>' & c",
}


def comparison(speeds=SPEEDS, **setting):
    return {"runs": [run(name, *parts) for name, parts in speeds.items()], "setting": SETTING | setting}


def verdict(*, speeds=SPEEDS, **setting):
    whole = comparison(speeds, **setting)
    return " ".join(words.verdict(whole["runs"], whole["setting"]))


def test_the_verdict_names_the_fastest_its_gain_and_the_distance_from_the_floor():
    said = verdict()
    assert "On 4 hosts at 100 Mb/s, acp:rank=4 steps 6.67x faster than plain DDP" in said
    assert "1.50x of the floor" in said
    assert "Slower than plain DDP here: fp16." in said


def test_who_trains_alone_is_no_rival():
    assert verdict(speeds={**SPEEDS, "barrier": (100, 0, 1)}) == verdict()


def test_the_verdict_says_when_compression_loses():
    said = verdict(speeds={"ddp": (100, 0, 10), "acp": (100, 30, 5), "fp16": (100, 60, 5)}, shaped=False)
    assert "unshaped" in said and "no method beats plain DDP" in said
    assert "acp, takes 1.23x its time" in said
    assert "faster" not in said


def test_times_within_the_noise_are_no_gain():
    assert "as fast" in verdict(speeds={"ddp": (100, 0, 0), "acp": (98, 0, 0)})


def test_the_verdict_on_a_target():
    whole = comparison(target_loss=2.0)
    for one, seconds in zip(whole["runs"], (30.0, 1.0, 6.0, None), strict=True):
        one["target_seconds"] = seconds
    first, late = words.verdict(whole["runs"], whole["setting"])
    assert "acp:rank=4 is first" in first and "5.00x sooner than plain DDP" in first
    assert late == "Not there in the steps given: fp16."
    for one in whole["runs"]:
        one["target_seconds"] = None
    assert "no method reaches" in words.verdict(whole["runs"], whole["setting"])[0]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"rates": [1e7, 1e9, 1e8, 1e8]}, "4 hosts at 10 Mb/s to 1 Gb/s"),
        ({"rates": [None] * 4, "delays": [0.005] * 4}, "4 hosts without a limit of rate, 5 ms delay"),
        ({"losses": [0.001] * 4, "per_host": 2}, "4 hosts of 2 workers at 100 Mb/s, 0.1 % loss"),
    ],
)
def test_a_place_in_words(setting, said):
    assert words.place(SETTING | setting) == said


@pytest.mark.parametrize(("low", "high", "log"), [(0, 1, False), (3.1, 3.4, False), (1e3, 7e8, True), (2, 30, True)])
def test_ticks_are_few_and_inside(low, high, log):
    scale = Scale.of([low, high], 100, 500, log)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 13
    assert all(100 - 1e-6 <= scale(tick) <= 500 + 1e-6 for tick in ticks)
    assert (scale(low), scale(high)) == (100, 500)


SHOWN = """{
    bars: [...document.querySelectorAll("#steps [data-ms]")].map(e => [+e.dataset.ms, e.getBoundingClientRect().width]),
    curves: [...document.querySelectorAll(".curve")].map(e => e.getTotalLength()),
    spans: [...document.querySelectorAll("[data-timeline]")].map(lane => [...lane.querySelectorAll("[data-span]")]
        .map(e => [e.dataset.span, e.getBoundingClientRect().width, e.getBoundingClientRect().top])),
    outside: [...document.querySelectorAll("section text")].filter(e => {
        const own = e.getBoundingClientRect(), card = e.closest("section").getBoundingClientRect();
        return own.left < card.left || own.right > card.right || own.bottom > card.bottom;
    }).map(e => e.textContent),
    overlaps: [...document.querySelectorAll("section")].flatMap(s => {
        const all = [...s.querySelectorAll(".label")].map(e => e.getBoundingClientRect());
        return all.flatMap((a, i) => all.slice(i + 1).filter(b =>
            a.left < b.right && b.left < a.right && a.top + 4 < b.bottom && b.top + 4 < a.bottom));
    }).length,
    rows: [...document.querySelectorAll("tr")].map(row => [...row.cells].map(cell => cell.innerText)),
    headline: document.querySelector("h1").innerText,
    command: document.querySelector("pre").innerText,
    requests: performance.getEntriesByType("resource").map(e => e.name),
    problems,
}"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return ask(page(comparison()), SHOWN, tmp_path_factory.mktemp("report"))


def test_bars_are_as_long_as_the_times(shown):
    bars = [(ms, width) for ms, width in shown["bars"] if ms]
    assert len(shown["bars"]) == 3 * len(SPEEDS)
    scale = bars[0][1] / bars[0][0]
    assert scale > 0.1
    assert all(width == pytest.approx(scale * ms, abs=0.6) for ms, width in bars)


def test_curves_are_drawn_for_all_but_who_trains_alone(shown):
    assert len(shown["curves"]) == 2 * (len(SPEEDS) - 1)
    assert all(length > 100 for length in shown["curves"])


def test_timelines_show_every_span_in_its_lane(shown):
    assert len(shown["spans"]) == len(SPEEDS)
    for lanes in shown["spans"]:
        places = {name: (width, top) for name, width, top in lanes}
        forward, wire = places["forward"], places["all_reduce bucket 0"]
        assert forward[0] == pytest.approx(2 * wire[0], rel=0.02)
        assert forward[1] < places["bucket 0"][1] < wire[1]
        assert places["wait"][1] == forward[1]


def test_nothing_sticks_out_or_lies_on_another(shown):
    assert shown["outside"] == []
    assert shown["overlaps"] == 0


def test_the_table_has_every_method_and_the_command_is_as_typed(shown):
    assert [row[0] for row in shown["rows"]] == ["method", *SPEEDS]
    assert "6.67x" in shown["rows"][3]
    assert "6.67x faster" in shown["headline"]
    assert shown["command"] == SETTING["command"]


def test_it_needs_no_network_and_has_no_errors(shown):
    assert shown["requests"] == []
    assert shown["problems"] == []


def test_pointing_at_a_method_tells_of_it_and_dims_the_others(tmp_path):
    told = ask(
        page(comparison()),
        """(() => {
            const point = document.querySelector('#time [data-method="acp:rank=4"] .point');
            point.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
            const tip = document.getElementById("tip");
            for (const one of document.getAnimations()) one.finish();
            const faint = name => getComputedStyle(document.querySelector(`#time [data-method="${name}"]`)).opacity;
            return [tip.textContent, getComputedStyle(tip).visibility, +faint("acp:rank=4"), +faint("ddp")];
        })()""",
        tmp_path,
    )
    assert told[0].startswith("acp:rank=4: loss 5.000 after 150 ms")
    assert told[1] == "visible"
    assert told[2] == 1 and told[3] < 0.5


@pytest.mark.parametrize("dark", [False, True])
def test_it_follows_the_readers_scheme_and_the_button_turns_it(tmp_path, dark):
    colours = """(() => {
        const look = () => getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number);
        const first = look();
        document.getElementById("theme").click();
        return [first, look()];
    })()"""
    before, after = ask(page(comparison()), colours, tmp_path, dark)
    assert (sum(before) < 200) is dark
    assert (sum(after) < 200) is not dark


def test_long_names_and_many_methods_stay_inside(tmp_path):
    speeds = {f"apm:warmup_steps={10**i}+acp:rank={16 + i}": (100 + i, 20, 30 + 40 * i) for i in range(10)}
    seen = ask(page(comparison({"ddp": (100, 0, 900)} | speeds)), SHOWN, tmp_path)
    assert seen["outside"] == []
    assert seen["overlaps"] == 0


def test_one_step_is_enough_to_draw():
    lone = copy.deepcopy(comparison({"local": (10, 0, 0)}))
    lone["runs"][0] |= {"losses": [1.0], "seconds": [0.01], "bytes": [0.0]}
    assert "takes 10 ms a step" in page(lone)
