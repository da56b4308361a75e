"""What a call costs in a program that JAX compiles, and what it hides.

    mpirun -n 2 python -m fompi bench tools/suites/jit.py

All contestants of a row alternate in one run. The second row is meant for two hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fompi
import fompi.jax
from fompi.bench.measure import Bench
from fompi.tuning.rounds import Row, difference, ratio

CALLS, QUICK_CALLS = 300, 60
"""Calls per round of the first row."""

NBYTES = 1024
"""Bytes of the all-reduce that is short."""

LONG_NBYTES, QUICK_LONG_NBYTES = 8 << 20, 1 << 20
"""Bytes of the all-reduce that moves during a product."""

SIDE = 512
"""Rows and columns of the product."""

TRIALS = 3
"""Calls by which the number of products is chosen. The fastest one counts."""


def rows(bench: Bench) -> list[Row]:
    return bench.rows({"all-reduce of 1 KiB under jit": short_calls, "product beside an all-reduce under jit": overlap})


def _row(bench: Bench, what: str, samples: Mapping[str, Sequence[float]], **fields: Any) -> Row:
    setup, progress = f"{bench.comm.size} ranks, jax {jax.__version__}", f"progress: {bench.comm.engine.progress_mode}"
    return Row(what, setup, samples, progress=progress, **fields)


def short_calls(bench: Bench) -> Row:
    """An all-reduce of 1 KiB in programs of `fompi.jax.jit` and `jax.jit`, bound, and a program without a call."""
    array = np.ones(NBYTES // 4, np.float32)
    x = jnp.asarray(array)

    def summed(x: Any) -> Any:
        return fompi.jax.all_reduce(x, comm=bench.comm)  # type: ignore[attr-defined]

    programs = {"fompi.jax.jit": fompi.jax.jit(summed), "jax.jit": jax.jit(summed)}
    programs["jax.jit of x + 1"] = jax.jit(lambda x: x + 1)
    with fompi.all_reduce.bind(array, comm=bench.comm) as bound:
        calls = {"fompi bound": bound, **{name: partial(_computed, f, x) for name, f in programs.items()}}
        seconds = bench.times(calls, calls=QUICK_CALLS if bench.quick else CALLS, idle=0.0)
    figures = [
        difference(f"{name}, above the bound one", seconds[name], seconds["fompi bound"], most=most)
        for name, most in (("fompi.jax.jit", 40.0), ("jax.jit", None))
    ]
    return _row(bench, "all-reduce of 1 KiB under jit", seconds, base="fompi bound", figures=figures)


def _computed(f: Any, *tensors: Any) -> Any:
    """The result of a program, when it is there."""
    return jax.block_until_ready(f(*tensors))


def overlap(bench: Bench) -> Row:
    """A chain of products during an all-reduce that takes about as long: with start and wait, and one by one."""
    nbytes, comm = QUICK_LONG_NBYTES if bench.quick else LONG_NBYTES, bench.comm
    x, a = jnp.ones(nbytes // 4, jnp.float32), jnp.full((SIDE, SIDE), 1 / SIDE, jnp.float32)
    summed: Any = fompi.jax.jit(lambda x: fompi.jax.all_reduce(x, comm=comm))  # type: ignore[attr-defined]

    def product(a: Any, count: int) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, c: c @ a, a)

    pilot = {"sum": partial(_computed, summed, x), "16": partial(_computed, jax.jit(product, static_argnums=1), a, 16)}
    fastest = {name: min(taken) for name, taken in bench.times(pilot, TRIALS, warmup=1, idle=0.0).items()}
    count = max(1, round(16 * fastest["sum"] / fastest["16"]))

    def started(x: Any, a: Any) -> Any:
        pending = fompi.jax.all_reduce.start(x, comm=comm)  # type: ignore[attr-defined]
        return pending.wait(after=product(pending.before(a), count))

    def one_by_one(x: Any, a: Any) -> Any:
        return summed(x), product(a, count)

    programs: dict[str, Any] = {
        "product": jax.jit(lambda x, a: product(a, count)),
        "all-reduce": fompi.jax.jit(lambda x, a: summed(x)),
        "start and wait": fompi.jax.jit(started),
        "blocking": fompi.jax.jit(one_by_one),
    }
    seconds = bench.times({name: partial(_computed, f, x, a) for name, f in programs.items()}, idle=0.0)
    longer = [max(pair) for pair in zip(seconds["product"], seconds["all-reduce"], strict=True)]
    figures = [
        ratio("start and wait / the longer of both", seconds["start and wait"], longer, most=1.1),
        ratio("blocking / the longer of both", seconds["blocking"], longer),
        ratio("blocking / start and wait", seconds["blocking"], seconds["start and wait"]),
    ]
    what = f"{count} products of {SIDE} beside an all-reduce of {nbytes >> 20} MiB under jit"
    marks = ("the target is for two hosts",) if bench.cluster.shared else ()
    return _row(bench, what, seconds, base="product", figures=figures, marks=marks)
