"""Sequences that are spread over the ranks: attention by all-to-all (Ulysses), round a ring, and both together.

    sharding = Sharding(length=4096, ring=comm.size)
    q, k, v = (sharding.shard(t, comm.rank) for t in (q, k, v))       # (tokens of this rank, heads, head_dim)
    o = ring_attention(q, k, v, sharding, comm=comm, causal=True)

| function | what travels | what it hides behind |
|---|---|---|
| `ulysses_attention` | all tokens of some heads: before, and back | the attention of the slice of queries before |
| `ring_attention` | keys and values, from rank to rank | the attention over the keys and values that are here |
| `usp_attention` | both: Ulysses on one axis of a mesh, the ring on the other | |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.numpy import narrow, widen
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import accumulator, integer, offsets, split
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import digest
from fompi.ops.operations import all_gather, all_to_all
from fompi.ops.pending import Pending
from fompi.parallel.arrays import Array, arrived, borrow, borrow_gradient, call, enter, give, start, transfer
from fompi.parallel.attention import Rule, attend, attend_backward, check_documents, check_heads, merge
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor

LAYOUTS = ("zigzag", "contiguous")

# ------------------------------------------------------------------------------------------------------ shardings


@dataclass(frozen=True)
class Sharding:
    """Which rank holds which tokens of a sequence. A value, without MPI.

    Rank = ring_rank * ulysses + ulysses_rank. The ring is dealt the tokens first, as `layout` says:

    - "zigzag": pieces r and 2 * ring - 1 - r of 2 * ring, so that causal attention is the same work for all ranks. Each
      packed document of `cu_seqlens` (where documents begin, and the end) is dealt out by itself.
    - "contiguous": the r-th run of the tokens.

    The ranks of one place in the ring share its tokens, as runs. All runs are as even as possible, for any length.
    """

    length: int
    ring: int = 1
    ulysses: int = 1
    layout: str = "zigzag"
    cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("ring", 1), ("ulysses", 1)):
            value = integer(getattr(self, name))
            if value is None or value < least:
                raise LayoutError(f"Sharding: {name}={getattr(self, name)!r} must be an integer >= {least}")
            object.__setattr__(self, name, value)
        if self.layout not in LAYOUTS:
            raise LayoutError(f"Sharding: layout={self.layout!r} must be one of {', '.join(LAYOUTS)}")
        object.__setattr__(self, "cu_seqlens", check_documents(self.cu_seqlens, self.length))

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def rows(self) -> list[int]:
        """The number of tokens of each rank."""
        return [len(self.indices(rank)) for rank in range(self.ranks)]

    def indices(self, rank: int) -> Array:
        """The positions in the sequence of the tokens of a rank, in the order in which it holds them."""
        if not 0 <= rank < self.ranks:
            raise LayoutError(f"rank {rank} is not one of the {self.ranks} ranks of {self}")
        return _indices(self, rank)

    def ring_indices(self, ring_rank: int) -> Array:
        """The positions of the tokens of all ranks of one place in the ring."""
        return np.concatenate([self.indices(ring_rank * self.ulysses + rank) for rank in range(self.ulysses)])

    def shard(self, x: Any, rank: int) -> Any:
        """x[indices(rank)]: the tokens of a rank, as a new tensor of the framework of x."""
        tensor = dlpack.borrow(x, "x")
        if tensor.array.ndim < 1 or len(tensor.array) != self.length:
            raise ShapeError(f"x has the shape {tensor.array.shape}, but the sequence has {self.length} tokens")
        return dlpack.lend(np.ascontiguousarray(tensor.array[self.indices(rank)]), tensor.dtype, tensor)

    def unshard(self, x_local: Any, comm: Any = None) -> Any:
        """The whole tensor on all ranks, from the tokens that each rank has. The inverse of `shard`. Collective."""

        def check(comm: Communicator) -> tuple[str, int, Tensor]:
            _check_ranks(self, comm.size)
            tensor = dlpack.borrow(x_local, "x_local")
            _check_tokens("x_local", tensor, self, comm.rank)
            return f"{_text(self)}, {tensor.dtype}, rows {tensor.array.shape[1:]}", 0, tensor

        group, tensor, _ = enter("Sharding.unshard", comm, check)
        rows = call(all_gather, np.ascontiguousarray(tensor.array), dtype=tensor.dtype, comm=group)
        whole = np.empty_like(rows)
        whole[np.concatenate([self.indices(rank) for rank in range(self.ranks)])] = rows
        return dlpack.lend(whole, tensor.dtype, tensor)


@lru_cache(maxsize=1024)
def _indices(sharding: Sharding, rank: int) -> Array:
    ring_rank, ulysses_rank = divmod(rank, sharding.ulysses)
    ring, parts = sharding.ring, []
    if sharding.layout == "contiguous":
        parts.append(_run(0, sharding.length, ring, ring_rank))
    else:
        ends = sharding.cu_seqlens or (0, sharding.length)
        for begin, end in pairwise(ends):
            parts += [_run(begin, end, 2 * ring, piece) for piece in (ring_rank, 2 * ring - 1 - ring_rank)]
    tokens = np.concatenate(parts)
    mine: Array = tokens[_run(0, len(tokens), sharding.ulysses, ulysses_rank)]
    mine.flags.writeable = False
    return mine


def _run(begin: int, end: int, pieces: int, piece: int) -> Array:
    """The numbers of one of `pieces` runs of begin, ..., end - 1."""
    first = offsets(split(end - begin, pieces))
    return np.arange(begin + first[piece], begin + first[piece + 1])


def _text(sharding: Sharding) -> str:
    """The sharding in few words, for the ranks to compare."""
    documents = "" if sharding.cu_seqlens is None else f", {len(sharding.cu_seqlens) - 1} documents"
    return (
        f"{sharding.length} tokens, ring={sharding.ring}, ulysses={sharding.ulysses}, {sharding.layout}{documents} "
        f"({digest(str(sharding)):x})"
    )


def _check_ranks(sharding: Sharding, size: int) -> None:
    if sharding.ranks != size:
        raise LayoutError(
            f"the sharding is for {sharding.ring} * {sharding.ulysses} = {sharding.ranks} ranks (ring * ulysses), but "
            f"the communicator has {size}"
        )


def _check_tokens(name: str, tensor: Tensor, sharding: Sharding, rank: int) -> None:
    tokens = len(sharding.indices(rank))
    if tensor.array.ndim < 1 or len(tensor.array) != tokens:
        raise ShapeError(f"{name} has the shape {tensor.array.shape}, but rank {rank} has {tokens} tokens")


# ------------------------------------------------------------------------------------------ what all three share


@dataclass
class Saved:
    """What the backward needs: the tensors, and what each step keeps, in the dtype of q."""

    tensors: tuple[Tensor, Tensor, Tensor]
    rule: Rule
    shape: tuple[int, ...]
    comms: tuple[Communicator, ...]
    steps: Any = None

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype


def _check(
    q: Any, k: Any, v: Any, sharding: Any, rank: int, causal: bool, scale: float | None
) -> tuple[str, int, Saved]:
    """The tensors of this rank, checked, and a text that must be the same on all ranks."""
    tq, tk = borrow(q, "q", None, 3), borrow(k, "k", None, 3)
    tensors = tq, tk, borrow(v, "v", None, 3)
    for name, tensor in zip("qkv", tensors, strict=True):
        if tensor.dtype != tq.dtype:
            borrow(tensor.owner, name, tq)
        _check_tokens(name, tensor, sharding, rank)
    (_, heads, d), (_, kv_heads, dk), (_, v_heads, e) = (tensor.array.shape for tensor in tensors)
    check_heads(heads, kv_heads)
    if (kv_heads, d) != (v_heads, dk):
        raise ShapeError(
            f"q {tq.array.shape}, k {tk.array.shape}, v {tensors[2].array.shape}: they must be (tokens, heads, d), "
            "(tokens, key/value heads, d), (tokens, key/value heads, e)"
        )
    text = f"{_text(sharding)}, {tq.dtype}, {heads} and {kv_heads} heads, d={d}, e={e}, {causal=}, {scale=}"
    saved = Saved(tensors, Rule(bool(causal), scale, sharding.cu_seqlens), (len(tq.array), heads, e), ())
    return text, 0, saved


def _enter_backward(name: str, saved: Saved, do: Any) -> Array:
    """The gradient of the result as an array, once all ranks have begun this backward."""
    refusal: Exception | None = None
    array: Array = np.empty(0)

    def check(comm: Communicator) -> tuple[str, int, Array]:
        if refusal is not None:
            raise refusal
        return "", 0, borrow_gradient(do, saved.dtype, saved.shape)

    for comm in saved.comms:
        try:
            array = enter(f"the backward of {name}", comm, check)[1]
        except Exception as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    return array


def _reads(heads: int, kv_heads: int) -> list[int]:
    return [head // (heads // kv_heads) for head in range(heads)]


def _give(gradients: Sequence[Array], saved: Saved) -> Gradients:
    return tuple(give(gradient, tensor) for gradient, tensor in zip(gradients, saved.tensors, strict=True))


# ----------------------------------------------------------------------------------------------------------- ring


@dataclass
class RingStep:
    """What the ring keeps. q, k, v and o have the storage of q's dtype."""

    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array
    at: list[Array]  # the positions of the tokens of each rank
    reads: list[int]


