"""Data parallelism with ZeRO 0 to 3 does what a single process does, whatever a rank uses, and refuses on all ranks."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from strategies import close, slopes

import fompi
from fompi.base.errors import (
    DtypeError,
    FompiError,
    LaunchError,
    LayoutError,
    MismatchError,
    ShapeError,
    StateError,
    TensorError,
)
from fompi.parallel.data import SGD, AdamW, Buckets, DataParallel

pytestmark = pytest.mark.ranks(mpich=[2, 4], openmpi=[])

ON_TWO = pytest.mark.ranks(mpich=[2])
"""What more ranks say no more of."""

ZEROS = [0, 1, 2, 3]
WIDTHS = [5, 7, 3, 11, 2]
LAYERS = range(len(WIDTHS) - 1)
ROWS = 13
ADAM = AdamW(0.05, weight_decay=0.1)


def parameters(dtype=np.float64):
    """Weights and biases of uneven sizes, one empty and one without dimensions. Some are smaller than the ranks."""
    random, params = np.random.default_rng(7), {}
    for i in LAYERS:
        params[f"w{i}"] = random.standard_normal((WIDTHS[i], WIDTHS[i + 1])).astype(dtype)
        params[f"b{i}"] = random.standard_normal(WIDTHS[i + 1]).astype(dtype)
        if i == 1:
            params["empty"] = np.zeros((0, 3), dtype)
            params["scale"] = np.asarray(1.5, dtype)
    return params


def batch(step):
    random = np.random.default_rng([step, 3])
    return random.standard_normal((ROWS, WIDTHS[0])), random.standard_normal((ROWS, WIDTHS[-1]))


def share(array, size, rank):
    """Uneven rows: rank 0 has the fewest."""
    edges = np.linspace(0, 1, size + 1) ** 2 * len(array)
    return array[int(edges[rank]) : int(edges[rank + 1])]


def forward(get, x, release=lambda name: None):
    saved, h = [], x
    for i in LAYERS:
        saved.append(h)
        z = h @ get(f"w{i}") + get(f"b{i}")
        if i == 1:
            z = z * get("scale")
            get("empty")
            release("empty")
            release("scale")
        release(f"w{i}")
        release(f"b{i}")
        h = np.tanh(z)
    return [*saved, h]


def backward(get, saved, dh, release=lambda name: None):
    """(name, gradient), the last layer first. A weight is read from `get` again."""
    for i in reversed(LAYERS):
        dz = dh * (1 - saved[i + 1] ** 2)
        if i == 1:
            z = saved[i] @ get(f"w{i}") + get(f"b{i}")
            yield "scale", np.asarray((dz * z).sum())
            yield "empty", np.zeros((0, 3))
            dz = dz * get("scale")
        yield f"b{i}", dz.sum(0)
        yield f"w{i}", saved[i].T @ dz
        dh = dz @ get(f"w{i}").T
        release(f"w{i}")


def single(steps=5, optimizer=ADAM, clip=None, unused=lambda step, name: False, micros=1):
    """What one process computes: the parameters, and the norm of every step."""
    params, norms = parameters(), []
    states = {name: optimizer.state(p.reshape(-1)) for name, p in params.items()}
    for step in range(steps):
        gradients = {name: np.zeros_like(p) for name, p in params.items()}
        for micro in range(micros):
            x, target = batch(step * micros + micro)
            saved = forward(params.__getitem__, x)
            for name, g in backward(params.__getitem__, saved, (saved[-1] - target) / ROWS):
                gradients[name] += g
        used = [name for name in params if not unused(step, name)]
        norms.append(np.sqrt(sum((gradients[name] ** 2).sum() for name in used)))
        factor = 1.0 if clip is None else min(1.0, clip / (norms[-1] + 1e-6))
        for name in used:
            optimizer.update(params[name].reshape(-1), gradients[name].reshape(-1) * factor, states[name])
    return params, norms


def run(comm, zero, *, steps=5, optimizer=ADAM, clip=None, skip=lambda step, name: False, micros=1, **options):
    """The same on all ranks, each with its rows."""
    norms = []
    options.setdefault("bucket_nbytes", 300)
    with DataParallel(parameters(), optimizer=optimizer, comm=comm, zero=zero, average=False, **options) as dp:
        for step in range(steps):
            for micro in range(micros - 1):
                with dp.no_sync():
                    announce(dp, comm, step * micros + micro, lambda name, s=step: skip(s, name))
            announce(dp, comm, step * micros + micros - 1, lambda name, s=step: skip(s, name))
            norms.append(dp.step(clip=clip))
        return {name: np.array(dp[name]) for name in parameters()}, norms


def announce(dp, comm, number, skip=lambda name: False):
    x, target = (share(a, comm.size, comm.rank) for a in batch(number))
    saved = forward(dp.__getitem__, x, dp.release)
    for name, g in backward(dp.__getitem__, saved, (saved[-1] - target) / ROWS, dp.release):
        if not skip(name):
            before = g.copy()
            dp.ready(name, g)
            assert (g == before).all()


def close_to(found, expected):
    """Both sum the same terms in another order: 5 steps of Adam on numbers of about 1."""
    (params, norms), (right, right_norms) = found, expected
    np.testing.assert_allclose(norms, right_norms, rtol=1e-11)
    for name, p in params.items():
        np.testing.assert_allclose(p, right[name], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        *((zero, {}) for zero in ZEROS),
        *((zero, {"bucket_nbytes": 1, "ahead_nbytes": 500}) for zero in (1, 3)),
        *((zero, {"bucket_nbytes": 1 << 20}) for zero in (0, 3)),
    ],
    ids=str,
)
def test_as_a_single_process(world, zero, options):
    close_to(run(world, zero, **options), single())


@pytest.mark.parametrize("zero", [1, 3])
def test_an_update_is_a_finite_difference(world, zero):
    """SGD with lr = 1 takes off the slope of the mean of the losses of all ranks."""
    given, (x, target) = parameters(), batch(0)

    def loss(*tensors):
        y = forward(dict(zip(given, tensors, strict=True)).__getitem__, x)[-1]
        return ((y - target) ** 2).sum() / 2 / ROWS / world.size

    with DataParallel(given, optimizer=SGD(1.0), comm=world, zero=zero, bucket_nbytes=300) as dp:
        announce(dp, world, 0)
        dp.step()
        for (name, p), slope in zip(given.items(), slopes(loss, given.values()), strict=True):
            close(p - dp[name], slope)


@pytest.mark.parametrize("zero", ZEROS)
def test_clipping_and_micro_batches(world, zero):
    found = run(world, zero, clip=0.01, micros=3, optimizer=SGD(0.5, 0.9))
    close_to(found, single(clip=0.01, micros=3, optimizer=SGD(0.5, 0.9)))
    assert min(found[1]) > 0.01, "every step is clipped"


@ON_TWO
@pytest.mark.parametrize("zero", ZEROS)
def test_a_parameter_that_no_rank_uses_is_left_alone(world, zero):
    """Also its state: the others go on, and it continues as if the step had not been."""

    def unused(step, name):
        return name in ("w1", "b3") and step % 2 == 1

    close_to(run(world, zero, skip=unused), single(unused=unused))


@pytest.mark.parametrize("zero", ZEROS)
def test_a_parameter_that_one_rank_does_not_use(world, zero):
    """It has a zero gradient there. In one step the rank reads and announces nothing at all."""
    names = [*parameters()]
    last = world.size - 1

    def gradient(step, rank, name):
        return np.full_like(parameters()[name], (rank + 1) * (names.index(name) + 1) * (step + 1.0))

    optimizer, expected = SGD(0.1, 0.5), parameters()
    states = {name: optimizer.state(p.reshape(-1)) for name, p in expected.items()}
    with DataParallel(parameters(), optimizer=optimizer, comm=world, zero=zero, bucket_nbytes=100) as dp:
        for step in range(3):
            uses = {
                rank: [n for n in names if rank != last or (step != 1 and n not in ("w3", "b2"))]
                for rank in range(world.size)
            }
            for name in uses[world.rank]:
                np.testing.assert_allclose(dp[name], expected[name], rtol=1e-13)
                dp.release(name)
            for name in reversed(uses[world.rank]):
                dp[name]
                dp.ready(name, gradient(step, world.rank, name))
            dp.step()
            for name, p in expected.items():
                terms = [gradient(step, r, name) for r in range(world.size) if name in uses[r]]
                if terms:
                    optimizer.update(p.reshape(-1), np.ravel(sum(terms) / world.size), states[name])
        for name in names:
            np.testing.assert_allclose(dp[name], expected[name], rtol=1e-13)


@pytest.mark.parametrize("zero", ZEROS)
def test_the_same_bits_twice_and_on_all_ranks(world, zero):
    first, second = run(world, zero, clip=1.0), run(world, zero, clip=1.0)
    assert first[1] == second[1]
    for name, p in first[0].items():
        assert p.tobytes() == second[0][name].tobytes()
        every = fompi.all_gather(p.reshape(1, -1), comm=world)
        assert (every == every[0]).all()


@ON_TWO
@pytest.mark.parametrize(
    ("kind", "zero"),
    [("torch", 1), ("torch-bfloat16", 3), ("jax", 0), ("jax", 3), ("numpy-bfloat16", 1), ("numpy-float16", 2)],
)
def test_kinds_and_dtypes(world, kind, zero):
    """A parameter comes back as what it was. Half types have a float32 copy: small steps are not lost."""
    dtype = {"torch": "float32", "jax": "float32"}.get(kind, kind.partition("-")[2])
    values = {"a": np.ones((3, 5)), "b": np.full(7, 2.0)}
    make = {
        "torch": lambda a: torch.tensor(a, dtype=getattr(torch, dtype), requires_grad=True),
        "jax": lambda a: jnp.asarray(a, jnp.float32),
    }.get(kind.partition("-")[0], lambda a: a.astype(getattr(ml_dtypes, dtype, dtype)))
    params = {name: make(a) for name, a in values.items()}
    kinds = {"torch": torch.Tensor, "jax": jax.Array}
    with DataParallel(params, optimizer=SGD(1.0), comm=world, zero=zero, bucket_nbytes=16) as dp:
        kept = dp["a"]
        for _ in range(16):
            for name, p in params.items():
                seen = dp[name]
                assert isinstance(seen, kinds.get(kind.partition("-")[0], np.ndarray)) and seen.dtype == p.dtype
                dp.release(name)
            for name in reversed(params):
                with dp.no_sync():
                    dp.ready(name, make(np.full(values[name].shape, 2.0**-10 * world.rank)))
                dp.ready(name, make(np.full(values[name].shape, 2.0**-10)))
            dp.step()
        mean = 2.0**-6 * (1 + (world.size - 1) / 2)
        for name, a in values.items():
            found = dp[name].detach().float().numpy() if "torch" in kind else np.asarray(dp[name], np.float32)
            np.testing.assert_allclose(found, a - mean, rtol=2.0**-8 if "bfloat" in kind else 2.0**-11)
        if kind == "jax":
            assert (np.asarray(kept) == 1).all(), "an array of JAX never changes"
    for name, a in values.items():
        assert (np.asarray(params[name].detach().float() if "torch" in kind else params[name], float) == a).all()


@pytest.mark.parametrize("zero", [1, 3])
def test_hooks_of_torch(world, zero):
    """A module in float32 whose hooks announce the gradients follows torch.optim on the whole batch."""
    torch.manual_seed(0)
    modules = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)) for _ in "ab"]
    module, whole = modules
    whole.load_state_dict(module.state_dict())
    x, target = torch.randn(12 * world.size, 8), torch.randn(12 * world.size, 4)
    theirs, named = torch.optim.AdamW(whole.parameters(), 0.01), dict(module.named_parameters())
    rows = slice(12 * world.rank, 12 * world.rank + 12)
    with DataParallel(named, optimizer=AdamW(0.01), comm=world, zero=zero, bucket_nbytes=200) as dp:
        for name, p in named.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: dp.ready(name, p.grad))
        for _ in range(5):
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(dp[name])
                    dp.release(name)
            for net, optimizer, part in ((module, module, rows), (whole, theirs, slice(None))):
                optimizer.zero_grad()
                (net(x[part]) - target[part]).square().mean().backward()
            norm = dp.step(clip=0.5)
            assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)), rel=1e-4)
            theirs.step()
        for name, p in whole.named_parameters():
            torch.testing.assert_close(dp[name], p.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [*({"zero": zero} for zero in ZEROS), {"order": fompi.Canonical(8)}], ids=str)
def test_a_gradient_that_is_none(world, how):
    """On all ranks: the parameter is left alone. On one of them: it is 0 there. No bucket waits for it."""
    params, last = {name: np.ones(3) for name in "abc"}, world.rank == world.size - 1
    leaves = 8 // world.size if "order" in how else 1
    with DataParallel(params, optimizer=ADAM, comm=world, microbatches=leaves, bucket_nbytes=24, **how) as dp:
        for name, gradient in [("c", None), ("b", None if last else np.ones(3)), ("a", np.ones(3))] * leaves:
            dp.ready(name, gradient)
        assert dp.step() == pytest.approx(np.sqrt(3 * (1 + (1 - 1 / world.size) ** 2)))
        assert (dp["c"] == 1).all() and (dp["b"] < 0.96).all() and (dp["a"] < 0.96).all()


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("zero", ZEROS)
def test_a_wire(world, zero, wire):
    """Gradients that the wire can hold give the same result. All ranks have the same bits, whatever it holds."""
    params, gradient = {"w": np.ones((40, 9), np.float32)}, np.full((40, 9), 1.0 + world.rank, np.float32)
    with DataParallel(params, optimizer=SGD(0.5), comm=world, zero=zero, wire=wire, feedback=True) as dp:
        dp.ready("w", gradient)
        norm = dp.step()
        mean = (1 + world.size) / 2
        assert norm == pytest.approx(mean * np.sqrt(360), rel=1e-2)
        np.testing.assert_allclose(dp["w"], 1 - 0.5 * mean, rtol=1e-2)
        rng = np.random.default_rng(world.rank)
        for _ in range(3):
            dp.ready("w", rng.standard_normal((40, 9)).astype(np.float32))
            dp.step()
        every = fompi.all_gather(dp["w"], comm=world).reshape(world.size, 360)
        assert (every == every[0]).all()


@pytest.mark.parametrize("zero", ZEROS)
def test_a_mean_that_fits_where_a_sum_does_not(world, zero):
    """float16 holds 40000 and not 80000: over the ranks, and over replicas."""
    odd = world.size % 2 == 1 or world.size == 2
    with world.split(world.rank // 2) as pair, world.split(world.rank % 2) as others:
        axes = {"comm": world} if odd else {"comm": pair, "replicas": others}
        with DataParallel({"w": np.zeros(9, np.float32)}, optimizer=SGD(1), zero=zero, wire="float16", **axes) as dp:
            dp.ready("w", np.full(9, 40000, np.float32))
            assert dp.step() == pytest.approx(3 * 40000)
            np.testing.assert_allclose(dp["w"], -40000)


def weighted(dp, world, steps, first=0):
    """Steps whose gradients depend on the parameters, so that an error in them would grow. Returns what is read."""
    read = []
    for step in range(first, first + steps):
        for name in ("w", "v"):
            value = widened(dp[name])
            noise = np.random.default_rng([world.rank, step]).standard_normal(value.shape)
            dp.ready(name, (0.1 * value + noise).astype(np.float32))
            read.append(value)
        dp.step()
    return read + [widened(dp[name]) for name in ("w", "v")]


def widened(tensor):
    """As a float32 array of its own."""
    return tensor.float().numpy().copy() if hasattr(tensor, "float") else np.array(tensor)


@pytest.mark.parametrize(
    ("zero", "half"),
    [(3, True), *(pytest.param(*cell, marks=ON_TWO) for cell in ((1, False), (1, True), (2, False), (3, False)))],
)
def test_gathers_in_a_wire(world, zero, half):
    """All ranks read the same bits, and what is updated is not rounded: 40 small steps have moved as far as without."""
    params = {"w": np.ones((40, 9), np.float32), "v": np.linspace(-3, 3, 77, dtype=np.float32)}
    if half:
        params = {name: torch.from_numpy(p).bfloat16() for name, p in params.items()}
    how = {"optimizer": SGD(1e-3), "comm": world, "zero": zero, "bucket_nbytes": 1000}
    found = []
    for wire in (None, "int8"):
        with DataParallel(params, wire_gather=wire, **how) as dp:
            read = weighted(dp, world, 40)
            found.append(read)
            every = [fompi.all_gather(np.ravel(a), comm=world).reshape(world.size, -1) for a in read]
            assert all((a == a[0]).all() for a in every)
            state = dp.state_dict()
            again = weighted(dp, world, 2, 40)
        with DataParallel({name: p * 0 for name, p in params.items()}, wire_gather=wire, **how) as dp:
            dp.load_state_dict(state)
            for a, b in zip(weighted(dp, world, 2, 40), again, strict=True):
                np.testing.assert_array_equal(a, b)
    distance = max(np.abs(a - b).max() for a, b in zip(*found, strict=True))
    assert (world.size > 1) == (distance > 0) and distance < 3 / 127
    moved = np.abs(found[1][-1] - found[0][1]).max()
    assert moved > 0.005
    for other in (0, 1, 2, 3):
        with DataParallel(params, wire_gather="fp8_e4m3" if other else None, **how | {"zero": other}) as dp:
            dp.load_state_dict(state)
            assert np.abs(widened(dp["w"]) - widened(state["parameters"]["w"])).max() < 0.1


def test_what_the_program_writes_is_kept_by_gathers_in_a_wire(world):
    params = {"w": np.linspace(0, 1, 80, dtype=np.float32)}
    with DataParallel(params, optimizer=SGD(0.0), comm=world, zero=1, wire_gather="int8") as dp:
        for value in (3.0, None, 5.0):
            if value is not None:
                dp["w"][7:9] = value
            dp.ready("w", np.zeros(80, np.float32))
            dp.step()
            expected = params["w"].copy()
            expected[7:9] = value or 3.0
            np.testing.assert_allclose(dp["w"], expected, atol=5 / 127)
            np.testing.assert_array_equal(dp.state_dict()["parameters"]["w"], expected)


def test_feedback_gives_back_what_is_lost(world):
    """The same gradient in each step: with feedback the sum of 64 updates is off by no more than one rounding."""
    gradient = np.random.default_rng(world.rank).standard_normal(500).astype(np.float32)
    exact, results = fompi.all_reduce(gradient.astype(np.float64), op="mean", comm=world), {}
    for feedback in (True, False):
        params = {"w": np.zeros(500, np.float32)}
        with DataParallel(params, optimizer=SGD(1.0), comm=world, zero=1, wire="int4", feedback=feedback) as dp:
            for _ in range(64):
                dp.ready("w", gradient)
                dp.step()
            results[feedback] = np.abs(dp["w"] / 64 + exact).max()
    if world.size > 1:
        assert results[True] < 0.01 and results[False] > 10 * results[True], results


@pytest.mark.parametrize("zero", ZEROS)
def test_feedback_is_saved_and_loaded(world, zero):
    """What was lost is in the state as a whole: also fewer ranks, which have other parts, give it back."""
    rng = np.random.default_rng(world.rank)
    how = {"optimizer": SGD(1.0), "zero": zero, "wire": "int4", "feedback": True}
    with DataParallel({"w": np.zeros((70, 3), np.float32)}, comm=world, **how) as dp:
        dp.ready("w", rng.standard_normal((70, 3)).astype(np.float32))
        dp.step()
        state = dp.state_dict()
        assert world.size == 1 or np.abs(state["feedback"]["w"]).max() > 0
        dp.ready("w", np.zeros((70, 3), np.float32))
        dp.step()
        after = dp["w"].copy()
    most = np.abs(state["feedback"]["w"]).max()
    assert np.abs(after - state["parameters"]["w"]).max() <= 1.25 * most  # it is rounded once more, or twice
    for color, average in ((world.rank % 2, True), (world.rank % 2, False), (world.rank, True), (0, True)):
        some = world.split(color, world.rank)
        with DataParallel({"w": np.zeros((70, 3), np.float32)}, comm=some, average=average, **how) as dp:
            dp.load_state_dict(state)
            again = dp.state_dict()["feedback"]["w"]
            np.testing.assert_allclose(again, state["feedback"]["w"], atol=1e-6)
            dp.ready("w", np.zeros((70, 3), np.float32))
            dp.step()
            gives_back = state["parameters"]["w"] - dp["w"]  # its owners add it without rounding
            np.testing.assert_allclose(gives_back, again, atol=1e-6 if zero or some.size == 1 else most / 13)
            with pytest.raises(fompi.LayoutError, match="missing names"):
                dp.load_state_dict({**state, "feedback": {}})


@pytest.mark.parametrize("zero", ZEROS)
def test_feedback_waits_for_its_parameter(world, zero):
    """What was lost of a parameter that no rank announces in a step is given back in the next one with it, once."""
    rng, none = np.random.default_rng(world.rank), np.zeros(100, np.float32)
    how = {"optimizer": SGD(1.0), "zero": zero, "wire": "int4", "feedback": True, "bucket_nbytes": 600}
    with DataParallel({name: none for name in "wvu"}, comm=world, **how) as dp:
        for name in "uvw":
            dp.ready(name, rng.standard_normal(100).astype(np.float32))
        dp.step()
        state = dp.state_dict()
        for _ in range(2):
            dp.ready("u", none)
            norm = dp.step()
        assert norm <= 1.2 * np.linalg.norm(state["feedback"]["u"]) / 7, "what is not applied is not in the norm"
        for name in "vw":
            kept = dp.state_dict()
            np.testing.assert_array_equal(kept["feedback"][name], state["feedback"][name])
            np.testing.assert_array_equal(kept["parameters"][name], state["parameters"][name])
        if world.rank == 0:
            dp.ready("w", none)
        dp.step()
        gives_back = state["parameters"]["w"] - dp["w"]
        np.testing.assert_allclose(gives_back, state["feedback"]["w"], atol=np.abs(state["feedback"]["w"]).max() / 6)
        assert world.size == 1 or np.linalg.norm(dp.state_dict()["feedback"]["w"]) < np.linalg.norm(gives_back) / 2
        np.testing.assert_array_equal(dp["v"], state["parameters"]["v"])


@pytest.mark.parametrize("zero", ZEROS)
def test_memory_between_steps(world, zero):
    """parameters, gradients, optimizer: what the stage promises, but for the rounding of each bucket."""
    n, size = 4 * 1000 * 6, world.size
    params = {f"p{i}": np.zeros(1000, np.float32) for i in range(6)}
    with DataParallel(params, optimizer=AdamW(0.1), comm=world, zero=zero, bucket_nbytes=8000) as dp:
        made = dp.nbytes
        for _ in range(2):
            for name in params:
                dp[name]
                dp.release(name)
            if zero == 3:
                assert dp.nbytes["parameters"] < n / size + n / 2, "at most two buckets and the last one"
            for name in reversed(params):
                dp[name]
                dp.ready(name, np.ones(1000, np.float32))
            dp.step()
            shares = {"parameters": zero == 3, "gradients": zero >= 2, "optimizer": zero >= 1}
            slack = 4 * len(dp.buckets)
            for what, is_shared in shares.items():
                whole = 2 * n if what == "optimizer" else n
                own = whole / size if is_shared else whole
                assert abs(dp.nbytes[what] - own) <= 2 * slack, (what, dp.nbytes, made)
        assert dp.nbytes == made


def test_replicas(world):
    """Hybrid sharding: shards over one axis, the same shards on the other."""
    if world.size != 4:
        pytest.skip("needs a grid of 2 x 2")
    with fompi.Mesh(outer=2, inner=2) as mesh:
        for zero in ZEROS:
            params = {name: p.copy() for name, p in parameters().items()}
            optimizer = SGD(0.1)
            with DataParallel(
                params, optimizer=optimizer, comm=mesh["inner"], replicas=mesh["outer"], zero=zero, average=False
            ) as dp:
                announce(dp, world, 0)
                norm = dp.step(clip=0.5)
                found = {name: np.array(dp[name]) for name in params}
            close_to((found, [norm]), single(steps=1, optimizer=optimizer, clip=0.5))
            every = fompi.all_gather(np.array([norm]), comm=world)
            assert (every == norm).all()
            how = {"comm": mesh["inner"], "replicas": mesh["outer"], "zero": zero, "wire": "int8", "feedback": True}
            with DataParallel({"w": np.zeros((40, 9), np.float32)}, optimizer=SGD(1.0), **how) as dp:
                dp.ready("w", np.full((40, 9), 1.0 + world.rank, np.float32))
                dp.step()
                every = fompi.all_gather(dp["w"], comm=world)
            np.testing.assert_allclose(every, -2.5, rtol=0.02)
            assert (every == every[0, 0]).all()


def test_norms_over_other_axes(world):
    """Each rank of the axis has another part of the model, but for a bias that is counted once."""
    with fompi.Mesh(dp=1, tp=world.size) as mesh:
        dp_axis, tp = mesh["dp"], mesh["tp"]
        params = {"part": np.zeros(2, np.float64), "bias": np.zeros(1, np.float64)}
        with DataParallel(params, optimizer=SGD(1.0), comm=dp_axis, replicated={"bias": tp}) as dp:
            dp.ready("part", np.full(2, 1.0 + tp.rank))
            dp.ready("bias", np.array([3.0]))
            norm = dp.step(over=(tp,))
        with DataParallel(params, optimizer=SGD(1.0), comm=dp_axis, replicated={"bias": tp}, over=tp) as dp:
            dp.ready("part", np.full(2, 1.0 + tp.rank))
            dp.ready("bias", np.array([3.0]))
            assert dp.step() == norm
        assert norm == pytest.approx(np.sqrt(2 * sum((1 + r) ** 2 for r in range(tp.size)) + 9))


def test_holders_of_each_element(world):
    """Shared key heads: some elements are on all ranks of the axis, the others on one. Each counts once."""
    with fompi.Mesh(dp=world.size, tp=1) as mesh:
        counts = np.array([[1.0, 4.0], [4.0, 1.0], [2.0, 1.0]])
        params = {"before": np.zeros(5), "part": np.zeros((3, 2)), "after": np.zeros(1)}
        for zero in ZEROS:
            how = {"optimizer": SGD(1.0), "comm": mesh["dp"], "zero": zero, "average": False}
            with DataParallel(params, replicated={"part": counts}, **how) as dp:
                dp.ready("after", np.full(1, 1.0))
                dp.ready("part", np.arange(6.0).reshape(3, 2))
                norm = dp.step()
            terms = np.square(np.arange(6.0).reshape(3, 2)) / counts
            assert norm == pytest.approx(world.size * np.sqrt(1 + terms.sum()))
        for wrong, error in ((counts[0], fompi.ShapeError), (counts - 1, LayoutError)):
            with pytest.raises(error, match="replicated="):
                DataParallel(params, replicated={"part": wrong}, **how)


def test_micro_batches(world):
    """A bucket leaves with the last announcement. The gradient is the sum, and one more is an error."""
    params = {"p": np.zeros(3), "q": np.zeros(3)}
    how = {"optimizer": SGD(1.0), "comm": world, "bucket_nbytes": Buckets((1, 1)), "microbatches": 2}
    with DataParallel(params, **how) as dp:
        left = lambda: [g.has_left for g in dp.gradients]  # noqa: E731
        for step in range(2):
            with dp.no_sync():
                dp.ready("q", np.ones(3))
            for _ in range(2):
                assert not any(left())
                dp.ready("q", np.ones(3))
            assert left() == [False, True]
            dp.ready("p", np.ones(3))  # the other one has no gradient on any rank
            dp.step()
            assert (np.array(dp["q"]) == -3 * (step + 1)).all() and (np.array(dp["p"]) == -1 * (step + 1)).all()
        for _ in range(2):
            dp.ready("q", np.ones(3))
        with pytest.raises(fompi.StateError, match="too often"):
            dp.ready("q", np.ones(3))
    with pytest.raises(LayoutError, match="microbatches="):
        DataParallel(params, **{**how, "microbatches": 0})


def test_traces_of_sums_and_gathers(world):
    with DataParallel({"p": np.zeros(64)}, optimizer=SGD(1.0), comm=world) as dp:
        with dp.record() as traces:
            dp.ready("p", np.ones(64))
            dp.step()
            np.array(dp["p"])
        titles = " ".join(trace.title for trace in traces)
        assert "reduce_scatter" in titles and "all_gather" in titles


def test_a_given_cut(world):
    with DataParallel(parameters(), optimizer=SGD(0.1), comm=world, bucket_nbytes=Buckets((1, 5, 4))) as dp:
        assert [len(b.names) for b in dp.buckets] == [1, 5, 4]


def test_buckets_leave_during_the_backward(world):
    """A bucket leaves when all of it is announced and those behind it have left; gathers run one bucket ahead."""
    params = {f"p{i}": np.zeros(4) for i in range(4)}
    with DataParallel(params, optimizer=SGD(0.1), comm=world, zero=1, bucket_nbytes=Buckets((1, 1, 1, 1))) as dp:
        sums = lambda: [g.has_left for g in dp.gradients]  # noqa: E731
        dp.ready("p2", np.ones(4))
        assert sums() == [False] * 4, "p3 has not left"
        dp.ready("p3", np.ones(4))
        assert sums() == [False, False, True, True]
        dp.ready("p1", np.ones(4))
        dp.ready("p0", np.ones(4))
        assert sums() == [True] * 4
        dp.step()
        gathers = lambda: [b.in_flight is not None or b.is_here for b in dp.buckets]  # noqa: E731
        assert gathers() == [True, True, True, False], "two buckets ahead"
        dp["p0"]
        assert gathers() == [True, True, True, False]
        dp["p1"]
        assert gathers() == [True] * 4


# -------------------------------------------------------------------------------------------------- refusals

CONSTRUCTIONS = [
    (lambda p: p | {"more": np.zeros(2)}, {}, ShapeError),  # other names
    (lambda p: dict(reversed(p.items())), {}, ShapeError),  # another order
    (lambda p: p | {"w0": np.zeros((5, 8))}, {}, ShapeError),  # another shape
    (lambda p: p | {"w0": p["w0"].astype(np.float32)}, {}, DtypeError),
    (lambda p: p | {"w0": p["w0"] + 1}, {}, ShapeError),  # other values
    (lambda p: p | {"w0": p["w0"].astype(np.int32)}, {}, DtypeError),
    (lambda p: p | {"w0": [1, 2]}, {}, TensorError),
    (lambda p: {}, {}, ShapeError),
    (lambda p: p, {"zero": 4}, LayoutError),
    (lambda p: p, {"zero": 2}, LayoutError),  # the others have zero=1
    (lambda p: p, {"optimizer": SGD(0.2)}, LayoutError),
    (lambda p: p, {"bucket_nbytes": 0}, LayoutError),
    (lambda p: p, {"bucket_nbytes": Buckets((3,))}, LayoutError),
    (lambda p: p, {"replicated": {"nobody": None}}, LayoutError),
    (lambda p: p, {"wire": "bfloat16"}, DtypeError),  # the parameters are float64
    (lambda p: p, {"wire_gather": "bfloat16"}, DtypeError),
    (lambda p: {n: a.astype("f4") for n, a in p.items()}, {"zero": 0, "wire_gather": "int8"}, LayoutError),
    (lambda p: p, {"feedback": True}, LayoutError),  # there is no wire
    (lambda p: p, {"ahead_nbytes": -1}, LayoutError),
    (lambda p: p, {"replicas": "pp"}, LaunchError),
    (lambda p: p, {"over": "tp"}, LaunchError),
    (lambda p: p, {"replicated": {"w0": np.full((5, 7), 2.0)}}, LayoutError),  # the others hold it once
    (lambda p: p, {"optimizer": None}, LayoutError),
    (lambda p: [*p.values()], {}, ShapeError),
]


@pytest.mark.parametrize("number", range(len(CONSTRUCTIONS)))
def test_ranks_that_construct_different_things(world, number):
    """All ranks raise: the rank whose arguments are wrong its own error, or MismatchError where they only differ."""
    change, options, error = CONSTRUCTIONS[number]
    differs = world.rank == world.size - 1
    params = change(parameters()) if differs else parameters()
    arguments = {"optimizer": SGD(0.1), "comm": world} | (options if differs else {})
    if world.size == 1:
        return
    with pytest.raises((MismatchError, error)) as caught:
        DataParallel(params, **arguments)
    assert differs or isinstance(caught.value, MismatchError)


ALIKE = [
    ({"params": None}, ShapeError, "params must map names to tensors, not NoneType"),
    ({"optimizer": 0.1}, LayoutError, "optimizer=0.1 must be"),
    ({"optimizer": SGD}, LayoutError, "optimizer=.*SGD.* must be"),
    ({"replicated": ["w0"]}, LayoutError, "replicated=.* must map"),
    ({"replicas": "pp"}, LaunchError, "not 'pp'"),
    ({"replicated": {"w0": "tp"}}, LaunchError, "not 'tp'"),
    ({"over": ["tp"]}, LaunchError, "not 'tp'"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), ALIKE, ids=str)
def test_wrong_arguments_on_all_ranks(world, wrong, error, words):
    with pytest.raises(error, match=words):
        DataParallel(**{"params": parameters(), "optimizer": SGD(0.1), "comm": world} | wrong)


def test_axes_that_share_ranks(world):
    """Gradients would be summed twice, or counted twice in the norm."""
    if world.size == 1:
        return
    with fompi.Mesh(a=world.size, b=1) as mesh:
        for wrong in ({"replicas": mesh["a"]}, {"over": (mesh["b"], mesh["a"])}):
            with pytest.raises(LayoutError, match=r"the axes '(world|a|b)' and 'a' have more ranks in common"):
                DataParallel(parameters(), optimizer=SGD(0.1), comm=world, **wrong)
        replicas = mesh["b"] if world.rank else None  # of one rank each
        with pytest.raises(MismatchError, match="1 replicas"):
            DataParallel(parameters(), optimizer=SGD(0.1), comm=world, replicas=replicas)


def twice(dp):
    dp.ready("w3", np.zeros_like(parameters()["w3"]))
    dp.ready("w3", np.zeros_like(parameters()["w3"]))


def after_it_left(dp):
    for name, p in parameters().items():
        dp.ready(name, p)
    with dp.no_sync():
        dp.ready("w0", parameters()["w0"])


WRONG = {
    "twice": (twice, StateError, "'w3' was announced twice"),
    "after it left": (after_it_left, StateError, "'w0' was announced twice"),
    "unknown": (lambda dp: dp.ready("w9", np.zeros(1)), LayoutError, "no parameter 'w9'"),
    "unknown get": (lambda dp: dp["w9"], LayoutError, "no parameter 'w9'"),
    "unknown release": (lambda dp: dp.release("w9"), LayoutError, "no parameter 'w9'"),
    "shape": (lambda dp: dp.ready("b0", np.zeros(8)), ShapeError, r"'b0' has shape \(8,\), not \(7,\)"),
    "dtype": (lambda dp: dp.ready("b0", np.zeros(7, np.int64)), DtypeError, "'b0' is int64"),
    "narrow": (lambda dp: dp.ready("b0", np.zeros(7, np.float32)), DtypeError, "'b0' is float32"),
    "no tensor": (lambda dp: dp.ready("b0", [0.0] * 7), TensorError, "np.asarray"),
    "nan": (lambda dp: dp.ready("b0", np.full(7, np.nan)), TensorError, "'b0' has a NaN on rank"),
    "inf": (lambda dp: dp.ready("b0", np.full(7, -np.inf)), TensorError, "'b0' has an infinite number on rank"),
    "clip": (lambda dp: dp.step(clip=-1.0), LayoutError, "clip=-1.0 must be"),
    "clip array": (lambda dp: dp.step(clip=np.ones(2)), LayoutError, "clip=array"),
    "clip text": (lambda dp: dp.step(clip="1"), LayoutError, "clip='1' must be"),
    "over": (lambda dp: dp.step(over="tp"), LaunchError, "not 'tp'"),
}


@ON_TWO
@pytest.mark.parametrize(
    ("case", "zero"), [*((case, 3) for case in WRONG), ("twice", 0), ("nan", 1), ("after it left", 2)]
)
def test_a_rank_that_refuses(world, case, zero):
    """The others get MismatchError from step, which quotes the error. Nothing is lost: the next steps are right."""
    wrong, error, words = WRONG[case]
    rank = {"twice": 0, "unknown": 0}.get(case, world.size - 1)
    with DataParallel(
        parameters(), optimizer=ADAM, comm=world, zero=zero, average=False, bucket_nbytes=300, check_for_nan=True
    ) as dp:
        norms = []
        for step in range(2):
            announce(dp, world, step)
            norms.append(dp.step())
        if world.rank == rank:
            with pytest.raises(error, match=words):
                if case not in ("twice", "after it left"):
                    x, _ = batch(9)
                    forward(dp.__getitem__, x, dp.release)
                wrong(dp)
        else:
            with pytest.raises(MismatchError, match=error.__name__):
                announce(dp, world, 9)
                dp.step()
        for step in range(2, 5):
            announce(dp, world, step)
            norms.append(dp.step())
        close_to(({name: np.array(dp[name]) for name in parameters()}, norms), single())


@pytest.mark.parametrize(("zero", "reads"), [(1, True), (3, True), (3, False)])
def test_a_rank_that_refuses_a_micro_batch(world, zero, reads):
    """The others are in a later micro-batch then, and their gathers must not wait for it. Also if they read nothing."""
    with DataParallel(parameters(), optimizer=SGD(0.1), comm=world, zero=zero, bucket_nbytes=300) as dp:
        for _ in range(2):
            if world.rank == world.size - 1:
                with pytest.raises(ShapeError), dp.no_sync():
                    dp["w0"]
                    dp.ready("w0", np.zeros(3))
            else:
                with pytest.raises(MismatchError):
                    for micro in range(3):
                        with dp.no_sync():
                            if reads:
                                announce(dp, world, micro)
                    dp.step()
        announce(dp, world, 0)
        dp.step()


def test_two_ranks_refuse_in_different_micro_batches(world):
    with DataParallel(parameters(), optimizer=SGD(0.1), comm=world, zero=3, bucket_nbytes=300) as dp:
        with pytest.raises(FompiError) as caught:
            for micro in range(3):
                with dp.no_sync():
                    if micro == world.rank:
                        dp.ready("w0", np.zeros(3))
                    announce(dp, world, micro)
            dp.step()
        if world.rank == 0:
            assert isinstance(caught.value, ShapeError)
        announce(dp, world, 0)
        dp.step()


def test_all_ranks_refuse_on_a_grid(world):
    """A refusal reaches the ranks of the other axes too: also in the first step, if they are known before it."""
    if world.size != 4:
        pytest.skip("needs a grid of 2 x 2")
    with fompi.Mesh(a=2, b=2) as mesh:
        a = mesh["a"]
        for options, over, done in [
            ({"replicas": a}, (), 0), ({}, a, 1), ({"over": a}, (), 0), ({"over": a}, a, 0),
            ({}, a, 0),  # they hear of it with the next step
            ({"zero": 3}, a, 0),
        ]:  # fmt: skip
            with DataParallel(parameters(), optimizer=SGD(0.1), comm=mesh["b"], bucket_nbytes=300, **options) as dp:
                for _ in range(done):
                    announce(dp, world, 0)
                    dp.step(over=over)
                with pytest.raises(FompiError) as caught:
                    if world.rank == 2:
                        dp.ready("w9", np.zeros(1))
                    announce(dp, world, 1)
                    dp.step(over=over)
                assert isinstance(caught.value, LayoutError if world.rank == 2 else MismatchError)
                for _ in range(2):
                    announce(dp, world, 1)
                    dp.step(over=over)


def test_two_first_steps_are_refused_on_a_grid(world):
    """By a rank, by its whole row, and for the arguments of the step itself."""
    if world.size != 4:
        pytest.skip("needs a grid of 2 x 2")
    with fompi.Mesh(a=2, b=2) as mesh, DataParallel(parameters(), optimizer=SGD(0.1), comm=mesh["b"]) as dp:
        for refusing, clip in (((1,), 1.0), ((0, 1), 1.0), ((), -1.0)):
            with pytest.raises(FompiError):
                if world.rank in refusing:
                    dp.ready("b0", np.zeros(3))
                announce(dp, world, 0)
                dp.step(clip=clip if world.rank == 1 else 1.0, over=mesh["a"])
        announce(dp, world, 0)
        dp.step(clip=1.0, over=mesh["a"])


def test_an_error_of_another_kind_reaches_all_axes(world):
    """What the objects of the user raise is no error of fompi."""
    if world.size != 4:
        pytest.skip("needs a grid of 2 x 2")

    class Odd:
        @property
        def state(self):
            raise ZeroDivisionError("an optimizer of the user")

    odd = world.rank == 2
    with fompi.Mesh(a=2, b=2) as mesh, pytest.raises(ZeroDivisionError if odd else MismatchError):
        how = {"comm": mesh["b"], "replicas": mesh["a"]}
        DataParallel(parameters(), optimizer=Odd() if odd else SGD(0.1), **how)


@pytest.mark.parametrize("zero", ZEROS)
def test_gradients_whose_sum_is_too_large(world, zero):
    """Each is finite. All ranks raise, nothing is updated, and the next step is right."""
    params = {"p": np.zeros(5), "q": np.zeros(3)}
    with DataParallel(params, optimizer=ADAM, comm=world, zero=zero, bucket_nbytes=40, check_for_nan=True) as dp:
        for _ in range(2):
            dp.ready("q", np.ones(3))
            dp.ready("p", np.full(5, 1e308))
            with pytest.raises(TensorError, match="the norm of the gradient of all ranks is inf"):
                dp.step()
            assert not np.array(dp["p"]).any() and not np.array(dp["q"]).any()
        dp.ready("p", np.ones(5))
        assert dp.step() == pytest.approx(np.sqrt(5))
        np.testing.assert_allclose(np.array(dp["p"]), -0.05)


def test_ranks_whose_optimizers_come_to_differ(world):
    if world.size == 1:
        return
    optimizer = SGD(1.0)
    with DataParallel({"p": np.zeros(5)}, optimizer=optimizer, comm=world, zero=0) as dp:
        for lr in (0.5, 1.0 + world.rank, 0.25):
            optimizer.lr = lr
            dp.ready("p", np.ones(5))
            if lr >= 1:
                with pytest.raises(MismatchError, match="SGD"):
                    dp.step()
            else:
                dp.step()
        assert (np.array(dp["p"]) == -0.75).all()


class Breaks(SGD):
    """An optimizer with an error in the update of a long parameter."""

    def update(self, p, g, state):
        if len(p) > 5:
            raise ZeroDivisionError("an error of the optimizer")
        super().update(p, g, state)


@pytest.mark.parametrize("zero", ZEROS)
def test_an_optimizer_that_fails_on_one_rank(world, zero):
    """It is raised there. No rank takes another step with parameters that are updated in part."""
    breaks = world.rank == world.size - 1
    optimizer = Breaks(0.1) if breaks else type("Breaks", (SGD,), {})(0.1)
    with DataParallel(parameters(), optimizer=optimizer, comm=world, zero=zero, bucket_nbytes=300) as dp:
        announce(dp, world, 0)
        if breaks:
            with pytest.raises(ZeroDivisionError):
                dp.step()
        else:
            dp.step()
        for _ in range(2):
            with pytest.raises(StateError if breaks else MismatchError, match="an error of the optimizer"):
                announce(dp, world, 1)
                dp.step()


def test_options_of_optimizers_that_are_no_numbers():
    for make in (
        lambda: SGD("0.1"), lambda: SGD(-1.0), lambda: SGD(0.1, momentum=None), lambda: AdamW(float("nan")),
        lambda: AdamW(0.1, betas=0.9), lambda: AdamW(0.1, betas=(0.9, 1.0)), lambda: AdamW(0.1, eps=[1]),
    ):  # fmt: skip
        with pytest.raises(LayoutError, match="must be"):
            make()


def test_ranks_that_clip_differently(world):
    if world.size == 1:
        return
    with DataParallel(parameters(), optimizer=SGD(0.1), comm=world) as dp:
        announce(dp, world, 0)
        with pytest.raises(MismatchError, match="clip"):
            dp.step(clip=float(world.rank))
        announce(dp, world, 0)
        dp.step(clip=1.0)


@pytest.mark.parametrize("zero", ZEROS)
def test_close_in_the_middle(world, zero):
    """Ranks that have come to different places close all the same."""
    dp = DataParallel(parameters(), optimizer=SGD(0.1), comm=world, zero=zero, bucket_nbytes=100)
    announce(dp, world, 0)
    dp.step()
    if world.rank == 0:
        for name, p in reversed(parameters().items()):
            dp.ready(name, p)
    elif world.rank == 1:
        if zero < 3:
            dp["w0"]
        dp.ready("b3", np.zeros(2))
    dp.close()
    dp.close()
    for call in (lambda: dp["w0"], lambda: dp.ready("w0", parameters()["w0"]), dp.step, lambda: dp.release("w0")):
        with pytest.raises(StateError, match="closed"):
            call()


def test_no_error_is_left_unread(world, recwarn):
    """A step reads the result of every call that it has started."""
    run(world, 3, steps=2)
    gc.collect()
    assert not [w for w in recwarn if w.category is ResourceWarning]


@ON_TWO
@pytest.mark.parametrize("kind", ["numpy", "jax"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_saved_and_loaded(world, zero, kind):
    """Parameters and state, whole, into another `zero`: the next steps give the same bits. In any framework."""
    jax = pytest.importorskip("jax") if kind == "jax" else None
    given = {name: jax.numpy.asarray(p, "float32") if jax else p for name, p in parameters().items()}

    def steps(dp, count):
        for i in range(count):
            for name in given:
                value = np.asarray(dp[name])
                dp.ready(name, np.asarray((i + 1) * value, value.dtype))
            dp.step(clip=1.0)

    how = {"optimizer": ADAM, "comm": world, "bucket_nbytes": 300}
    with DataParallel(given, zero=zero, **how) as dp:
        steps(dp, 2)
        state = dp.state_dict()
        assert type(state["parameters"]["w0"]) is type(given["w0"])
        steps(dp, 2)
        expected = {name: np.asarray(dp[name]).copy() for name in given}
    for other in (0, 2, 3):
        with DataParallel({name: np.zeros_like(p) for name, p in given.items()}, zero=other, **how) as dp:
            dp.load_state_dict(state)
            steps(dp, 2)
            for name, value in expected.items():
                np.testing.assert_allclose(np.asarray(dp[name]), value, rtol=1e-6 if jax else 1e-13)
