"""Expert parallelism: results and gradients are those of one process that computes row by row, in long double."""

import numpy as np
import pytest
from strategies import close, drawn, refused, runs, same_bits, slopes, uneven

import fompi
from fompi.base.layout import split
from fompi.parallel.choices import choose, choose_backward
from fompi.parallel.exchange import halves
from fompi.parallel.expert import combine, dispatch, experts, experts_of, moe, route

pytestmark = pytest.mark.ranks(mpich=[2, 3], openmpi=[])

SMALL = {"experts": 5, "h": 3, "f": 2, "n": 4}


def defined(z, activation):
    """The activation by its definition."""
    if activation == "swiglu":
        gate, up = np.split(z, 2, -1)
        return gate / (1 + np.exp(-gate)) * up
    return {"none": z, "relu": np.where(z > 0, z, 0), "silu": z / (1 + np.exp(-z))}[activation]


def chosen(logits, k, normalize=True, capacity=None, policy="probs"):
    """[row][expert] -> weight, for the rows of one rank. Row by row."""
    shares = []
    for row in logits:
        best = sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
        e = np.exp(row - row.max())
        p = e / e.sum()
        total = sum(p[e] for e in best) if normalize else 1
        shares.append({e: p[e] / total for e in best})
    if capacity is not None:
        for e in range(logits.shape[1]):
            users = [i for i, share in enumerate(shares) if e in share]
            if policy == "probs":
                users.sort(key=lambda i: (-shares[i][e], i))
            for i in users[capacity:]:
                del shares[i][e]
    return shares


def whole(x, router, w1, w2, s1=None, s2=None, *, parts, activation="silu", capacity_factor=None, **options):
    """y of all ranks. `parts` are the rows of each rank: an expert has a capacity for each rank."""
    y = np.zeros((len(x), w2.shape[2]), np.longdouble)
    for part in parts:
        logits = x[part] @ router
        capacity = None
        if capacity_factor is not None:
            capacity = int(np.ceil(capacity_factor * options["k"] * len(logits) / router.shape[1]))
        for i, share in enumerate(chosen(logits, capacity=capacity, **options), part.start):
            for e, weight in share.items():
                y[i] += weight * (defined(x[i] @ w1[e], activation) @ w2[e])
    return y if s1 is None else y + defined(x @ s1, activation) @ s2


def layer(size, rows, activation="silu", shared=False, experts=5, h=3, f=2, n=4):
    """The tensors of a whole layer: x, router, w1, w2, and s1, s2."""
    wide = 2 * f if activation == "swiglu" else f
    tensors = [drawn(sum(rows), h), drawn(h, experts), drawn(experts, h, wide), drawn(experts, f, n)]
    return [*tensors, drawn(h, wide, seed=3), drawn(f, n, seed=4)] if shared else tensors


def own_of(world, tensors, rows):
    """What this rank holds of them."""
    mine = experts_of(world.rank, world.size, tensors[1].shape[1])
    held = slice(mine.start, mine.stop)
    x, router, w1, w2, *shared = tensors
    own = [x[runs(rows)[world.rank]], router, w1[held], w2[held]]
    return own, tuple(shared) or None, held


def flat(tensors):
    return [t for each in tensors if each is not None for t in (each if isinstance(each, tuple) else [each])]


