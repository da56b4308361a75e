"""The local kernels of strategies on an emulated accelerator: results of the same form, and the time of their work."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import pytest

import accelerator as kernels
import pipelines
import strategy
from emulated import Emulated
from fompi.backends.numbers import product, wide_product
from fompi.model.machine import Machine
from fompi.parallel import linear
from fompi.parallel.activations import activate, activate_backward
from fompi.parallel.arrays import add
from fompi.parallel.attention import Rule, attend, attend_backward, merge
from fompi.parallel.exchange import grouped, grouped_gradient


def a(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


AT = np.arange(6)
RULES = [Rule(False, None, None), Rule(True, None, None), Rule(True, None, (0, 4, 6)), Rule(False, None, (0, 1, 6))]
Q, K, V, LSE = a(6, 4, 3), a(6, 2, 3), a(6, 2, 5), a(6, 4)
READS = [0, 0, 1, 1]
CALLS = [
    (product, (a(2, 3, 4), a(4, 5))),
    (product, (a(3, 2).T, a(3, 5))),
    (wide_product, (a(2, 3, 4), a(4, 5), "float32")),
    (wide_product, (a(3, 4).astype("f2"), a(4, 5).astype("f2"), "float16")),
    (add, (a(3, 2), a(3, 2))),
    (activate, (a(3, 4), "gelu")),
    (activate, (a(3, 4), "swiglu")),
    (activate_backward, (a(3, 4), a(3, 2), "swiglu")),
    (attend, (Q, K, V, READS, AT, AT, RULES[0])),
    (attend, (Q[:0], K, V, READS, AT[:0], AT, RULES[1])),
    (attend_backward, ((Q, K, V), (a(6, 4, 5), LSE, a(6, 4, 5)), READS, AT, AT, RULES[1])),
    (merge, (a(6, 4, 5), LSE.copy(), a(6, 4, 5), LSE)),
    (grouped, (a(5, 3), [2, 0, 3], a(3, 3, 4))),
    (grouped_gradient, (a(5, 3), [2, 3], a(5, 4), a(2, 3, 4))),
]


@pytest.mark.parametrize(("kernel", "args"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_results_have_the_form_of_the_real_ones(kernel, args):
    accelerator = Emulated(Machine("fast", 0.0, 1.0, 1e15, 1e15, 0.0))
    emulated, real = kernels.spend(accelerator, kernel, *args), kernel(*args)
    forms = [
        [(x.shape, x.dtype) for x in (result if isinstance(result, tuple) else (result,) if result is not None else ())]
        for result in (emulated, real)
    ]
    assert forms[0] == forms[1]


def test_a_kernel_takes_the_time_of_its_work():
    backend = Emulated(Machine("slow", 0.0, 1.0, 1e3, 1e15, 0.0))
    begun = perf_counter()
    with kernels.emulated(backend):
        assert linear.wide_product is not wide_product
        linear.wide_product(a(2, 5), a(5, 3), "float32")  # 60 operations
    assert linear.wide_product is wide_product
    assert perf_counter() - begun >= 0.06 and backend.busy == pytest.approx(0.06)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("q_at", [AT, AT[::-1], AT[3:], AT[:0]], ids=len)
def test_pairs(rule, q_at):
    """The work of an attention is the number of pairs that see each other."""
    seen = sum(
        rule.documents(np.array([q]))[0] == rule.documents(np.array([k]))[0] and (not rule.causal or q >= k)
        for q in q_at
        for k in AT
    )
    assert kernels.pairs(rule, q_at, AT) == seen


def test_flows():
    """The bounds of `bench parallel`, on cases that can be seen by eye."""
    assert strategy.sent([1, 1], [3, 3]) == 7 and strategy.received([1, 1], [3, 3]) == 7
    assert strategy.round_trip([0, 1, 0], [1, 2, 1], [0, 1, 0]) == 4  # everything hides behind 4 of kernels
    assert strategy.round_trip([2], [1], [2]) == 5  # nothing hides
    assert strategy.round_trip([1, 1, 1], [1, 1, 1], [1, 1, 1]) == 6  # the port out is busy until 3


@pytest.mark.parametrize(("schedule", "milliseconds"), [
    ("gpipe", 8 * 30 + 3 * 30 + 6),
    ("1f1b", 8 * 30 + 3 * 30 + 2 * 3 * 2 + 4),
    ("interleaved", 8 * 30 + 3 * 15 + 2 * 7),
    ("zb-h1", 8 * 30 + 3 * 10 + 12),
    ("zb-h2", 8 * 30 + 6),
    ("zbv", 8 * 30 + 16),
    ("dualpipev", 8 * 30 + 2 * 5 + 18),
])  # fmt: skip
def test_formulas_of_pipelines(schedule, milliseconds):
    chunks = pipelines.chunks_of(schedule)
    seconds = {kind: each / chunks for kind, each in pipelines.STAGE_SECONDS.items()}
    assert pipelines.predicted(schedule, 4, 8, chunks, seconds, 1e-3) == pytest.approx(1e-3 * milliseconds)
