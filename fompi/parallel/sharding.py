"""Which rank holds which tokens of a sequence that is spread over a ring of ranks, over groups of ranks, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.numbers import constant, contiguous
from fompi.base.differences import detail
from fompi.base.errors import LayoutError, ShapeError, quoted
from fompi.base.layout import as_integer, integer, offsets, split
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_gather
from fompi.parallel.arrays import Array, borrow_any, call, enter, lent
from fompi.parallel.attention import check_documents
from fompi.parallel.section import in_section
from fompi.parallel.shares import dealt, in_proportion
from fompi.tensors.dlpack import Tensor

LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Sharding:
    """Which rank holds which tokens of a sequence. A value, without MPI.

    Rank = ring_rank * ulysses + ulysses_rank. The ring is dealt the tokens first, as `layout` says:

    - "zigzag": pieces r and 2 * ring - 1 - r of 2 * ring, so that causal attention is the same work for all ranks. Each
      packed document of `cu_seqlens` (where documents begin, and the end) is dealt out by itself.
    - "contiguous": the r-th run of the tokens.

    The ranks of one place in the ring share its tokens, as runs. All runs are as even as possible, for any length; or
    `shares` are the tokens of each rank (`fompi.parallel.shares`). Of packed documents it has that part of each.
    """

    length: int
    ring: int = 1
    ulysses: int = 1
    layout: str = "zigzag"
    cu_seqlens: tuple[int, ...] | None = None
    shares: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("ring", 1), ("ulysses", 1)):
            value = integer(getattr(self, name))
            if value is None or value < least:
                raise LayoutError(f"Sharding: {name}={getattr(self, name)!r} must be an integer >= {least}")
            object.__setattr__(self, name, value)
        if self.layout not in LAYOUTS:
            raise LayoutError(f"Sharding: layout={quoted(self.layout, LAYOUTS)} must be one of {', '.join(LAYOUTS)}")
        object.__setattr__(self, "cu_seqlens", check_documents(self.cu_seqlens, self.length))
        if self.shares is not None:
            object.__setattr__(self, "shares", dealt(self.shares, "tokens", self.length, self.ranks))

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def rows(self) -> list[int]:
        """The number of tokens of each rank."""
        return [len(self.indices(rank)) for rank in range(self.ranks)]

    def indices(self, rank: int) -> Array:
        """The positions in the sequence of the tokens of a rank, in the order in which it holds them."""
        if not 0 <= as_integer(rank, "rank") < self.ranks:
            raise LayoutError(f"rank {rank} is not one of the {self.ranks} ranks of {self}")
        return _indices(self, rank)

    def ring_indices(self, ring_rank: int) -> Array:
        """The positions of the tokens of all ranks of one place in the ring."""
        return np.concatenate([self.indices(ring_rank * self.ulysses + rank) for rank in range(self.ulysses)])

    def shard(self, x: Any, rank: int) -> Any:
        """x[indices(rank)]: the tokens of a rank, as a new tensor of the framework of x."""
        tensor = borrow_any(x, "x")
        if tensor.array.ndim < 1 or len(tensor.array) != self.length:
            raise ShapeError(f"x has the shape {tensor.array.shape}, but the sequence has {self.length} tokens")
        return lent(tensor.array[constant(self.indices(rank), tensor.array)], tensor)

    @in_section("Sharding.unshard")
    def unshard(self, x_local: Any, comm: Any = None) -> Any:
        """The whole tensor on all ranks, from the tokens that each rank has. The inverse of `shard`. Collective."""

        def check(comm: Communicator) -> tuple[str, int, Tensor]:
            check_ranks(self, comm.size)
            tensor = borrow_any(x_local, "x_local")
            check_tokens("x_local", tensor, self, comm.rank)
            return f"{in_few_words(self)}, {tensor.dtype}, rows {tensor.array.shape[1:]}", 0, tensor

        group, tensor, _ = enter("Sharding.unshard", comm, check)
        rows = call(all_gather, contiguous(tensor.array), dtype=tensor.dtype, comm=group)
        places = np.empty(self.length, np.intp)
        places[np.concatenate([self.indices(rank) for rank in range(self.ranks)])] = np.arange(self.length)
        return lent(rows[constant(places, rows)], tensor)


@lru_cache(maxsize=1024)
def _indices(sharding: Sharding, rank: int) -> Array:
    ring_rank, ulysses_rank = divmod(rank, sharding.ulysses)
    shares, parts, count = sharding.shares or (), [], sharding.ulysses
    places = [shares[i : i + count] for i in range(0, len(shares), count)]
    is_zigzag = sharding.layout != "contiguous"
    for begin, end in pairwise((is_zigzag and sharding.cu_seqlens) or (0, sharding.length)):
        sizes = _dealt(end - begin, [*map(sum, places)], sharding.ring)
        # both pieces of a zigzag are as far from the middle: so a token is as much work on all ranks
        pieces = [*((n + 1) // 2 for n in sizes), *(n // 2 for n in reversed(sizes))] if is_zigzag else sizes
        ends = offsets(pieces)
        for piece in (ring_rank, len(pieces) - 1 - ring_rank)[: 1 + is_zigzag]:
            parts.append(np.arange(begin + ends[piece], begin + ends[piece + 1]))
    tokens = np.concatenate(parts)
    first = offsets(_dealt(len(tokens), places[ring_rank] if places else (), count))
    mine: Array = tokens[first[ulysses_rank] : first[ulysses_rank + 1]]
    mine.flags.writeable = False
    return mine


def _dealt(count: int, shares: Sequence[int], ranks: int) -> Sequence[int]:
    """So many tokens by shares, or as evenly as possible."""
    return [b - a for a, b in pairwise(in_proportion(count, shares))] if shares else split(count, ranks)


def in_few_words(sharding: Sharding) -> str:
    """The sharding in few words, for the ranks to compare."""
    documents = "" if sharding.cu_seqlens is None else f", {len(sharding.cu_seqlens) - 1} documents"
    return (
        f"{sharding.length} tokens, ring={sharding.ring}, ulysses={sharding.ulysses}, {sharding.layout}{documents}"
        + ("" if sharding.shares is None else f", shares={[*sharding.shares]}")
        + detail("cu_seqlens", sharding.cu_seqlens)
    )


def check_sharding(sharding: Any) -> None:
    if not isinstance(sharding, Sharding):
        raise LayoutError(f"sharding must be a Sharding(length, ring=, ulysses=), not {type(sharding).__name__}")


def check_ranks(sharding: Sharding, size: int) -> None:
    check_sharding(sharding)
    if sharding.ranks != size:
        raise LayoutError(
            f"the sharding is for {sharding.ring} * {sharding.ulysses} = {sharding.ranks} ranks (ring * ulysses), but "
            f"the communicator has {size}"
        )


def check_tokens(name: str, tensor: Tensor, sharding: Sharding, rank: int) -> None:
    tokens = len(sharding.indices(rank))
    if tensor.array.ndim < 1 or len(tensor.array) != tokens:
        raise ShapeError(f"{name} has the shape {tensor.array.shape}, but rank {rank} has {tokens} tokens")