def check(world, tensors, rows, gradients=True, within=1e-10, **options):
    """Forward and backward, the same bits twice, inputs unchanged. Returns what the layer saved."""
    parts, (own, shared, held) = runs(rows), own_of(world, tensors, rows)
    given = flat([*own, shared])
    before = [t.copy() for t in given]
    how = {key: options[key] for key in options if key != "microbatches"}
    expected = whole(*map(np.longdouble, tensors), parts=parts, **how)
    y, saved = moe.forward(*own, shared, comm=world, **options)
    close(y, expected[parts[world.rank]], 1e-13)
    assert same_bits([y], [moe(*own, shared, comm=world, **options)])

    dy = drawn(*expected.shape, seed=9)
    d = dy[parts[world.rank]]
    found = moe.backward(saved, d)
    assert same_bits(flat(found), flat(moe.backward(saved, d)))
    assert same_bits(given, before) and same_bits([d], [dy[parts[world.rank]]])
    (dx,), rest = moe.backward_input(saved, d)
    assert same_bits(flat(found), flat([dx, *moe.backward_weight(rest)]))
    assert (found[4] is None) == (shared is None)
    if gradients:
        slope = slopes(lambda *t: (whole(*t, parts=parts, **how) * dy).sum(), tensors)
        of_rank = [slope[0][parts[world.rank]], slope[1], slope[2][held], slope[3][held], *slope[4:]]
        for actual, exact in zip(flat(found), of_rank, strict=True):
            close(actual, exact, within)
    return saved


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", ["uneven", "even", "none"])
@pytest.mark.parametrize("shared", [False, True])
def test_dropless(world, kind, shared, microbatches):
    rows = uneven(world.size, kind)
    saved = check(world, layer(world.size, rows, shared=shared), rows, k=2, microbatches=microbatches)
    assert saved.dropped == 0 and saved.tokens_per_expert.sum() == 2 * sum(rows)


@pytest.mark.parametrize("activation", ["none", "relu", "swiglu"])
@pytest.mark.parametrize("normalize", [True, False])
def test_activations_and_weights(world, activation, normalize):
    rows = uneven(world.size)
    tensors = layer(world.size, rows, activation, shared=True)
    check(world, tensors, rows, k=3, activation=activation, normalize=normalize)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("normalize", [True, False])
def test_capacity(world, policy, normalize, microbatches):
    rows = [6, 0, 4, 3, 2, 5, 0, 1][: world.size]
    tensors = layer(world.size, rows)
    tensors[1][:, 1] *= 3  # a popular expert
    options = {"k": 2, "capacity_factor": 0.5, "policy": policy, "normalize": normalize}
    saved = check(world, tensors, rows, microbatches=microbatches, **options)
    logits = [tensors[0][part] @ tensors[1] for part in runs(rows)]
    kept = [chosen(a, 2, normalize, int(np.ceil(0.2 * len(a))), policy) for a in logits]
    counts = np.bincount([e for shares in kept for share in shares for e in share], minlength=5)
    assert saved.tokens_per_expert.tolist() == counts.tolist()
    assert saved.dropped == 2 * sum(rows) - counts.sum() > 0


@pytest.mark.parametrize("experts", [1, 2, 3, 7])
def test_numbers_of_experts(world, experts):
    """Fewer than ranks too. k is all of them."""
    rows = uneven(world.size)
    saved = check(world, layer(world.size, rows, experts=experts, f=1, n=2), rows, k=experts)
    assert saved.tokens_per_expert.tolist() == [sum(rows)] * experts


@pytest.mark.parametrize("best", [0, 4])
def test_an_expert_that_gets_all(world, best):
    """And the others get none, so that their gradients are zero."""
    rows = uneven(world.size)
    tensors = layer(world.size, rows)
    tensors[0] = np.abs(tensors[0])
    tensors[1][:] = 0
    tensors[1][:, best] = 3
    saved = check(world, tensors, rows, k=1)
    assert saved.tokens_per_expert.tolist() == [sum(rows) if e == best else 0 for e in range(5)]
    dw1 = moe.backward(saved, np.ones(saved.shape))[2]
    for e, gradient in zip(experts_of(world.rank, world.size, 5), dw1, strict=True):
        assert gradient.any() == (e == best)


