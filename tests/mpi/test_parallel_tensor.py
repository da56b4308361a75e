"""Tensor parallelism: results and gradients of all layers are those of one process, with uneven rows and none."""

import numpy as np
import pytest
from strategies import close, cycled, drawn, refused, runs, same_bits, slopes, softmax_attention, uneven

import fompi
from fompi.base.layout import split
from fompi.parallel import norm
from fompi.parallel.activations import ACTIVATIONS, erf
from fompi.parallel.tensor import (
    all_reduce_rmsnorm,
    attention,
    column_parallel_linear,
    heads_of,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

pytestmark = pytest.mark.ranks(mpich=[2, 3], openmpi=[])

STRATEGIES = (
    attention,
    column_parallel_linear,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)


def defined(z, activation):
    """The activation by its definition."""
    if activation == "relu":
        return np.where(z > 0, z, 0)
    if activation == "gelu":  # erf by a series of positive terms, right to long double
        u = z / np.sqrt(np.longdouble(2))
        total = term = u
        for n in range(1, 120):
            term = term * 2 * u * u / (2 * n + 1)
            total = total + term
        return z * (0.5 + total * np.exp(-u * u) / np.sqrt(np.longdouble(np.pi)))
    if activation == "silu":
        return z / (1 + np.exp(-z))
    if activation == "swiglu":
        gate, up = np.split(z, 2, -1)
        return gate / (1 + np.exp(-gate)) * up
    return z


@pytest.mark.parametrize(("rows", "between"), [(7, (2,)), (1, ()), (0, ())])
@pytest.mark.parametrize("least", [0, 1 << 30], ids=["halves", "whole"])
@pytest.mark.parametrize("sharded", [False, True])
def test_sum_and_norm(world, monkeypatch, sharded, least, rows, between):
    """Values and gradients are those of the definition, with fewer rows than ranks and none."""
    monkeypatch.setattr(norm, "LEAST_NBYTES", least)
    n, size = 5, world.size
    terms = [drawn(rows, *between, n, seed=i) for i in range(size)]
    residual, weight = drawn(rows, *between, n, seed=20), drawn(n, seed=21)
    dys, drs = ([drawn(rows, *between, n, seed=s + i) for i in range(size)] for s in (30, 40))
    mine = runs(split(rows, size))[world.rank] if sharded else slice(rows)

    def defined(r, weight):
        return r / np.sqrt((r * r).mean(-1, keepdims=True) + 1e-3) * weight

    def loss(*tensors):
        """The ranks hold r alike, or each a part. Its gradient is of the copy of this rank."""
        *xs, weight, common, own = tensors
        total = 0
        for rank in range(size):
            held = own if rank == world.rank and not sharded else common
            r = held + sum(xs)
            at = runs(split(rows, size))[rank] if sharded else slice(rows)
            total = total + (defined(r, weight) * dys[rank]).sum() + (r[at] * drs[rank][at]).sum()
        return total

    (y, r), saved = all_reduce_rmsnorm.forward(
        terms[world.rank], residual[mine], weight, eps=1e-3, comm=world, sharded=sharded
    )
    whole = residual + sum(terms)
    close(r, whole[mine], 1e-13)
    close(y, defined(whole, weight), 1e-13)
    dx, dresidual, dweight = all_reduce_rmsnorm.backward(saved, (dys[world.rank], drs[world.rank][mine]))
    *dxs, dw, dcommon, down = slopes(loss, (*terms, weight, residual, residual))
    close(dx, dxs[world.rank], 1e-9)
    close(dweight, dw, 1e-9)
    close(dresidual, dcommon[mine] if sharded else down, 1e-9)


@pytest.mark.parametrize("sharded", [False, True])
def test_sum_and_norm_in_float32_and_half_types(world, sharded):
    """In torch's dtypes, attached to autograd, with a wire, and in halves: near torch's own in one process."""
    torch = pytest.importorskip("torch")
    for dtype, near, wire in ((torch.float32, 1e-5, None), (torch.bfloat16, 2e-2, None), (torch.float32, 2e-2, "int8")):
        xs = [torch.randn(301, 256, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(world.size)]
        weight = torch.linspace(0.5, 2, 256, dtype=dtype, requires_grad=True)
        mine = runs(split(301, world.size))[world.rank] if sharded else slice(301)
        x, residual = xs[world.rank].clone().requires_grad_(), torch.ones(301, 256, dtype=dtype)[mine].requires_grad_()
        y, r = all_reduce_rmsnorm(x, residual, weight, comm=world, sharded=sharded, wire=wire)
        assert y.dtype == r.dtype == dtype
        (y.float() * 2).sum().backward()
        whole = torch.stack([t.float() for t in xs]).sum(0).add(1).requires_grad_()
        scale = weight.detach().float().requires_grad_()
        z = torch.nn.functional.rms_norm(whole, (256,), scale, 1e-6)
        (z * 2 * world.size).sum().backward()
        for got, wanted in ((y, z), (r, whole[mine]), (x.grad, whole.grad), (weight.grad, scale.grad)):
            assert (got.float() - wanted).norm() <= near * wanted.norm(), (dtype, wire)
        part = whole.grad[mine] / (1 if sharded else world.size)
        assert (residual.grad.float() - part).norm() <= near * part.norm()


def test_sums_and_norms_that_are_refused(world):
    x, weight = np.ones((4, 3)), np.ones(3)
    wrong = [
        ({"residual": np.ones((5, 3))}, fompi.ShapeError, "residual has the shape"),
        ({"weight": np.ones(4)}, fompi.ShapeError, "they must be"),
        ({"weight": np.ones(3, "f4")}, fompi.DtypeError, "weight has dtype"),
        ({"eps": -1}, fompi.LayoutError, "eps=-1"),
        ({"wire": "int8"}, fompi.DtypeError, "float64 is sent as it is"),
    ]
    for change, error, words in wrong:
        given = {"x": x, "residual": x, "weight": weight, **change}
        refused(world, None, error, lambda given=given: all_reduce_rmsnorm(**given, comm=world), words)
        refused(
            world, 0, error,
            lambda given=given: all_reduce_rmsnorm(
                **(given if world.rank == 0 else {"x": x, "residual": x, "weight": weight}), comm=world
            ),
        )  # fmt: skip


def test_the_definition_of_gelu():
    z = np.linspace(-3, 3, 99)
    close(erf(z / np.sqrt(2)), np.float64(2 * (defined(z, "gelu") / np.where(z == 0, 1, z) - 0.5)) * (z != 0), 1e-13)


def backward(f, saved, dy):
    """The gradients. Both halves give the same as the whole, and the whole gives the same bits twice."""
    gradients = f.backward(saved, dy)
    assert same_bits(gradients, f.backward(saved, dy))
    dxs, rest = f.backward_input(saved, dy)
    dws = f.backward_weight(rest)
    assert len(dxs) == f.inputs and len(dxs) + len(dws) == len(f.tensors)
    for half, whole in zip((*dxs, *dws), gradients, strict=True):
        assert (half is None) == (whole is None)
        if whole is not None:
            close(half, whole, 1e-13)
    return gradients


def forward(f, tensors, **options):
    """(y, saved). The same bits twice, and the tensors are not changed."""
    before = [None if t is None else t.copy() for t in tensors]
    written, saved = f.forward(*tensors, **options)
    y = f(*tensors, **options)
    assert same_bits([y], [written])
    written[...] = np.nan  # the caller may write to its result
    assert same_bits(before, tensors)
    return y, saved


@pytest.mark.parametrize(
    ("activation", "has_bias", "kind"),
    [
        *((activation, True, "uneven") for activation in ACTIVATIONS),
        *((activation, False, "none") for activation in ACTIVATIONS),
        ("none", False, "even"),
        ("swiglu", False, "uneven"),
    ],
)
def test_column_parallel_linear(world, activation, has_bias, kind):
    rank, rows, columns = world.rank, uneven(world.size, kind), cycled([4, 2, 0, 6], world.size)
    at, ours, total = runs(rows), runs(columns), sum(rows)
    x, w, b = drawn(total, 2, 3), drawn(3, sum(columns)), drawn(sum(columns))
    dys = [drawn(total, 2, n // 2 if activation == "swiglu" else n, seed=1 + r) for r, n in enumerate(columns)]

    def parts(x, w, b):
        return [defined(x @ w[:, c] + (b[c] if has_bias else 0), activation) for c in ours]

    def loss(*tensors):
        return sum((y * dy).sum() for y, dy in zip(parts(*tensors), dys, strict=True))

    given = x[at[rank]], w[:, ours[rank]].copy(), b[ours[rank]] if has_bias else None
    y, saved = forward(column_parallel_linear, given, activation=activation, comm=world)
    close(y, np.float64(parts(x, w, b)[rank]), 1e-13)
    dx, dw, db = backward(column_parallel_linear, saved, dys[rank])
    expected = slopes(loss, (x, w, b))
    close(dx, expected[0][at[rank]])
    close(dw, expected[1][:, ours[rank]])
    assert (db is not None) == has_bias
    if has_bias:
        close(db, expected[2][ours[rank]])


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_column_parallel_linear_of_replicated_rows(world, activation):
    """Each rank has a copy of x, whose gradient it computes by itself."""
    rank, columns = world.rank, cycled([4, 2, 0, 6], world.size)
    x, w, b = drawn(5, 3), drawn(3, columns[rank], seed=rank), drawn(columns[rank], seed=rank)
    dy = drawn(5, columns[rank], seed=9 + rank)
    y, saved = forward(column_parallel_linear, (x, w, b), activation=activation, comm=world, sequence_parallel=False)
    close(y, np.float64(defined(np.longdouble(x) @ w + b, activation)), 1e-13)
    expected = slopes(lambda x, w, b: (defined(x @ w + b, activation) * dy).sum(), (x, w, b))
    for actual, slope in zip(backward(column_parallel_linear, saved, dy), expected, strict=True):
        close(actual, slope)


def test_fompi_sums_what_all_ranks_hold(world, monkeypatch):
    """On a crowded host the library does small sums, but its sums may differ between ranks. These must not."""
    monkeypatch.setattr(world, "crowded", True)
    rank, x, w, b, table = world.rank, drawn(6, 2), drawn(2, 3), drawn(3), drawn(4, 4)
    with world.record() as traces:
        for sequence_parallel in (True, False):
            options = {"comm": world, "sequence_parallel": sequence_parallel}
            y, saved = row_parallel_linear.forward(x + rank, w, b, **options)
            row_parallel_linear.backward(saved, y)
            y, saved = vocab_parallel_embedding.forward(np.arange(6) % 4, table, **options)
            vocab_parallel_embedding.backward(saved, y)
        y, saved = vocab_parallel_cross_entropy.forward(drawn(6, 4, seed=rank), np.arange(6) % 4, comm=world)
        vocab_parallel_cross_entropy.backward(saved, y)
        weights = drawn(4, 2 * world.size), drawn(4, 2), drawn(4, 2), drawn(2, 4)
        y, saved = attention.forward(table, weights[0][:, :2], *weights[1:], heads=world.size, kv_heads=1, comm=world)
        attention.backward(saved, y)
    assert sum("all_reduce" in trace.title for trace in traces) == 7 + (world.size > 1)
    assert not any("all_reduce{" in event.name for trace in traces for event in trace.events)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind", ["uneven", "default", "none"])
def test_row_parallel_linear(world, sequence_parallel, has_bias, kind):
    rank, features = world.rank, cycled([2, 3, 0, 1], world.size)
    rows = list(split(7, world.size)) if kind == "default" else uneven(world.size, kind)
    at, ours, total = runs(rows), runs(features), sum(rows)
    x, w, b = drawn(total, 2, sum(features)), drawn(sum(features), 3), drawn(3)
    kept = at if sequence_parallel else [slice(0, total)] * world.size
    dys = [drawn(total, 2, 3, seed=1 + r)[kept[r]] for r in range(world.size)]

    def loss(x, w, b):
        y = x @ w + (b if has_bias else 0)
        return sum((y[run] * dy).sum() for run, dy in zip(kept, dys, strict=True))

    given = x[..., ours[rank]], w[ours[rank]], b if has_bias else None
    options = {"counts": rows} if sequence_parallel and kind != "default" else {}
    y, saved = forward(row_parallel_linear, given, comm=world, sequence_parallel=sequence_parallel, **options)
    close(y, (x @ w + (b if has_bias else 0))[kept[rank]], 1e-13)
    dx, dw, db = backward(row_parallel_linear, saved, dys[rank])
    expected = slopes(loss, (x, w, b))
    close(dx, expected[0][..., ours[rank]])
    close(dw, expected[1][ours[rank]])
    assert (db is not None) == has_bias
    if has_bias:
        close(db, expected[2])


# ----------------------------------------------------------------------------------------------------- attention


def columns_of(heads, d):
    return [head * d + i for head in heads for i in range(d)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind", "options"),
    [
        (4, 4, "uneven", {"causal": True}),
        (4, 1, "uneven", {"causal": True, "cu_seqlens": "packed"}),
        (6, 2, "uneven", {"scale": 0.7, "query_split": False}),
        (4, 2, "even", {"query_split": False, "cu_seqlens": "packed"}),
        (3, 3, "even", {}),
        (2, 1, "even", {"causal": True}),
        (1, 1, "uneven", {}),
        (4, 2, "none", {"causal": True}),
    ],
)
def test_attention(world, heads, kv_heads, kind, options):
    """Key heads that several ranks hold, ranks without heads, ranks without rows, packed sequences."""
    rank, d, n, rows = world.rank, 2, 3, uneven(world.size, kind)
    at, total = runs(rows), sum(rows)
    if "cu_seqlens" in options:
        options = {**options, "cu_seqlens": [0, 1, 1, total]}
    rule = {name: value for name, value in options.items() if name != "query_split"}
    x, dy = drawn(total, n), drawn(total, n, seed=1)
    full = (
        drawn(n, heads * d),
        drawn(n, kv_heads * d, seed=1),
        drawn(n, kv_heads * d, seed=2),
        drawn(heads * d, n, seed=3),
    )

    def layer(x, wq, wk, wv, wo):
        q, k, v = (a.reshape(total, a.shape[1] // d, d) for a in (x @ wq, x @ wk, x @ wv))
        return softmax_attention(q, k, v, **rule).reshape(total, heads * d) @ wo

    mine, keys = (columns_of(part, d) for part in heads_of(rank, world.size, heads, kv_heads))
    given = x[at[rank]], full[0][:, mine], full[1][:, keys], full[2][:, keys], full[3][mine]
    options = {**options, "heads": heads, "kv_heads": kv_heads, "comm": world}
    y, saved = forward(attention, given, **options)
    close(y, np.float64(layer(x, *full))[at[rank]], 1e-13)
    gradients = backward(attention, saved, dy[at[rank]])
    expected = slopes(lambda *tensors: (layer(*tensors) * dy).sum(), (x, *full))
    own = (at[rank], *[(slice(None), columns) for columns in (mine, keys, keys)], mine)
    for actual, slope, part in zip(gradients, expected, own, strict=True):
        close(actual, slope[part])


def test_attention_of_a_batch(world):
    """The dimension between rows and features: each entry is by itself."""
    d, rows = 2, uneven(world.size)
    at, total = runs(rows)[world.rank], sum(rows)
    x, dy = drawn(total, 3, 4), drawn(total, 3, 4, seed=1)
    mine, keys = (columns_of(part, d) for part in heads_of(world.rank, world.size, 4, 2))
    wq, wk, wv, wo = drawn(4, 4 * d)[:, mine], *drawn(2, 4, 2 * d)[:, :, keys], drawn(4 * d, 4)[mine]
    options = {"heads": 4, "kv_heads": 2, "comm": world, "causal": True}
    y, saved = attention.forward(x[at], wq, wk, wv, wo, **options)
    gradients = attention.backward(saved, dy[at])
    sums = [0, 0, 0, 0]
    for i in range(3):
        one, kept = attention.forward(x[at, i], wq, wk, wv, wo, **options)
        close(y[:, i], one, 1e-13)
        dx, *dws = attention.backward(kept, dy[at, i])
        close(gradients[0][:, i], dx, 1e-13)
        sums = [s + dw for s, dw in zip(sums, dws, strict=True)]
    for actual, expected in zip(gradients[1:], sums, strict=True):
        close(actual, expected, 1e-12)


def test_a_shared_key_head_gets_the_same_gradient_on_all_ranks(world):
    x, w = drawn(2, 3), drawn(3, 2)
    mine, keys = heads_of(world.rank, world.size, world.size, 1)
    assert (list(mine), list(keys)) == ([world.rank], [0])
    _, saved = attention.forward(x, w, w, w, w.T.copy(), heads=world.size, kv_heads=1, comm=world)
    _, _, dwk, dwv, _ = attention.backward(saved, x)
    for gradient in (dwk, dwv):
        assert len({part.tobytes() for part in fompi.all_gather(gradient[None], comm=world)}) == 1


# ---------------------------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", ["uneven", "none"])
def test_vocab_parallel_embedding(world, sequence_parallel, kind):
    rank, parts, rows = world.rank, cycled([5, 3, 0, 2], world.size), uneven(world.size, kind)
    at, ours, total = runs(rows), runs(parts), sum(rows)
    table = drawn(sum(parts), 3)
    tokens = np.random.default_rng(3).integers(0, sum(parts), (total, 2))
    kept = at if sequence_parallel else [slice(0, total)] * world.size
    dys = [drawn(total, 2, 3, seed=1 + r)[kept[r]] for r in range(world.size)]
    options = {"counts": rows} if sequence_parallel else {"sequence_parallel": False}
    y, saved = forward(vocab_parallel_embedding, (tokens, table[ours[rank]]), comm=world, **options)
    assert np.array_equal(y, table[tokens][kept[rank]])
    (dtable,) = backward(vocab_parallel_embedding, saved, dys[rank])
    expected = np.zeros_like(table)
    for run, dy in zip(kept, dys, strict=True):
        np.add.at(expected, tokens[run], dy)
    close(dtable, expected[ours[rank]], 1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)])
def test_vocab_parallel_cross_entropy(world, smoothing, shape):
    rank, parts = world.rank, cycled([3, 2, 0, 2], world.size)
    ours, size = runs(parts), sum(parts)
    logits = drawn(*shape, size) * 3
    targets = np.random.default_rng(3).integers(0, size, shape)
    weights = [drawn(*shape, seed=1 + r) for r in range(world.size)]

    def losses(logits):
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = np.take_along_axis(logp, targets[..., None], -1)[..., 0]
        return -(1 - smoothing) * chosen - smoothing * logp.mean(-1)

    part = logits[..., ours[rank]]
    y, saved = forward(vocab_parallel_cross_entropy, (part, targets), comm=world, label_smoothing=smoothing)
    close(y, np.float64(losses(np.longdouble(logits))), 1e-13)
    (d,) = backward(vocab_parallel_cross_entropy, saved, weights[rank])
    (expected,) = slopes(lambda logits: (losses(logits) * sum(weights)).sum(), (logits,))
    close(d, expected[..., ours[rank]])


@pytest.mark.parametrize("ignored", [-100, 1])
def test_ignored_targets(world, ignored):
    """As torch: no loss and no gradient, whatever the logits of the row are. Also for a number of the vocabulary."""
    torch = pytest.importorskip("torch")
    parts = cycled([3, 2, 0, 2], world.size)
    size, columns = sum(parts), runs(parts)[world.rank]
    whole = torch.from_numpy(drawn(6, size)).requires_grad_()
    targets = torch.tensor([0, ignored, 2, ignored, 1, ignored]).clamp(max=size - 1)
    expected = torch.nn.functional.cross_entropy(whole, targets, ignore_index=ignored, reduction="none")
    (expected.sum() / (targets != ignored).sum()).backward()
    part = whole.detach()[:, columns].clone()
    part[1] = np.inf
    part.requires_grad_()
    losses = vocab_parallel_cross_entropy(part, targets, comm=world, ignore_index=ignored)
    close(losses.detach(), expected.detach(), 1e-12)
    (losses.sum() / (targets != ignored).sum() / world.size).backward()
    close(part.grad, whole.grad[:, columns], 1e-12)
    if ignored == -100:
        assert torch.equal(vocab_parallel_cross_entropy(part, targets, comm=world), losses)  # as in torch, by default
    with pytest.raises(fompi.LayoutError, match="ignore_index=None"):
        vocab_parallel_cross_entropy(part, targets, comm=world, ignore_index=None)


def test_cross_entropy_of_large_and_hidden_logits(world):
    """No overflow, and an entry with the logit -infinity has no part in it."""
    logits = np.array([[1e4, -1e4, -np.inf]] * 2, np.float32)
    logits[:, 0] += 1e4 * world.rank
    y, saved = vocab_parallel_cross_entropy.forward(logits, np.array([3 * world.size - 3] * 2), comm=world)
    assert np.array_equal(y, [0, 0])
    (d,) = vocab_parallel_cross_entropy.backward(saved, np.ones(2, np.float32))
    assert np.isfinite(d).all()


# ---------------------------------------------------------------------------------------------------- frameworks


def mlp_and_attention(world, x, weights, kinds):
    """A block of all layers, and its loss."""
    w1, b1, w2, b2, wq, wo = weights
    h = column_parallel_linear(x, w1, b1, activation="swiglu", comm=world)
    y = row_parallel_linear(h, w2, bias=b2, comm=world, counts=kinds)
    return attention(y, wq, wq, wq, wo, heads=world.size, kv_heads=world.size, comm=world, causal=True)


def block(world, dtype=np.float64):
    rows = uneven(world.size)
    shapes = (3, 4), (4,), (2, 3), (3,), (3, 2), (2, 3)
    weights = [drawn(*shape, seed=5 + world.rank * (i != 3)).astype(dtype) / 2 for i, shape in enumerate(shapes)]
    return drawn(rows[world.rank], 3, seed=world.rank).astype(dtype), weights, rows


def by_hand(world, dtype=np.float64):
    x, weights, rows = block(world, dtype)
    w1, b1, w2, b2, wq, wo = weights
    h, kept1 = column_parallel_linear.forward(x, w1, b1, activation="swiglu", comm=world)
    y, kept2 = row_parallel_linear.forward(h, w2, b2, comm=world, counts=rows)
    z, kept3 = attention.forward(y, wq, wq, wq, wo, heads=world.size, kv_heads=world.size, comm=world, causal=True)
    dy, dwq, dwk, dwv, dwo = attention.backward(kept3, 2 * z)
    dh, dw2, db2 = row_parallel_linear.backward(kept2, dy)
    dx, dw1, db1 = column_parallel_linear.backward(kept1, dh)
    return z, [dx, dw1, db1, dw2, db2, dwq + dwk + dwv, dwo]


def test_torch(world):
    torch = pytest.importorskip("torch")
    x, weights, rows = block(world)
    leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *weights)]
    z = mlp_and_attention(world, leaves[0], leaves[1:], rows)
    z.square().sum().backward()
    expected, gradients = by_hand(world)
    close(z.detach(), expected, 1e-14)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        close(leaf.grad, gradient, 1e-13)
    with torch.no_grad():
        assert type(mlp_and_attention(world, leaves[0], leaves[1:], rows)) is torch.Tensor
    y = column_parallel_linear(leaves[0], leaves[1], comm=world)  # no bias
    with torch.no_grad():
        leaves[1] += 1
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


def test_torch_embedding_and_cross_entropy(world):
    torch = pytest.importorskip("torch")
    table = torch.from_numpy(drawn(3, 2, seed=world.rank)).requires_grad_()
    tokens = torch.arange(3 * world.size)
    y = vocab_parallel_embedding(tokens, table, comm=world, sequence_parallel=False)
    losses = vocab_parallel_cross_entropy(y, tokens % 2, comm=world)
    losses.sum().backward()
    assert table.grad.shape == table.shape and table.grad.abs().sum() > 0


def test_jax(world):
    jax = pytest.importorskip("jax")
    x, weights, rows = block(world, np.float32)
    leaves = [jax.numpy.asarray(t) for t in (x, *weights)]
    gradients = jax.grad(lambda t: (mlp_and_attention(world, t[0], t[1:], rows) ** 2).sum())(leaves)
    for actual, expected in zip(gradients, by_hand(world, np.float32)[1], strict=True):
        close(actual, expected, 1e-5)
    assert isinstance(column_parallel_linear(leaves[0], leaves[1], comm=world), jax.Array)


def test_half_types(world):
    """Every result is that of float64 within a few roundings of the half type."""
    torch = pytest.importorskip("torch")
    for dtype, within in ((torch.float16, 4e-3), (torch.bfloat16, 4e-2)):
        x, weights, rows = block(world)
        leaves = [torch.from_numpy(t).to(dtype) for t in (x, *weights)]
        z = mlp_and_attention(world, leaves[0], leaves[1:], rows)
        assert z.dtype == dtype
        wide = [t.double().numpy() for t in leaves]
        close(z.float(), mlp_and_attention(world, wide[0], wide[1:], rows), within)
        for t in leaves:
            t.requires_grad_()
        mlp_and_attention(world, leaves[0], leaves[1:], rows).float().sum().backward()
        exact = [torch.from_numpy(t).requires_grad_() for t in wide]
        mlp_and_attention(world, exact[0], exact[1:], rows).sum().backward()
        for leaf, expected in zip(leaves, exact, strict=True):
            assert leaf.grad.dtype == dtype
            largest = fompi.all_gather(np.array([np.abs(expected.grad.numpy()).max(initial=0)]), comm=world).max()
            close(leaf.grad.float() / largest, expected.grad / largest, within)
        tokens = torch.arange(world.size)
        y = vocab_parallel_embedding(tokens, leaves[1].detach(), comm=world, sequence_parallel=False)
        losses = vocab_parallel_cross_entropy(y, tokens, comm=world)
        assert (y.dtype, losses.dtype) == (dtype, torch.float32)


# -------------------------------------------------------------------------------------------------------- errors


def test_all_ranks_refuse(world):
    x, w, last = np.ones((2, 3)), np.ones((3, 4)), world.size - 1
    bad = np.ones((2, 5)) if world.rank == last else x
    refused(world, last, fompi.ShapeError, lambda: column_parallel_linear(bad, w, comm=world), "last dimension of x")
    refused(world, last, fompi.ShapeError, lambda: row_parallel_linear(bad, w, comm=world), "last dimension of x")
    refused(world, None, fompi.PlanError, lambda: column_parallel_linear(x, w, activation="tanh", comm=world), "tanh")
    odd = np.ones((3, 3))
    refused(
        world, None, fompi.ShapeError, lambda: column_parallel_linear(x, odd, activation="swiglu", comm=world), "odd"
    )
    counts = [2] * world.size
    if world.size > 1:
        refused(world, None, fompi.LayoutError, lambda: row_parallel_linear(x, w, counts=counts, comm=world), "add up")
    half = x.astype(np.float32) if world.rank == last else x
    refused(world, last, fompi.DtypeError, lambda: column_parallel_linear(half, w, comm=world), "float32")
    refused(world, None, fompi.DtypeError, lambda: column_parallel_linear(x.astype(int), w, comm=world), "int64")
    y, saved = column_parallel_linear.forward(x, w, comm=world)
    wrong = y[:1] if world.rank == last else y
    refused(world, last, fompi.ShapeError, lambda: column_parallel_linear.backward(saved, wrong), "dy has the shape")
    if world.size > 1:
        options = {"activation": "relu" if world.rank else "none"}
        refused(world, None, fompi.MismatchError, lambda: column_parallel_linear(x, w, comm=world, **options), "relu")


def test_heads_that_do_not_fit(world):
    x, size = np.ones((2, 3)), world.size

    def call(heads, kv_heads, d=2, **options):
        mine, keys = heads_of(world.rank, size, heads, max(1, heads // (heads // kv_heads or 1)))
        wq, wk = np.ones((3, len(mine) * d)), np.ones((3, len(keys) * d))
        return attention(x, wq, wk, wk, wq.T, heads=heads, kv_heads=kv_heads, comm=world, **options)

    refused(world, None, fompi.LayoutError, lambda: call(3, 2), "3 query heads cannot be dealt out")
    refused(world, None, fompi.LayoutError, lambda: call(2 * size, size, cu_seqlens=[0, 3]), "end with")
    for scale in ("1", np.ones(2), np.nan):
        refused(
            world, None, fompi.LayoutError, lambda scale=scale: call(2 * size, size, scale=scale), "scale=.* must be"
        )
    refused(world, None, fompi.LayoutError, lambda: call(2 * size, size, cu_seqlens=[0, 0.5, 2 * size]), "integer")
    refused(world, None, fompi.LayoutError, lambda: call(2 * size, size, cu_seqlens=[1, 2 * size]), "begin with 0")
    if size > 1:
        wider = 2 + (world.rank == 0)
        refused(world, None, fompi.MismatchError, lambda: call(size, size, wider), "3 numbers a head")
    w = np.ones((3, 2))
    options = {"heads": 2 * size, "kv_heads": size, "comm": world}
    refused(world, None, fompi.ShapeError, lambda: attention(x, w, np.ones((3, 7)), w, w.T, **options), "wk has")


def test_tokens_outside_the_vocabulary(world):
    table = np.ones((3, 2))
    error = (fompi.LayoutError, fompi.PeerError)  # a rank may hear of another one before it looks at its own tokens
    for wrong in (3 * world.size, -1):
        call = lambda wrong=wrong: vocab_parallel_embedding(np.array([0, wrong]), table, comm=world)  # noqa: E731
        refused(world, None, error, call, f"token {wrong}")
    wrong_target = lambda: vocab_parallel_cross_entropy(table, np.full(3, 99), comm=world)  # noqa: E731
    refused(world, None, error, wrong_target, "target 99")
    refused(world, None, fompi.DtypeError, lambda: vocab_parallel_embedding(np.ones(2), table, comm=world), "integer")
    smoothed = lambda: vocab_parallel_cross_entropy(table, tokens[:3], comm=world, label_smoothing="x")  # noqa: E731
    tokens = np.zeros(3, np.uint8 if world.rank else np.int64)  # any integer dtype
    vocab_parallel_embedding(tokens, table, comm=world)
    refused(world, None, fompi.LayoutError, smoothed, "label_smoothing='x'")
    if world.size > 1:  # results would be wrong without an error
        tokens[1] = world.rank % 2
        calls = (
            lambda: vocab_parallel_embedding(tokens, table, comm=world),
            lambda: vocab_parallel_embedding(tokens, table, comm=world, sequence_parallel=False),
            lambda: vocab_parallel_cross_entropy(table, tokens, comm=world),
        )
        for call in calls:
            refused(world, None, fompi.MismatchError, call, "contents differ between rank")


def test_heads_of():
    assert [heads_of(r, 3, 7, 7) for r in range(3)] == [
        (range(0, 3), range(0, 3)),
        (range(3, 5), range(3, 5)),
        (range(5, 7), range(5, 7)),
    ]
    assert [heads_of(r, 4, 4, 2)[1] for r in range(4)] == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    assert heads_of(2, 4, 2, 1) == (range(2, 2), range(0))


@pytest.mark.parametrize("f", STRATEGIES, ids=repr)
def test_a_strategy_says_what_it_means(f):
    assert "=" in f.__doc__.splitlines()[0]
