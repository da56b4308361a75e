"""A plan on fixed memory: the caller's tensors are checked, and each op gets the arrays that it works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from operator import gt, index
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.base import Backend
from fompi.backends.cuda.failures import OutOfMemory
from fompi.base.errors import DeviceError, DtypeError, PlanError, ShapeError, TensorError
from fompi.base.layout import Sizes
from fompi.engine.communicator import Communicator
from fompi.mpi import environment
from fompi.plans.plan import Collective, Plan, Send
from fompi.plans.staged import for_device
from fompi.runtime.compiled import Compiled
from fompi.runtime.default_device import default_device, upload
from fompi.runtime.dispatch import Announcing
from fompi.runtime.needs import remedy
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray
from fompi.tensors.dlpack import Tensor


class Memory(NamedTuple):
    """`tensors`: those that the caller gave, by buffer. `shapes`: the shape that a flat result gets back.

    `arrays`: every buffer of the program as an array. Buffers that the caller did not give have fresh memory.
    """

    tensors: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    arrays: dict[str, Any]


def check_tensors(plan: Plan, comm: Communicator, given: Mapping[str, Any], backend: Backend) -> Memory:
    """The memory of a bound plan. Raises PlanError, ShapeError, DtypeError or TensorError if the tensors do not fit."""
    if plan.size != comm.size:
        raise PlanError(f"the plan is for {plan.size} ranks, {comm!r} has {comm.size}")
    program, extents = plan.programs[comm.rank], plan.extents(comm.rank)
    named = {b.name: b for b in program.buffers if b.role != "scratch"}
    device = backend.device
    borrow = dlpack.borrow if device is None or device is not default_device() else upload
    borrowed = {name: borrow(value, name) for name, value in given.items()}
    if plan.problem.columns and "x" in borrowed:
        borrowed |= _columns(plan.problem, borrowed.pop("x"), extents.rows[comm.rank], comm.rank)
    given = dict.fromkeys(borrowed)
    if unknown := sorted(set(given) - set(named)):
        raise PlanError(f"{plan.problem.operation} has no tensor {unknown[0]!r}; it has {', '.join(named)}")
    if missing := [b.name for b in named.values() if b.role == "input" and b.name not in given]:
        raise PlanError(f"bind({plan.problem.operation}) needs {', '.join(missing)}")
    sent = {c.buffer for op in program.ops if isinstance(op, (Send, Collective)) for c in op.reads}
    shapes = {}
    for name, tensor in borrowed.items():
        buffer = named[name]
        if tensor.device is not device:
            where, wanted = (f"the {d.name}" if d is not None else "the host" for d in (tensor.device, device))
            raise TensorError(f"{name} is on {where}, but the kernels run on {wanted}")
        shape = buffer.shape(extents)
        flat = plan.problem.flat and name in ("x", "y")
        if tensor.dtype != buffer.dtype:
            raise DtypeError(f"{name} is {tensor.dtype}, the plan has {buffer.dtype}")
        if tensor.array.shape != shape and not (flat and tensor.array.size == shape[0]):
            raise ShapeError(f"{name} has the shape {tensor.array.shape}, the plan has {shape} on rank {comm.rank}")
        dense = tensor.array.flags.c_contiguous
        if buffer.role == "output" and tensor.readonly:
            raise TensorError(f"{name} is an output, but its memory is read-only")
        if not dense and (buffer.role == "output" or name in sent or flat):
            raise TensorError(
                f"{name} is strided: pass a contiguous tensor, or make the plan with packed=True if x is strided"
            )
        if flat:
            if name == "y" or "y" not in given:
                shapes["y"] = plan.problem.result_shape(tensor.array.shape, comm.rank)
            tensor = replace(tensor, array=tensor.array.reshape(shape))
        borrowed[name] = tensor
    for name, tensor in borrowed.items():
        for other in borrowed:
            if named[name].role == "output" and other != name and dlpack.overlap(tensor.array, borrowed[other].array):
                raise TensorError(f"{name} shares memory with {other}")
    arrays = {name: tensor.array for name, tensor in borrowed.items()}
    for buffer in program.buffers:
        if buffer.name not in arrays:
            shape = buffer.shape(extents)
            try:
                arrays[buffer.name] = backend.empty(comm.engine.arena, shape, buffer.dtype, buffer.place)
            except OutOfMemory as error:
                taken = sum(a.nbytes for name, a in arrays.items() if name not in given and isinstance(a, DeviceArray))
                stage = partial(for_device, pairs=comm.paths(device).is_staged)
                words = remedy(plan, plan.problem, extents, given, error.free + taken, stage)
                arrays.clear()  # the traceback of the error keeps them
                raise DeviceError(f"{error}. {words}") from error
    return Memory(borrowed, shapes, arrays)


def _columns(problem: Any, x: Tensor, rows: int, rank: int) -> dict[str, Tensor]:
    """The columns of x for each rank, by the name of the input."""
    if x.array.shape != (rows, *problem.row):
        raise ShapeError(f"x has the shape {x.array.shape}, the plan has {(rows, *problem.row)} on rank {rank}")
    hosts = {} if x.host is None else problem.cut({"x": x.host})
    return {name: replace(x, array=array, host=hosts.get(name)) for name, array in problem.cut({"x": x.array}).items()}


class BoundPlan:
    """A compiled plan on fixed memory, with what each op does for the rows in use.

    The rows are those of the plan, or fewer (`_use`). Work that depends on rows is done when the rows change, not
    at every call.
    """

    def __init__(
        self,
        compiled: Compiled,
        comm: Communicator,
        memory: Memory,
        backend: Backend,
        kernels: Mapping[str, Callable[..., object]] | None = None,
    ):
        self.plan, self.compiled, self.comm = compiled.plan, compiled, comm
        self.backend, self.kernels = backend, kernels
        self._tensors, self._shapes, self._arrays = memory
        # Collectives of several bound plans may start in any order, because each plan has a communicator for them.
        self._link = comm.link.duplicate() if compiled.natives else comm.link
        self._like = self._tensors.get("x") or self._tensors.get("x0")
        self._readers: dict[str, dict[int, list[int]]] = {}
        self._writers: dict[str, dict[int, int]] = {}
        self._use(self.plan.sizes)

    def _use(self, sizes: Sizes) -> None:
        """Work out what every op does with these rows."""
        self._sizes, self._extents = sizes, self.plan.extents(self.comm.rank, sizes)
        sized, native = self.compiled.sized(self._extents), self._link.collective
        self._is_long = not self.compiled.asynchronous and self.compiled.is_long(sized)
        self._is_small = not self.kernels and self.compiled.is_small(sized)  # a kernel of the caller may be slow
        self._actions = self.compiled.resolve(self._arrays, sized.starts, self.backend, native, self.kernels)
        self._announcing = self._announced_whole if sizes == self.plan.sizes else None  # other rows change too often
        self._outputs = []
        for buffer in self.compiled.outputs:
            array = self._arrays[buffer.name]
            if buffer.axis != "whole":
                array = array[: sum(self._extents.counts(buffer.axis))]
                if buffer.name in self._shapes and sizes == self.plan.sizes:
                    array = array.reshape(self._shapes[buffer.name])
            like = self._tensors.get(buffer.name) or self._like or dlpack.borrow(np.empty(0))
            self._outputs.append((array, buffer.dtype, like))
        self._results = () if self._is_copied_back else self._lent()
        given = [self._tensors[b.name].owner for b in self.compiled.outputs if b.name in self._tensors]
        self._written = [x for x in (*self._results, *given) if dlpack.framework_of(x) == "torch"]

    @cached_property
    def _announced_whole(self) -> Announcing | None:
        """The one kernel for the products that a device can announce. None: each product is a kernel of its own.

        It is for the rows of the plan. An error here belongs to this rank alone, and the ranks have agreed already. So
        it is the first call that fails, if the device is of no more use.
        """
        compiled, choice = self.compiled, environment.value("FOMPI_COUNTERS")
        names = {compiled.program.ops[i].kernel for i in compiled.announced}  # type: ignore[union-attr]
        if choice == "0" or self.backend.device is None or not names or names & {*(self.kernels or ())}:
            return None
        starts = compiled.sized(self.plan.extents(self.comm.rank)).starts
        products, folder = compiled.products(self._arrays, starts), environment.cache_folder()
        try:
            launch = self.backend.bind_announced(products, choice == "1", folder)  # type: ignore[attr-defined]
        except Exception:
            return None
        return None if launch is None else Announcing(compiled.announced, launch)

    @property
    def _is_copied_back(self) -> bool:
        """True if results are copied from a device to the host, once they are there."""
        return any(isinstance(array, DeviceArray) and like.host is not None for array, _, like in self._outputs)

    def _lent(self) -> tuple[Any, ...]:
        """The outputs as tensors of the caller's framework.

        A JAX array must never change. So it gets memory that the next call does not write.
        """
        lent = []
        for array, dtype, like in self._outputs:
            if like.framework == "jax" and like.device is None:
                own = self.comm.engine.arena.take(array.shape, array.dtype)
                own[...] = array
                array = own
            elif like.framework == "jax" and like.host is None:
                array = self.backend.packed(array)  # type: ignore[attr-defined]
            lent.append(dlpack.lend(array, dtype, like))
        return tuple(lent)

    def _upload(self, name: str, block: int | None = None) -> None:
        """Copy an input, or one block of it, to the device, if the caller's tensor is on the host."""
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.host is not None:
            array, host = self._arrays[name], tensor.host.reshape(self._arrays[name].shape)
            if block is not None:
                starts = self.compiled.buffers[name].offsets(self._extents)
                first = block - self.compiled.buffers[name].first
                array, host = (a[starts[first] : starts[first + 1]] for a in (array, host))
            array.device.put(array, host)

    def _download(self) -> None:
        """Copy outputs back to the caller's tensors on the host."""
        for buffer in self.compiled.outputs:
            tensor = self._tensors.get(buffer.name)
            if tensor is not None and tensor.host is not None:
                tensor.host[...] = tensor.array.get().reshape(tensor.host.shape)

    def _sizes_of(self, counts: Any) -> Sizes:
        """The rows of a call. Raises ShapeError on all ranks: every rank checks the counts of all."""
        most = self.plan.sizes
        if counts is None:
            return most
        form = "rows[source][dest]" if most.pairs else "the rows of every rank"
        try:
            table = [tuple(map(index, row)) for row in (counts if most.pairs else (counts,))]
        except TypeError as error:
            raise ShapeError(f"counts must be {form}: {error}") from None
        allowed = most.pairs or (most.rows,)
        if [*map(len, table)] != [*map(len, allowed)]:
            raise ShapeError(f"counts must be {form}, for {self.comm.size} ranks, not {counts}")
        for row, limits in zip(table, allowed, strict=True):
            if min(row) < 0 or any(map(gt, row, limits)):
                rank, n = next((r, n) for r, n in enumerate(row) if not 0 <= n <= limits[r])
                raise ShapeError(f"counts have {n} rows for rank {rank}, but the plan allows 0 to {limits[rank]}")
        sizes = Sizes(pairs=tuple(table)) if most.pairs else Sizes(table[0])
        return most if sizes == most else sizes

    def _block(self, name: str, part: int) -> int:
        """The block of the buffer `name` that is part `part` on this rank."""
        buffer = self.compiled.buffers.get(self.compiled.named(name)[0])
        if buffer is None or not 0 <= part < buffer.count:
            raise PlanError(f"{self.compiled.title} has no part {part} of {name!r} on rank {self.comm.rank}")
        return buffer.first + part

    def _readers_of(self, name: str) -> dict[int, list[int]]:
        """The ops that read each block of the input `name`."""
        if name not in self._readers:
            if name not in self.compiled.buffers or self.compiled.buffers[name].role != "input":
                raise PlanError(f"{name!r} is no input of {self.compiled.title}")
            self._readers[name] = self.compiled.readers(name)
        return self._readers[name]

    def _release(self) -> None:
        """Give the memory of buffers back, and the communicator of the library's collectives."""
        self._arrays, self._actions, self._announcing = {}, [], None
        self.__dict__.pop("_announced_whole", None)
        if self._link is not self.comm.link and self.comm.channel.broken is None:
            self._link.close()
