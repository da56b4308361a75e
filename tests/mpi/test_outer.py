"""Outer steps do what the formulas of DiLoCo say, to the last bit: against a loop over islands in one process."""

from __future__ import annotations

import hashlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from device_mutants import plant

import fompi
from fompi.base.errors import ArgumentError, FompiError, LayoutError, MismatchError, PeerError, ShapeError, StateError
from fompi.base.wires import WIRES
from fompi.parallel.outer import OuterSteps

pytestmark = pytest.mark.ranks(mpich=[2, 4], openmpi=[])

ON_TWO = pytest.mark.ranks(mpich=[2])
"""What more ranks say no more of."""

SHAPES = {"a": (3, 5), "b": (7,), "empty": (0, 2), "c": (4, 1, 2), "scale": (), "d": (11,)}
ETA, BETA = 0.7, 0.9
COMBINATIONS = {"plain": (4, 1, 0), "delay": (4, 1, 3), "fragments": (4, 2, 0), "both": (6, 3, 1)}
"""H, P, delay."""


def start(dtype=np.float64):
    random = np.random.default_rng(5)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def inner(params, island, step):
    """One step of SGD on a loss that each island has of its own."""
    made = {}
    for name, p in params.items():
        wave = np.sin(np.arange(p.size, dtype=p.dtype) * (island + 1) + step).astype(p.dtype).reshape(p.shape)
        made[name] = np.asarray(p - p.dtype.type(0.1) * (p * p.dtype.type(0.5 + island) - wave))
    return made


def tree(terms):
    """((0 + 1) + (2 + 3)): the order of ranks."""
    return terms[0] if len(terms) == 1 else tree([a + b for a, b in zip(terms[::2], terms[1::2], strict=True)])


def islands(count, steps, period, fragments, delay, alpha, eta=ETA, beta=BETA):
    """The parameters of all islands after these steps: one process, one loop, the formulas as the papers have them."""
    thetas = [start() for _ in range(count)]
    outer, v = start(), {name: np.zeros(shape) for name, shape in SHAPES.items()}
    flying = {}
    for t in range(1, steps + 1):
        thetas = [inner(theta, k, t) for k, theta in enumerate(thetas)]
        for p in range(fragments):
            if (t - (p + 1) * (period // fragments)) % period == 0:
                mine = [name for i, name in enumerate(SHAPES) if i % fragments == p]
                flying[t + delay] = {n: tree([outer[n] - theta[n] for theta in thetas]) / count for n in mine}
        for name, d in flying.pop(t, {}).items():
            v[name] = d + beta * v[name]
            outer[name] = outer[name] - eta * (d + beta * v[name])
            for theta in thetas:
                theta[name] = np.asarray(alpha * theta[name] + (1 - alpha) * outer[name])
    return thetas


def digest(params):
    return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in params.values())).hexdigest()


def train(outer, params, island, steps):
    for t in steps:
        params = outer.step(inner(params, island, t))
    return params


def has_the_bits(world, combination, alpha):
    """True if 19 steps end with those of one process."""
    period, fragments, delay = COMBINATIONS[combination]
    how = {"sync_every": period, "fragments": fragments, "delay": delay, "alpha": alpha}
    with OuterSteps(start(), comm=world, **how) as outer:
        found = train(outer, start(), world.rank, range(1, 20))
    return digest(found) == digest(islands(world.size, 19, period, fragments, delay, alpha)[world.rank])


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_islands_have_the_bits_of_one_process(world, combination, alpha):
    assert has_the_bits(world, combination, alpha)


def test_one_step_at_a_time_is_data_parallelism(world):
    """Inner SGD, H=1, delay=0, eta=1, beta=0, alpha=0: the mean of the gradients, up to rounding."""
    with OuterSteps(start(), comm=world, sync_every=1, outer_lr=1.0, outer_momentum=0.0) as outer:
        found = train(outer, start(), world.rank, range(1, 9))
    expected = start()
    for t in range(1, 9):
        moved = [inner(expected, k, t) for k in range(world.size)]
        expected = {name: np.mean([theta[name] for theta in moved], axis=0) for name in SHAPES}
    for name in SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-13)


def test_alpha_one_never_exchanges(world):
    with OuterSteps(start(), comm=world, sync_every=2, delay=1, alpha=1.0) as outer:
        with outer.comm.record() as traces:
            found, alone = train(outer, start(), world.rank, range(1, 9)), start()
        assert not traces
    for t in range(1, 9):
        alone = inner(alone, world.rank, t)
    assert digest(found) == digest(alone)


