"""The operators `torch.ops.fompi` on several ranks: compiled programs equal those without the compiler.

All operations are in few programs, because each one that is compiled takes seconds.
"""

import numpy as np
import operators
import pytest
import torch
from operators import CASES, drawn

import fompi
from fompi.base.errors import LaunchError, LayoutError, MismatchError, PlanError, ShapeError

MOVES = [name for name in CASES if "matmul" not in name and "gradient" not in name]
PRODUCTS = [name for name in CASES if name not in MOVES]

pytestmark = [pytest.mark.ranks(mpich=[2], openmpi=[]), pytest.mark.one_mpi]


@pytest.fixture(autouse=True)
def fresh():
    torch.set_num_threads(1)
    torch._dynamo.reset()


def compiled(f):
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def run(tp, names, namespace, compile=lambda f: f):
    """The results of all calls on twice the tensors, and the gradients of the sum of their squares."""
    calls = [(CASES[name].call, getattr(namespace, name.split()[0])) for name in names]

    def program(*given):
        found = [call(f, tp.size, tp.rank, *[2 * t for t in ts], comm=tp) for (call, f), ts in zip(calls, given)]  # noqa: B905
        return operators.tensors(found)

    given = [drawn(name, tp) for name in names]
    results = compile(program)(*given)
    sum(y.square().sum() for y in results).backward()
    return [y.detach() for y in results], [t.grad for ts in given for t in ts]


@pytest.mark.timeout(110)  # two compilations, on all ranks at the same time
@pytest.mark.parametrize("names", [MOVES, PRODUCTS], ids=["moves", "products"])
def test_compiled_equals_eager(tp, names):
    """Results, their strides, and gradients, of `fompi.<operation>` and of `fompi.torch.<operation>`."""
    expected = run(tp, names, fompi)
    for actual in (run(tp, names, fompi, compiled), run(tp, names, fompi.torch)):
        for mine, theirs in zip(actual, expected, strict=True):
            for a, e in zip(mine, theirs, strict=True):
                assert a.stride() == e.stride() and torch.allclose(a, e, rtol=1e-12, atol=1e-12)


def test_calls_run_on_all_ranks_used_or_not(tp):
    """Only rank 0 uses the result of the reduce, and nobody that of the all-gather."""

    @compiled
    def program(x):
        total = fompi.reduce(x.detach(), comm=tp)
        fompi.all_gather(x.detach(), comm=tp)
        y = fompi.all_reduce(x, comm=tp)
        return y + total.sum() if tp.rank == 0 else y

    for _ in range(2):
        before, x = tp.calls, torch.ones(3, requires_grad=True)
        y = program(x)
        y.sum().backward()
        assert tp.calls - before == 4 and x.grad.tolist() == [tp.size] * 3
        assert y.tolist() == [tp.size + 3 * tp.size * (tp.rank == 0)] * 3


def test_a_communicator_that_carries_keywords(tp):
    """A wire, which integers do not take and a keyword of the call replaces, and an order of leaves."""
    wired, ordered = tp.using(wire="int8"), tp.using(order=fompi.Canonical(2 * tp.size))
    x, n = torch.randn(64, generator=torch.Generator().manual_seed(tp.rank)), torch.arange(3)

    def program(x, n):
        leaves = fompi.all_reduce([x, 2 * x], comm=ordered)
        return (
            *(fompi.all_reduce(each, comm=wired) for each in (x, n)),
            fompi.all_reduce(x, comm=wired, wire=None),
            leaves,
        )

    right = [fompi.all_reduce(x, comm=tp, wire="int8"), n * tp.size, fompi.all_reduce(x, comm=tp)]
    right.append(fompi.all_reduce([x, 2 * x], comm=tp, order=fompi.Canonical(2 * tp.size)))
    for found in (program(x, n), compiled(program)(x, n)):
        assert all(map(torch.equal, found, right))