def test_ties_go_to_the_lower_expert(world):
    """A router of equal columns: experts 0 and 1, for all rows."""
    rows = uneven(world.size, "even")
    tensors = layer(world.size, rows)
    tensors[1] = np.repeat(tensors[1][:, :1], 5, 1)
    saved = check(world, tensors, rows, gradients=False, k=2, microbatches=2)
    assert saved.tokens_per_expert.tolist() == [sum(rows), sum(rows), 0, 0, 0]


def test_a_full_expert_with_ties_keeps_the_first_rows():
    for policy in ("probs", "position"):
        choice = choose(np.zeros((4, 3)), 1, True, 2, policy)
        assert choice.experts.tolist() == [[0]] * 4 and choice.kept[:, 0].tolist() == [True, True, False, False]
        assert not choose_backward(choice, np.ones((4, 1))).any()  # the only weight of a row is 1
    logits = np.log([[0.5, 0.5], [0.9, 0.1], [0.6, 0.4]])
    keeps = {policy: choose(logits, 1, False, 1, policy).kept[:, 0].tolist() for policy in ("probs", "position")}
    assert keeps == {"probs": [False, True, False], "position": [True, False, False]}


def test_any_number_of_micro_batches(world):
    """More than rows, too."""
    rows = [40, 0, 33, 7, 5, 21, 0, 12][: world.size]
    tensors = layer(world.size, rows, shared=True, experts=6, h=8, f=16, n=8)
    for microbatches in (1, 2, 50):
        check(world, tensors, rows, gradients=False, k=2, microbatches=microbatches)


def test_halves():
    (first, a), (last, b) = halves(np.array([3, 0, 1, 4]))
    assert first.tolist() == [0, 1, 3, 4, 5] and a.tolist() == [2, 0, 1, 2]
    assert last.tolist() == [2, 6, 7] and b.tolist() == [1, 0, 0, 2]


# --------------------------------------------------------------------------------------------------------- parts


def in_parts(own, comm, **options):
    x, router, w1, w2 = own
    r = route(x, router, comm=comm, **options)
    return combine(experts(dispatch(x, r), w1, w2, r), r), r


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_the_parts_are_the_layer(world, capacity_factor):
    rows = uneven(world.size)
    tensors = layer(world.size, rows)
    own = own_of(world, tensors, rows)[0]
    options = {"k": 2, "capacity_factor": capacity_factor}
    y, saved = moe.forward(*own, comm=world, **options)
    dy = drawn(*y.shape, seed=7 + world.rank)
    dx, drouter, dw1, dw2, _ = moe.backward(saved, dy)

    r, gate = route.forward(own[0], own[1], comm=world, **options)
    assert r.tokens_per_expert.tolist() == saved.tokens_per_expert.tolist() and r.dropped == saved.dropped
    mine = experts_of(world.rank, world.size, 5)
    assert r.rows_per_expert == saved.tokens_per_expert[mine.start : mine.stop].tolist()
    moved, a = dispatch.forward(own[0], r)
    made, b = experts.forward(moved, own[2], own[3], r)
    z, c = combine.forward(made, r)
    close(z, y, 1e-13)
    dmade, dweights = combine.backward(c, dy)
    dmoved, *dws = experts.backward(b, dmade)
    (through_rows,) = dispatch.backward(a, dmoved)
    through_weights, drouter_of_parts = route.backward(gate, dweights)
    close(through_rows + through_weights, dx, 1e-12)
    for actual, expected in zip((drouter_of_parts, *dws), (drouter, dw1, dw2), strict=True):
        close(actual, expected, 1e-12)


def test_dispatch_sorts_by_expert_and_rank(world):
    """Row i of rank r wants expert i: each expert gets one row of each rank, in the order of the ranks."""
    size, rank = world.size, world.rank
    x = np.hstack([np.eye(size), np.full((size, 1), rank)])
    r = route(x, np.vstack([np.eye(size), np.zeros((1, size))]), k=1, comm=world)
    rows = dispatch(x, r)
    assert r.rows_per_expert == [size] and rows[:, -1].tolist() == list(range(size)) and (rows[:, rank] == 1).all()
    assert r.weights.tolist() == np.ones((size, 1)).tolist() and r.experts[:, 0].tolist() == list(range(size))


