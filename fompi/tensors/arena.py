"""A pool of host memory for results and scratch. Blocks are aligned to 64 bytes and lent as NumPy arrays.

    take() ──▶ array ──base──▶ lease ──▶ block      Views of the array, and tensors that torch or JAX make of it, keep
                                │                   the lease alive. When the lease dies, its `__del__` adds the block
    free blocks ◀── settle ◀── returned blocks      to the returned blocks.

New memory from the operating system costs one page fault per 4 KiB at the first write. A block that is used again
costs none. JAX borrows memory without a copy only if it is aligned to 64 bytes.
"""

from __future__ import annotations

from collections import deque
from ctypes import c_char
from functools import cache
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from fompi.base.errors import DtypeError

ALIGNMENT = 64
"""Bytes. Every block begins at a multiple of this: JAX copies memory that does not."""


class _Block(NamedTuple):
    nbytes: int
    address: int
    memory: np.ndarray  # owns the block; up to 64 bytes larger than `nbytes`, for the alignment


class Arena:
    """A pool of host memory that keeps at most `limit_nbytes` of free blocks. Thread-safe.

    Arrays of up to `small_nbytes` come from NumPy instead, and are not counted.

    A lease can die at any moment: inside `take()` on the same thread when the garbage collector runs, or on a thread
    of XLA. Therefore no method here waits for a lock. Blocks move by single list and dict operations, which are
    atomic. The thread that gets the lock at the first try moves the returned blocks of all threads to the free blocks.
    After it has released the lock it checks again for blocks that were returned in the meantime.
    """

    def __init__(self, limit_nbytes: int, small_nbytes: int = -1):
        self.limit_nbytes, self.small_nbytes = limit_nbytes, small_nbytes
        self._lent: dict[int, int] = {}  # address -> nbytes
        self._returned: deque[_Block] = deque()
        self._free: dict[int, list[_Block]] = {}  # nbytes -> blocks; the least recently used size is first
        self._free_bound = 0  # at least the bytes in `_free`: take() does not lower it
        self._settling = Lock()

    def take(self, shape: tuple[int, ...], dtype: DTypeLike, aligned: bool = True) -> np.ndarray:
        """`np.empty(shape, dtype)` in an aligned block of this arena. The contents are undefined.

        `aligned=False`: a small array need not be aligned. This saves a microsecond. Raises DtypeError for objects.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise DtypeError(f"dtype {dtype} holds Python objects; an arena holds plain numbers only")
        nbytes = int(prod(shape)) * dtype.itemsize
        if nbytes <= self.small_nbytes:  # here a lease costs more than new memory
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

    @property
    def lent_nbytes(self) -> int:
        """The bytes of the blocks that are lent at this moment."""
        self._settle()
        return sum(list(self._lent.values()))

    @property
    def free_nbytes(self) -> int:
        """The bytes of the blocks that are free at this moment: never more than `limit_nbytes`."""
        self._settle()
        return self._free_nbytes()

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
        """Drop free blocks until the limit holds. Blocks of the least recently used size go first."""
        self._free_bound = self._free_nbytes()
        for nbytes, blocks in list(self._free.items()):
            while blocks and self._free_bound > self.limit_nbytes:
                del blocks[-1:]  # a slice: a take() on another thread may have taken the last block
                self._free_bound -= nbytes
            if blocks:
                break
            self._free.pop(nbytes, None)

    def _free_nbytes(self) -> int:
        return sum([nbytes * len(blocks) for nbytes, blocks in list(self._free.items())])


def block_nbytes(nbytes: int) -> int:
    """The size of the block for `nbytes`. There are four sizes per power of two, so at most a fifth is unused.

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


@cache  # one type per block size: a few hundred at most
def _lease_type(nbytes: int) -> Any:
    """A ctypes array type: it exports the buffer that `np.ndarray` needs, and its `__del__` returns the block."""
    members = {"__slots__": ("arena", "block"), "__del__": lambda lease: lease.arena._give_back(lease.block)}
    return type("Lease", (c_char * nbytes,), members)
