"""SGD and AdamW do what torch.optim does, on every part of a parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fompi.backends.numbers import narrow
from fompi.base.errors import DtypeError
from fompi.parallel.optimizers import MASTER, SGD, AdamW, state_of, update

CASES = [
    (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (SGD(0.05, 0.5, 0.1), lambda p: torch.optim.SGD(p, 0.05, momentum=0.5, weight_decay=0.1)),
    (SGD(0.05, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1)),
    (AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    (AdamW(0.1, (0.8, 0.95), 1e-6, 0.2), lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.95), 1e-6, 0.2)),
    (AdamW(0.1, weight_decay=0.0), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.0)),
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("optimizer", "make"), CASES, ids=lambda case: repr(case) if not callable(case) else "")
def test_as_torch(optimizer, make, dtype):
    """Twenty steps in parts of uneven sizes, one of them empty. An element has a few roundings per step."""
    random, steps = np.random.default_rng(0), 20
    p = random.standard_normal(31).astype(dtype)
    expected = torch.from_numpy(p.copy()).requires_grad_()
    theirs = make([expected])
    parts = [slice(0, 7), slice(7, 7), slice(7, 31)]
    states = [optimizer.state(p[part]) for part in parts]
    for _ in range(steps):
        g = random.standard_normal(31).astype(dtype)
        before = g.copy()
        expected.grad = torch.from_numpy(g.copy())
        theirs.step()
        for part, state in zip(parts, states, strict=True):
            optimizer.update(p[part], g[part], state)
        assert (g == before).all()
    bound = 8 * steps * np.finfo(dtype).eps
    np.testing.assert_allclose(p, expected.detach().numpy(), rtol=bound, atol=bound)
    assert p.dtype == dtype and all(a.dtype == dtype for s in states for a in s.values() if isinstance(a, np.ndarray))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_have_a_float32_copy(dtype):
    """Zero and small gradients change nothing that is not said; small steps add up; a state without a copy gets one."""
    for optimizer, g, steps in ((AdamW(1e-3, weight_decay=0), 0, 3), (AdamW(1e-5), 1e-4, 200), (SGD(1e-4), 1.0, 200)):
        p, single = narrow(np.linspace(-2, 2, 5, dtype=np.float32), dtype), np.linspace(-2, 2, 5, dtype=np.float32)
        state, other, g = state_of(optimizer, p, dtype), optimizer.state(single), np.full(5, g, np.float32)
        for _ in range(steps):
            update(optimizer, p, g, state, dtype)
            optimizer.update(single, g, other)
        np.testing.assert_array_equal(p, narrow(single, dtype))
        assert (state.pop(MASTER) == single).all()
        update(optimizer, p, g, state, dtype)
        assert state[MASTER].dtype == np.float32
        with pytest.raises(DtypeError, match="give it a float32 copy"):
            optimizer.state(p)


def test_a_learning_rate_that_changes():
    optimizer, p = SGD(1.0), np.zeros(2)
    optimizer.update(p, np.ones(2), state := optimizer.state(p))
    optimizer.lr = 0.5
    optimizer.update(p, np.ones(2), state)
    assert (p == -1.5).all()