def test_rows_that_go_to_experts_are_outside_of_the_graph(tp):
    """The call runs as without the compiler. `fompi.torch` takes no arriving= for it."""

    def program(x, w):
        y = fompi.all_to_all_grouped_matmul(2 * x, w, counts=[[1, 2]] * tp.size, comm=tp)
        return fompi.torch.all_to_all_grouped_matmul(y, w.mT, counts=[[1, 2]] * tp.size, comm=tp).square().sum()

    x, w = torch.ones(3 * tp.size, 2, requires_grad=True), torch.ones(2, 2, 4, requires_grad=True)
    expected = torch.autograd.grad(program(x, w), (x, w))
    actual = torch.autograd.grad(torch.compile(program, backend="eager")(x, w), (x, w))
    assert all(map(torch.equal, actual, expected))
    with pytest.raises(LayoutError, match="takes no arriving="):
        fompi.torch.all_to_all_grouped_matmul(x, w, counts=[[1, 2]] * tp.size, arriving=[3] * tp.size, comm=tp)


def test_uneven_rows(tp):
    """The compiler is told the rows of the other ranks. Without that, all ranks get an error."""
    counts = [r + 1 for r in range(tp.size)]
    x, w = torch.randn(counts[tp.rank], 4, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)

    def gradients(program):
        leaf = x.clone().requires_grad_()
        y = program(leaf)
        y.square().sum().backward()
        return y.detach(), leaf.grad

    expected = gradients(lambda x: fompi.all_gather_matmul(x, w, comm=tp))
    actual = gradients(compiled(lambda x: fompi.torch.all_gather_matmul(x, w, comm=tp, arriving=counts)))
    assert all(map(torch.equal, actual, expected))
    sent = torch.ones(sum(counts), 2)
    y = compiled(lambda x: fompi.torch.all_to_all(x, counts=counts, comm=tp, arriving=[tp.rank + 1] * tp.size))(sent)
    assert torch.equal(y, torch.ones((tp.rank + 1) * tp.size, 2))
    if tp.size > 1:
        with pytest.raises(ShapeError, match=r"rows are gathered.*x must have the same shape on all ranks.*arriving="):
            compiled(lambda x: fompi.all_gather(x, comm=tp))(x)
        with pytest.raises(ShapeError, match=r"has sent the shape .* but x has"):
            compiled(lambda x: fompi.sendrecv(x, (tp.rank + 1) % tp.size, (tp.rank - 1) % tp.size, comm=tp))(x)


def test_a_replicated_loss_counts_once(tp):
    """A block with replicated input, output and loss: the gradients are those of one process, not `size` times them."""
    random = torch.Generator().manual_seed(3)
    x, up, down, b = (
        torch.randn(s, generator=random).double() for s in ((3, 4), (4, 2 * tp.size), (2 * tp.size, 4), (4,))
    )
    mine = slice(2 * tp.rank, 2 * tp.rank + 2)

    def block(x, up, down, b):
        h = torch.tanh(fompi.torch.replicated_matmul(x, up, comm=tp))
        return fompi.torch.matmul_all_reduce(h, down, bias=b, comm=tp, gradient="replicated")

    leaves = [t.clone().requires_grad_() for t in (x, up, down, b)]
    (torch.tanh(leaves[0] @ leaves[1]) @ leaves[2] + leaves[3]).square().sum().backward()
    expected = [leaves[0].grad, leaves[1].grad[:, mine], leaves[2].grad[mine], leaves[3].grad]
    for program in (block, compiled(block)):
        own = [t.clone().requires_grad_() for t in (x, up[:, mine], down[mine], b)]
        program(*own).square().sum().backward()
        assert all(torch.allclose(t.grad, e, rtol=1e-10) for t, e in zip(own, expected, strict=True))


def test_moves_of_a_replicated_loss(tp):
    """The results of these are replicated: their backward has no messages."""
    names = ["all_gather", "all_reduce", "broadcast"]
    for name in names:
        (x,) = drawn(name, tp)
        y = CASES[name].call(getattr(fompi.torch, name), tp.size, tp.rank, x, comm=tp, gradient="replicated")
        before = tp.calls
        y.backward(torch.ones_like(y))
        is_source = name != "broadcast" or tp.rank == tp.size - 1
        assert tp.calls == before and torch.equal(x.grad, torch.full_like(x, float(is_source)))


