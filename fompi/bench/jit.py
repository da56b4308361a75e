"""What a call costs in a program that JAX compiles, and what it hides: `mpirun -n 2 python -m fompi bench jit`.

All contestants of a row alternate in one run. The second row is meant for two hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fompi
import fompi.jax
from fompi.base.layout import Partial, Spec
from fompi.bench.options import Options
from fompi.tuning.rounds import Row, alternate, difference, meet, of_all_ranks, ratio, seconds_of

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


def rows(comm: Any, options: Options) -> list[Row]:
    parts: dict[str, Callable[[Any, Options], Row]] = {
        "all-reduce of 1 KiB under jit": short_calls,
        "product beside an all-reduce under jit": overlap,
    }
    return [parts[name](comm, options) for name in options.each([*parts])]


def _setup(comm: Any) -> dict[str, Any]:
    return {"setup": f"{comm.size} ranks, jax {jax.__version__}", "progress": f"progress: {comm.engine.progress_mode}"}


def short_calls(comm: Any, options: Options) -> Row:
    """An all-reduce of 1 KiB in programs of `fompi.jax.jit` and `jax.jit`, bound, and a program without a call."""
    array = np.ones(NBYTES // 4, np.float32)
    x = jnp.asarray(array)

    def summed(x: Any) -> Any:
        return fompi.jax.all_reduce(x, comm=comm)  # type: ignore[attr-defined]

    ours, plain, without = fompi.jax.jit(summed), jax.jit(summed), jax.jit(lambda x: x + 1)
    plan = fompi.plan(fompi.all_reduce, Spec(array.shape, "float32", Partial()), ranks=comm.size)
    with fompi.bind(plan, comm=comm, x=array) as bound:
        contestants: dict[str, Callable[[], object]] = {
            "fompi bound": bound,
            "fompi.jax.jit": lambda: ours(x).block_until_ready(),
            "jax.jit": lambda: plain(x).block_until_ready(),
            "jax.jit of x + 1": lambda: without(x).block_until_ready(),
        }
        calls = QUICK_CALLS if options.quick else CALLS
        seconds = alternate(comm.link.comm, contestants, options.rounds, calls=calls)
    figures = [
        difference("fompi.jax.jit, above the bound one", seconds["fompi.jax.jit"], seconds["fompi bound"], most=40),
        difference("jax.jit, above the bound one", seconds["jax.jit"], seconds["fompi bound"]),
    ]
    return Row("all-reduce of 1 KiB under jit", samples=seconds, base="fompi bound", figures=figures, **_setup(comm))


def overlap(comm: Any, options: Options) -> Row:
    """A chain of products during an all-reduce that takes about as long: with start and wait, and one by one."""
    nbytes = QUICK_LONG_NBYTES if options.quick else LONG_NBYTES
    x, a = jnp.ones(nbytes // 4, jnp.float32), jnp.full((SIDE, SIDE), 1 / SIDE, jnp.float32)
    summed: Any = fompi.jax.jit(lambda x: fompi.jax.all_reduce(x, comm=comm))  # type: ignore[attr-defined]

    def product(a: Any, count: int) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, c: c @ a, a)

    times = _fastest(comm, lambda: summed(x)) / _fastest(comm, lambda: jax.jit(product, static_argnums=1)(a, 16)) * 16
    count = max(1, round(float(np.max(of_all_ranks(comm.link.comm, np.array([times]))))))

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
    contestants = {name: lambda f=f: jax.block_until_ready(f(x, a)) for name, f in programs.items()}
    seconds = alternate(comm.link.comm, contestants, options.rounds)
    longer = [max(pair) for pair in zip(seconds["product"], seconds["all-reduce"], strict=True)]
    figures = [
        ratio("start and wait / the longer of both", seconds["start and wait"], longer, most=1.1),
        ratio("blocking / the longer of both", seconds["blocking"], longer),
        ratio("blocking / start and wait", seconds["blocking"], seconds["start and wait"]),
    ]
    what = f"{count} products of {SIDE} beside an all-reduce of {nbytes >> 20} MiB under jit"
    marks = () if comm.link.several_hosts() else ("the target is for two hosts",)
    return Row(what, samples=seconds, base="product", figures=figures, marks=marks, **_setup(comm))


def _fastest(comm: Any, call: Callable[[], Any]) -> float:
    """The seconds of the fastest of some calls, on this rank."""
    seconds = []
    for _ in range(1 + TRIALS):  # the first one compiles
        meet(comm.link.comm)
        seconds.append(seconds_of(lambda: jax.block_until_ready(call())))
    return min(seconds[1:])
