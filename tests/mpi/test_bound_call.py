"""`operation.bind(...)`: what an unbound call gives, at every call, without an agreement."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import drawn

import fompi

WIDTH = 3
NAMES = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter", "reduce"),
    *("all_gather_matmul", "all_gather_matmul bias", "all_gather_matmul_many", "matmul_reduce_scatter"),
    *("matmul_all_reduce", "matmul_all_to_all", "all_to_all_matmul", "all_gather_weight_gradient"),
    "all_gather_matmul_weight_gradient",
    *("all_to_all split", "matmul_all_to_all_columns bias", "all_to_all_columns_matmul", "grouped_matmul_all_to_all"),
    *("all_to_all_grouped_matmul", "all_to_all_grouped_weight_gradient", "all_to_all_grouped_matmul_weight_gradient"),
)


def call_of(name, world, seed=0, dtype=np.float64):
    """(operation, positional tensors, options). Rows are uneven where they may be."""
    size, rank = world.size, world.rank
    own = rank % 3 + 1 if size > 1 else 2
    total = sum(r % 3 + 1 for r in range(size)) if size > 1 else 2
    x = {
        "all_gather": (own, WIDTH), "gather": (own, WIDTH), "broadcast": (4, WIDTH), "scatter": (7, WIDTH),
        "reduce": (4, WIDTH),
        "all_to_all": (2 * size, WIDTH), "matmul_all_to_all": (2 * size, WIDTH), "all_to_all_matmul": (2 * size, WIDTH),
        "reduce_scatter": (2 * size + 1, WIDTH), "matmul_reduce_scatter": (2 * size + 1, WIDTH),
        "all_reduce": (5,), "matmul_all_reduce": (2 * size + 1, WIDTH),
    }.get(name, (own, WIDTH))  # fmt: skip
    operation, _, bias = name.partition(" ")
    tensors = [drawn(*x, seed=10 * seed + rank).astype(dtype)]
    w = [drawn(WIDTH, 2, seed=seed + 5).astype(dtype), drawn(WIDTH, 4, seed=seed + 6).astype(dtype)]
    options = {"bias": drawn(2, seed=seed).astype(dtype)} if bias == "bias" else {}
    if "grouped" in operation:  # one expert on each rank, but two on the first
        return grouped(operation, size, rank, seed)
    if operation == "all_to_all_columns_matmul":
        columns = [2] * size
        tensors = [drawn(total, 2, seed=10 * seed + rank)]
        w = [drawn(sum(columns), 2, seed=seed + 5)]
        options["counts"] = [r % 3 + 1 for r in range(size)] if size > 1 else [2]
    if bias == "split":
        options |= {"split_dim": 1, "concat_dim": 0}
    if operation == "all_gather_matmul_many":
        tensors.append(w)
    elif operation == "all_gather_weight_gradient":
        tensors.append(drawn(total, 2, seed=seed).astype(dtype))
    elif operation == "all_gather_matmul_weight_gradient":
        tensors += [w[0], drawn(total, 2, seed=seed).astype(dtype)]
    elif "matmul" in operation:
        tensors.append(w[0])
    return getattr(fompi, operation), tensors, options


def grouped(operation, size, rank, seed):
    """Each rank has two rows for each expert."""
    experts = [2] + [1] * (size - 1)
    first = operation.startswith("grouped")  # the rank that sends rows multiplies them
    counts = [[2] * experts[rank if first else dest] for dest in range(size)]
    arriving = 2 * size * experts[rank]
    x, h = drawn(sum(map(sum, counts)), WIDTH, seed=10 * seed + rank), drawn(arriving, 2, seed=seed)
    options = {"counts": counts, "experts": sum(experts)}
    w = drawn(experts[rank], WIDTH, 2, seed=seed + rank)
    tensors = [x, *[w] * ("matmul" in operation), *[h] * ("gradient" in operation)]
    return getattr(fompi, operation), tensors, options


def same(a, b):
    if isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_every_operation(world, name):
    """The results of unbound calls, also after the tensors have changed, and of a call that is started."""
    operation, tensors, options = call_of(name, world)
    with operation.bind(*tensors, comm=world, **options) as step:
        same(step(), operation(*tensors, comm=world, **options))
        for x in tensors[:1]:
            x *= 2
        before = world.calls
        y = step()
        assert step.start().wait() is not None and step.done() and world.calls == before  # no agreement
        same(y, operation(*tensors, comm=world, **options))
        assert str(step).startswith(f"<{operation.name}") and step.plan.size == world.size


@pytest.mark.parametrize("name", ["all_gather_matmul", "all_reduce", "all_to_all"])
def test_one_call_on_other_tensors(world, name):
    operation, tensors, options = call_of(name, world)
    _, (other, *_), _ = call_of(name, world, seed=1)
    with operation.bind(*tensors, comm=world, **options) as step:
        given = other if world.rank == 0 else tensors[0]  # each rank decides for itself
        same(step(x=other) if world.rank == 0 else step(), operation(given, *tensors[1:], comm=world))
        same(step(), operation(*tensors, comm=world))


def test_in_place_and_out(world):
    x = drawn(4, 2, seed=world.rank)
    expected = fompi.all_reduce(x, op="mean", comm=world)
    with fompi.all_reduce.bind(x, op="mean", out=x, comm=world) as step:
        assert step() is x
        np.testing.assert_array_equal(x, expected)
        x[...] = world.rank
        step()
        np.testing.assert_array_equal(x, (world.size - 1) / 2)
        other, into = np.full_like(x, 2.0), np.empty_like(x)
        assert step(x=other) is x and np.all(x == 2.0) and np.all(other == 2.0)  # all_reduce(other, out=x)
        assert step(x=other + 1, out=into) is into and np.all(into == 3.0) and np.all(x == 2.0)
    out = np.empty((world.size * 2, 3))
    rows = np.full((2, 3), world.rank + 1.0)
    with fompi.all_gather.bind(rows, out=out, comm=world) as step:
        assert step() is out
        np.testing.assert_array_equal(out[:, 0], np.repeat(np.arange(world.size) + 1.0, 2))
        other = np.empty_like(out)
        assert step(out=other) is other
        np.testing.assert_array_equal(other, out)


@pytest.mark.parametrize("dim", [1, 2])
def test_rows_that_are_not_the_first_dimension(world, dim):
    shape = [3, 4, 5]
    shape[dim] = world.rank + 1
    x = drawn(*shape, seed=world.rank)
    with fompi.all_gather.bind(x, dim=dim, comm=world) as step:
        same(step(), fompi.all_gather(x, dim=dim, comm=world))
        x += 1
        same(step(), fompi.all_gather(x, dim=dim, comm=world))
        other = drawn(*shape, seed=9)
        same(step(x=other), fompi.all_gather(other, dim=dim, comm=world))


@pytest.mark.parametrize("name", ["all_gather_matmul_many", "all_gather_matmul_weight_gradient"])
def test_every_result_has_its_rows_in_the_dimension_of_x(world, name):
    size, rank = world.size, world.rank
    x, w = drawn(2, rank + 1, 3, seed=rank), drawn(3, 4)
    h = drawn(2, size * (size + 1) // 2, 2, seed=1)
    rest = ([w, drawn(3, 2)],) if name == "all_gather_matmul_many" else (w, h)
    operation = getattr(fompi, name)
    with operation.bind(x, *rest, dim=1, comm=world) as step:
        same(step(), operation(x, *rest, dim=1, comm=world))


def test_a_call_on_what_is_no_tensor_is_refused_by_all(world):
    x = np.ones((3, world.rank + 1))
    with fompi.all_gather.bind(x, dim=1, comm=world) as step:
        last = world.rank == world.size - 1
        with pytest.raises(fompi.TensorError if last else fompi.PeerError):
            step(x="nothing") if last else step()
        same(step(), fompi.all_gather(x, dim=1, comm=world))


def test_torch_and_half_types(world):
    torch = pytest.importorskip("torch")
    x, w = torch.ones(2, 3, dtype=torch.bfloat16) * (world.rank + 1), torch.ones(3, 4, dtype=torch.bfloat16)
    with fompi.all_gather_matmul.bind(x, w, comm=world) as step:
        y = step()
        assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16
        assert torch.equal(y, fompi.all_gather_matmul(x, w, comm=world))
    gradient = torch.full((5,), float(world.rank))
    version = gradient._version
    with fompi.all_reduce.bind(gradient, op="mean", out=gradient, comm=world) as step:
        assert step() is gradient and gradient[0] == (world.size - 1) / 2 and gradient._version > version
    with pytest.raises(fompi.TensorError, match=r"fompi.all_reduce.bind has no gradient: pass x.detach\(\)"):
        fompi.all_reduce.bind(torch.ones(3, requires_grad=True), comm=world)


def larger(x):
    kept = x.clone()
    x.untyped_storage().resize_(1 << 16)
    x.copy_(kept)


MOVES = {
    "share_memory_": lambda x: x.share_memory_(),
    "storage.resize_": larger,
    "set_": lambda x: x.set_(x.clone()),
    "data": lambda x: setattr(x, "data", x.clone()),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("how", ["in place", "out", "columns", "plan", "dim"])
def test_memory_that_torch_moves(world, how, move):
    """A bound call reads and writes the tensors where they are, as torch does."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(world.rank)
    x, w, out = torch.randn(4, 3), torch.randn(3, 2 * world.size), torch.empty(4 * world.size, 3)
    rows = fompi.Spec((4 * world.size, 3), "float32", fompi.Shard(0))
    bound = {
        "in place": lambda: fompi.all_reduce.bind(x, out=x, comm=world),
        "out": lambda: fompi.all_gather.bind(x, out=out, comm=world),
        "columns": lambda: fompi.matmul_all_to_all_columns.bind(x, w, comm=world),
        "plan": lambda: fompi.bind(fompi.plan(fompi.all_gather, rows, ranks=world.size), comm=world, x=x, out=out),
        "dim": lambda: fompi.all_gather.bind(x, dim=1, comm=world),
    }[how]
    unbound = {
        "in place": lambda: fompi.all_reduce(x, comm=world),
        "columns": lambda: fompi.matmul_all_to_all_columns(x, w, comm=world),
        "dim": lambda: fompi.all_gather(x, dim=1, comm=world),
    }.get(how, lambda: fompi.all_gather(x, comm=world))
    with bound() as step:
        for number in range(4):
            if number == 1 or (number == 2 and world.rank == 0):
                for tensor in (x, w, out):
                    MOVES[move](tensor)
                dust = [torch.full((n,), -7.0) for n in (12, 24, 48, 96) for _ in range(9)]  # over what was freed
            x += number
            expected = unbound()
            y = step() if number < 3 else step.start().wait()
            assert torch.equal(y.reshape(expected.shape), expected), number
            if how in ("out", "plan"):
                assert torch.equal(out, expected)
            if how == "in place":
                assert torch.equal(x, expected)
            if y is not x and y is not out:
                y.share_memory_()  # a result may move, too
    assert dust