def test_second_derivatives(tp):
    """The operators of the backward have a backward, with the rows of the forward."""

    def hessian(f):
        x, w, b = drawn("matmul_reduce_scatter", tp)
        y = CASES["matmul_reduce_scatter"].call(f, tp.size, tp.rank, x, w, b, comm=tp)
        grads = torch.autograd.grad(y.pow(3).sum(), (x, w, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w, b))

    for actual, expected in zip(
        hessian(fompi.torch.matmul_reduce_scatter), hessian(fompi.matmul_reduce_scatter), strict=True
    ):
        assert torch.allclose(actual, expected, rtol=1e-10)


def test_second_derivatives_of_a_replicated_loss(tp):
    """The loss counts once, and the sum over all ranks of the squares of its gradients is differentiated."""
    random = torch.Generator().manual_seed(5)
    xs, w = torch.randn(tp.size, 2, 3, generator=random).double(), torch.randn(3, 2, generator=random).double()

    def gradient(x, loss):
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    every = xs.clone().requires_grad_()
    expected = gradient(every, every.square().sum(0).pow(3).sum() + (every.square() @ w).sum(0).pow(3).sum())
    x = xs[tp.rank].clone().requires_grad_()
    how = {"comm": tp, "gradient": "replicated"}
    sums, products = fompi.torch.all_reduce(x.square(), **how), fompi.torch.matmul_all_reduce(x.square(), w, **how)
    assert torch.allclose(gradient(x, sums.pow(3).sum() + products.pow(3).sum()), expected[tp.rank], rtol=1e-10)


def test_second_derivatives_through_results_of_each_rank(tp):
    """With a replicated loss: a reduce-scatter or a reduce belongs to each rank, so its gradient does too."""
    random = torch.Generator().manual_seed(7)
    xs, vs = torch.randn(2, tp.size, 2 * tp.size, generator=random).double()
    every = xs.clone().requires_grad_()
    (g,) = torch.autograd.grad(every.sum(0).pow(3).sum(), every, create_graph=True)
    (expected,) = torch.autograd.grad((g * vs).sum(), every)
    how = {"comm": tp, "gradient": "replicated"}

    def scattered(x):
        return fompi.torch.all_gather(fompi.torch.reduce_scatter(x, **how), **how).pow(3).sum()

    def reduced(x):
        y = fompi.torch.reduce(x, **how)
        return fompi.torch.broadcast(y if tp.rank == 0 else y.sum().expand(x.shape), **how).pow(3).sum()

    def summed(x):
        return fompi.torch.all_reduce(fompi.torch.reduce_scatter(x, **how).pow(3).sum(), **how)

    for loss in (scattered, reduced, summed):
        x = xs[tp.rank].clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
        (second,) = torch.autograd.grad(fompi.torch.all_reduce((g * vs[tp.rank]).sum(), **how), x)
        assert torch.allclose(second, expected[tp.rank], rtol=1e-10), loss.__name__