# ---------------------------------------------------------------------------------------------------- frameworks


def test_torch(world):
    torch = pytest.importorskip("torch")
    rows = uneven(world.size)
    own, shared, _ = own_of(world, layer(world.size, rows, shared=True), rows)
    y, saved = moe.forward(*own, shared, k=2, comm=world)
    expected = flat(moe.backward(saved, np.ones_like(y)))
    leaves = [torch.from_numpy(t.copy()).requires_grad_() for t in flat([*own, shared])]
    result = moe(*leaves[:4], tuple(leaves[4:]), k=2, comm=world)
    result.sum().backward()
    assert same_bits([result.detach().numpy()], [y])
    assert same_bits([t.grad.numpy() for t in leaves], expected)

    y, saved = moe.forward(*own, k=2, comm=world)
    expected = flat(moe.backward(saved, np.ones_like(y)))
    leaves = [t.detach().requires_grad_() for t in leaves[:4]]
    in_parts(leaves, world, k=2)[0].sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        close(leaf.grad, gradient, 1e-12)


def test_jax(world):
    jax = pytest.importorskip("jax")
    rows = uneven(world.size)
    own, shared, _ = own_of(world, [t.astype(np.float32) for t in layer(world.size, rows, shared=True)], rows)
    y, saved = moe.forward(*own, shared, k=2, comm=world)
    expected = flat(moe.backward(saved, np.ones_like(y)))
    leaves = [*map(jax.numpy.asarray, own), tuple(map(jax.numpy.asarray, shared))]
    gradients = jax.grad(lambda t: moe(*t, k=2, comm=world).sum())(leaves)
    for actual, exact in zip(flat(gradients), expected, strict=True):
        close(actual, exact, 1e-6)


def test_half_types(world):
    torch = pytest.importorskip("torch")
    rows = uneven(world.size)
    own, shared, _ = own_of(world, layer(world.size, rows, shared=True), rows)
    for dtype, within in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        leaves = [torch.from_numpy(t).to(dtype) for t in flat([*own, shared])]
        wide = [t.double().numpy() for t in leaves]
        results = []
        for tensors in (leaves, wide):
            y, saved = moe.forward(*tensors[:4], tuple(tensors[4:]), k=2, comm=world)
            ones = torch.ones_like(y) if tensors is leaves else np.ones_like(y)
            results.append([y, *flat(moe.backward(saved, ones))])
        assert all(t.dtype == dtype for t in results[0])
        for half, exact in zip(*results, strict=True):
            close(half.double(), exact, within)
        y, r = in_parts(leaves[:4], world, k=2)
        assert y.dtype == dtype and r.weights.dtype == torch.float32
        close(y.double(), moe(*wide[:4], k=2, comm=world), within)


# -------------------------------------------------------------------------------------------------------- errors


