"""Gradients of gradients in torch, and who wants a gradient: compared with one process in float64."""

import meanings
import numpy as np
import pytest
import torch
from meanings import BASIC, CASES

import fompi

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])

WEIGHTED = [case for case in BASIC if case.weights and not case.dim]


def random_tensor(tp, *shape, call=0, rank=None):
    random = np.random.default_rng([call, tp.rank if rank is None else rank])
    return torch.from_numpy(random.standard_normal(shape))


def close(actual, expected, within=1e-10):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.allclose(actual, expected, rtol=within, atol=within), (actual, expected)


def compare(tp, case, order):
    given = meanings.tensors(case, tp.size, meanings.normal)
    every = [[torch.from_numpy(t).requires_grad_() for t in mine] for mine in given]
    losses = [meanings.loss(rank, mine) for rank, mine in enumerate(meanings.expected(case, every))]
    expected = [of_order[tp.rank] for of_order in meanings.derivatives(losses, every, order)]
    leaves = [torch.from_numpy(t).requires_grad_() for t in given[tp.rank]]
    loss = meanings.loss(tp.rank, case.call(fompi, tp.size, tp.rank, leaves, comm=tp))
    actual = [of_order[0] for of_order in meanings.derivatives([loss], [leaves], order)]
    for mine, theirs in zip(actual, expected, strict=True):
        for a, e in zip(mine, theirs, strict=True):
            close(a, e, within=1e-9)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_derivatives(tp, case):
    """A product of the Hessian with a vector, for every tensor of every operation."""
    compare(tp, case, 2)


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_third_derivatives(tp, case):
    """The weight gradients are differentiated twice here."""
    compare(tp, case, 3)


def test_the_hessian_of_a_sum(tp):
    """The example that was wrong: `inputs=` of torch.autograd.grad, through a linear operation after a square."""
    x = random_tensor(tp, 3).requires_grad_()
    total = fompi.all_reduce(x**2, comm=tp)
    (gradient,) = torch.autograd.grad((total**2).sum(), x, create_graph=True)
    (actual,) = torch.autograd.grad(gradient.sum(), x)
    xs = [random_tensor(tp, 3, rank=r).requires_grad_() for r in range(tp.size)]
    loss = tp.size * (sum(x**2 for x in xs) ** 2).sum()
    gradients = torch.autograd.grad(loss, xs, create_graph=True)
    close(actual, torch.autograd.grad(sum(g.sum() for g in gradients), xs)[tp.rank])


def test_torch_autograd_functional_hvp(tp):
    w, v = random_tensor(tp, 4, 3), random_tensor(tp, 2, 4, call=1)

    def loss(x):
        return torch.tanh(fompi.all_gather_matmul(x, w, comm=tp)).square().sum()

    _, actual = torch.autograd.functional.hvp(loss, random_tensor(tp, 2, 4), v)
    weights = [random_tensor(tp, 4, 3, rank=r) for r in range(tp.size)]

    def whole(*xs):
        return sum(torch.tanh(torch.cat(xs) @ u).square().sum() for u in weights)

    xs, vs = ([random_tensor(tp, 2, 4, rank=r, call=c) for r in range(tp.size)] for c in (0, 1))
    _, expected = torch.autograd.functional.hvp(whole, tuple(xs), tuple(vs))
    close(actual, expected[tp.rank])


def test_second_derivatives_of_complex_numbers(tp):
    """They equal what torch computes for the unfused meaning."""
    x = torch.complex(random_tensor(tp, 3, 4), random_tensor(tp, 3, 4, call=1)).requires_grad_()
    w = torch.complex(random_tensor(tp, 4, 2), random_tensor(tp, 4, 2, call=1)).requires_grad_()
    found = []
    for product in (
        lambda: fompi.all_gather_matmul(x, w, comm=tp),
        lambda: fompi.all_gather(x, comm=tp) @ w,
    ):
        gradients = torch.autograd.grad(product().abs().square().sum(), [x, w], create_graph=True)
        found.append(torch.autograd.grad(sum(g.abs().square().sum() for g in gradients), [x, w]))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


