"""What the hot loops cost, as multiples of copying the same tensor, on one thread.

    python -m benchmarks.kernels [--size 25000000] [--only acp,signs] [--json FILE]
    python -m benchmarks.kernels --compile

A row is work that a method does in a step, through the functions that it does it with. Rounds of all rows, each beside
a copy, follow one another; a row's figure is the median over the rounds of its time over the copy's.

``--compile`` times what ``attach`` does so that no training step compiles: for each method in a fresh process, with
numba's cache empty and then filled. Importing numba, which it waits for too, is apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from thinwire import kernels
from thinwire.core.combine import error_feedback
from thinwire.core.lift import Decoded, two_way
from thinwire.core.lockstep import Lockstep, drive
from thinwire.core.method import Context, Method
from thinwire.core.rehearsal import rehearse
from thinwire.core.requests import AllGather, Batched
from thinwire.core.value import Sum, Value, subtract, write
from thinwire.methods.lowrank import Product, orthogonalize, product, transposed_product
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.qsgd import StochasticLevels
from thinwire.methods.signs import ScaledSign, Signs
from thinwire.methods.topk import TopK
from thinwire.registry import METHODS

Work = Callable[[], None]
ROUNDS = 7


def rows(size: int) -> dict[str, tuple[float, Work]]:
    """By the work's name: the most that it should cost, and the work, on tensors of ``size`` numbers."""
    return elementwise_rows(size) | lowrank_rows(size)


