"""Messages that carry fewer bits, through the public interfaces: errors within the bound, equal bits on all ranks."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

import fompi
from fompi.backends.half import narrow, storage, widen
from fompi.base.wires import WIDE, WIRES
from fompi.plans.problems import Form, on_wire, problem
from fompi.schedules import registry
from fompi.tensors import dlpack

pytestmark = pytest.mark.ranks(mpich=[2, 3], openmpi=[2])

SUMS = ("all_reduce", "reduce_scatter", "reduce")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "gather", "reduce")


class Case:
    """A random call, drawn alike on all ranks."""

    def __init__(self, world, seed):
        draw = np.random.default_rng(seed)
        self.operation = str(draw.choice(OPERATIONS))
        self.dtype = str(draw.choice(["float32", "bfloat16", "float16"]))
        self.wire = str(draw.choice(WIDE[self.dtype]))
        self.op = str(draw.choice(["sum", "mean"])) if self.operation in SUMS else "sum"
        row = tuple(map(int, draw.integers(1, 70, draw.integers(0, 3))))
        is_whole = self.operation in (*SUMS, "broadcast")
        total = int(draw.choice([0, 1, 2, 7, 300]))
        rows = [total if is_whole else int(draw.choice([0, 1, 5, 90])) for _ in range(world.size)]
        problem_ = problem(self.operation, world.size, Form((0, *row), self.dtype), op=self.op)
        self.schedule = str(draw.choice(["auto", *registry.available(on_wire(problem_, self.wire))]))
        mine = np.random.default_rng([seed, world.rank])
        scale = 10.0 ** float(draw.integers(-3, 3))
        self.inputs = [
            scale * np.random.default_rng([seed, r]).standard_normal((n, *row)).astype(np.float32)
            for r, n in enumerate(rows)
        ]
        if self.dtype != "float32":
            self.inputs = [widen(narrow(x, self.dtype), self.dtype) for x in self.inputs]
        self.world, self.mine = world, mine

    def __str__(self):
        shapes = [x.shape for x in self.inputs]
        return f"{self.operation} {self.op} {self.dtype} wire {self.wire} by {self.schedule}, {shapes}"

    def call(self, **more):
        """The result of this rank as float32. With `certify`, and its bound."""
        x = self.inputs[self.world.rank]
        how = {"op": self.op} if self.op != "sum" else {}
        given = x if self.dtype == "float32" else dlpack.lend(narrow(x, self.dtype), self.dtype, "dlpack")
        how |= {"wire": self.wire, "schedule": self.schedule, "comm": self.world, **more}
        y = getattr(fompi, self.operation)(given, **how)
        y, error = y if "certify" in more else (y, None)
        y = y if self.dtype == "float32" else widen(np.asarray(y.array), self.dtype)
        return y if error is None else (y, error)

    def wanted(self):
        """The exact result of this rank, in float64."""
        rank, size = self.world.rank, self.world.size
        x = [each.astype(np.float64) for each in self.inputs]
        if self.operation in SUMS:
            total = sum(x) / (size if self.op == "mean" else 1)
            if self.operation == "reduce":
                return total if rank == 0 else total[:0]
            return total if self.operation == "all_reduce" else np.array_split(total, size)[rank]
        if self.operation == "broadcast":
            return x[0]
        if self.operation == "all_to_all":
            return np.concatenate([np.array_split(each, size)[rank] for each in x])
        return np.concatenate(x) if self.operation == "all_gather" or rank == 0 else np.concatenate(x)[:0]

    def bound(self):
        """Each rounding is by half a unit of a scale, which is that of the largest term or partial sum at most."""
        wire, size = WIRES[self.wire], self.world.size
        largest = [float(np.abs(x).max(initial=0.0)) for x in self.inputs]
        total = sum(largest)
        each = (wire.of_scale / wire.top if wire.top else 0.0) * total + wire.of_itself * total + wire.least
        of_dtype = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[self.dtype] * total
        return (size + 1) * (each + 2 * of_dtype) + 1e-30 + 2.0**-24 * (self.dtype == "float16")


def check(world, seed):
    case = Case(world, seed)
    got, wanted = case.call(), case.wanted()
    assert got.shape == wanted.shape, str(case)
    error = float(np.abs(got - wanted).max(initial=0.0))
    assert error <= case.bound(), f"{case}: off by {error}, at most {case.bound()}"
    if case.operation in ("all_reduce", "all_gather", "broadcast") and got.size:
        every = fompi.all_gather(got.reshape(1, -1), comm=world)
        assert (every.view(np.uint32) == every[0].view(np.uint32)).all(), str(case)


def check_certified(world, seed):
    """The measured error is at most the certified one, which is at most the a-priori bound, but for float32 itself."""
    case = Case(world, seed)
    got, most = case.call(certify=True, schedule="auto")
    error = float(np.abs(got - case.wanted()).max(initial=0.0))
    assert error <= most, f"{case}: off by {error}, certified are {most}"
    assert most <= 1.2 * case.bound() + 2.0**-22 * sum(np.abs(x).max(initial=0.0) for x in case.inputs), str(case)


def test_random_calls(world):
    for seed in range(100):
        check(world, seed)
    for seed in range(100, 140):
        check_certified(world, seed)


def test_certified_products(own):
    """A product is rounded after it is computed. What is multiplied after it has travelled has no certificate."""
    draw = np.random.default_rng(own.rank)
    x, w = draw.standard_normal((12, 20)).astype(np.float32), draw.standard_normal((20, 7)).astype(np.float32)
    exact = {"matmul_reduce_scatter": fompi.matmul_reduce_scatter, "matmul_all_reduce": fompi.matmul_all_reduce}
    for wire in WIRES:
        for name, operation in exact.items():
            wanted = operation(x.astype(np.float64), w.astype(np.float64), comm=own)
            y, error = operation(x, w, wire=wire, certify=True, comm=own)
            assert 0 < np.abs(y - wanted).max() <= error + 1e-5 and error < 200 * np.abs(y - wanted).max(), name
    with pytest.raises(fompi.PlanError, match="multiplied here"):
        fompi.all_gather_matmul(x, w, wire="int8", certify=True, comm=own)


def test_a_bound_call_is_certified_again_and_again(own):
    x = np.zeros(300, np.float32)
    out = np.empty_like(x)
    with fompi.all_reduce.bind(x, wire="int8", certify=True, out=out, comm=own) as step:
        with pytest.raises(fompi.StateError, match="no result is certified"):
            _ = step.error
        for scale in (1.0, 100.0, 0.0):
            x[:] = scale * np.random.default_rng(own.rank).standard_normal(300)
            assert step() is out
            wanted = fompi.all_reduce(x.astype(np.float64), comm=own)
            assert np.abs(out - wanted).max() <= step.error <= 0.03 * own.size * scale + 1e-30
        x[5] = np.nan if own.rank == 0 else 1
        step.start().wait()
        assert step.error == np.inf


CERTIFIED = [
    ({"schedule": "ring"}, "written over"),
    ({"wire": None}, "needs a wire"),
]


@pytest.mark.parametrize(("how", "words"), CERTIFIED, ids=str)
def test_calls_that_cannot_be_certified(own, how, words):
    x = np.ones(40, np.float32)
    if own.size == 2 and "schedule" in how:
        return  # a ring of two ranks sends no block twice
    with pytest.raises(fompi.PlanError, match=words):
        fompi.all_reduce(x, **{"wire": "int8", "certify": True, "comm": own, **how})
    with pytest.raises(fompi.PlanError, match="not for start"):
        fompi.all_reduce.start(x, wire="int8", certify=True, comm=own)
    with pytest.raises(fompi.MismatchError, match="certified"):
        fompi.all_reduce(x, wire="int8", certify=own.rank == 0, comm=own)
    y, error = fompi.all_reduce(x, wire="int8", certify=True, comm=own)
    assert np.abs(y - own.size).max() <= error < 0.1


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 11_000, 500))
def test_many_random_calls(world, first):
    """10,000 of them, and every tenth also with a certificate."""
    for seed in range(first, first + 500):
        check(world, seed)
        if seed % 10 == 0:
            check_certified(world, seed)


def test_all_schedules_have_the_same_bits_in_and_out_of_place(own):
    x = np.random.default_rng(own.rank).standard_normal(1000).astype(np.float32)
    for turn in range(4):
        y = fompi.all_reduce(x, wire="int8", comm=own)
        z = x.copy()
        assert fompi.all_reduce(z, wire="int8", out=z, comm=own) is z
        np.testing.assert_array_equal(y, z, err_msg=str(turn))
    step = fompi.all_reduce.bind(x, wire="int8", comm=own)
    np.testing.assert_array_equal(step(), y)
    np.testing.assert_array_equal(fompi.all_reduce.start(x, wire="int8", comm=own).wait(), y)
    assert step.plan.roundings == 2 and step.plan.problem.wire == "int8"


WRONG = [
    ({"wire": "int3"}, np.float32, fompi.DtypeError, "known are bfloat16"),
    ({"wire": 8}, np.float32, fompi.DtypeError, "known are bfloat16"),
    ({"wire": "int8"}, np.int64, fompi.DtypeError, "int64 is sent as it is"),
    ({"wire": "int8"}, np.float64, fompi.DtypeError, "float64 is sent as it is"),
    ({"wire": "int8", "op": "max"}, np.float32, fompi.DtypeError, "only sums and means"),
    ({"wire": "int8", "schedule": "exchange"}, np.float32, fompi.PlanError, "cannot carry the wire int8"),
]


@pytest.mark.parametrize(("how", "dtype", "error", "words"), WRONG)
def test_wrong_use(own, how, dtype, error, words):
    """On all ranks it is this error; where one rank alone is wrong, a MismatchError on the others."""
    with pytest.raises(error, match=words):
        fompi.all_reduce(np.ones(4, dtype), comm=own, **how)
    with pytest.raises(error if own.rank == 0 else fompi.MismatchError, match=words):
        fompi.all_reduce(np.ones(4, dtype), comm=own, **(how if own.rank == 0 else {}))
    assert fompi.all_reduce(np.ones(4, np.float32), wire="int8", comm=own).tolist() == [own.size] * 4


def test_another_wire_on_one_rank(own):
    with pytest.raises(fompi.MismatchError, match=r"wire int8.*wire int4|wire int4.*wire int8"):
        fompi.all_reduce(np.ones(4, np.float32), wire="int4" if own.rank else "int8", comm=own)


# ------------------------------------------------------------------------------------------------------- frameworks


def wires_of(comm):
    """The wires of all problems that `comm` has planned."""
    return {key[0].wire for key in comm.plans}


def test_gradients_of_torch_have_the_same_wire(own):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(own.rank)
    x, w = (torch.tensor(rng.standard_normal(shape), dtype=torch.float32) for shape in ((6, 5), (5, 4)))
    exact = []
    for wire in (None, "int8"):
        a, b = (t.clone().requires_grad_() for t in (x, w))
        y = fompi.all_gather_matmul(a, b, wire=wire, comm=own)
        fompi.matmul_reduce_scatter(torch.relu(y), torch.ones(4, 3), wire=wire, comm=own).square().sum().backward()
        exact.append((y.detach(), a.grad, b.grad))
        if wire is None:
            own.plans.clear()
    assert wires_of(own) == {"int8"}
    for plain, rounded in zip(*exact, strict=True):
        scale = plain.abs().max()
        assert 0 < (plain - rounded).abs().max() < 0.1 * scale


def test_certificates_of_torch(own):
    torch = pytest.importorskip("torch")
    x = torch.randn(200, generator=torch.Generator().manual_seed(own.rank))
    y, error = fompi.all_reduce(x, wire="int8", certify=True, comm=own)
    assert type(y) is torch.Tensor and (y - fompi.all_reduce(x.double(), comm=own)).abs().max() <= error
    for call in (fompi.all_reduce, import_module("fompi.torch").all_reduce):
        assert call(x, wire="int8", certify=True, comm=own)[1] == error
        with pytest.raises(fompi.TensorError, match="no gradient"):
            call(x.clone().requires_grad_(), wire="int8", certify=True, comm=own)


def test_jax(own):
    jax = pytest.importorskip("jax")
    import_module("fompi.jax")
    x = jax.numpy.asarray(np.random.default_rng(own.rank).standard_normal(130).astype(np.float32))
    y = fompi.all_reduce(x, wire="int8", comm=own)
    jitted = jax.jit(lambda x: fompi.jax.all_reduce(x, wire="int8", comm=own))(x)
    np.testing.assert_array_equal(np.asarray(jitted), np.asarray(y))
    own.plans.clear()
    gradient = jax.grad(lambda x: (fompi.jax.all_reduce(x, wire="int8", comm=own) ** 2).sum())(x)
    assert np.isfinite(np.asarray(gradient)).all() and wires_of(own) == {"int8"}


def test_torch_compile(own):
    torch = pytest.importorskip("torch")
    import fompi.torch

    x = torch.tensor(np.random.default_rng(own.rank).standard_normal(130), dtype=torch.float32)

    def summed(x):
        return fompi.torch.all_reduce(x, wire="int8", comm=own) + 1

    compiled = torch.compile(summed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), fompi.all_reduce(x, wire="int8", comm=own) + 1, rtol=0, atol=0)


def test_half_storage_is_that_of_the_program(own):
    """A result of bfloat16 is bfloat16, of what was summed in float32."""
    x = dlpack.lend(narrow(np.full(200, 1 + 0.5 * own.rank, np.float32), "bfloat16"), "bfloat16", "dlpack")
    y = fompi.all_reduce(x, wire="int8", comm=own)
    assert np.asarray(y.array).dtype == storage("bfloat16")
    wanted = sum(1 + 0.5 * rank for rank in range(own.size))
    np.testing.assert_allclose(widen(np.asarray(y.array), "bfloat16"), wanted, rtol=0.02)
