"""A reference for each differentiable operation: torch code on the tensors of all ranks in one process.

`CASES` are calls with uneven rows; some ranks have no rows. `tensors(case, ranks)` are the inputs of each rank,
`expected` the results of each rank, and `gradients` the gradients of the sum of the losses of all ranks. A test
compares the values of its own rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from fompi.base.layout import split

K, N = 4, 3  # columns of x, columns of a weight


@dataclass(frozen=True)
class Case:
    """A call of `operation`. `weights` are the columns of each weight, `biased` says which weights have a bias.

    `split` is the dimension that an all-to-all splits, if it is not `dim`.
    """

    operation: str
    weights: tuple[int, ...] = ()
    biased: tuple[bool, ...] = ()
    dim: int = 0
    root: int = 0
    options: dict[str, object] = field(default_factory=dict)  # schedule, slices
    split: int | None = None

    @property
    def deals(self) -> bool:
        """True if columns travel."""
        return "columns" in self.operation

    def __str__(self) -> str:
        words = [self.operation, *[f"dim{self.dim}"] * bool(self.dim), *["bias"] * any(self.biased)]
        words += [f"split{self.split}"] * (self.split is not None)
        return "-".join([*words, *map(str, self.options.values())])

    def call(self, namespace, ranks, rank, given, **more):
        """Call the operation of `namespace` (fompi or fompi.jax) on the inputs of `rank`. Returns a list of results."""
        x, weights, biases = self.operands(given)
        options = dict(self.options)
        if self.operation not in ("all_reduce", "broadcast", "reduce") and not self.deals:
            options["dim"] = self.dim
        if self.operation in ("broadcast", "gather", "scatter", "reduce"):
            options["root"] = self.root % ranks
        if self.operation == "scatter" and rank == options["root"]:
            options["counts"] = kept(ranks)
        if self.operation in ("reduce_scatter", "matmul_reduce_scatter"):
            options["counts"] = kept(ranks)
        if self.split is not None:
            extent = given[0].shape[self.split]
            options |= {"split_dim": self.split, "concat_dim": options.pop("dim"), "counts": parts(extent, ranks)}
        elif self.deals:
            options["columns"] = parts(weights[0].shape[self.operation == "matmul_all_to_all_columns"], ranks)
            if self.operation == "all_to_all_columns_matmul":
                options["counts"] = kept(ranks)
        elif "all_to_all" in self.operation:
            options["counts"] = exchanged(ranks)[rank]
        operation = getattr(namespace, self.operation)
        if self.operation.endswith("_many"):
            full, products = operation(x, weights, biases=biases, **options, **more)
            return [full, *products]
        if weights:
            options["bias"] = biases[0]
        return [operation(x, *weights, **options, **more)]

    def operands(self, given):
        """x, the weights, and for each weight its bias or None."""
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
    Case("all_reduce", options={"op": "mean"}),
    Case("all_reduce", options={"op": "max"}),
    Case("reduce_scatter", options={"op": "min"}),
    Case("reduce_scatter", dim=1, options={"op": "mean"}),
    Case("reduce"),
    Case("reduce", root=1, options={"op": "max"}),
    Case("reduce", root=2, options={"op": "mean"}),
    Case("gather"),
    Case("gather", root=1, dim=1, options=unfused),
    Case("scatter"),
    Case("scatter", root=1, dim=1, options=unfused),
    Case("all_to_all"),
    Case("all_to_all", dim=1, options=unfused),
    Case("all_to_all", split=1),
    Case("all_to_all", dim=1, split=0, options=sliced),
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
    Case("matmul_all_to_all_columns", (N,), (True,)),
    Case("all_to_all_columns_matmul", (N,), (True,)),
]
BASIC = [case for case in CASES if not case.options]
"""The cases with default options."""


# ---------------------------------------------------------------------------------------------------------- rows


def own(ranks):
    """The rows of each rank. The third rank has none."""
    return [(1, 3, 0, 2, 4, 1, 2, 3)[rank] for rank in range(ranks)]


def kept(ranks):
    """The rows of a sum that each rank keeps. The second rank keeps none."""
    return [(2, 0, 3, 1, 1, 4, 0, 2)[rank] for rank in range(ranks)]


def exchanged(ranks):
    """counts[source][dest]. The fourth rank sends nothing. The first rank receives only from itself."""
    return [[0 if s == 3 or (d == 0 and s) else (s + 2 * d) % 3 + 1 for d in range(ranks)] for s in range(ranks)]


def parts(extent, ranks):
    """How much of a dimension each rank gets. The last rank gets as much as all others together."""
    return [extent] if ranks == 1 else [*split(extent // 2, ranks - 1), extent - extent // 2]


def shape(case, ranks, rank):
    """The shape of x on this rank: (rows, K), or (2, rows, K) if the rows are the second dimension."""
    if case.deals:
        first = case.operation == "matmul_all_to_all_columns"
        return (own(ranks)[rank], 2, K) if first else (sum(kept(ranks)), 2, parts(K, ranks)[rank])
    if "all_to_all" in case.operation and case.split is None:
        rows = sum(exchanged(ranks)[rank])
    elif case.operation.startswith(("all_gather", "gather")) or case.split is not None:
        rows = own(ranks)[rank]
    elif case.operation == "scatter" and rank != case.root % ranks:
        rows = rank  # nobody reads them
    else:
        rows = sum(kept(ranks))
    return (2, rows, K) if case.dim else (rows, K)


# ------------------------------------------------------------------------------------------------------ all ranks


def tensors(case, ranks, draw):
    """The inputs of each rank: x, the weights, the biases. `draw(random, shape)` makes an array."""
    given = []
    for rank in range(ranks):
        shapes = [shape(case, ranks, rank), *[(K, n) for n in case.weights]]
        shapes += [(n,) for n, has in zip(case.weights, case.biased, strict=True) if has]
        has_shared_bias = case.operation == "matmul_all_reduce" and any(case.biased)  # equal on all ranks
        shared = len(shapes) - 1 if has_shared_bias else -1
        seeds = [[0 if i == shared else rank, i] for i in range(len(shapes))]
        given.append([draw(np.random.default_rng(seed), s) for seed, s in zip(seeds, shapes, strict=True)])
    return given


def normal(random, shape):
    return random.standard_normal(shape)


def small_integers(random, shape):
    """0, 1 and 2. Every sum and product of the cases stays below 256, so it is exact in every dtype."""
    return random.integers(0, 3, shape)


def reduced(case, xs):
    """The reduction of the tensors of all ranks."""
    op = {"max": torch.amax, "min": torch.amin, "mean": torch.mean}.get(case.options.get("op"), torch.sum)
    return op(torch.stack(list(xs)), 0)


def expected(case, given):
    """The results of all ranks, from the inputs of all ranks."""
    ranks, dim = len(given), case.dim
    operands = [case.operands(tensors) for tensors in given]
    xs = [x for x, _, _ in operands]

    def product(x, rank, i=0, bias=True):
        _, weights, biases = operands[rank]
        y = x @ weights[i]
        return y + biases[i] if bias and biases[i] is not None else y

    def summed(counts):
        """The pieces of sum(x @ w). Each piece has the bias of its owner."""
        pieces = sum(product(x, rank, bias=False) for rank, x in enumerate(xs)).split(counts, dim)
        biases = [biases[0] for _, _, biases in operands]
        return [piece if b is None else piece + b for piece, b in zip(pieces, biases, strict=True)]

    def exchange(xs):
        pieces = [x.split(counts, dim) for x, counts in zip(xs, exchanged(ranks), strict=True)]
        return [torch.cat([pieces[source][rank] for source in range(ranks)], dim) for rank in range(ranks)]

    if case.operation.startswith("all_gather"):
        full = torch.cat(xs, dim)
        products = [[product(full, rank, i) for i in range(len(case.weights))] for rank in range(ranks)]
        keep = case.operation.endswith("_many") or not case.weights
        return [[*[full] * keep, *products[rank]] for rank in range(ranks)]
    root = case.root % ranks
    if case.operation == "reduce_scatter":
        results = reduced(case, xs).split(kept(ranks), dim)
    elif case.operation == "all_reduce":
        results = [reduced(case, xs)] * ranks
    elif case.operation == "reduce":
        y = reduced(case, xs)
        results = [y if rank == root else y[:0] for rank in range(ranks)]
    elif case.operation == "gather":
        y = torch.cat(xs, dim)
        results = [y if rank == root else y.narrow(dim, 0, 0) for rank in range(ranks)]
    elif case.operation == "scatter":
        results = xs[root].split(kept(ranks), dim)
    elif case.operation == "broadcast":
        results = [xs[case.root % ranks]] * ranks
    elif case.split is not None:
        pieces = [x.split(parts(x.shape[case.split], ranks), case.split) for x in xs]
        results = [torch.cat([mine[rank] for mine in pieces], dim) for rank in range(ranks)]
    elif case.operation == "all_to_all":
        results = exchange(xs)
    elif case.operation == "matmul_reduce_scatter":
        results = summed(kept(ranks))
    elif case.operation == "matmul_all_reduce":
        total = xs[0].shape[dim]
        even = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
        results = [torch.cat(summed(even), dim)] * ranks
    elif case.operation == "matmul_all_to_all_columns":
        y = torch.cat([product(x, rank) for rank, x in enumerate(xs)])
        results = y.split(parts(y.shape[-1], ranks), -1)
    elif case.deals:
        mine = zip(*(x.split(kept(ranks)) for x in xs), strict=True)
        results = [product(torch.cat(pieces, -1), rank) for rank, pieces in enumerate(mine)]
    elif case.operation == "matmul_all_to_all":
        results = exchange([product(x, rank) for rank, x in enumerate(xs)])
    else:
        assert case.operation == "all_to_all_matmul"
        results = [product(x, rank) for rank, x in enumerate(exchange(xs))]
    return [[y] for y in results]


# ---------------------------------------------------------------------------------------------------- the gradient


def loss(rank, results):
    """The loss of one rank, in any framework. Its gradient depends on the results and on the rank."""
    return sum((rank + 2 + i) * (y * y).sum() + (y * (i + 1)).sum() for i, y in enumerate(results))


def gradients(case, ranks):
    """The inputs of each rank (float64 arrays), the results, and the gradients of the sum of all losses."""
    given = tensors(case, ranks, normal)
    leaves = [[torch.from_numpy(t).requires_grad_() for t in local] for local in given]
    results = expected(case, leaves)
    total = sum(loss(rank, local) for rank, local in enumerate(results))
    flat = torch.autograd.grad(total, [t for local in leaves for t in local], materialize_grads=True)
    grads = iter(flat)
    return given, [[y.detach() for y in local] for local in results], [[next(grads) for _ in local] for local in leaves]


def derivatives(losses, leaves, order):
    """The derivatives of the sum of the losses up to `order`, along `direction`, for the leaves of each rank.

    `losses` and `leaves` have one entry for each rank that is computed here. The derivative of order k + 1 is the
    gradient of the sum of `derivative of order k * direction`.
    """
    found, scalars = [], losses
    flat = [t for mine in leaves for t in mine]
    for step in range(1, order + 1):
        grads = iter(torch.autograd.grad(sum(scalars), flat, create_graph=True, materialize_grads=True))
        grouped = [[next(grads) for _ in mine] for mine in leaves]
        found.append([[g.detach() for g in mine] for mine in grouped])
        scalars = [sum((g * torch.from_numpy(direction(g.shape, step))).sum() for g in mine) for mine in grouped]
    return found


def direction(shape, step):
    """An array without symmetries, the same on all ranks."""
    return np.cos(np.arange(np.prod(shape, dtype=int)) * (1.0 + step)).reshape(shape)
