"""Predicted steps: with overlap they are never slower, and a layer has as many operations as its model."""

from __future__ import annotations

import pytest
from scale import PARALLEL, main, step

from fompi.base.errors import LayoutError
from fompi.model.machine import Machine
from fompi.planner.layers import MODELS

NVLINK = Machine.load("h100-nvlink")


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("model", ["gpt2-1.5b", "llama-7b", "llama-8b", "ul2-20b"])
def test_every_model_with_every_parallelism(model, parallel):
    predicted = step(model, parallel, 4, NVLINK, 512)
    assert all(0 <= part.fused <= part.unfused * (1 + 1e-9) for part in predicted.parts)
    assert 0 < predicted.fused <= predicted.unfused and predicted.layers == MODELS[model].layers
    lines = str(predicted).splitlines()
    assert lines[0].startswith(f"{model}, {parallel} over 4 ranks") and lines[-1].endswith("(simulated)")


@pytest.mark.parametrize("parallel", PARALLEL)
def test_one_rank_has_nothing_to_hide(parallel):
    predicted = step("llama-7b", parallel, 1, NVLINK, 512)
    assert predicted.fused == pytest.approx(predicted.unfused, rel=0.05)


def test_a_step_takes_at_least_the_time_of_its_products():
    """They have six operations per parameter and token. Attention and messages take more time."""
    model, tokens = MODELS["llama-7b"], 2048
    weights = 4 * model.hidden**2 + 3 * model.hidden * model.ffn
    products = 6 * tokens * weights * model.layers / NVLINK.flops_rate
    assert products < step("llama-7b", "tp", 4, NVLINK, tokens).fused < 1.6 * products
    assert products < step("llama-7b", "dp", 4, NVLINK, tokens).fused < 1.6 * products


@pytest.mark.parametrize(
    ("model", "parallel", "ranks", "tokens", "words"),
    [
        ("gpt-9", "tp", 4, 8, "no model 'gpt-9'; choose gpt2-1.5b"),
        ("llama-7b", "pp", 4, 8, "no parallelism 'pp'; choose tp"),
        ("mixtral-8x7b", "ep", 4, 8, "has 8 experts: see `fompi layout`"),
        ("llama-7b", "tp", 0, 8, "ranks=0"),
        ("llama-7b", "tp", 4, 0, "tokens=0"),
        ("llama-7b", "dp", 4, 10**400, "both must be from 1 to"),
    ],
)
def test_unknown_models_and_numbers_out_of_range(model, parallel, ranks, tokens, words):
    with pytest.raises(LayoutError, match=words):
        step(model, parallel, ranks, NVLINK, tokens)


def test_the_command(capsys):
    main(["--model", "llama-7b", "--parallel", "dp", "--ranks", "8"])
    assert capsys.readouterr().out == f"{step('llama-7b', 'dp', 8, Machine.load('h100-ndr'), 2048)}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["--model", "gpt-9", "--ranks", "8"])
    assert "no model 'gpt-9'; choose gpt2-1.5b" in capsys.readouterr().err
