"""Calls of every differentiable operation, as programs for torch.compile write them: the rows of all ranks are known.

`CASES[name].call(f, ranks, rank, *tensors, comm=...)` calls `f`, the operation of `fompi`, of `fompi.torch` or of
`torch.ops.fompi`.
`drawn(name, comm)` are the tensors of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    shapes: Any  # ranks -> the shapes of the tensors
    call: Any  # (f, ranks, rank, *tensors, **how) -> the result


def sums(f, n, r, x, w, b, **how):
    return f(x, w, bias=b, **how)


def rows(f, n, r, x, *others, **how):
    return f(x, *others, **how)


def inner(f, n, r, x, *others, **how):
    return f(x, *others, dim=1, **how)


def several(f, n, r, x, w, v, b, c, **how):
    return f(x, [w, v], biases=[b, c], **how)


def option(**more):
    return lambda f, n, r, *tensors, **how: f(*tensors, **more, **how)


def last(f, n, r, x, **how):
    return f(x, root=n - 1, **how)


CASES = {
    "all_gather": Case(lambda n: [(3, 2)], rows),
    "all_gather dim": Case(lambda n: [(2, 3, 2)], inner),
    "reduce_scatter": Case(lambda n: [(2, 3 * n + 1, 2)], inner),
    "reduce_scatter max": Case(lambda n: [(3 * n, 2)], option(op="max")),
    "reduce_scatter counts": Case(
        lambda n: [(3, 2)], lambda f, n, r, x, **how: f(x, counts=[3] + [0] * (n - 1), **how)
    ),
    "all_reduce": Case(lambda n: [(3, 2)], rows),
    "all_reduce mean": Case(lambda n: [()], option(op="mean")),
    "all_to_all": Case(lambda n: [(2, 3 * n + 1, 2)], inner),
    "all_to_all split": Case(lambda n: [(3, 2, 2 * n + 1)], option(split_dim=2, concat_dim=0)),
    "broadcast": Case(lambda n: [(3, 2)], last),
    "gather": Case(lambda n: [(3, 2)], last),
    "scatter": Case(lambda n: [(3 * n + 1, 2)], last),
    "reduce": Case(lambda n: [(3, 2)], last),
    "sendrecv": Case(lambda n: [(3, 2)], lambda f, n, r, x, **how: f(x, (r + 1) % n, (r - 1) % n, **how)),
    "sendrecv line": Case(
        lambda n: [(3, 2)],
        lambda f, n, r, x, **how: f(x, r + 1 if r < n - 1 else None, r - 1 if r else None, tag=3, **how),
    ),
    "all_gather_matmul": Case(lambda n: [(3, 4), (4, 2), (2,)], sums),
    "all_gather_matmul dim": Case(lambda n: [(2, 3, 4), (4, 2)], inner),
    "all_gather_matmul_many": Case(lambda n: [(3, 4), (4, 2), (4, 1), (2,), (1,)], several),
    "matmul_reduce_scatter": Case(lambda n: [(3 * n + 1, 4), (4, 2), (2,)], sums),
    "matmul_reduce_scatter dim": Case(lambda n: [(2, 3 * n, 4), (4, 2)], inner),
    "matmul_all_reduce": Case(lambda n: [(2, 3, 4), (4, 2), (2,)], sums),
    "matmul_all_to_all": Case(lambda n: [(3 * n, 4), (4, 2), (2,)], sums),
    "all_to_all_matmul": Case(lambda n: [(2, 3 * n + 1, 4), (4, 2)], inner),
    "matmul_all_to_all_columns": Case(lambda n: [(3, 2, 4), (4, 2 * n), (2 * n,)], sums),
    "all_to_all_columns_matmul": Case(lambda n: [(3 * n + 1, 2), (2 * n, 3), (3,)], sums),
    "all_gather_weight_gradient": Case(lambda n: [(3, 4), (3 * n, 2)], rows),
    "all_gather_matmul_weight_gradient": Case(lambda n: [(3, 4), (4, 2), (3 * n, 5)], rows),
    "all_to_all_weight_gradient": Case(lambda n: [(3 * n, 4), (3 * n, 2)], rows),
    "all_to_all_matmul_weight_gradient": Case(lambda n: [(3 * n, 4), (4, 2), (3 * n, 5)], rows),
}


def drawn(name, comm, dtype=torch.float64):
    """Random tensors of a case, others on each rank."""
    random = torch.Generator().manual_seed(1000 * comm.rank + list(CASES).index(name))
    shapes = CASES[name].shapes(comm.size)
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def tensors(result):
    """The tensors of a result as a list."""
    return [t for each in result for t in tensors(each)] if isinstance(result, (tuple, list)) else [result]