@pytest.mark.parametrize("change", ["resize_", "as many elements", "one dimension more", "t_", "freed"])
def test_a_bound_tensor_of_another_shape_is_refused(world, change):
    """On all ranks, if only one of them has it."""
    torch = pytest.importorskip("torch")
    x = torch.ones(4, 4)
    last = world.rank == world.size - 1
    with fompi.all_reduce.bind(x, comm=world) as step:
        step()
        if last:
            kept = x.clone()
            {
                "resize_": lambda: x.resize_(64, 64),
                "as many elements": lambda: x.resize_(2, 8),
                "one dimension more": lambda: x.unsqueeze_(0),
                "t_": lambda: x.copy_(torch.arange(16.0).view(4, 4)).t_(),
                "freed": lambda: x.untyped_storage().resize_(0),
            }[change]()
        with pytest.raises((fompi.ShapeError, fompi.TensorError) if last else fompi.PeerError):
            step()
        if last:
            x.set_(kept)
        assert torch.equal(step(), torch.full((4, 4), float(world.size)))
        if last:
            x.untyped_storage().resize_(0)
        with pytest.raises(fompi.TensorError if last else (fompi.PeerError, fompi.MismatchError)):
            fompi.all_reduce(x, comm=world)


def test_refusals_reach_all_ranks(world):
    """And the communicator stays in step."""
    last = world.rank == world.size - 1
    wrong = [
        (lambda: fompi.all_reduce.bind(np.ones((4, 4)).T[::2], comm=world), fompi.TensorError, "strided"),
        (lambda: fompi.all_reduce.bind([1, 2], comm=world), fompi.TensorError, "not a tensor"),
        (lambda: fompi.all_reduce.bind(np.ones(3), schedule="rings", comm=world), fompi.PlanError, "rings"),
        (lambda: fompi.all_reduce.bind(np.ones(3), effort="measure", comm=world), fompi.PlanError, "explain"),
        (lambda: fompi.all_reduce.bind(np.ones(3), schedul="ring", comm=world), fompi.ArgumentError, "schedule"),
    ]
    for call, error, words in wrong:
        with pytest.raises(error if last else fompi.MismatchError, match=words if last else ""):
            call() if last else fompi.all_reduce.bind(np.ones(3), comm=world)
        assert fompi.all_reduce(np.ones(2), comm=world)[0] == world.size
    if world.size > 1:
        with pytest.raises(fompi.MismatchError, match="all_reduce"):
            fompi.all_reduce.bind(np.ones(3 + last), comm=world)
    with fompi.all_reduce.bind(np.ones(3), comm=world) as step, pytest.raises(fompi.FompiError):
        step(x=np.ones(4) if last or world.size == 1 else np.ones(3))
    assert fompi.all_reduce(np.ones(2), comm=world)[0] == world.size


def test_labels_are_compared(world, comm):
    own = fompi.Communicator(comm)  # after that it cannot be used any more
    step = fompi.all_reduce.bind(np.ones(3), comm=own)
    assert step(label=1)[0] == world.size
    if world.size > 1:
        with pytest.raises(fompi.MismatchError, match="label"):
            step(label=2 + world.rank)
    own.close()


def test_the_machine_of_the_communicator_chooses(own):
    """As it does in an unbound call, and under jax.jit."""
    own.machine = fompi.Machine.load("gigabit")
    x = np.ones((64 * own.size, 256), np.float32)
    with own.record() as traces:
        fompi.all_reduce(x, comm=own)
    with fompi.all_reduce.bind(x, comm=own) as step:
        assert f" by {step.plan.schedule}" in traces[0].title
        step()
