"""fompi.sum_replicated, and the table of docs/howto/torch.md that says which parameter needs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fompi

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])


def numbers(tp, *shape, call=0, rank=None):
    random = np.random.default_rng([call, tp.rank if rank is None else rank])
    return random.standard_normal(shape)


SHAPES = [(3, 4), (), (0, 5), (7,), (2, 1, 3)]


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_sums_of_every_shape_and_dtype(tp, make):
    """The sums have the order, shapes, dtypes and framework of the gradients, with one all-reduce per dtype."""
    dtypes = ["float32", "float16", "float32", "int32", "float16"]
    every = [
        [
            np.asarray(8 * numbers(tp, *s, call=i, rank=r)).astype(d)
            for i, (s, d) in enumerate(zip(SHAPES, dtypes, strict=True))
        ]
        for r in range(tp.size)
    ]
    grads = [make(g) for g in every[tp.rank]]
    with tp.record() as traces:
        sums = fompi.sum_replicated(iter(grads), comm=tp)
    assert [trace.title.partition(" ")[0] for trace in traces] == ["all_reduce"] * 3
    for i, (y, grad) in enumerate(zip(sums, grads, strict=True)):
        assert isinstance(y, type(grad)) and y.dtype == grad.dtype and y.shape == grad.shape
        exact = sum(mine[i].astype(np.float64) for mine in every)
        np.testing.assert_allclose(np.asarray(y).astype(np.float64), exact, rtol=2e-3, atol=2e-2)
        assert (np.asarray(grad) == every[tp.rank][i]).all()  # the gradients are not written


def test_sums_in_place(tp):
    """out= may be the gradients themselves, also strided ones and bfloat16."""
    grads = [torch.from_numpy(numbers(tp, 3, 4)).T, torch.ones(5, dtype=torch.bfloat16)]
    assert grads[0].T.is_contiguous()
    addresses = [g.data_ptr() for g in grads]
    exact = sum(numbers(tp, 3, 4, rank=r).T for r in range(tp.size))
    sums = fompi.sum_replicated(grads, comm=tp, out=grads)
    assert all(s is g for s, g in zip(sums, grads, strict=True)) and [g.data_ptr() for g in grads] == addresses
    np.testing.assert_allclose(grads[0].numpy(), exact)
    assert grads[1].tolist() == [tp.size] * 5


def test_no_gradients(tp):
    assert fompi.sum_replicated([], comm=tp) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fompi.sum_replicated([np.ones(2), None]), "gradient 1 has type NoneType"),
        (lambda: fompi.sum_replicated(None), "takes a list of gradients"),
        (lambda: fompi.sum_replicated([np.ones(2)], out=3), "and out= a list too"),
        (lambda: fompi.sum_replicated([np.ones(2)], out=[]), "out= has 0 tensors for 1 gradients"),
        (lambda: fompi.sum_replicated([np.ones(2)], out=[np.ones(3)]), r"out 0 is float64 \(3,\), but its gradient"),
        (lambda: fompi.sum_replicated([np.ones(2)], out=[jnp.ones(2)]), "out 0 is read-only"),
    ],
)
def test_what_one_rank_refuses_is_an_error_on_all_ranks(tp, call, words):
    for origin in {0, tp.size - 1}:
        mine = tp.rank == origin
        with pytest.raises(fompi.TensorError if mine else fompi.MismatchError, match=words):
            call() if mine else fompi.sum_replicated([np.ones(2)])
    assert fompi.all_reduce(np.ones(1)) == tp.size


@pytest.mark.parametrize("count", [2, 20])
def test_ranks_with_other_shapes_raise_an_error(tp, count):
    """Also if they have as many numbers: the sums would be of different parameters."""
    if tp.size == 1:
        return
    shapes = [(2, 3), (6,), *[(2,)] * (count - 2)]
    if tp.rank == 1:
        shapes[:2] = reversed(shapes[:2])
    with pytest.raises(fompi.MismatchError, match=r"gradient 0: float64 \(2, 3\) on rank.*float64 \(6,\) on rank"):
        fompi.sum_replicated([np.ones(s) for s in shapes], comm=tp)
    assert fompi.all_reduce(np.ones(1), comm=tp) == tp.size


# ---------------------------------------------------------------- the table "Gradients" of docs/howto/torch.md


def one_process(scale, up, down, bias, x, target):
    """A block with a norm's scale, a residual connection, a bias, and the mean loss."""
    x = x * scale
    return (x + torch.tanh(x @ up) @ down + bias - target).square().mean()


@pytest.mark.parametrize("sequence", [True, False], ids=["with sequence parallelism", "without"])
def test_the_gradients_of_tensor_parallelism(tp, sequence):
    """Shards: nothing. Replicated parameters: sum_replicated. The loss: see the table."""
    rows, features, hidden = 4 * tp.size, 3, 2 * tp.size
    shapes = [(features,), (features, hidden), (hidden, features), (features,), (rows, features), (rows, features)]
    scale, up, down, bias, x, target = (torch.from_numpy(numbers(tp, *s, call=i, rank=0)) for i, s in enumerate(shapes))
    whole = [t.clone().requires_grad_() for t in (scale, up, down, bias)]
    one_process(*whole, x, target).backward()

    columns, mine = (slice(n * tp.rank, n * (tp.rank + 1)) for n in (2, 4))
    scale, up, down, bias = params = [t.clone().requires_grad_() for t in (scale, up[:, columns], down[columns], bias)]
    if sequence:
        x, target = x[mine] * scale, target[mine]
        y = x + fompi.matmul_reduce_scatter(torch.tanh(fompi.all_gather_matmul(x, up, comm=tp)), down, comm=tp) + bias
        loss = (y - target).square().sum() / (rows * features)
    else:
        x = x * scale
        y = x + fompi.matmul_all_reduce(torch.tanh(x @ up), down, bias=bias, comm=tp)
        loss = (y - target).square().mean() / tp.size
    loss.backward()
    replicated = [scale.grad, bias.grad]
    fompi.sum_replicated(replicated, comm=tp, out=replicated)
    expected = whole[0].grad, whole[1].grad[:, columns], whole[2].grad[columns], whole[3].grad
    for p, e in zip(params, expected, strict=True):
        assert torch.allclose(p.grad, e, rtol=1e-10, atol=1e-12)


def test_the_gradients_of_data_parallelism(tp):
    """Each rank has its own batch: divide the mean by the number of ranks, and sum all gradients."""
    x = torch.from_numpy(numbers(tp, 4 * tp.size, 3, rank=0))
    w, v = (torch.from_numpy(numbers(tp, 3, rank=0)).requires_grad_() for _ in range(2))
    (x @ v).square().mean().backward()
    ((x[4 * tp.rank : 4 * tp.rank + 4] @ w).square().mean() / tp.size).backward()
    (total,) = fompi.sum_replicated([w.grad], comm=tp)
    assert torch.allclose(total, v.grad, rtol=1e-10)


def test_a_tree_of_jax(tp):
    grads = {"norm": jnp.ones(3, jnp.float32), "bias": [jnp.ones(2, jnp.float32)]}
    leaves, tree = jax.tree.flatten(grads)
    sums = jax.tree.unflatten(tree, fompi.sum_replicated(leaves, comm=tp))
    assert (sums["norm"] == tp.size).all() and (sums["bias"][0] == tp.size).all()