def elementwise_rows(size: int) -> dict[str, tuple[float, Work]]:
    x, e, out = torch.randn(size), torch.zeros(size), torch.zeros(size)
    signs, chunk = ScaledSign(2048), -(-size // 4)
    (one,) = signs.encode([(x, 1, size)])
    both_ways, feedback = error_feedback(two_way(signs)), error_feedback(TopK(ratio=0.01))
    world = Context(world=4)
    pulled = [Signs(*(torch.cat([t] * 4) for t in signs.encode([(x[:chunk], 1, chunk)])[0]))]
    states = {method: method.init(x, world) for method in (both_ways, feedback)}
    levels, k = StochasticLevels(4, 512, math.inf, 12345678901234567), size // 1000
    sketch = kernels.count_sketch(x, 5, 16 * k, 7)

    def recover() -> None:
        kernels.top_k(kernels.estimate(sketch, size, 7), 8 * k)

    def compress() -> None:
        p = Sum(x, e, 1.0)
        subtract(p.out, Decoded(signs, signs.encode([(p, 1, size)])[0], size), out=e)

    def exchange() -> None:
        mean, states[both_ways] = step(both_ways, x, states[both_ways], world, lambda payload: pulled[0])
        write(x, mean)

    def choose() -> None:
        alone = Context()
        _, states[feedback] = step(feedback, x, states[feedback], alone, lambda p: type(p)(*(t[None] for t in p)))

    return {
        "signs: residual in, scale, pack, new residual": (2.5, compress),
        "signs: unpack one worker's and accumulate": (1.5, lambda: signs.add([(one, size, out, 0.25, out, False)])),
        "signs: two-way exchange of one of 4 ranks": (6, exchange),
        "top-k: exact 1 %, new residual": (4, choose),
        "QSGD: 4 bits, unbiased, pack": (5, lambda: levels.encode([(x, 1, size)])),  # type: ignore[dict-item]
        "sketch: 5 rows": (15, lambda: kernels.count_sketch(x, 5, 16 * k, 7)),
        "sketch: estimates and the top k of them": (30, recover),
    }


def step(method: Method, x: Tensor, state: Any, ctx: Context, gathered: Callable[[Any], Any]) -> tuple[Value, Any]:
    """One of a method's steps, with nobody at the other end: what goes to all comes back, as ``gathered`` says."""
    reduction, reply = method.reduce(x, state, ctx), None
    while True:
        try:
            request = reduction.send(reply)
        except StopIteration as stop:
            return stop.value[0].mean, stop.value[1]
        if isinstance(request, Batched):
            (reply,) = request.function([request.args])
            continue
        reply = gathered(request.payload) if isinstance(request, AllGather) else request.payload


def lowrank_rows(size: int) -> dict[str, tuple[float, Work]]:
    """Whole steps of a worker, alone, at rank 4: one large matrix, and as many numbers in matrices of 1024 x 1024."""
    found = {}
    for side, what in [(math.isqrt(size), "one matrix"), (1024, "matrices of 1024 x 1024")]:
        gradients = [torch.randn(side, side) for _ in range(max(1, size // side**2))]
        errors = [torch.randn(side, side) for _ in gradients]
        P, Q = orthogonalize(torch.randn(2, side, 4).unbind())
        pairs = list(zip(gradients, errors, strict=True))
        steps = {
            "P": lambda M, Q=Q: Product(product([(M, Q)])[0], Q),
            "Q": lambda M, P=P: Product(P, transposed_product([(M, P)])[0]),
        }
        for turn, factors in steps.items():
            found[f"ACP {turn}-step, {what}"] = 2.5, partial(_low_rank_step, pairs, factors)
            found[f"ACP {turn}-step with P Q^T into the bucket, {what}"] = 3.7, partial(_fused_step, pairs, factors)
        found[f"P Q^T into the bucket, {what}"] = 1.2, partial(_reconstruct, gradients, Product(P, Q))
        power = error_feedback(PowerSGD())
        states = [power.init(x, Context())._replace(error=e) for x, e in pairs]
        found[f"Power-SGD, whole step, {what}"] = 5.0, partial(_power_step, power, gradients, states)
    return found


def _low_rank_step(pairs: Sequence[tuple[Tensor, Tensor]], factors: Callable[[Sum], Product]) -> None:
    for x, error in pairs:
        M = Sum(x, error, 1.0)
        factors(M).subtract(M, error)


def _fused_step(pairs: Sequence[tuple[Tensor, Tensor]], factors: Callable[[Sum], Product]) -> None:
    """As the engine runs it; the mean of one worker is its own factor."""
    for x, error in pairs:
        M = Sum(x, error, 1.0)
        sent = factors(M)
        Product.settle_each([(sent, sent, M)])


def _reconstruct(buckets: Sequence[Tensor], value: Product) -> None:
    for out in buckets:
        value.write(out)


def _power_step(method: Method, gradients: Sequence[Tensor], states: Sequence[Any]) -> None:
    """The mean of one worker is its own factor."""
    for x, state in zip(gradients, states, strict=True):
        lockstep = Lockstep([method.reduce(x, state, Context())])
        drive(lockstep, lambda c: c.buffer)
        ((out, _),) = lockstep.results
        write(x, out.mean)


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(size: int, chosen: dict[str, tuple[float, Work]]) -> dict[str, float]:
    source, target = torch.randn(size), torch.empty(size)
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    for turn in range(ROUNDS + 1):
        for name, (_, work) in chosen.items():
            copy = min(seconds(lambda: target.copy_(source)) for _ in range(3))
            taken = seconds(work)
            if turn:  # the first compiles
                ratios[name].append(taken / copy)
    return {name: statistics.median(found) for name, found in ratios.items()}


def compile_all() -> None:
    print("| method | `import numba`, seconds | attach, cold | warm |\n|---|---|---|---|")
    for name in METHODS:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "benchmarks.kernels", "--rehearse", name]
            env = os.environ | {"NUMBA_CACHE_DIR": cache}
            cold, warm = (subprocess.run(command, env=env, stdout=-1, text=True).stdout.split() for _ in range(2))
        print(f"| {name} | {warm[0]} | {cold[1]} | {warm[1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=25_000_000)
    parser.add_argument("--only", help="rows whose names have one of these words in them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rehearse", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_all()
        return
    if args.rehearse:
        imported = seconds(lambda: import_module("numba"))
        taken = seconds(lambda: rehearse(tw.method(args.rehearse), [torch.float32], torch.device("cpu")))
        print(f"{imported:.2f} {taken:.2f}")
        return
    torch.set_num_threads(1)
    words = args.only.split(",") if args.only else [""]
    chosen = {name: row for name, row in rows(args.size).items() if any(word in name for word in words)}
    found = measure(args.size, chosen)
    print(f"{args.size:,} numbers in fp32, one thread\n")
    print("| work | x copy | at most |\n|---|---|---|")
    for name, (bar, _) in chosen.items():
        print(f"| {name} | {found[name]:.2f} | {bar:g} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
