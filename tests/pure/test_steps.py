"""Whole steps on paper: overlap never loses there, and the arithmetic of a layer is that of the model."""

from __future__ import annotations

import pytest

from fompi.base.errors import LayoutError
from fompi.model.machine import Machine
from fompi.planner.layers import MODELS, PARALLEL, step

NVLINK = Machine.load("h100-nvlink")


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_in_every_way(model, parallel):
    made = step(model, parallel, 4, NVLINK, 512)
    assert all(0 <= part.fused <= part.unfused * (1 + 1e-9) for part in made.parts)
    assert 0 < made.fused <= made.unfused and made.layers == MODELS[model].layers
    lines = str(made).splitlines()
    assert lines[0].startswith(f"{model}, {parallel} over 4 ranks") and lines[-1].endswith("(simulated)")


@pytest.mark.parametrize("parallel", PARALLEL)
def test_one_rank_has_nothing_to_hide(parallel):
    made = step("llama-7b", parallel, 1, NVLINK, 512)
    assert made.fused == pytest.approx(made.unfused, rel=0.05)


def test_a_step_takes_its_products():
    """Six operations a parameter and token, at the rate of the machine; attention and messages come on top."""
    model, tokens = MODELS["llama-7b"], 2048
    weights = 4 * model.hidden**2 + 3 * model.hidden * model.ffn
    products = 6 * tokens * weights * model.layers / NVLINK.flops_rate
    assert products < step("llama-7b", "tp", 4, NVLINK, tokens).fused < 1.6 * products
    assert products < step("llama-7b", "dp", 4, NVLINK, tokens).fused < 1.6 * products


@pytest.mark.parametrize(
    ("model", "parallel", "ranks", "tokens", "words"),
    [
        ("gpt-9", "tp", 4, 8, "no model 'gpt-9'; there are gpt2-1.5b"),
        ("llama-7b", "pp", 4, 8, "no parallelism 'pp'; there are tp"),
        ("llama-7b", "tp", 0, 8, "ranks=0"),
        ("llama-7b", "tp", 4, 0, "tokens=0"),
        ("llama-7b", "dp", 4, 10**400, "both are from 1 to"),
    ],
)
def test_what_there_is_not(model, parallel, ranks, tokens, words):
    with pytest.raises(LayoutError, match=words):
        step(model, parallel, ranks, NVLINK, tokens)