def _shift(array: Array, dtype: str, comm: Communicator) -> Any:
    """The array travels to the next rank, and that of the rank before comes."""
    return transfer(array, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, dtype, comm)


def _circle(k: Array, v: Array, dtype: str, comm: Communicator) -> Iterator[tuple[int, Array, Array]]:
    """(source, keys, values) of each rank in turn, this one first. The next block travels while one is used."""
    block, width = np.concatenate([k, v], 2), k.shape[2]
    for step in range(comm.size):
        travels = _shift(block, dtype, comm) if step + 1 < comm.size else None
        yield (comm.rank - step) % comm.size, block[..., :width], block[..., width:]
        if travels is not None:
            block = arrived(travels)


def _ring_run(
    q: Array, k: Array, v: Array, at: list[Array], reads: list[int], rule: Rule, dtype: str, comm: Communicator
) -> tuple[Array, RingStep]:
    """(o, what the backward keeps): the results over the blocks of all ranks, merged in the dtype of sums."""
    mine, o, lse = widen(q, dtype), None, None
    for source, key, value in _circle(k, v, dtype, comm):
        part = attend.on(comm, mine, widen(key, dtype), widen(value, dtype), reads, at[comm.rank], at[source], rule)
        if o is None or lse is None:
            o, lse = part
        else:
            merge.on(comm, o, lse, *part)
    assert o is not None and lse is not None
    o = narrow(o, dtype)
    return o, RingStep(q, k, v, o, lse, at, reads)


