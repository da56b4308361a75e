"""Host memory for what fompi makes: 64-byte aligned blocks, lent as arrays, back when the last view has died.

    take() ──▶ array ──base──▶ lease ──▶ block      views of the array, and tensors that torch or JAX make
                                │                   of it, keep the lease alive; when it dies, its `__del__`
    free blocks ◀── settle ◀── returned blocks      puts the block among the returned ones

Memory fresh from the operating system costs a page fault per 4 KiB when it is first written; a block that
came back does not. JAX borrows memory only where it is aligned to 64 bytes.
"""

from __future__ import annotations

from collections import deque
from ctypes import c_char
from dataclasses import dataclass
from functools import cache
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from fompi.base.errors import DtypeError

ALIGNMENT = 64


class _Block(NamedTuple):
    nbytes: int
    address: int
    memory: np.ndarray  # owns it; a little larger than `nbytes`, for the alignment


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Bytes of an arena, counted in whole blocks."""

    lent_nbytes: int
    free_nbytes: int
    limit_nbytes: int  # what `free_nbytes` never exceeds

    @property
    def held_nbytes(self) -> int:
        return self.lent_nbytes + self.free_nbytes

    def __str__(self) -> str:
        lent, free, limit = (n / 2**20 for n in (self.lent_nbytes, self.free_nbytes, self.limit_nbytes))
        return f"arena: {lent:.1f} MiB lent, {free:.1f} MiB free (keeps at most {limit:.1f})"


class Arena:
    """A pool of host memory that keeps at most `limit_nbytes` of free blocks. For all threads, and `with`.

    Up to `small_nbytes` memory is Python's own, and not counted.

    A lease can die at any moment: inside `take()` on the same thread when the collector runs, or on a thread
    of XLA's. So nothing here waits for a lock. Blocks move by single list and dict operations, which are
    atomic, and whoever gets the lock at once settles what was returned, for all. It looks once more after it
    has let go of the lock, so that no block returned meanwhile is overlooked.
    """

    def __init__(self, limit_nbytes: int, small_nbytes: int = -1):
        self.limit_nbytes, self.small_nbytes = limit_nbytes, small_nbytes
        self._lent: dict[int, int] = {}  # address -> nbytes
        self._returned: deque[_Block] = deque()
        self._free: dict[int, list[_Block]] = {}  # nbytes -> blocks; first the size unused for longest
        self._free_bound = 0  # the bytes in `_free`, or more: take() leaves it
        self._settling = Lock()

    def take(self, shape: tuple[int, ...], dtype: DTypeLike, aligned: bool = True) -> np.ndarray:
        """`np.empty(shape, dtype)` in a block of this arena: aligned, and with whatever was there before.

        `aligned=False`: where it is small it need not be, which takes a microsecond less.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise DtypeError(f"an arena holds plain numbers, no Python objects: dtype {dtype}")
        nbytes = int(prod(shape)) * dtype.itemsize
        if nbytes <= self.small_nbytes:  # a lease costs more than this memory
            if not aligned:
                return np.empty(shape, dtype)
            memory = np.empty(nbytes + ALIGNMENT, np.uint8)
            return np.ndarray(shape, dtype, memory, -memory.__array_interface__["data"][0] % ALIGNMENT)
        nbytes = block_nbytes(nbytes)
        try:
            block = self._free[nbytes].pop()
        except (KeyError, IndexError):
            block = _fresh_block(nbytes)
        lease = _lease_type(nbytes).from_address(block.address)
        lease.arena, lease.block = self, block
        self._lent[block.address] = nbytes
        return np.ndarray(shape, dtype, lease)

    def stats(self) -> ArenaStats:
        """How many bytes are lent and free at this moment."""
        self._settle()
        return ArenaStats(sum(list(self._lent.values())), self._free_nbytes(), self.limit_nbytes)

    def close(self) -> None:
        """Free what is free, and from now on every block as it comes back. What is lent stays as it is."""
        self.limit_nbytes = 0
        self._free.clear()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _give_back(self, block: _Block) -> None:
        del self._lent[block.address]
        self._returned.append(block)
        self._settle()

    def _settle(self) -> None:
        while self._returned and self._settling.acquire(blocking=False):
            try:
                while self._returned:
                    block = self._returned.popleft()
                    if block.nbytes <= self.limit_nbytes:
                        blocks = self._free.pop(block.nbytes, [])
                        blocks.append(block)
                        self._free[block.nbytes] = blocks
                        self._free_bound += block.nbytes
                if self._free_bound > self.limit_nbytes:
                    self._trim()
            finally:
                self._settling.release()

    def _trim(self) -> None:
        """Drop free blocks until the limit holds, first those of the size unused for longest."""
        self._free_bound = self._free_nbytes()
        for nbytes, blocks in list(self._free.items()):
            while blocks and self._free_bound > self.limit_nbytes:
                del blocks[-1:]  # a take() on another thread may have had the last
                self._free_bound -= nbytes
            if blocks:
                break
            self._free.pop(nbytes, None)

    def _free_nbytes(self) -> int:
        return sum([nbytes * len(blocks) for nbytes, blocks in list(self._free.items())])


def block_nbytes(nbytes: int) -> int:
    """The size of the block that serves `nbytes`: four steps per power of two, so at most a fifth is spare.

    >>> [block_nbytes(n) for n in (0, 64, 65, 1024, 1025, 5000)]
    [64, 64, 128, 1024, 1280, 5120]
    """
    if nbytes <= ALIGNMENT:
        return ALIGNMENT
    step = max(1 << ((nbytes - 1).bit_length() - 3), ALIGNMENT)
    return -(-nbytes // step) * step


def _fresh_block(nbytes: int) -> _Block:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    address = memory.ctypes.data
    return _Block(nbytes, address + -address % ALIGNMENT, memory)


@cache  # one type per block size: some hundred at most
def _lease_type(nbytes: int) -> Any:
    """A ctypes array: it offers the buffer that `np.ndarray` wants, and being a class it has a `__del__`."""
    members = {"__slots__": ("arena", "block"), "__del__": lambda lease: lease.arena._give_back(lease.block)}
    return type("Lease", (c_char * nbytes,), members)
