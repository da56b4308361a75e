"""What each differentiable operation means, as code on the tensors of all ranks, in one process, by torch's autograd.

`CASES` are calls with uneven rows, none on some ranks; `tensors(case, ranks)` is what each rank gives, `means` what
each rank gets, `gradients` the derivative of the sum of all ranks' losses. A test compares its rank with that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

K, N = 4, 3  # columns of x, columns of a weight


@dataclass(frozen=True)
class Case:
    """A call of `operation`; `weights` has the columns of each weight, `biased` tells which of them has a bias."""

    operation: str
    weights: tuple[int, ...] = ()
    biased: tuple[bool, ...] = ()
    dim: int = 0
    root: int = 0
    options: dict[str, object] = field(default_factory=dict)  # schedule, slices

    def __str__(self) -> str:
        words = [self.operation, *[f"dim{self.dim}"] * bool(self.dim), *["bias"] * any(self.biased)]
        return "-".join([*words, *map(str, self.options.values())])

    def call(self, namespace, ranks, rank, given, **more):
        """The operation of `namespace` (fompi, fompi.jax) on what `rank` gives: its results as a list."""
        x, weights, biases = self.sorted(given)
        options = dict(self.options)
        if self.operation not in ("all_reduce", "broadcast"):
            options["dim"] = self.dim
        if self.operation == "broadcast":
            options["root"] = self.root % ranks
        if self.operation in ("reduce_scatter", "matmul_reduce_scatter"):
            options["counts"] = kept(ranks)
        if "all_to_all" in self.operation:
            options["counts"] = exchanged(ranks)[rank]
        operation = getattr(namespace, self.operation)
        if self.operation.endswith("_many"):
            full, products = operation(x, weights, biases=biases, **options, **more)
            return [full, *products]
        if weights:
            options["bias"] = biases[0]
        return [operation(x, *weights, **options, **more)]

    def sorted(self, given):
        """x, the weights, and a bias or None for each of them."""
        count = len(self.weights)
        rest = iter(given[1 + count :])
        return given[0], list(given[1 : 1 + count]), [next(rest) if has else None for has in self.biased]


ring, unfused, sliced = {"schedule": "ring"}, {"schedule": "unfused"}, {"schedule": "direct", "slices": 2}
CASES = [
    Case("all_gather"),
    Case("all_gather", dim=1, options=ring),
    Case("all_gather", options=unfused),
    Case("reduce_scatter"),
    Case("reduce_scatter", dim=1, options=unfused),
    Case("reduce_scatter", options=ring),
    Case("all_reduce"),
    Case("all_reduce", options=ring),
    Case("all_reduce", options=unfused),
    Case("broadcast"),
    Case("broadcast", root=1, options=ring),
    Case("all_to_all"),
    Case("all_to_all", dim=1, options=unfused),
    Case("all_gather_matmul", (N,), (False,)),
    Case("all_gather_matmul", (N,), (True,), options=ring),
    Case("all_gather_matmul", (N,), (True,), dim=1, options=sliced),
    Case("all_gather_matmul", (N,), (True,), options=unfused),
    Case("all_gather_matmul_many", (N, 2), (False, True)),
    Case("all_gather_matmul_many", (N, 2), (True, True), dim=1, options=ring),
    Case("matmul_reduce_scatter", (N,), (False,)),
    Case("matmul_reduce_scatter", (N,), (True,), options=ring),
    Case("matmul_reduce_scatter", (N,), (True,), dim=1, options=sliced),
    Case("matmul_reduce_scatter", (N,), (True,), options=unfused),
    Case("matmul_all_reduce", (N,), (True,)),
    Case("matmul_all_reduce", (N,), (True,), dim=1, options=ring),
    Case("matmul_all_reduce", (N,), (False,), options=unfused),
    Case("matmul_all_to_all", (N,), (True,)),
    Case("matmul_all_to_all", (N,), (True,), dim=1, options=unfused),
    Case("all_to_all_matmul", (N,), (True,)),
    Case("all_to_all_matmul", (N,), (True,), dim=1, options=unfused),
]
BASIC = [case for case in CASES if not case.options]
"""Every operation once."""


# ---------------------------------------------------------------------------------------------------------- rows


def own(ranks):
    """Rows that each rank has: none on the third."""
    return [(1, 3, 0, 2, 4, 1, 2, 3)[rank] for rank in range(ranks)]


def kept(ranks):
    """Rows of a sum that each rank keeps: none on the second."""
    return [(2, 0, 3, 1, 1, 4, 0, 2)[rank] for rank in range(ranks)]


def exchanged(ranks):
    """counts[source][dest]; the fourth rank sends nothing, the first one gets nothing (but from itself)."""
    return [[0 if s == 3 or (d == 0 and s) else (s + 2 * d) % 3 + 1 for d in range(ranks)] for s in range(ranks)]


def shape(case, ranks, rank):
    """Of x on this rank: two dimensions, or three if its rows are not the first of them."""
    if "all_to_all" in case.operation:
        rows = sum(exchanged(ranks)[rank])
    elif case.operation.startswith("all_gather"):
        rows = own(ranks)[rank]
    else:
        rows = sum(kept(ranks))
    return (2, rows, K) if case.dim else (rows, K)


# ------------------------------------------------------------------------------------------------------ all ranks


def tensors(case, ranks, draw):
    """What each rank gives: x, the weights, the biases; `draw(random, shape)` makes an array."""
    given = []
    for rank in range(ranks):
        shapes = [shape(case, ranks, rank), *[(K, n) for n in case.weights]]
        shapes += [(n,) for n, has in zip(case.weights, case.biased, strict=True) if has]
        shared = len(shapes) - 1 if case.operation == "matmul_all_reduce" and any(case.biased) else -1  # its bias
        seeds = [[0 if i == shared else rank, i] for i in range(len(shapes))]
        given.append([draw(np.random.default_rng(seed), s) for seed, s in zip(seeds, shapes, strict=True)])
    return given


def normal(random, shape):
    return random.standard_normal(shape)


def small(random, shape):
    """0, 1 and 2: every sum and product of the cases is below 256, and so exact in every dtype."""
    return random.integers(0, 3, shape)


def means(case, given):
    """The results of all ranks, from what all ranks give."""
    ranks, dim = len(given), case.dim
    listed = [case.sorted(tensors) for tensors in given]
    xs = [x for x, _, _ in listed]

    def product(x, rank, i=0, bias=True):
        _, weights, biases = listed[rank]
        y = x @ weights[i]
        return y + biases[i] if bias and biases[i] is not None else y

    def summed(counts):
        """The pieces of sum(x @ w), each with the bias of its owner."""
        pieces = sum(product(x, rank, bias=False) for rank, x in enumerate(xs)).split(counts, dim)
        biases = [biases[0] for _, _, biases in listed]
        return [piece if b is None else piece + b for piece, b in zip(pieces, biases, strict=True)]

    def exchange(xs):
        pieces = [x.split(counts, dim) for x, counts in zip(xs, exchanged(ranks), strict=True)]
        return [torch.cat([pieces[source][rank] for source in range(ranks)], dim) for rank in range(ranks)]

    if case.operation.startswith("all_gather"):
        full = torch.cat(xs, dim)
        products = [[product(full, rank, i) for i in range(len(case.weights))] for rank in range(ranks)]
        keep = case.operation.endswith("_many") or not case.weights
        return [[*[full] * keep, *products[rank]] for rank in range(ranks)]
    if case.operation == "reduce_scatter":
        results = sum(xs).split(kept(ranks), dim)
    elif case.operation == "all_reduce":
        results = [sum(xs)] * ranks
    elif case.operation == "broadcast":
        results = [xs[case.root % ranks]] * ranks
    elif case.operation == "all_to_all":
        results = exchange(xs)
    elif case.operation == "matmul_reduce_scatter":
        results = summed(kept(ranks))
    elif case.operation == "matmul_all_reduce":
        total = xs[0].shape[dim]
        even = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
        results = [torch.cat(summed(even), dim)] * ranks
    elif case.operation == "matmul_all_to_all":
        results = exchange([product(x, rank) for rank, x in enumerate(xs)])
    else:
        assert case.operation == "all_to_all_matmul"
        results = [product(x, rank) for rank, x in enumerate(exchange(xs))]
    return [[y] for y in results]


# ---------------------------------------------------------------------------------------------------- the gradient


def loss(rank, results):
    """A rank's own loss, in any framework: its gradient depends on the results, and on which rank this is."""
    return sum((rank + 2 + i) * (y * y).sum() + (y * (i + 1)).sum() for i, y in enumerate(results))


def gradients(case, ranks):
    """What each rank gives (arrays of float64), the results, and the gradients of the sum of all losses."""
    given = tensors(case, ranks, normal)
    leaves = [[torch.from_numpy(t).requires_grad_() for t in mine] for mine in given]
    results = means(case, leaves)
    total = sum(loss(rank, mine) for rank, mine in enumerate(results))
    flat = torch.autograd.grad(total, [t for mine in leaves for t in mine], materialize_grads=True)
    found = iter(flat)
    return given, [[y.detach() for y in mine] for mine in results], [[next(found) for _ in mine] for mine in leaves]
