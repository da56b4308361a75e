"""Memory of CUDA that is kept and used again: blocks of 256 bytes and more, in slabs that CUDA has given.

Memory comes from cudaMalloc and cudaHostAlloc, not from CuPy's pools, so that another process can open it: a handle of
CUDA names a whole allocation. No call of fompi gives memory back to CUDA, because that would wait for the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from fompi.tensors.arena import block_nbytes

ALIGNMENT = 256
"""Bytes. Every block begins at a multiple of this."""

SLAB_NBYTES = 2 << 20
"""CUDA gives and exports memory in pieces of this size. Blocks of less than half of it share a slab."""

OUT_OF_MEMORY = 2


class Slab:
    """One allocation of CUDA. `handle` is what another process opens; it names the whole slab."""

    __slots__ = ("block_nbytes", "handle", "nbytes", "ptr")

    def __init__(self, ptr: int, nbytes: int, block_nbytes: int):
        self.ptr, self.nbytes, self.block_nbytes = ptr, nbytes, block_nbytes
        self.handle: bytes | None = None


class Lease:
    """A block of a slab that is in use. It goes back to its pool when the last array on it has died.

    `is_lent`: a framework has got the memory. Kernels of the program may still use it when its last array dies.
    """

    __slots__ = ("__array_interface__", "__weakref__", "device", "is_lent", "nbytes", "pool", "ptr", "slab")

    __array_interface__: dict[str, Any]  # of page-locked memory, for NumPy

    def __init__(self, pool: Pool, slab: Slab, ptr: int, nbytes: int):
        self.pool, self.slab, self.ptr, self.nbytes = pool, slab, ptr, nbytes
        self.device, self.is_lent = pool.device, False

    def __del__(self) -> None:  # at any moment, on any thread: nothing here may wait for a lock
        self.pool.returned.append((self.slab, self.ptr, self.is_lent))


class Pool:
    """Blocks of one kind of memory. Nothing goes back to CUDA before `release`, or until CUDA has no more.

        lease dies ──▶ returned ──▶ free                 fompi has used it: its calls end after their kernels
                           └──▶ lent ──▶ awaited ──▶ free    the program has used it

    A block that the program has used is free once an event is done that was recorded later in the program's stream:
    the next call records one (`Device.entry`).
    """

    def __init__(self, device: Any, allocate: Callable[[int], int], give_back: Callable[[int], None]):
        self.device, self._allocate, self._give_back = device, allocate, give_back
        self.returned: deque[tuple[Slab, int, bool]] = deque()
        self._free: dict[int, list[tuple[Slab, int]]] = {}
        self._lent: list[tuple[Slab, int]] = []
        self._awaited: deque[tuple[Any, list[tuple[Slab, int]]]] = deque()
        self._slabs: set[Slab] = set()
        self._taken = self.most_nbytes = 0  # the bytes of blocks that are not free, and the most there were
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The bytes that the pool has from CUDA."""
        return sum(slab.nbytes for slab in list(self._slabs))

    def take(self, nbytes: int) -> Lease:
        size = -(-block_nbytes(nbytes) // ALIGNMENT) * ALIGNMENT
        with self.lock:
            self._settle()
            blocks = self._free.get(size)
            if not blocks:
                self._add_slab(size)
                blocks = self._free[size]
            slab, ptr = blocks.pop()
            self._taken += size
            self.most_nbytes = max(self.most_nbytes, self._taken)
        return Lease(self, slab, ptr, nbytes)

    def lent(self) -> list[tuple[Slab, int]]:
        """The blocks that the program gave back since the last call. The caller must `await_lent` them."""
        with self.lock:
            self._settle()
            blocks, self._lent = self._lent, []
        return blocks

    def put_back(self, blocks: list[tuple[Slab, int]]) -> None:
        """There is no event to await: the next call takes care of them."""
        with self.lock:
            self._lent += blocks

    def await_lent(self, blocks: list[tuple[Slab, int]], event: Any) -> None:
        """They are free once `event` is done. None: now."""
        with self.lock:
            if event is None:
                self._add(blocks)
            else:
                self._awaited.append((event, blocks))

    def release(self, exported: bool = False) -> None:
        """Give all slabs that nothing uses back to CUDA. Waits for the device.

        A slab that another process may have opened stays, because CUDA does not allow to free it. `exported`: it goes.
        """
        with self.lock:
            self._release(exported)

    def _settle(self) -> None:
        while self.returned:
            slab, ptr, is_lent = self.returned.popleft()
            if is_lent:
                self._lent.append((slab, ptr))
            else:
                self._add([(slab, ptr)])
        while self._awaited and self._awaited[0][0].done():
            self._add(self._awaited.popleft()[1])

    def _add(self, blocks: list[tuple[Slab, int]]) -> None:
        for slab, ptr in blocks:
            self._free.setdefault(slab.block_nbytes, []).append((slab, ptr))
            self._taken -= slab.block_nbytes

    def _add_slab(self, size: int) -> None:
        nbytes = SLAB_NBYTES if size < SLAB_NBYTES // 2 else size
        ptr = self._allocated(nbytes)
        if ptr is None:
            self._release(exported=False)
            ptr = self._allocated(nbytes)
        if ptr is None:
            raise self.device.out_of_memory(nbytes, self)
        slab = Slab(ptr, nbytes, size)
        self._slabs.add(slab)
        self._taken += nbytes // size * size  # `_add` takes them off
        self._add([(slab, ptr + at) for at in range(0, nbytes - size + 1, size)])

    def _allocated(self, nbytes: int) -> int | None:
        """None: CUDA has no memory."""
        try:
            return self._allocate(nbytes)
        except Exception as error:
            if getattr(error, "status", None) == OUT_OF_MEMORY:
                return None
            raise self.device.failure(error, "an allocation") from error

    def _release(self, exported: bool) -> None:
        self._settle()
        if self._lent or self._awaited:
            self.device.ask(self.device.runtime.deviceSynchronize)
            self._add([*self._lent, *(block for _, blocks in self._awaited for block in blocks)])
            self._lent = []
            self._awaited.clear()
        idle: dict[Slab, int] = {}
        for blocks in self._free.values():
            for slab, _ in blocks:
                idle[slab] = idle.get(slab, 0) + 1
        for slab, count in idle.items():
            if count == slab.nbytes // slab.block_nbytes and (exported or slab.handle is None):
                blocks = self._free[slab.block_nbytes]
                blocks[:] = [block for block in blocks if block[0] is not slab]
                self._slabs.discard(slab)
                self._give_back(slab.ptr)


class Opened:
    """Memory of another process. When its last array has died, its address goes to `dropped`, and is closed later."""

    __slots__ = ("_dropped", "device", "is_lent", "nbytes", "ptr")

    def __init__(self, device: Any, ptr: int, nbytes: int, dropped: deque[int] | None):
        self.device, self.ptr, self.nbytes, self.is_lent, self._dropped = device, ptr, nbytes, False, dropped

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped.append(self.ptr)
