"""The first line of the docstring of each operation is its meaning as code: here it runs, on NumPy and mpi4py."""

from __future__ import annotations

import numpy as np
import pytest

import fompi
from fompi.base.layout import offsets, split
from fompi.ops.operations import OPERATIONS

pytestmark = pytest.mark.ranks(mpich=[2, 3], openmpi=[])

K, N = 3, 2


def drawn(*shape, seed=0):
    """Small whole numbers: their sums and products are exact."""
    return np.random.default_rng(seed).integers(-5, 6, shape).astype(float)


def cut(x, counts, dim=0):
    return np.split(x, offsets(counts)[1:-1], dim)


def empty(x, dim):
    return np.split(x, [0], dim)[0]


def runs(table):
    """(rows, expert) of every run."""
    numbers = [(n, e) for of_rank in table for e, n in enumerate(of_rank)]
    ends = offsets(n for n, _ in numbers)
    return [(slice(a, a + n), e) for a, (n, e) in zip(ends, numbers, strict=False)]


def grouped_matmul(x, w, table, dim=0):
    return np.concatenate([x[:0] @ w[0], *(x[rows] @ w[e] for rows, e in runs(table))])


def grouped_gradient(x, h, table, dim=0):
    g = np.zeros((len(table[0]), x.shape[-1], h.shape[-1]))
    for rows, e in runs(table):
        g[e] += x[rows].T @ h[rows]
    return g


def names_of(comm):
    """What the code may say, by mpi4py."""

    def all_to_all(x, dim=0, counts=None, split_dim=None, concat_dim=None):
        pieces = cut(x, counts, dim if split_dim is None else split_dim)
        return np.concatenate(comm.alltoall(pieces), dim if concat_dim is None else concat_dim)

    return {
        "rank": comm.rank, "size": comm.size, "concatenate": np.concatenate, "split": cut, "empty": empty,
        "matrix": lambda x: x.reshape(-1, x.shape[-1]), "grouped_matmul": grouped_matmul,
        "grouped_gradient": grouped_gradient,
        "all_gather": lambda x, dim=0: np.concatenate(comm.allgather(x), dim), "all_to_all": all_to_all,
        "all_reduce": lambda x: sum(comm.allgather(x)),
        "reduce_scatter": lambda x, dim, counts: cut(sum(comm.allgather(x)), counts, dim)[comm.rank],
    }  # fmt: skip


def arguments(name, size, rank):
    """(the tensors by name, the other keywords) of a call. Rows are uneven where they may be."""
    own, kept = [r + 1 for r in range(size)], [2 * r + 1 for r in range(size)]
    sent = [[(s + d) % 3 for d in range(size)] for s in range(size)]
    total, b = sum(own), drawn(N, seed=4)
    x = drawn({"s": sum(kept), "a": total}.get("s" if "reduce_scatter" in name else "a"), K, seed=rank)
    w = drawn(K, N, seed=5 + rank)
    if "grouped" in name:
        return of_experts(name, size, rank)
    if name in ("all_gather", "gather"):
        return {"x": drawn(own[rank], K, seed=rank)}, {"dim": 0} | ({"root": size - 1} if name == "gather" else {})
    if name in ("all_reduce", "reduce", "broadcast"):
        return {"x": x}, {} if name == "all_reduce" else {"root": size - 1}
    if name == "scatter":
        return {"x": drawn(sum(kept), K, seed=rank)}, {"root": 0, "dim": 0, "counts": kept}
    if name == "reduce_scatter":
        return {"x": x}, {"dim": 0, "counts": kept}
    if name == "all_gather_matmul":
        return {"x": drawn(own[rank], K, seed=rank), "w": w, "bias": b}, {"dim": 0}
    if name == "all_gather_matmul_many":
        return {"x": drawn(own[rank], K, seed=rank), "ws": [w, 2 * w], "biases": [b, b + 1]}, {"dim": 0}
    if name == "all_gather_weight_gradient":
        return {"x": drawn(own[rank], K, seed=rank), "h": drawn(total, N, seed=8 + rank)}, {"dim": 0}
    if name == "all_gather_matmul_weight_gradient":
        return {"d": drawn(own[rank], K, seed=rank), "w": w, "h": drawn(total, 4, seed=8 + rank)}, {"dim": 0}
    if name == "matmul_reduce_scatter":
        return {"x": x, "w": w, "bias": b}, {"dim": 0, "counts": kept}
    if name == "matmul_all_reduce":
        return {"x": x, "w": w, "bias": b}, {}
    if name == "matmul_all_to_all_columns":
        return {"x": drawn(own[rank], K, seed=rank), "w": drawn(K, total, seed=5), "bias": drawn(total)}, {
            "columns": own
        }
    if name == "all_to_all_columns_matmul":
        given = {"x": drawn(sum(kept), own[rank], seed=rank), "w": drawn(total, N, seed=5), "bias": b}
        return given, {"counts": kept, "columns": own}
    x, arriving = drawn(sum(sent[rank]), K, seed=rank), sum(row[rank] for row in sent)
    more = {"bias": b} if name in ("matmul_all_to_all", "all_to_all_matmul") else {}
    weights = {"w": w} if "matmul" in name else {}
    operands = {"h": drawn(arriving, 4, seed=8 + rank)} if "gradient" in name else {}
    first = "d" if name == "all_to_all_matmul_weight_gradient" else "x"
    return {first: x, **weights, **operands, **more}, {"dim": 0, "counts": sent[rank]}


def of_experts(name, size, rank):
    """Each rank has some experts; counts[dest][expert]."""
    experts, sends = split(size + 1, size), name.startswith("grouped")  # who sends, multiplies
    table = [[[(s + d + e) % 3 for e in range(experts[s if sends else d])] for d in range(size)] for s in range(size)]
    rows, arriving = sum(map(sum, table[rank])), sum(sum(of[rank]) for of in table)
    w = {"w": drawn(experts[rank], K, N, seed=5 + rank)} if "matmul" in name else {}
    h = {"h": drawn(arriving, 4, seed=8 + rank)} if "gradient" in name else {}
    first = "d" if name == "all_to_all_grouped_matmul_weight_gradient" else "x"
    return {first: drawn(rows, K, seed=rank), **w, **h}, {"dim": 0, "counts": table[rank], "experts": size + 1}


def run(code, names):
    """The value of the code of a docstring."""
    *before, last = code.split("; ")
    lines = [*before, last if last.startswith("return ") else f"return {last.partition(' = ')[2]}"]
    scope = dict(names)
    exec("def meaning():\n" + "\n".join(f"    {line}" for line in lines), scope)
    return scope["meaning"]()


def same(got, wanted):
    if isinstance(wanted, tuple):
        assert len(got) == len(wanted)
        for pair in zip(got, wanted, strict=True):
            same(*pair)
    else:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_meaning(comm, world, name):
    operation = OPERATIONS[name]
    tensors, options = arguments(name, comm.size, comm.rank)
    names = {**names_of(comm), **tensors, **options, "xs": comm.allgather(tensors.get("x"))}
    names.setdefault("split_dim", names.get("dim")), names.setdefault("concat_dim", names.get("dim"))
    counts = comm.allgather(options.get("counts"))
    names |= {"counts_of": counts, "arrived": [of[comm.rank] for of in counts] if "grouped" in name else None}
    names["sums"] = [sum(of) for of in options["counts"]] if "grouped" in name else None
    same(operation(**tensors, **options, comm=world), run(operation.__doc__.splitlines()[0], names))
    assert getattr(fompi, name) is operation