def _ring_run_backward(
    step: RingStep, do: Array, rule: Rule, dtype: str, comm: Communicator
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in the dtype of sums. The gradients of a block travel with it, and each rank adds its own."""
    q, o, do = (widen(a, dtype) for a in (step.q, step.o, do))
    dq, width, wide = np.zeros_like(q), step.k.shape[2], accumulator(dtype)
    travels = None
    for source, key, value in _circle(step.k, step.v, dtype, comm):
        k, v, at = widen(key, dtype), widen(value, dtype), step.at
        more, dk, dv = attend_backward.on(comm, q, k, v, o, step.lse, do, step.reads, at[comm.rank], at[source], rule)
        dq += more
        own = np.concatenate([dk, dv], 2)
        total = own if travels is None else arrived(travels) + own
        travels = _shift(total, wide, comm) if comm.size > 1 else None
    if travels is not None:
        total = arrived(travels)
    return dq, total[..., :width], total[..., width:]


def _ring(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    comm: Any = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Any, Saved]:
    """o = softmax(scale * q @ all keys.T) @ all values

    q: (tokens of this rank, heads, d). k: (tokens of this rank, key/value heads, d). v: (tokens of this rank, key/value
    heads, e). o: (tokens of this rank, heads, e). `sharding` says which tokens those are, for as many ranks as `comm`
    has. With `causal` a token sees the tokens up to itself. Packed documents of the sharding do not see each other.
    `scale` is d ** -0.5 by default.

    Keys and values go round the ranks; results are merged in float32, or float64 for such tensors.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, int, Saved]:
        _check_ranks(sharding, comm.size)
        return _check(q, k, v, sharding, comm.rank, causal, scale)

    group, saved, _ = enter("ring_attention", comm, check)
    saved.comms = (group,)
    q, k, v = (tensor.array for tensor in saved.tensors)
    at = [sharding.indices(rank) for rank in range(group.size)]
    reads = _reads(q.shape[1], k.shape[1])
    o, saved.steps = _ring_run(q, k, v, at, reads, saved.rule, saved.dtype, group)
    return dlpack.lend(o.copy(), saved.dtype, saved.tensors[0]), saved  # the backward needs o as it is