def test_all_ranks_refuse(world):
    rows, last = uneven(world.size, "even"), world.size - 1
    (x, router, w1, w2), shared, _ = own_of(world, layer(world.size, rows, shared=True), rows)

    def call(x=x, router=router, w1=w1, w2=w2, shared=None, k=2, **options):
        return lambda: moe(x, router, w1, w2, shared, k=k, comm=world, **options)

    def on_last(wrong, right):
        return wrong if world.rank == last else right

    refused(world, None, fompi.LayoutError, call(k=6), "k=6 must be an integer from 1 to 5")
    refused(world, None, fompi.LayoutError, call(k=0), "k=0")
    refused(world, None, fompi.LayoutError, call(microbatches=0), "microbatches=0")
    refused(world, None, fompi.LayoutError, call(capacity_factor=-1), "capacity_factor=-1")
    refused(world, last, fompi.LayoutError, call(capacity_factor=on_last(np.ones(2), None)), "capacity_factor=array")
    refused(world, None, fompi.PlanError, call(policy="best"), "policy='best'")
    refused(world, None, fompi.PlanError, call(activation="tanh"), "tanh")
    more = np.ones((len(w1) + 1, *w1.shape[1:]))  # the last of many ranks has no expert to repeat
    dealt = f"w1 has [0-9] experts, but 5 experts on {world.size} ranks"
    refused(world, last, fompi.LayoutError, call(w1=on_last(more, w1)), dealt)
    refused(world, last, fompi.ShapeError, call(x=on_last(x[:, :2], x)), "x has 2 features")
    refused(world, last, fompi.ShapeError, call(w2=on_last(w2[:, :1], w2)), "w2 has 1 rows")
    refused(world, last, fompi.ShapeError, call(w1=on_last(w1[:, :1], w1)), "w1 has 1 rows")
    refused(world, last, fompi.ShapeError, call(w1=on_last(w1[..., 0], w1)), "3 dimensions")
    refused(world, None, fompi.ShapeError, call(w1=w1[..., :1], activation="swiglu"), "odd number")
    refused(world, None, fompi.ShapeError, call(shared=shared[:1]), "shared must be")
    refused(world, None, fompi.ShapeError, call(shared=(shared[0], shared[1][:, :1])), "s2 has 1 columns")
    refused(world, last, fompi.DtypeError, call(x=on_last(x.astype(np.float32), x)), "float32|float64")
    if world.size > 1:
        refused(world, None, fompi.MismatchError, call(k=1 + (world.rank == 0)), "k=1")
        refused(world, None, fompi.MismatchError, call(w2=w2[..., : 3 + (world.rank == 0)]), "n=3")
    y, saved = moe.forward(x, router, w1, w2, k=2, comm=world)
    refused(world, last, fompi.ShapeError, lambda: moe.backward(saved, on_last(y[:1], y)), "dy has the shape")


def test_all_ranks_refuse_in_parts(world):
    rows, last = uneven(world.size, "even"), world.size - 1
    (x, router, w1, w2), _, _ = own_of(world, layer(world.size, rows), rows)

    def on_last(wrong, right):
        return wrong if world.rank == last else right

    refused(world, None, fompi.LayoutError, lambda: route(x, router, k=9, comm=world), "k=9")
    r = route(x, router, k=2, comm=world)
    refused(world, last, fompi.ShapeError, lambda: dispatch(on_last(x[:1], x), r), "x has 1 rows")
    moved = dispatch(x, r)
    wrong = np.ones((len(moved) + 1, 3))
    refused(world, last, fompi.ShapeError, lambda: experts(on_last(wrong, moved), w1, w2, r), "rows")
    made = experts(moved, w1, w2, r)
    wrong = np.ones((len(made) + 1, 4))
    refused(world, last, fompi.ShapeError, lambda: combine(on_last(wrong, made), r), "rows")
    refused(world, None, fompi.ShapeError, lambda: combine(made, r, r.weights[:, :1]), "weights have the shape")
    refused(world, None, fompi.DtypeError, lambda: combine(made, r, r.weights.astype(np.float32)), "weights have dtype")
    for call in (lambda: dispatch(x, None), lambda: experts(moved, w1, w2, r.weights), lambda: combine(made, 5)):
        refused(world, None, fompi.LayoutError, call, "route must be what")


def test_experts_of():
    assert [experts_of(rank, 3, 5) for rank in range(3)] == [range(0, 2), range(2, 4), range(4, 5)]
    assert [len(experts_of(rank, 4, 2)) for rank in range(4)] == [1, 1, 0, 0] == list(split(2, 4))


@pytest.mark.parametrize("f", [moe, dispatch, experts, combine, route], ids=repr)
def test_a_strategy_says_what_it_means(f):
    assert "=" in f.__doc__.splitlines()[0]
