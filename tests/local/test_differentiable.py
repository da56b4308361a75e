"""Strategies in frameworks: one adapter makes a forward and a backward a node of autograd, and a custom_vjp of JAX."""

import inspect
from typing import Any

import numpy as np
import pytest

from fompi.base.errors import TensorError
from fompi.base.nested import flatten, unflatten
from fompi.parallel.arrays import borrow, give
from fompi.parallel.differentiable import Differentiable


def _forward(x, w, more=None, bias=None, *, power=1):
    """y = (x @ w) ** power + sum(more) + bias"""
    tensors = [borrow(t, "t") for t in (x, w, *(more or ()))] + ([] if bias is None else [borrow(bias, "bias")])
    a, b, *others = (t.array for t in tensors)
    return give((a @ b) ** power + sum(others), tensors[0]), (tensors, more is not None, bias is not None, power)


def _backward(saved, dy):
    (tx, tw, *others), has_more, has_bias, power = saved
    d = borrow(dy, "dy").array
    dz = d * power * (tx.array @ tw.array) ** (power - 1)
    rest = [give(d, t) for t in others]
    bias = rest.pop() if has_bias else None
    return give(dz @ tw.array.T, tx), give(tx.array.T @ dz, tw), tuple(rest) if has_more else None, bias


def strategy(**keywords):
    return Differentiable(_forward, _backward, tensors=("x", "w", "more", "bias"), inputs=1, **keywords)


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


X, W, M = drawn(2, 3), drawn(3, 4), (drawn(2, 4, seed=1), drawn(2, 4, seed=2))


def test_it_is_a_function_with_a_forward_and_a_backward():
    f = strategy(name="f")
    y, saved = f.forward(X, W, M, power=2)
    assert np.array_equal(f(X, W, M, power=2), y) and np.allclose(y, (X @ W) ** 2 + M[0] + M[1])
    gradients = f.backward(saved, y)
    (dx,), rest = f.backward_input(saved, y)
    assert np.array_equal(dx, gradients[0]) and f.backward_weight(rest)[0] is rest[0]
    assert [g.shape for g in flatten(gradients[:3])] == [(2, 3), (3, 4), (2, 4), (2, 4)] and gradients[3] is None
    assert f.__doc__.startswith("y =") and repr(f).endswith(".f>")
    assert inspect.signature(f).return_annotation is Any, "a call returns y alone, not the pair of `forward`"


def test_arguments_that_do_not_fit_name_the_function():
    with pytest.raises(TypeError, match="f: missing a required argument"):
        strategy(name="f")(X)


def test_halves_of_its_own():
    f = strategy(backward_input=lambda saved, dy: (("dx",), saved), backward_weight=lambda rest: ("dw", rest))
    assert f.backward_input(1, 2) == (("dx",), 1) and f.backward_weight(3) == ("dw", 3)


def test_flatten_and_unflatten():
    like = [1, (2, (3, None)), None, ()]
    assert flatten(like) == [1, 2, 3, None, None]
    assert unflatten(like, "abcde") == ("a", ("b", ("c", "d")), "e", ())


@pytest.mark.parametrize("has_more", [True, False])
def test_torch(has_more):
    torch = pytest.importorskip("torch")
    f = strategy()
    x, w, *more = (torch.from_numpy(t.copy()).requires_grad_() for t in (X, W, *(M if has_more else ())))
    y = f(x, w, tuple(more) if has_more else None, power=3)
    (y * y).sum().backward()
    found = [t.grad for t in (x, w, *more)]
    for t in (x, w, *more):
        t.grad = None
    expected = (x @ w) ** 3 + sum(more)
    (expected * expected).sum().backward()
    assert torch.allclose(y, expected)
    assert all(torch.allclose(a, t.grad) for a, t in zip(found, (x, w, *more), strict=True))
    with torch.no_grad():
        assert not f(x, w).requires_grad
    assert not f(x.detach(), w.detach()).requires_grad


def test_torch_refuses_a_second_derivative_and_changed_tensors():
    torch = pytest.importorskip("torch")
    f, (x, w) = strategy(), (torch.from_numpy(t.copy()).requires_grad_() for t in (X, W))
    with pytest.raises(TensorError, match="no second derivative"):
        torch.autograd.grad(f(x, w, power=2).sum(), x, create_graph=True)
    y = f(x, w)
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("has_more", [True, False])
def test_jax(has_more):
    jax = pytest.importorskip("jax")
    f = strategy()
    tensors = [jax.numpy.asarray(t, "float32") for t in (X, W, *(M if has_more else ()))]

    def loss(call, tensors):
        x, w, *more = tensors
        return (call(x, w, tuple(more)) ** 2).sum()

    found = jax.grad(lambda t: loss(lambda x, w, more: f(x, w, more if has_more else None, power=2), t))(tensors)
    expected = jax.grad(lambda t: loss(lambda x, w, more: (x @ w) ** 2 + sum(more), t))(tensors)
    assert all(np.allclose(a, b, rtol=1e-4) for a, b in zip(found, expected, strict=True))
    assert isinstance(f(*tensors[:2]), jax.Array)


def test_jax_jit():
    jax = pytest.importorskip("jax")
    x, w = (jax.numpy.asarray(t, "float32") for t in (X, W))
    assert np.array_equal(jax.jit(strategy())(x, w), strategy()(x, w))
