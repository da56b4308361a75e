"""A plan on fixed memory: each op has the arrays that it works on, in every call with any rows and any tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import addressof, c_char
from dataclasses import replace
from functools import cached_property, partial
from operator import gt, index
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.base import Backend
from fompi.base.errors import PlanError, ShapeError, TensorError, quoted
from fompi.base.layout import CARRIERS, Sizes
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import digest
from fompi.mpi import environment
from fompi.plans.plan import Buffer, Plan
from fompi.runtime.compiled import Compiled
from fompi.runtime.dispatch import Announcing
from fompi.runtime.given import Given, On, Overlay, TensorForm, address_of
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray
from fompi.tensors.dlpack import Tensor

NOTHING = np.zeros(0)


class BoundMemory(NamedTuple):
    """`tensors`: those that the caller gave, by buffer. `shapes`: their shapes, and that of a flat result.

    `given`: the same tensors as the caller named them. `arrays`: every buffer of the program as an array. Buffers that
    the caller did not give have fresh memory.
    """

    tensors: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    arrays: dict[str, Any]
    given: Mapping[str, Any]


def cut(plan: Plan, tensors: dict[str, Tensor], rank: int) -> None:
    """Replace the tensors of which the plan has pieces, because it deals columns (`Problem.cut`)."""
    problem = plan.problem
    for name in [name for name in tensors if problem.columns and name in problem.whole_shapes]:
        whole, shape = tensors.pop(name), problem.whole_shapes[name]
        wanted = (plan.sizes.rows[rank], *shape) if name == "x" else shape
        if whole.array.shape != wanted:
            raise ShapeError(f"{name} has the shape {whole.array.shape}, the plan has {wanted} on rank {rank}")
        hosts = {} if whole.host is None else problem.cut({name: whole.host})
        pieces = problem.cut({name: whole.array})
        tensors |= {piece: replace(whole, array=array, host=hosts.get(piece)) for piece, array in pieces.items()}


class BoundPlan:
    """A compiled plan on fixed memory, with what each op does for the rows in use.

    The rows are those of the plan, or fewer (`_use`). Work that depends on rows is done when the rows change, not
    at every call.
    """

    def __init__(
        self,
        compiled: Compiled,
        comm: Communicator,
        memory: BoundMemory,
        backend: Backend,
        kernels: Mapping[str, Callable[..., object]] | None = None,
    ):
        self.plan, self.compiled, self.comm = compiled.plan, compiled, comm
        self.backend, self.kernels = backend, kernels
        self._tensors, self._shapes, self._arrays, given = memory
        self._places = dlpack.places(given)
        # Collectives of several bound plans may start in any order, because each plan has a communicator for them.
        self._link = comm.link.duplicate() if compiled.collectives else comm.link
        self._like = self._tensors.get("x") or self._tensors.get("x0")
        self._inputs = [buffer.name for buffer in compiled.program.buffers if buffer.is_input]
        self._unplaced: frozenset[str] = frozenset()  # the buffers of which a call in C needs no address
        self._readers: dict[str, dict[int, list[int]]] = {}
        self._writers: dict[str, dict[int, int]] = {}
        self._forms: dict[str, TensorForm] = {}
        self._overlays: dict[tuple[str, ...], Overlay] = {}  # by the buffers that are given
        self._spare: dict[str, Any] = {}  # memory for tensors of a call that one kernel with announced products uses
        self._spare_announcing: dict[tuple[str, ...], Announcing | None] = {}  # by the buffers that lie there
        self._use(self.plan.sizes)
        self._actions = self._resolve(self._arrays)

    @cached_property
    def _actions(self) -> list[Any]:
        """What each op does, on the bound memory."""
        return self._resolve(self._arrays)

    def _use(self, sizes: Sizes) -> None:
        """Work out what every op does with these rows."""
        self._sizes, self._extents = sizes, self.plan.extents(self.comm.rank, sizes)
        self._sizes_digest = digest(str(sizes))  # alike on all ranks, as the mark of a call must be
        sized = self.compiled.sized(self._extents)
        self._is_long = not self.compiled.asynchronous and self.compiled.is_long(sized)
        self._is_small = not self.kernels and self.compiled.is_small(sized)  # a kernel of the caller may be slow
        self._resolve = partial(
            self.compiled.resolve,
            starts=sized.starts,
            backend=self.backend,
            collective=self._link.collective,
            kernels=self.kernels,
        )
        self.__dict__.pop("_actions", None)
        self._overlays.clear()
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
        self._names = [buffer.name for buffer in self.compiled.outputs]
        self._lend_results()

    def _lend_results(self) -> None:
        """Make the tensors that calls return, unless the results of a call are copied from a device."""
        self._results = () if self._is_copied_back else self._lent()
        written = [*zip(self._names, self._results, strict=False)]
        written += [(name, self._tensors[name].owner) for name in self._names if name in self._tensors]
        self._written = [(name, x) for name, x in written if dlpack.versioned([x])]
        self._all_written = [x for _, x in self._written]
        self._lent_places = dlpack.places(dict(zip(self._names, self._results, strict=False)))
        self._seen = [pair for place in self._places for pair in place.seen]
        self._seen += [place.seen[0] for place in self._lent_places]  # the address

    def _moved(self) -> dict[str, Any]:
        """The bound tensors that have other memory by now: a call takes them as tensors of its own."""
        if dlpack.moved(self._lent_places):
            self._lend_results()
        return dlpack.moved(self._places)

    def _given(self, tensors: Mapping[str, Any], is_whole: bool) -> Given:
        """The memory of a call on these tensors. `is_whole`: all inputs are ready when it starts.

        Raises ShapeError, DtypeError or TensorError if one has not the form of the bound tensor, and PlanError if the
        plan has no such tensor.
        """
        if self.backend.device is not None or self.plan.problem.columns:
            return self._given_views(tensors, is_whole)
        names, addresses = (*tensors,), []
        overlay = self._overlays.get(names) or self._overlay(names)
        for form, (name, value) in zip(overlay.forms, tensors.items(), strict=True):
            is_plain = type(value) is np.ndarray and value.dtype is form.plain
            if is_plain and value.shape == form.shape and value.flags.carray:
                addresses.append(addressof(c_char.from_buffer(value)))
                continue
            tensor = dlpack.borrow(value, name)
            self._form(name).check(name, tensor, self.backend.device)
            if form.strides is not None:
                return self._given_views(tensors, is_whole)
            addresses.append(address_of(tensor.array))
        return Given(tensors, self._at(overlay, (*addresses,)), overlay.outputs)

    def _at(self, overlay: Overlay, addresses: tuple[int, ...]) -> On:
        """The memory of a call in which these buffers are contiguous memory of the host at these addresses.

        The arrays keep no memory alive. Who starts the call does so until it is finished.
        """
        on = overlay.known.get(addresses)
        if on is None:
            on = self._on(overlay, {**self._arrays, **overlay.arrays_at(addresses)})
            on = on._replace(is_shared=True, bases=self._bases(on.arrays))
            overlay.remember(addresses, on)
        return on

    def _bases(self, arrays: Mapping[str, Any]) -> bytes | None:
        """The addresses of the buffers, as a call in C takes them. None: some are not contiguous memory of the host."""
        every = [NOTHING if name in self._unplaced else arrays[name] for name in self.compiled.buffers]
        if not all(isinstance(array, np.ndarray) and array.flags.c_contiguous for array in every):
            return None
        return np.array([*map(address_of, every)], np.uint64).tobytes()

    def _given_views(self, tensors: Mapping[str, Any], is_whole: bool) -> Given:
        """The memory of a call on tensors of a device, or on strided ones. The arrays keep their memory alive."""
        borrowed = {name: dlpack.borrow(value, name) for name, value in tensors.items()}
        cut(self.plan, borrowed, self.comm.rank)
        for name, tensor in borrowed.items():
            self._form(name).check(name, tensor, self.backend.device)
        copied, spare, announcing = {}, {}, None
        if self.backend.device is not None:
            announcing = self._announcing if is_whole else None
            announced = set() if announcing is None else self.compiled.touched(announcing.ops)
            for name, tensor in borrowed.items():
                if tensor.device is None:
                    copied[name] = replace(tensor, array=self._arrays[name], host=tensor.array)
                elif name in announced:
                    copied[name], spare[name] = tensor, self._spare_memory(name)
        direct = {name: tensor for name, tensor in borrowed.items() if name not in copied}
        moved = {name: tensor.array.reshape(self._form(name).at) for name, tensor in direct.items()}
        on = self._on(self._overlay((*direct, *spare)), {**self._arrays, **moved, **spare})
        if spare:
            if (*spare,) not in self._spare_announcing:
                self._spare_announcing[*spare,] = self._announced_on(on.arrays)
            announcing = self._spare_announcing[*spare,]
        outputs = self._overlay((*borrowed,)).outputs
        owners = {name: tensor.owner for name, tensor in borrowed.items()}
        return Given(owners, on, outputs, copied, announcing)

    def _copy_given(self, given: Given, back: bool = False) -> Exception | None:
        """Copy inputs of a call to spare memory of a device, or outputs from there. Returns the error of the device."""
        buffers = given.outputs if back else self._inputs
        pairs = [(self._spare[n], t.array) for n, t in given.copied.items() if n in buffers and t.host is None]
        if not pairs:
            return None
        if back:
            pairs = [(theirs, mine) for mine, theirs in pairs]
        try:
            self.backend.copy(*pairs)  # type: ignore[attr-defined]
        except Exception as error:
            return error
        return None

    def _results_given(self, given: Given) -> tuple[Any, ...]:
        """The results of a call with tensors of its own."""
        error = self._copy_given(given, back=True) if given.copied else None
        if error is not None:
            raise error
        if self._sizes is self.plan.sizes and len(given.outputs) == len(self._names):
            return tuple([given.owners[name] for name in given.outputs])
        results = [given.owners.get(name, y) for name, y in zip(self._names, self._results, strict=True)]
        if self._sizes is not self.plan.sizes:
            for at, (buffer, tensor) in enumerate(zip(self.compiled.outputs, results, strict=True)):
                if buffer.name in given.outputs and buffer.axis != "whole":
                    results[at] = self._rows_of(given, buffer, tensor)
        return tuple(results)

    def _rows_of(self, given: Given, buffer: Buffer, tensor: Any) -> Any:
        """The rows of an output of a call that has fewer rows than the plan."""
        mine = given.copied.get(buffer.name) or dlpack.borrow(tensor, buffer.name)
        array = (mine.array if mine.host is None else mine.host).reshape(self._arrays[buffer.name].shape)
        return dlpack.lend(array[: sum(self._extents.counts(buffer.axis))], buffer.dtype, mine)

    def _spare_memory(self, name: str) -> Any:
        """Memory like that of the buffer `name`. A kernel is bound to it once: tensors of a call are copied to it."""
        if name not in self._spare:
            buffer, mine = self.compiled.buffers[name], self._arrays[name]
            arena = self.comm.engine.arena
            self._spare[name] = self.backend.empty(arena, mine.shape, buffer.dtype, buffer.place)
        return self._spare[name]

    def _on(self, overlay: Overlay, arrays: dict[str, Any]) -> On:
        """A call on these arrays. Raises TensorError if an output shares memory."""
        for name, other in overlay.apart:
            if dlpack.overlap(arrays[name], arrays[other]):
                raise TensorError(f"{name} shares memory with {other}")
        actions = self._actions.copy()
        for i, action in zip(overlay.ops, self._resolve(arrays, only=overlay.ops), strict=True):
            actions[i] = action
        return On(arrays, actions)

    def _overlay(self, names: tuple[str, ...]) -> Overlay:
        if names not in self._overlays:
            self._overlays[names] = Overlay(self.compiled, names, [*map(self._form, names)])
        return self._overlays[names]

    def _form(self, name: str) -> TensorForm:
        """What the tensor `name` of a call must be like. Raises PlanError if the plan has no such tensor."""
        if name in self._forms:
            return self._forms[name]
        buffer = self.compiled.buffers.get(name)
        if buffer is None or buffer.role == "scratch":
            known = [b.name for b in self.compiled.program.buffers if b.role != "scratch"]
            raise PlanError(f"{self.compiled.title} has no tensor {quoted(name, known)}; it has {', '.join(known)}")
        bound, mine = self._tensors.get(name), self._arrays[name]
        like, array = bound or self._like, mine if bound is None or bound.host is None else bound.host
        storage, is_contiguous = dlpack.STORAGE[buffer.dtype], array.flags.c_contiguous
        form = self._forms[name] = TensorForm(
            storage if buffer.dtype not in CARRIERS and is_contiguous and mine.size else None,
            self._shapes.get(name, mine.shape),
            storage,
            buffer.dtype,
            None if is_contiguous else array.strides,
            buffer.is_output,
            self.backend.device is None or (like is not None and like.host is not None),
            mine.shape,
        )
        return form

    @cached_property
    def _announced_whole(self) -> Announcing | None:
        """The one kernel for the products that a device can announce. None: each product is a kernel of its own.

        It is for the rows of the plan. An error here belongs to this rank alone, and the ranks have agreed already. So
        it is the first call that fails, if the device is of no more use.
        """
        return self._announced_on(self._arrays)

    def _announced_on(self, arrays: Mapping[str, Any]) -> Announcing | None:
        """The one kernel for announced products, on these arrays. None: each product is a kernel of its own."""
        compiled, choice = self.compiled, environment.value("FOMPI_COUNTERS")
        names = {compiled.program.ops[i].kernel for i in compiled.announced}  # type: ignore[union-attr]
        if choice == "0" or self.backend.device is None or not names or names & {*(self.kernels or ())}:
            return None
        starts = compiled.sized(self.plan.extents(self.comm.rank)).starts
        products, folder = compiled.products(arrays, starts), environment.cache_folder()
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

    def _upload(self, tensors: Mapping[str, Tensor], name: str, block: int | None = None) -> None:
        """Copy an input, or one block of it, to the device, if the caller's tensor is on the host."""
        tensor = tensors.get(name)
        if tensor is not None and tensor.host is not None:
            array, host = self._arrays[name], tensor.host.reshape(self._arrays[name].shape)
            if block is not None:
                starts = self.compiled.buffers[name].offsets(self._extents)
                first = block - self.compiled.buffers[name].first
                array, host = (a[starts[first] : starts[first + 1]] for a in (array, host))
            array.device.put(array, host)

    def _download(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy outputs back to the caller's tensors on the host."""
        for buffer in self.compiled.outputs:
            tensor = tensors.get(buffer.name)
            if tensor is not None and tensor.host is not None:
                tensor.host[...] = tensor.array.get().reshape(tensor.host.shape)

    def _sizes_of(self, counts: Any) -> Sizes:
        """The rows of a call. Raises ShapeError on all ranks: every rank checks the counts of all."""
        most = self.plan.sizes
        if counts is None:
            return most
        if most.runs:
            return self._runs_of(counts)
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

    def _runs_of(self, counts: Any) -> Sizes:
        """The rows of a call whose rows go to experts. Raises ShapeError on all ranks."""
        most, sizes = self.plan.sizes, self.plan.problem.grouped(counts)
        pairs = [(n, limit) for of in zip(sizes.runs, most.runs, strict=True) for runs in zip(*of, strict=True)
                 for n, limit in zip(*runs, strict=True)]  # fmt: skip
        if over := [pair for pair in pairs if pair[0] > pair[1]]:
            raise ShapeError(f"counts have {over[0][0]} rows for an expert, but the plan allows 0 to {over[0][1]}")
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
            if name not in self.compiled.buffers or not self.compiled.buffers[name].is_input:
                raise PlanError(f"{name!r} is no input of {self.compiled.title}")
            self._readers[name] = self.compiled.readers(name)
        return self._readers[name]

    def _release(self) -> None:
        """Give the memory of buffers back, and the communicator of the library's collectives."""
        self._arrays, self._actions, self._announcing = {}, [], None
        for cache in (self._overlays, self._spare, self._spare_announcing):
            cache.clear()
        self.__dict__.pop("_announced_whole", None)
        if self._link is not self.comm.link and self.comm.channel.broken is None:
            self._link.close()