@pytest.mark.parametrize("wire", [None, "int8"])
def test_bytes_are_those_of_the_formula(world, wire):
    """An all-reduce of K islands sends 2 (K - 1) / K of its elements: 2 |theta| b / H a step for many islands."""
    n, period, steps, exchanges = 1 << 16, 4, 16, []
    params = {name: np.zeros(n, np.float32) for name in "abcd"}
    options = {"sync_every": period, "fragments": 2, "delay": 1, "wire": wire, "on_exchange": exchanges.append}
    with OuterSteps(params, comm=world, **options) as outer:
        for _ in range(steps + 1):  # the last exchange is applied one step later
            params = outer.step(params)
    element = 4 if wire is None else WIRES[wire].nbytes(n) / n
    expected = 2 * (world.size - 1) / world.size * 4 * n * element / period
    assert sum(each.nbytes for each in exchanges) / steps == pytest.approx(expected, rel=0.02)
    assert [(each.step, each.fragment) for each in exchanges] == [(t, t // 2 % 2 ^ 1) for t in range(2, steps + 1, 2)]


def test_numbers_of_an_exchange(world):
    """norm: of the mean. drift: of what this island has sent minus that."""
    exchanges, here = [], world.rank + 1.0
    options = {"sync_every": 1, "on_exchange": exchanges.append, "outer_momentum": 0.0}
    with OuterSteps({"w": np.zeros(4)}, comm=world, **options) as outer:
        outer.step({"w": np.full(4, here)})
    mean = (world.size + 1) / 2
    assert (
        exchanges[0].exposed > 0
        and exchanges[0].norm == pytest.approx(2 * mean)
        and exchanges[0].drift == pytest.approx(2 * abs(here - mean))
    )


def test_a_mean_by_rows(world):
    """The difference of an island counts by the rows since the last exchange of its fragment; a state keeps them."""
    rows, options = world.rank + 1, {"sync_every": 2, "fragments": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    params = {"v": np.zeros(3), "w": np.zeros(5)}
    with OuterSteps(params, comm=world, weights="rows", **options) as outer:
        params = outer.step({"v": np.full(3, 1.0 * rows), "w": np.full(5, 1.0 * rows)}, rows=rows)
        state = outer.state_dict()
        assert state["trained"] == [0, rows]
        outer.load_state_dict(state)
        params = outer.step({**params, "w": np.full(5, 2.0 * rows)}, rows=2 * rows)
    all_rows = np.arange(1, world.size + 1)
    mean = (all_rows**2).sum() / all_rows.sum()
    np.testing.assert_allclose(params["v"], mean)
    np.testing.assert_allclose(params["w"], 2 * mean)
    with pytest.raises(LayoutError, match="weights='tokens' must be"):
        OuterSteps(params, comm=world, weights="tokens", **options)


RESUMED = {
    "float64": ({"sync_every": 6, "fragments": 3, "delay": 1}, np.float64),
    "int4": ({"sync_every": 4, "delay": 3, "alpha": 0.25, "wire": "int4", "feedback": True}, np.float32),
}


def continued(world, case, at):
    """The bits after 24 steps of a run that is saved after `at` steps, and goes on from that; with at=0, of one run."""
    (options, dtype), params = RESUMED[case], start()
    params = {name: p.astype(dtype) for name, p in params.items()}
    other = {name: np.asarray(p + p.dtype.type(1)) for name, p in params.items()}  # a new program begins with others
    with OuterSteps(params, comm=world, **options) as outer:
        params = train(outer, params, world.rank, range(1, at or 25))
        state = outer.state_dict()
        if at:
            train(outer, params, world.rank, range(at, at + 2))  # what it does after the save changes nothing
    if at:
        with OuterSteps(other, comm=world, **options) as outer:
            outer.load_state_dict(state)
            params = train(outer, params, world.rank, range(at, 25))
    return digest(params)


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_that_is_resumed_in_the_middle_of_a_delay(world, case):
    whole = continued(world, case, 0)
    for at in range(8, 14):
        assert continued(world, case, at) == whole, at


def means_off(world, feedback):
    """How far the mean of 32 outer gradients, always of the same terms, is from the exact one."""
    term = np.random.default_rng(world.rank).standard_normal(300).astype(np.float32)
    exact, total = fompi.all_reduce(term, op="mean", comm=world), np.zeros(300)
    options = {"sync_every": 2, "delay": 1, "outer_lr": 0.0, "wire": "int4", "feedback": feedback}
    with OuterSteps({"w": np.zeros(300, np.float32)}, comm=world, **options) as outer:
        for t in range(1, 65):
            outer.step({"w": -term})
            total += outer.state_dict()["mean"]["w"] if t % 2 == 0 else 0
    return float(np.linalg.norm(total / 32 - exact))


@ON_TWO
def test_feedback_gives_back_what_was_lost(world):
    assert means_off(world, True) < 0.6 * means_off(world, False)


@ON_TWO
def test_moments_travel_less_often(world):
    """DES-LOC: the mean of what is averaged, in every third exchange, without an outer copy."""
    values = {"w": np.zeros(3), "m": np.zeros(5)}
    options = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "averaged": {"m": 3}}
    with OuterSteps(values, comm=world, **options) as outer:
        for t in range(1, 13):
            values = outer.step({name: x + world.rank for name, x in values.items()})
            assert (values["w"] == values["w"][0]).all()
            if t % 6 == 0:
                np.testing.assert_allclose(values["m"], t * (world.size - 1) / 2)
            assert t % 2 or values["w"][0] == pytest.approx(t * (world.size - 1) / 2)


@ON_TWO
@pytest.mark.parametrize("kind", ["jax", "bfloat16", "device"])
def test_other_frameworks_and_half_types(world, device, kind):
    """Outer copies of half types are in float32, so small outer steps add up."""
    made = {
        "jax": lambda a: jnp.asarray(a, jnp.float32),
        "bfloat16": lambda a: np.asarray(a, ml_dtypes.bfloat16),
        "device": lambda a: device.array(np.asarray(a, np.float32)),
    }[kind]

    def on_host(w):
        return w.get() if kind == "device" else np.asarray(w, np.float32)

    values = {"w": made(np.ones(8))}
    with OuterSteps(values, comm=world, sync_every=1, outer_lr=2.0**-12, outer_momentum=0.0) as outer:
        for _ in range(16):
            moved = {"w": made(on_host(values["w"]) - (world.rank + 1))}
            values = outer.step(moved)
        assert type(values["w"]) is type(moved["w"]) and values["w"].dtype == moved["w"].dtype
        kept = outer.state_dict()["outer"]["w"]
    assert kept.dtype == np.float32 and (np.abs(1 - kept - 16 * 2.0**-12 * (world.size + 1) / 2) < 2.0**-12).all()


MISMATCHES = {
    "sync_every": {"sync_every": 8},
    "delay": {"delay": 1},
    "alpha": {"alpha": 0.5},
    "outer_lr": {"outer_lr": 0.5},
    "outer_momentum": {"outer_momentum": 0.5},
    "parameter 'a'": {"fragments": [["b", "c", "d"], ["a", "empty", "scale"]]},
    "wire": {"wire": "int8"},
}


@ON_TWO
@pytest.mark.parametrize("word", MISMATCHES)
def test_another_option_on_one_rank(world, word):
    fragments = [["a", "empty", "scale"], ["b", "c", "d"]]
    options = {"sync_every": 4, "fragments": fragments} | (MISMATCHES[word] if world.rank == 1 else {})
    with pytest.raises(MismatchError, match=f"{word}: .* on rank"):
        OuterSteps(start(np.float32), comm=world, **options)


def test_other_parameters_on_one_rank(world):
    """Another shape when they are made; other contents, and another step, in the first step."""
    params, last = start(), world.rank == world.size - 1
    shaped = {**params, "b": np.zeros(8)} if last else params
    with pytest.raises(MismatchError, match="parameter 'b'"):
        OuterSteps(shaped, comm=world, sync_every=4)
    with (
        OuterSteps({**params, "b": params["b"] + last}, comm=world, sync_every=4) as outer,
        pytest.raises(MismatchError, match="outer of 'b': contents differ"),
    ):
        outer.step(params)
    with OuterSteps(params, comm=world, sync_every=4) as outer:
        state = outer.state_dict()
        outer.load_state_dict(state | {"steps": int(last)})
        with pytest.raises(MismatchError, match="steps: 0 on rank"):
            outer.step(params)
        outer.load_state_dict(state)
        outer.step(params)


def test_an_island_that_cannot_send_refuses_for_all(world):
    """The exchange is left out on all of them. The next one is right, as if there had been no outer step."""
    last, params = world.rank == world.size - 1, {"w": np.zeros(4)}
    with OuterSteps(params, comm=world, sync_every=2, delay=1, outer_momentum=0.0, outer_lr=1.0) as outer:
        outer.step(params)
        if last:
            with pytest.raises(ShapeError, match="'w' was float64"):
                outer.step({"w": np.zeros(5)})
            params = outer.step(params)
        else:
            params = outer.step(params)
            with pytest.raises((MismatchError, PeerError), match="fragment 0 after step 2"):
                outer.step(params)
        for _ in range(2):
            params = outer.step({"w": np.full(4, float(world.rank))})
        np.testing.assert_allclose(params["w"], (world.size - 1) / 2)
    with pytest.raises(StateError, match="closed"):
        outer.step(params)


def test_an_island_that_has_left_out_an_exchange_is_refused(world):
    """As after an error that only some ranks have had: its outer copy is another one."""
    params = start()
    with OuterSteps(params, comm=world, sync_every=2) as outer:
        params = train(outer, params, world.rank, range(1, 3))
        outer._applied[0] -= world.rank == 1
        with pytest.raises(MismatchError, match="fragment 0 after step 4 and 0 of its exchanges"):
            train(outer, params, world.rank, range(3, 5))


def test_wrong_arguments_on_one_rank(world):
    """That rank raises what is wrong, the others a MismatchError."""
    last = world.rank == world.size - 1
    for wrong, kind, words in (
        ({"delay": 4}, LayoutError, "delay=4"),
        ({"sync_every": None}, LayoutError, "sync_every=None"),
        ({"fragments": 2.0}, LayoutError, "fragments=2.0"),
        ({"dely": 1}, ArgumentError, "did you mean 'delay'"),
        ({"averaged": {"x": 2}}, LayoutError, "averaged={'x': 2}"),
        ({"feedback": True}, LayoutError, "needs a wire"),
    ):
        with pytest.raises(kind if last else MismatchError, match=words):
            OuterSteps(start(), comm=world, **{"sync_every": 4, **(wrong if last else {})})
    with OuterSteps(start(), comm=world, sync_every=4) as outer:
        state = outer.state_dict()
        if last:
            with pytest.raises(LayoutError, match="no 'momentum' of 'a'"):
                outer.load_state_dict({name: state[name] for name in ("steps", "applied", "outer")})
        else:
            with pytest.raises(MismatchError, match="the state has no"):
                outer.step(start())
        outer.step(start())


WHERE = "fompi.parallel.outer:"
MUTANTS = {
    "the sign of D": ("OuterRow.term", "(self.outer, x,", "(x, self.outer,"),
    "the blend is the wrong way round": ("OuterRule.blend", "self.alpha * theta + (1 - self.alpha) * target",
        "(1 - self.alpha) * theta + self.alpha * target"),
    "momentum once": ("OuterRule.update", "mean[part] + self.outer_momentum * v)", "v)"),
    "momentum is not kept": ("OuterRule.update", "v *= self.outer_momentum", "v *= 0"),
    "a sum, not a mean": ("OuterSteps._send", '"mean" if', '"sum" if'),
    "a step too late": ("OuterSchedule.applies", "step - self.delay", "step - self.delay - 1"),
    "a step too early": ("OuterSchedule.applies", "step - self.delay", "step - max(0, self.delay - 1)"),
    "fragments in another order on one island": ("OuterSchedule.begins", "(count - 1) % self", "-count % self"),
    "a stale outer copy after a resume": ("OuterSteps.load_state_dict", "row.kept[kind][...] = array", "pass"),
    "the mean on its way is forgotten": ("OuterSteps.load_state_dict", "= flight,", "= None,"),
    "what was lost is forgotten after a resume": ("OuterSteps.load_state_dict", "= array",
        '= array * (kind != "feedback")'),
    "what was lost is never given back": ("OuterSteps._arrived", "row.feedback.keep()", "row.feedback.forget()"),
}  # fmt: skip


def is_found(world):
    """True if one of the tests above finds a planted bug on this rank."""
    try:
        right = has_the_bits(world, "both", 0.25)
        right &= all([continued(world, case, 11) == continued(world, case, 0) for case in RESUMED])
        return not right or not means_off(world, True) < 0.6 * means_off(world, False)
    except (FompiError, AssertionError):
        return True


@ON_TWO
@pytest.mark.parametrize("name", ["nothing", *MUTANTS])
def test_planted_bugs_are_found(world, name):
    """Each of them by one of the tests above."""
    undo, is_here = (lambda: None), "on one island" not in name or world.rank == 1
    if name in MUTANTS and is_here:
        path, old, new = MUTANTS[name]
        undo = plant(WHERE + path, old, new)
    try:
        found = is_found(world)
    finally:
        undo()
    assert fompi.all_reduce(np.array(int(found)), op="max", comm=world) == (name != "nothing")
