"""The elements of tensors of torch as one row of memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

import numpy as np
import torch
from torch import Tensor

from fompi.tensors.arena import Arena

MOST_NBYTES = 1 << 18
"""torch copies more bytes than these with several threads."""

LARGE = 1 << 14
"""Smaller parts are copied faster than it takes to find out whether they are neighbours."""


def flat(t: Tensor) -> Tensor:
    """The elements of `t` in one row: the memory of `t` if it is contiguous, else a copy."""
    return rows(t).view(-1)


def rows(t: Tensor) -> Tensor:
    """`t` in contiguous memory, with at least one dimension. Raises TypeError for a layout that is not strided."""
    if t.layout != torch.strided:
        words = f"of tensors of the layout {t.layout} the backend fompi has only the all-reduce of COO with SUM"
        raise TypeError(f"{words}: call to_dense() before")
    t = t.data.resolve_conj().resolve_neg().contiguous()
    return t.view(1) if t.dim() == 0 else t


def is_place_for(out: Tensor, x: Tensor) -> bool:
    """True if a result can be written straight to `out`."""
    return (
        out.dtype == x.dtype
        and out.is_contiguous()
        and not (out.is_conj() or out.is_neg())
        and out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    )


def is_plain(t: Tensor) -> bool:
    """True if the elements of `t` are in contiguous memory of the host, and few: then one copy in C is the fastest."""
    return (
        t.is_cpu and t.layout is torch.strided and t.is_contiguous() and t.nbytes <= MOST_NBYTES
        and not (t.is_neg() or t.is_conj())
    )  # fmt: skip


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The memory of `parts` in one row, if they are neighbours in one tensor of the host, in order, and large."""
    first = parts[0] if parts else None
    if not isinstance(first, Tensor) or first.layout is not torch.strided or first.nbytes < LARGE:
        return None
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if not isinstance(part, Tensor) or part.layout is not torch.strided:
            return None
        if part.data_ptr() != at or part.dtype is not first.dtype or not (part.is_cpu and part.is_contiguous()):
            return None
        if part.untyped_storage().data_ptr() != storage or part.is_neg() or part.is_conj():
            return None
        at += part.nbytes
    return first.data.as_strided((sum([part.numel() for part in parts]),), (1,))


def place_for(parts: Sequence[Tensor], x: Tensor) -> Tensor | None:
    """The memory of `parts` in one row, if a result can be written straight to it."""
    whole = as_one(parts)
    return whole if whole is not None and is_place_for(whole, x) else None


def copy_parts(parts: Sequence[Tensor], whole: Tensor) -> None:
    """Copy the elements of `whole` to the tensors `parts`, one after the other, if they are not there."""
    if parts and parts[0].data_ptr() == whole.data_ptr() != 0:
        return  # they are `as_one`
    dtype = whole.dtype
    if is_plain(whole) and all(part.dtype is dtype and is_plain(part) for part in parts):
        at = whole.data_ptr()
        for part in parts:
            memmove(part.data_ptr(), at, part.nbytes)
            at += part.nbytes
        return
    for part, piece in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        part.data.copy_(piece.view(part.shape))


def joined(parts: Sequence[Tensor], arena: Arena) -> Tensor:
    """The elements of all `parts` in one row: their own memory, or memory that is used again if it is much."""
    whole, dtype = as_one(parts), parts[0].dtype
    if whole is not None:
        return whole
    if all(part.dtype is dtype and is_plain(part) for part in parts):
        whole = torch.empty(sum([part.numel() for part in parts]), dtype=dtype)
        at = whole.data_ptr()
        for part in parts:
            memmove(at, part.data_ptr(), part.nbytes)
            at += part.nbytes
        return whole
    pieces = [flat(part) for part in parts]
    if not all(piece.is_cpu and piece.dtype is dtype for piece in pieces):
        return torch.cat(pieces)
    count = sum(piece.numel() for piece in pieces)
    memory = torch.from_numpy(arena.take((count * dtype.itemsize,), np.dtype(np.uint8)))
    return torch.cat(pieces, out=memory.view(dtype)[:count])