def _ring_backward(saved: Saved, do: Any) -> Gradients:
    array = _enter_backward("ring_attention", saved, do)
    return _give(_ring_run_backward(saved.steps, array, saved.rule, saved.dtype, saved.comms[0]), saved)


# -------------------------------------------------------------------------------------------------------- Ulysses

SLICES = 4
"""The slices of the queries: one travels while the attention of another is computed."""


@dataclass(frozen=True)
class Deal:
    """Which rank has which heads, and how many rows each rank has of a slice of the tokens."""

    heads: int
    kv_heads: int
    comm: Communicator

    @property
    def queries(self) -> list[range]:
        first = offsets(split(self.heads, self.comm.size))
        return [range(a, b) for a, b in pairwise(first)]

    @property
    def keys(self) -> list[range]:
        """The key/value heads that the query heads of each rank read."""
        group = self.heads // self.kv_heads
        return [range(mine[0] // group, mine[-1] // group + 1) if mine else range(0) for mine in self.queries]

    @property
    def reads(self) -> list[int]:
        """Which of the key/value heads of this rank each of its query heads reads."""
        group, keys = self.heads // self.kv_heads, self.keys[self.comm.rank]
        return [head // group - keys.start for head in self.queries[self.comm.rank]]

    @property
    def shares(self) -> bool:
        """True if several ranks have the same key/value head. Their gradients are then summed."""
        return sum(map(len, self.keys)) > len({head for keys in self.keys for head in keys})


def _to_heads(x: Array, heads: list[range], dtype: str, comm: Communicator) -> Pending:
    """(tokens of this rank, all heads, d) leaves. What comes is (tokens of all ranks * heads of this rank, d)."""
    packed = [np.ascontiguousarray(x[:, run.start : run.stop]).reshape(len(x) * len(run), x.shape[2]) for run in heads]
    return start(
        all_to_all, np.concatenate(packed), counts=[len(part) for part in packed], dtype=dtype, comm=comm
    )  # fmt: skip


def _by_heads(pending: Pending, rows: Sequence[int], heads: range) -> Array:
    """What `_to_heads` sent, as (tokens of all ranks, heads of this rank, d)."""
    array: Array = arrived(pending)
    return array.reshape(sum(rows), len(heads), array.shape[1])


def _to_rows(y: Array, rows: Sequence[int], dtype: str, comm: Communicator) -> Pending:
    """(tokens of all ranks, heads of this rank, d) leaves: the tokens return to their ranks."""
    flat = np.ascontiguousarray(y).reshape(len(y) * y.shape[1], y.shape[2])
    return start(all_to_all, flat, counts=[n * y.shape[1] for n in rows], dtype=dtype, comm=comm)


def _by_rows(pending: Pending, into: Array, heads: list[range], dtype: str) -> None:
    """Add what `_to_rows` sent to (tokens of this rank, all heads, d), in the order of the ranks."""
    array: Array = widen(arrived(pending), dtype)
    first = offsets(len(into) * len(run) for run in heads)
    for begin, end, run in zip(first[:-1], first[1:], heads, strict=True):
        into[:, run.start : run.stop] += array[begin:end].reshape(len(into), len(run), into.shape[2])


def _cuts(rows: Sequence[int], number: int) -> list[list[slice]]:
    """The rows of each rank in `number` slices: for each slice, the run of each rank among its own rows."""
    first = [offsets(split(n, number)) for n in rows]
    return [[slice(ends[i], ends[i + 1]) for ends in first] for i in range(number)]


def _lengths(cut: Sequence[slice]) -> list[int]:
    return [run.stop - run.start for run in cut]


@dataclass
class UlyssesStep:
    """What Ulysses keeps, for each slice of the queries. Arrays have the storage of q's dtype."""

    deal: Deal
    rows: list[int]
    at: list[Array]  # the positions of the tokens of each rank
    q: list[Array]
    k: Array
    v: Array
    o: list[Array]
    lse: list[Array]


def _ulysses(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    comm: Any = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Any, Saved]:
    """o = softmax(scale * q @ all keys.T) @ all values

    q: (tokens of this rank, heads, d). k: (tokens of this rank, key/value heads, d). v: (tokens of this rank, key/value
    heads, e). o: (tokens of this rank, heads, e). `sharding` says which tokens those are, for as many ranks as `comm`
    has. With `causal` a token sees the tokens up to itself. Packed documents of the sharding do not see each other.
    `scale` is d ** -0.5 by default.

    An all-to-all gives each rank all tokens of some heads, as even as possible. Another one brings the results back.
    A key/value head is on every rank that has one of its query heads.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, int, Saved]:
        _check_ranks(sharding, comm.size)
        return _check(q, k, v, sharding, comm.rank, causal, scale)

    group, saved, _ = enter("ulysses_attention", comm, check)
    saved.comms = (group,)
    dtype, (q, k, v) = saved.dtype, (tensor.array for tensor in saved.tensors)
    deal, rows = Deal(q.shape[1], k.shape[1], group), sharding.rows
    at = [sharding.indices(rank) for rank in range(group.size)]
    queries, keys = deal.queries, deal.keys
    come = _to_heads(np.concatenate([k, v], 2), keys, dtype, group)
    cuts = _cuts(rows, SLICES)
    leave = [_to_heads(q[cut[group.rank]], queries, dtype, group) for cut in cuts]
    kv = _by_heads(come, rows, keys[group.rank])
    full_k, full_v = kv[..., : k.shape[2]], kv[..., k.shape[2] :]
    step = UlyssesStep(deal, rows, at, [], full_k, full_v, [], [])
    wide_k, wide_v, all_at, back = widen(full_k, dtype), widen(full_v, dtype), np.concatenate(at), []
    for cut, pending in zip(cuts, leave, strict=True):
        part = _by_heads(pending, _lengths(cut), queries[group.rank])
        part_at = np.concatenate([a[run] for a, run in zip(at, cut, strict=True)])
        o, lse = attend.on(group, widen(part, dtype), wide_k, wide_v, deal.reads, part_at, all_at, saved.rule)
        o = narrow(o, dtype)
        back.append(_to_rows(o, _lengths(cut), dtype, group))  # leaves while the next slice is computed
        step.q.append(part)
        step.o.append(o)
        step.lse.append(lse)
    saved.steps = step
    result = np.zeros(saved.shape, accumulator(dtype))
    for cut, pending in zip(cuts, back, strict=True):
        _by_rows(pending, result[cut[group.rank]], queries, dtype)
    return give(result, saved.tensors[0]), saved


def _ulysses_backward(saved: Saved, do: Any) -> Gradients:
    array = _enter_backward("ulysses_attention", saved, do)
    step, dtype, group, (tq, tk, tv) = saved.steps, saved.dtype, saved.comms[0], saved.tensors
    deal, rows, wide = step.deal, step.rows, accumulator(saved.dtype)
    queries, keys, all_at = deal.queries, deal.keys, np.concatenate(step.at)
    cuts = _cuts(rows, SLICES)
    come = [_to_heads(array[cut[group.rank]], queries, dtype, group) for cut in cuts]
    k, v, back = widen(step.k, dtype), widen(step.v, dtype), []
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for i, (cut, pending) in enumerate(zip(cuts, come, strict=True)):
        part = widen(_by_heads(pending, _lengths(cut), queries[group.rank]), dtype)
        part_at = np.concatenate([a[run] for a, run in zip(step.at, cut, strict=True)])
        q, o = widen(step.q[i], dtype), widen(step.o[i], dtype)
        dq, *more = attend_backward.on(group, q, k, v, o, step.lse[i], part, deal.reads, part_at, all_at, saved.rule)
        back.append(_to_rows(narrow(dq, dtype), _lengths(cut), dtype, group))
        dk += more[0]
        dv += more[1]
    sent = wide if deal.shares else dtype  # what is summed later travels in the dtype of sums
    last = _to_rows(narrow(np.concatenate([dk, dv], 2), sent), rows, sent, group)
    dq = np.zeros(tq.array.shape, wide)
    for cut, pending in zip(cuts, back, strict=True):
        _by_rows(pending, dq[cut[group.rank]], queries, dtype)
    dkv = np.zeros((*tk.array.shape[:2], tk.array.shape[2] + tv.array.shape[2]), wide)
    _by_rows(last, dkv, keys, sent)
    return _give((dq, dkv[..., : k.shape[2]], dkv[..., k.shape[2] :]), saved)


# ----------------------------------------------------------------------------------------------------------- both


def _usp(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    ring: Any = None,
    ulysses: Any = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Any, Saved]:
    """o = softmax(scale * q @ all keys.T) @ all values

    The tensors are those of `ring_attention`. `ring` and `ulysses` are the axes of a mesh: Mesh(ring=..., ulysses=...).
    The ranks of one place in the ring exchange tokens for heads, and each head goes round the ring.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """
    refusal: Exception | None = None
    saved: Saved | None = None
    axes: list[Communicator] = []

    def check(comm: Communicator) -> tuple[str, int, Saved]:
        if refusal is not None:
            raise refusal
        around, across = Communicator.of(ring), Communicator.of(ulysses)
        if (around.size, across.size) != (sharding.ring, sharding.ulysses):
            raise LayoutError(
                f"the sharding has ring={sharding.ring} and ulysses={sharding.ulysses}, but the axes of the mesh have "
                f"{around.size} and {across.size} ranks"
            )
        return _check(q, k, v, sharding, around.rank * across.size + across.rank, causal, scale)

    for axis in (ulysses, ring):  # a refusal of one rank reaches the ranks of its row, and by them all others
        try:
            group, saved, _ = enter("usp_attention", axis, check)
            axes.append(group)
        except Exception as error:
            refusal = refusal or error
    if refusal is not None or saved is None:
        raise refusal  # type: ignore[misc]
    saved.comms = across, around = (axes[0], axes[1])
    dtype, (q, k, v) = saved.dtype, (tensor.array for tensor in saved.tensors)
    deal = Deal(q.shape[1], k.shape[1], across)
    rows = [len(sharding.indices(around.rank * across.size + rank)) for rank in range(across.size)]
    queries, keys = deal.queries, deal.keys
    come = _to_heads(np.concatenate([k, v], 2), keys, dtype, across)
    more = _to_heads(q, queries, dtype, across)
    kv, full_q = _by_heads(come, rows, keys[across.rank]), _by_heads(more, rows, queries[across.rank])
    at = [sharding.ring_indices(rank) for rank in range(around.size)]
    full_k, full_v = kv[..., : k.shape[2]], kv[..., k.shape[2] :]
    o, step = _ring_run(full_q, full_k, full_v, at, deal.reads, saved.rule, dtype, around)
    result = np.zeros(saved.shape, accumulator(dtype))
    _by_rows(_to_rows(o, rows, dtype, across), result, queries, dtype)
    saved.steps = step, deal, rows
    return give(result, saved.tensors[0]), saved


def _usp_backward(saved: Saved, do: Any) -> Gradients:
    array = _enter_backward("usp_attention", saved, do)
    (step, deal, rows), dtype, (across, around), (tq, tk, tv) = saved.steps, saved.dtype, saved.comms, saved.tensors
    wide = accumulator(dtype)
    queries, keys = deal.queries, deal.keys
    full = _by_heads(_to_heads(array, queries, dtype, across), rows, queries[across.rank])
    dq, dk, dv = _ring_run_backward(step, full, saved.rule, dtype, around)
    back = _to_rows(narrow(dq, dtype), rows, dtype, across)
    sent = wide if deal.shares else dtype
    last = _to_rows(narrow(np.concatenate([dk, dv], 2), sent), rows, sent, across)
    dq = np.zeros(tq.array.shape, wide)
    _by_rows(back, dq, queries, dtype)
    dkv = np.zeros((*tk.array.shape[:2], tk.array.shape[2] + tv.array.shape[2]), wide)
    _by_rows(last, dkv, keys, sent)
    return _give((dq, dkv[..., : tk.array.shape[2]], dkv[..., tk.array.shape[2] :]), saved)


ring_attention = Differentiable(_ring, _ring_backward, tensors=("q", "k", "v"), inputs=3, name="ring_attention")
ulysses_attention = Differentiable(
    _ulysses, _ulysses_backward, tensors=("q", "k", "v"), inputs=3, name="ulysses_attention"
)
usp_attention = Differentiable(_usp, _usp_backward, tensors=("q", "k", "v"), inputs=3, name="usp_attention")