def test_a_backward_without_create_graph_has_no_graph(tp):
    x, w = random_tensor(tp, 2, 4).requires_grad_(), random_tensor(tp, 4, 3).requires_grad_()
    for gradient in torch.autograd.grad(fompi.all_gather_matmul(x, w, comm=tp).sum(), [x, w]):
        assert not gradient.requires_grad and gradient.grad_fn is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func uses it
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "hessian"])
def test_torch_func_is_refused_in_words(tp, transform):
    """Never a wrong value. Later calls work."""

    def f(x):
        return fompi.all_gather(x, comm=tp).square().sum()

    x = random_tensor(tp, 2, 4)
    calls = {
        "grad": lambda: torch.func.grad(f)(x),
        "vjp": lambda: torch.func.vjp(f, x)[1](torch.ones((), dtype=torch.float64)),
        "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
        "vmap": lambda: torch.func.vmap(f)(x),
        "hessian": lambda: torch.func.hessian(f)(x),
    }
    with pytest.raises(fompi.TensorError, match=r"torch\.func|forward-mode tangent|no plain memory"):
        calls[transform]()
    assert fompi.all_reduce(torch.ones(1), comm=tp).item() == tp.size


def test_batched_gradients_are_refused_in_words(tp):
    """`is_grads_batched`, and with it `torch.autograd.functional.hessian(vectorize=True)`."""
    x = random_tensor(tp, 2, 4).requires_grad_()
    y = fompi.all_gather(x, comm=tp)
    with pytest.raises(fompi.TensorError, match="the backward of all_gather: x has no plain memory"):
        torch.autograd.grad(y, x, torch.ones(3, *y.shape, dtype=y.dtype), is_grads_batched=True)
    assert fompi.all_reduce(torch.ones(1), comm=tp).item() == tp.size


def test_forward_mode_is_refused_in_words(tp):
    x = random_tensor(tp, 2, 4)
    for needs in (False, True):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(needs), x)
            with pytest.raises(fompi.TensorError, match="forward-mode tangent"):
                fompi.all_gather(dual, comm=tp)
    assert fompi.all_reduce(torch.ones(1), comm=tp).item() == tp.size


# ------------------------------------------------------------------------------------------- who wants a gradient


def mismatch(tp, call, *words):
    """All ranks raise a MismatchError with these words, and later calls work."""
    with pytest.raises(fompi.MismatchError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value
    assert fompi.all_reduce(torch.ones(1), comm=tp).item() == tp.size


@pytest.mark.parametrize("case", [case for case in BASIC if case.weights], ids=str)
def test_a_tensor_frozen_on_one_rank_only(tp, case):
    """x, a weight or a bias: the forward raises on all ranks, for each of them."""
    if tp.size == 1:
        return
    given = meanings.tensors(case, tp.size, meanings.normal)[tp.rank]
    for number in range(len(given)):
        frozen = number if tp.rank == tp.size - 1 else -1
        leaves = [torch.from_numpy(t).requires_grad_(i != frozen) for i, t in enumerate(given)]
        mismatch(tp, lambda leaves=leaves: case.call(fompi, tp.size, tp.rank, leaves, comm=tp), "for the gradient of x")


def test_two_layers_where_one_weight_is_frozen_on_one_rank(tp):
    """The example that was wrong: the backward of one layer met the backward of the other one."""
    if tp.size == 1:
        return
    x = random_tensor(tp, 2, 4)
    first, second = (random_tensor(tp, 4, 4, call=c).requires_grad_() for c in (1, 2))
    (first if tp.rank else second).requires_grad_(False)

    def loss():
        h = fompi.all_gather_matmul(x, first, comm=tp)
        return fompi.all_gather_matmul(x, second, comm=tp).sum() + h.sum()

    mismatch(tp, lambda: loss().backward(), "for the gradient of w")


def test_one_rank_under_no_grad(tp):
    if tp.size == 1:
        return
    x, w = random_tensor(tp, 2, 4).requires_grad_(), random_tensor(tp, 4, 3).requires_grad_()

    def call():
        with torch.set_grad_enabled(tp.rank != 0):
            return fompi.all_gather_matmul(x, w, comm=tp)

    mismatch(tp, call, "for the gradient of x and w")


def test_the_backwards_of_different_layers_never_meet(tp):
    """Two equal branches, whose backwards start in different orders: an error, where the values would be exchanged."""
    if tp.size == 1:
        return
    xs = [random_tensor(tp, 2, 4, call=c).requires_grad_() for c in (1, 2)]
    totals = [fompi.all_gather(x, comm=tp).sum() for x in xs]
    mine = tp.rank == 0
    mismatch(
        tp, lambda: torch.autograd.grad(totals[mine], xs[mine]), "reduce_scatter", "in the backward of all_gather (call"
    )


def test_an_error_of_a_backward_names_it(tp):
    """Also if the inner operation itself refuses."""
    x, w = random_tensor(tp, 2, 4).requires_grad_(), random_tensor(tp, 4, 3).requires_grad_()
    with fompi.Communicator() as other:
        y = fompi.all_gather_matmul(x, w, comm=other)
    with pytest.raises(fompi.StateError, match=r"the backward of all_gather_matmul: .*closed"):
        y.sum().backward()
