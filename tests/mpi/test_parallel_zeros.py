"""Zero in every dimension of every strategy and operation: right, or refused on all ranks, and never a wait.

A sender and a receiver that decide by different facts whether a message exists would wait for each other for ever.
"""

import itertools

import numpy as np
import pytest
from strategies import close, drawn, softmax_attention

import fompi
from fompi.parallel import expert, sequence, tensor

pytestmark = pytest.mark.ranks(mpich=[2, 3], openmpi=[])

TENSORS = {  # a strategy: its tensors by the names of their dimensions, and its keywords
    tensor.column_parallel_linear: ("mk", "kn", "n"),
    tensor.row_parallel_linear: ("mk", "kn", "n"),
    tensor.attention: ("mk", "kd", "kd", "kd", "dk"),
    expert.moe: ("mk", "kE", "ekn", "enk"),
}
OPERATIONS = {
    "all_gather_matmul": ("mk", "kn"),
    "matmul_reduce_scatter": ("Mk", "kn"),
    "matmul_all_reduce": ("Mk", "kn"),
    "matmul_all_to_all": ("Mk", "kn"),
    "all_to_all_matmul": ("Mk", "kn"),
    "all_gather_weight_gradient": ("mk", "Mn"),
    "all_gather": ("mk",),
    "reduce_scatter": ("Mk",),
    "all_reduce": ("Mk",),
    "all_to_all": ("Mk",),
    "broadcast": ("mk",),
}


def zeros(names):
    """Every set of at most two dimensions that are zero."""
    found = sorted(set("".join(names).lower()))
    return ["".join(c) for n in (1, 2) for c in itertools.combinations(found, n)]


def sizes(world, none):
    """The size of each dimension. Capitals are those of all ranks together."""
    n = world.size
    known = {"m": 2, "k": 3, "n": 4, "d": 2, "e": 1} | dict.fromkeys(none, 0)
    return known | {"M": known["m"] * n, "E": known["e"] * n}


def outcome(world, call):
    """What the call returns, or None if it is refused: then by all ranks. The ranks are in step afterwards."""
    try:
        result, refused = call(), False
    except fompi.FompiError as error:
        result, refused = None, True
        assert "waited" not in str(error), error
    assert fompi.all_reduce(np.array([refused * 1]), comm=world)[0] in (0, world.size)
    return result


@pytest.fixture(autouse=True)
def soon(world, monkeypatch):
    """A rank that waits for ever fails the test."""
    monkeypatch.setattr(world.engine, "timeout", 20.0)


@pytest.mark.parametrize("f", TENSORS, ids=repr)
def test_strategies(world, f):
    for none in zeros(TENSORS[f]):
        size = sizes(world, none)
        tensors = [drawn(*(size[name] for name in names)) for names in TENSORS[f]]
        options = {tensor.attention: {"heads": 2, "kv_heads": 2}, expert.moe: {"k": 1}}.get(f, {})
        if f is tensor.attention:
            options = dict.fromkeys(options, 0 if "d" in none else world.size)
        result = outcome(world, lambda: f.forward(*tensors, comm=world, **options))  # noqa: B023
        if result is None:
            assert set(none) & set("edk"), none
            continue
        y, saved = result
        gradients = outcome(world, lambda: f.backward(saved, np.ones_like(y)))  # noqa: B023
        assert gradients is not None
        gradients = gradients[: len(tensors)]
        assert [g.shape for g in gradients] == [t.shape for t in tensors]
        assert all(np.isfinite(g).all() for g in (y, *gradients)), none
        if f is tensor.column_parallel_linear:
            close(y, np.concatenate([tensors[0]] * world.size) @ tensors[1] + tensors[2])
        elif f is tensor.row_parallel_linear and "m" in none:
            assert y.shape == (0, size["n"])


@pytest.mark.parametrize("f", (sequence.ring_attention, sequence.ulysses_attention), ids=repr)
@pytest.mark.parametrize("none", ["t", "h", "d", "w", "th", "td", "tw", "hd", "hw", "dw"])
def test_attention(world, f, none):
    """tokens, heads, the width of q and k, the width of v."""
    tokens, heads, d, w = (0 if name in none else n for name, n in zip("thdw", (8, world.size, 3, 2), strict=True))
    ring = world.size if f is sequence.ring_attention else 1
    q, k, v = (drawn(tokens, heads, width, seed=i) for i, width in enumerate((d, d, w)))
    sharding = outcome(world, lambda: sequence.Sharding(tokens, ring, world.size // ring))
    if sharding is None:
        return
    mine = [sharding.shard(t, world.rank) for t in (q, k, v)]
    result = outcome(world, lambda: f.forward(*mine, sharding, comm=world, scale=0.5))
    if result is None:
        return
    y, saved = result
    if tokens and heads:
        close(y, np.float64(softmax_attention(q, k, v, scale=0.5))[sharding.indices(world.rank)])
    gradients = outcome(world, lambda: f.backward(saved, np.ones_like(y)))
    assert gradients is not None and [g.shape for g in gradients] == [t.shape for t in mine]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("schedule", ["auto", "unfused", "direct"])
def test_operations(world, name, schedule):
    for none in zeros(OPERATIONS[name]):
        size = sizes(world, none)
        tensors = [np.ones([size[letter] for letter in names]) for names in OPERATIONS[name]]
        f = getattr(fompi, name)
        result = outcome(world, lambda: f(*tensors, comm=world, schedule=schedule))  # noqa: B023
        assert result is not None, (none, schedule)
        if name.startswith("matmul_all_reduce"):
            close(result, np.full((size["M"], size["n"]), float(size["k"] * world.size)))
        elif name == "all_gather_matmul":
            close(result, np.full((size["M"], size["n"]), float(size["k"])))
        elif name == "all_gather_weight_gradient":
            close(result, np.full((size["k"], size["n"]), float(size["M"])))


def test_embedding_and_loss(world):
    for rows, table, width in itertools.product((0, 2), (0, 3), (0, 4)):
        tokens = np.zeros(rows, np.int64)
        weights = drawn(table, width)
        result = outcome(world, lambda: tensor.vocab_parallel_embedding.forward(tokens, weights, comm=world))  # noqa: B023
        assert (result is None) == (rows > 0 and table == 0), (rows, table, width)
        if result is not None:
            y, saved = result
            assert y.shape[1] == width and len(y) <= rows
            outcome(world, lambda: tensor.vocab_parallel_embedding.backward(saved, np.ones_like(y)))  # noqa: B023
        logits = drawn(rows * world.size, table)
        result = outcome(
            world,
            lambda: tensor.vocab_parallel_cross_entropy.forward(logits, np.zeros(len(logits), int), comm=world),  # noqa: B023
        )
        assert (result is None) == (rows > 0 and table == 0), (rows, table)
