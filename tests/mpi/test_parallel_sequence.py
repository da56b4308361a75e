"""Attention over sequences that are spread over the ranks: results and gradients are those of one process."""

import numpy as np
import pytest
from strategies import close, drawn, refused, same_bits, slopes, softmax_attention

import fompi
from fompi.parallel import heads
from fompi.parallel.sequence import Sharding, ring_attention, ulysses_attention, usp_attention

pytestmark = pytest.mark.ranks(mpich=[3, 4], openmpi=[])

UNEVEN = ([3, 11, 0], [3, 4, 0, 7]), ([5, 0, 3], [7, 1])
STRATEGIES = ring_attention, ulysses_attention, usp_attention


@pytest.fixture(scope="module")
def meshes(world):
    """Every way to lay the ranks out as ring x ulysses."""
    sizes = [n for n in range(1, world.size + 1) if world.size % n == 0]
    made = {n: fompi.Mesh(world, ring=n, ulysses=world.size // n) for n in sizes}
    yield made
    for mesh in made.values():
        mesh.close()


def grids(f, meshes, size):
    """(ring, ulysses, the keywords of the call) for each way in which a strategy can run."""
    if f is usp_attention:
        return [(n, size // n, {"ring": mesh["ring"], "ulysses": mesh["ulysses"]}) for n, mesh in meshes.items()]
    ring = size if f is ring_attention else 1
    return [(ring, size // ring, {})]


def check(f, world, meshes, length, heads, kv_heads, layout="zigzag", cu_seqlens=None, d=2, e=3, shares=(), **options):
    """`shares`: the tokens of each of all ranks, and the heads of each rank of an axis, by the number of ranks."""
    q, k, v = drawn(length, heads, d), drawn(length, kv_heads, d, seed=1), drawn(length, kv_heads, e, seed=2)
    do = drawn(length, heads, e, seed=3)

    def whole(q, k, v):
        return softmax_attention(q, k, v, cu_seqlens=cu_seqlens, **options)

    expected, gradients = np.float64(whole(q, k, v)), slopes(lambda *tensors: (whole(*tensors) * do).sum(), (q, k, v))
    for ring, ulysses, comms in grids(f, meshes, world.size):
        tokens, of_heads = ({len(n): n for n in each} for each in shares or ([], []))
        sharding = Sharding(length, ring, ulysses, layout, cu_seqlens, tokens.get(world.size))
        mine, comms = sharding.indices(world.rank), comms or {"comm": world}
        if f is not ring_attention and ulysses in of_heads:
            comms = comms | {"shares": of_heads[ulysses]}
        tensors = [sharding.shard(t, world.rank) for t in (q, k, v)]
        before = [t.copy() for t in tensors]
        o, saved = f.forward(*tensors, sharding, **comms, **options)
        close(o, expected[mine], 1e-13)
        actual = f.backward(saved, do[mine])
        for gradient, slope in zip(actual, gradients, strict=True):
            close(gradient, slope[mine])
        assert same_bits(before, tensors)
        again, kept = f.forward(*tensors, sharding, **comms, **options)
        assert same_bits([o], [again])
        again[...] = np.nan  # the caller may write to its result
        assert same_bits(actual, f.backward(kept, do[mine]))
        close(sharding.unshard(o, comm=world), expected, 1e-13)


@pytest.mark.parametrize("f", STRATEGIES, ids=repr)
@pytest.mark.parametrize(
    "case",
    [
        {"length": 13, "heads": 4, "kv_heads": 4, "causal": True},
        {"length": 9, "heads": 4, "kv_heads": 2, "layout": "contiguous", "scale": 0.9},
        {"length": 11, "heads": 4, "kv_heads": 1, "causal": True, "cu_seqlens": (0, 1, 1, 7, 11)},
        {"length": 11, "heads": 3, "kv_heads": 3, "cu_seqlens": (0, 4, 11), "layout": "contiguous", "causal": True},
        {"length": 5, "heads": 6, "kv_heads": 2},
        {"length": 2, "heads": 2, "kv_heads": 1, "causal": True},  # fewer tokens and heads than ranks
        {"length": 0, "heads": 2, "kv_heads": 2},
        {"length": 14, "heads": 8, "kv_heads": 4, "causal": True, "shares": UNEVEN},
        {"length": 14, "heads": 8, "kv_heads": 8, "causal": True, "cu_seqlens": (0, 5, 14), "shares": UNEVEN},
        {"length": 28, "heads": 8, "kv_heads": 1, "layout": "contiguous", "shares": UNEVEN},
    ],
    ids=str,
)
def test_attention(f, world, meshes, case):
    if world.size > 3 and f is not usp_attention:
        return  # only a mesh of two axes needs four ranks
    check(f, world, meshes, **case)


@pytest.mark.parametrize("case", [(13, 9, 9), (9, 12, 6), (11, 10, 2), (4, 5, 1)], ids=str)
def test_long_messages_travel_in_slices_of_the_heads(world, meshes, case, monkeypatch):
    """Also where a rank has fewer key/value heads than there are slices, or shares one with another rank."""
    length, query_heads, kv_heads = case
    monkeypatch.setattr(heads, "LEAST_NBYTES", 1)
    parts = heads.Deal(query_heads, kv_heads, world).slices(1000)
    assert len(parts) == min(4, max(map(len, heads.Deal(query_heads, kv_heads, world).keys)))
    for rank in range(world.size):
        dealt = [head for part in parts for head in part.queries[rank]]
        assert dealt == [*heads.Deal(query_heads, kv_heads, world).queries[rank]]
    for f in STRATEGIES if world.size == 3 else (usp_attention,):  # with a mesh of two axes
        check(f, world, meshes, length, query_heads, kv_heads, causal=True, cu_seqlens=(0, 3, length))


@pytest.mark.parametrize("f", STRATEGIES, ids=repr)
def test_float32_and_half_types(f, world, meshes):
    """The error is that of a few roundings of the dtype, and the result has the caller's framework and dtype."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(drawn(12, n, 4, seed=i)) for i, n in enumerate((4, 2, 2)))
    for dtype, within in ((torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        whole = [t.to(dtype) for t in (q, k, v)]
        expected = softmax_attention(*(t.double().numpy() for t in whole), causal=True)
        for ring, ulysses, comms in grids(f, meshes, world.size):
            sharding = Sharding(12, ring, ulysses)
            tensors = [sharding.shard(t, world.rank).requires_grad_() for t in whole]
            o = f(*tensors, sharding, **(comms or {"comm": world}), causal=True)
            assert o.dtype == dtype and o.requires_grad
            close(o.detach().float(), expected[sharding.indices(world.rank)], within)
            o.float().sum().backward()
            exact = [t.detach().double().requires_grad_() for t in tensors]
            f(*exact, sharding, **(comms or {"comm": world}), causal=True).sum().backward()
            for tensor, reference in zip(tensors, exact, strict=True):
                assert tensor.grad.dtype == dtype
                close(tensor.grad.float(), reference.grad, 4 * within)


def test_jax(world):
    jax = pytest.importorskip("jax")
    sharding = Sharding(6, world.size)
    tensors = [
        jax.numpy.asarray(sharding.shard(drawn(6, 2, 2, seed=i).astype(np.float32), world.rank)) for i in range(3)
    ]
    gradients = jax.grad(lambda t: (ring_attention(*t, sharding, comm=world) ** 2).sum())(tensors)
    o, saved = ring_attention.forward(*map(np.asarray, tensors), sharding, comm=world)
    for actual, expected in zip(gradients, ring_attention.backward(saved, 2 * o), strict=True):
        assert isinstance(actual, jax.Array)
        close(actual, expected, 1e-6)


def test_many_tokens_and_strided_tensors(world):
    """More than one tile, views of one tensor, and all three ways to the same result."""
    length, rank, size = 300, world.rank, world.size
    results = []
    for f, ring in ((ring_attention, size), (ulysses_attention, 1)):
        sharding = Sharding(length, ring, size // ring, cu_seqlens=(0, 10, 210, length))
        qkv = sharding.shard(drawn(length, 3, 4, 8), rank)
        o = f(qkv[:, 0], qkv[:, 1], qkv[:, 2], sharding, comm=world, causal=True)
        results.append(sharding.unshard(o, comm=world))
    close(*results, 1e-12)


# -------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("f", STRATEGIES, ids=repr)
def test_all_ranks_refuse(f, world, meshes):
    for ring, ulysses, comms in grids(f, meshes, world.size):
        refusals(f, world, ring, ulysses, comms or {"comm": world})


def refusals(f, world, ring, ulysses, comms):
    size, last, x = world.size, world.size - 1, np.ones((3, 4, 2))
    right = Sharding(3 * size, ring, ulysses, "contiguous")

    def call(q=x, k=x, v=x, sharding=right, **options):
        return f(q, k, v, sharding, **comms, **options)

    short = x[:2] if world.rank == last else x
    refused_everywhere(world, last, fompi.ShapeError, lambda: call(short), "has 3 tokens|disagree")
    refused(world, None, fompi.LayoutError, lambda: call(x[:, :3], x[:, :2], x[:, :2]), "cannot be dealt out")
    refused(world, None, fompi.ShapeError, lambda: call(x, x, x[:, :2]), "they must be")
    refused(world, None, fompi.LayoutError, lambda: call(sharding=Sharding(3 * size, ring, ulysses + 1)), "ring")
    refused(world, None, fompi.LayoutError, lambda: call(sharding=(3 * size, ring)), "must be a Sharding")
    for scale in ("1", np.ones(2)):
        refused(world, None, fompi.LayoutError, lambda scale=scale: call(scale=scale), "scale=.* must be")
    refused(world, None, fompi.DtypeError, lambda: call(x, x, x.astype(np.float32)), "float32")
    if size > 1:
        refused_everywhere(world, None, fompi.MismatchError, lambda: call(causal=world.rank == last), "disagree")
    o, saved = f.forward(x, x, x, right, **comms)
    wrong = o[:1] if world.rank == last else o
    refused_everywhere(world, last, fompi.ShapeError, lambda: f.backward(saved, wrong), "dy has the shape|disagree")


def test_axes_that_are_exchanged_on_one_rank(world):
    """They have equally many ranks. Without an error before data moves, the ranks would wait for each other."""
    if world.size != 4:
        pytest.skip("needs a grid of 2 x 2")
    x = np.ones((2, 2, 3))
    with fompi.Mesh(ring=2, ulysses=2) as mesh:
        axes = [mesh["ring"], mesh["ulysses"]][:: -1 if world.rank == 3 else 1]
        call = lambda: usp_attention(x, x, x, Sharding(8, 2, 2), ring=axes[0], ulysses=axes[1])  # noqa: E731
        refused_everywhere(world, None, fompi.MismatchError, call, "disagree")


def refused_everywhere(world, rank, error, call, words):
    """As `refused`, for an error that reaches some ranks by others only."""
    with pytest.raises(fompi.FompiError, match=words) as raised:
        call()
    assert world.rank != rank or isinstance(raised.value, error)
    assert fompi.all_reduce(np.ones(1), comm=world)[0] == world.size


def test_unshard_refuses(world):
    sharding, last = Sharding(2 * world.size, world.size), world.size - 1
    short = np.ones(1 if world.rank == last else 2)
    refused(world, last, fompi.ShapeError, lambda: sharding.unshard(short, comm=world), "has 2 tokens")
    other = Sharding(2 * world.size, world.size + 1)
    refused(world, None, fompi.LayoutError, lambda: other.unshard(np.ones(2), comm=world), "ring \\* ulysses")


def test_shards_of_torch_tensors(world):
    torch = pytest.importorskip("torch")
    whole = torch.arange(7, dtype=torch.bfloat16)
    sharding = Sharding(7, world.size)
    part = sharding.shard(whole, world.rank)
    assert part.dtype == torch.bfloat16 and part.tolist() == sharding.indices(world.rank).tolist()
    assert torch.equal(sharding.unshard(part, comm=world), whole)