def test_arriving_is_compared_with_what_the_ranks_send(tp):
    rank, size = tp.rank, tp.size
    x = torch.ones(3 + rank, 2, requires_grad=True)
    right = [3 + r for r in range(size)]
    assert len(fompi.torch.all_gather(x, comm=tp, arriving=right)) == sum(right)
    for wrong in (right[:-1], [*right, 0], [right[0] + 1, *right[1:]]):
        with pytest.raises((ShapeError, MismatchError), match=r"arriving=\[.*\] must be the rows from each of"):
            fompi.torch.all_gather(x, comm=tp, arriving=wrong)
    if size == 1:
        return
    with pytest.raises(ShapeError, match="must be the rows from each of"):
        fompi.torch.all_gather(x, comm=tp, arriving=right[::-1] if size == 2 else right[1:] + right[:1])
    other = list(right)
    other[1 - min(rank, 1)] += 1  # the entry of this rank is right, that of rank 0 or 1 is not
    other[-1] -= size > 2 and rank < size - 1
    with pytest.raises((ShapeError, MismatchError)):
        fompi.torch.all_gather(x, comm=tp, arriving=other)
    each, sent = torch.ones((1 + rank) * size, requires_grad=True), [1 + r for r in range(size)]
    how = {"counts": [1 + rank] * size, "comm": tp}
    assert len(fompi.torch.all_to_all(each, arriving=sent, **how)) == sum(sent)
    skewed, (i, j) = list(sent), (rank, (rank + 1) % size)
    if size > 2:  # the entry of this rank and the sum are right
        i = (rank + 2) % size
    skewed[i], skewed[j] = skewed[j], skewed[i]
    with pytest.raises(ShapeError, match=r"rows arrive here, a number from each rank|must be the rows from each of"):
        fompi.torch.all_to_all(each, arriving=skewed, **how)


def test_what_one_rank_refuses_is_an_error_on_all(tp):
    """Arguments that torch would refuse on this rank alone, or on which a shape cannot be computed."""
    refuses, x = tp.rank == tp.size - 1, torch.ones(2, 2)

    def check(error, call, wrong, right):
        with pytest.raises(error if refuses else MismatchError):
            call(**{**right, **(wrong if refuses else {})})

    t, how = fompi.torch, {"x": x, "comm": tp}
    check(ShapeError, t.all_gather, {"x": x.sum()}, how)
    check(ShapeError, t.all_to_all, {"x": x.sum()}, {**how, "split_dim": 0, "concat_dim": 1})
    check(ShapeError, t.all_gather_matmul, {"w": x.sum()}, {**how, "w": x})
    for root in (None, "0", 0.0, tp.size):
        check(LayoutError, t.broadcast, {"root": root}, how)
    check(ShapeError, t.all_gather, {"dim": None}, how)
    check(LayoutError, t.all_reduce, {"op": None}, how)
    check(LayoutError, t.reduce_scatter, {"counts": 5}, {**how, "dim": 0})
    check(LayoutError, t.gather, {"root": tp.size}, how)
    check(TypeError, t.all_gather, {"arriving": 5}, how)
    check(PlanError, t.all_gather, {"schedule": 5}, how)
    check(PlanError, t.all_gather, {"slices": 2.5}, how)
    check(LaunchError, t.all_gather, {"comm": 5}, {"x": x})
    assert t.broadcast(x, root=np.int64(0), comm=tp).equal(x)
    short = torch.ones(2 * tp.size, 2, 2)
    for call in (
        lambda x: t.all_to_all(x, split_dim=0, concat_dim=1, counts=[2] * (tp.size + 1), comm=tp),
        lambda x: t.all_to_all(x.sum(), split_dim=0, concat_dim=1, comm=tp),
        lambda x: t.all_gather(x.sum(), comm=tp),
    ):
        with pytest.raises((LayoutError, ShapeError)):
            compiled(call)(short)


@pytest.mark.parametrize("compile", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_ranks_that_want_other_gradients_disagree_in_the_forward(tp, compile):
    if tp.size == 1:
        return
    first = tp.rank == 0
    x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=first)
    with pytest.raises(MismatchError, match=r"for the gradient of x and w \(sum\).*for the gradient of x \(sum\)"):
        compile(lambda x, w: fompi.torch.all_gather_matmul(x, w, comm=tp))(x, w)
    convention = "sum" if first else "replicated"
    with pytest.raises(MismatchError, match=r"gradient of x \(sum\).*gradient of x \(replicated\)"):
        compile(lambda x: fompi.torch.all_reduce(x, comm=tp, gradient=convention))(x)
    with torch.no_grad():
        assert compile(lambda x: fompi.torch.all_reduce(x, comm=tp, gradient=convention))(x).sum() == 4 * tp.size
