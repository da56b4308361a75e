"""`bind` makes an Executor of a plan and tensors: it checks that they fit, and the ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fompi.backends.base import Backend
from fompi.backends.cuda import backend_of
from fompi.backends.cuda.failures import OutOfMemory
from fompi.backends.numpy import Numpy
from fompi.base.errors import DtypeError, LaunchError, PlanError, ShapeError, TensorError, quoted
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.mpi import environment
from fompi.plans.kernels import find
from fompi.plans.plan import Buffer, Collective, Plan, Send, parts_in_words
from fompi.plans.staged import for_device, is_mirror
from fompi.runtime.bound_plan import BoundMemory, cut
from fompi.runtime.compiled import Compiled
from fompi.runtime.default_device import default_device, upload
from fompi.runtime.executor import Executor
from fompi.runtime.needs import out_of_memory
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor


def check_tensors(plan: Plan, comm: Communicator, given: Mapping[str, Any], backend: Backend) -> BoundMemory:
    """The memory of a bound plan. Raises PlanError, ShapeError, DtypeError or TensorError if the tensors do not fit."""
    if plan.size != comm.size:
        raise PlanError(f"the plan is for {plan.size} ranks, {comm!r} has {comm.size}")
    program, extents = plan.programs[comm.rank], plan.extents(comm.rank)
    named = {b.name: b for b in program.buffers if b.role != "scratch"}
    device = backend.device
    borrow = dlpack.borrow if device is None or device is not default_device() else upload
    borrowed = {name: borrow(value, name) for name, value in given.items()}
    cut(plan, borrowed, comm.rank)
    shapes = {name: tensor.array.shape for name, tensor in borrowed.items()}
    if unknown := min(set(borrowed) - set(named), default=""):
        raise PlanError(f"{plan.problem.operation} has no tensor {quoted(unknown, named)}; it has {', '.join(named)}")
    if missing := [b.name for b in named.values() if b.is_input and b.name not in borrowed]:
        raise PlanError(f"bind({plan.problem.operation}) needs {', '.join(missing)}")
    sent = {c.buffer for op in program.ops if isinstance(op, (Send, Collective)) for c in op.reads}
    for name, tensor in borrowed.items():
        flat, shape = plan.problem.flat and name in ("x", "y"), named[name].shape(extents)
        _check_kind(named[name], tensor, device)
        if tensor.array.shape != shape and not (flat and tensor.array.size == shape[0]):
            raise ShapeError(f"{name} has the shape {tensor.array.shape}, the plan has {shape} on rank {comm.rank}")
        if not tensor.array.flags.c_contiguous and (named[name].is_output or name in sent or flat):
            raise TensorError(
                f"{name} is strided: pass a contiguous tensor, or make the plan with packed=True if x is strided"
            )
        if flat:
            if name == "y" or "y" not in borrowed:
                shapes["y"] = plan.problem.result_shape(tensor.array.shape, comm.rank)
            borrowed[name] = replace(tensor, array=tensor.array.reshape(shape))
    for name, tensor in borrowed.items():
        for other in borrowed:
            if named[name].is_output and other != name and dlpack.overlap(tensor.array, borrowed[other].array):
                raise TensorError(f"{name} shares memory with {other}")
    return BoundMemory(borrowed, shapes, _arrays(plan, comm, borrowed, backend), given)


def _check_kind(buffer: Buffer, tensor: Tensor, device: Any) -> None:
    """Raise TensorError or DtypeError if the kernels cannot use the memory of a tensor as this buffer."""
    name = buffer.name
    if tensor.device is not device:
        where, wanted = (f"the {d.name}" if d is not None else "the host" for d in (tensor.device, device))
        raise TensorError(f"{name} is on {where}, but the kernels run on {wanted}")
    if tensor.dtype != buffer.dtype:
        raise DtypeError(f"{name} is {tensor.dtype}, the plan has {buffer.dtype}")
    if buffer.is_output and tensor.readonly:
        raise TensorError(f"{name} is an output, but its memory is read-only")


def _arrays(plan: Plan, comm: Communicator, borrowed: Mapping[str, Tensor], backend: Backend) -> dict[str, Any]:
    """Every buffer as an array: those of the tensors, and fresh memory. Raises DeviceError if there is none left."""
    extents, arrays = plan.extents(comm.rank), {name: tensor.array for name, tensor in borrowed.items()}
    for buffer in plan.programs[comm.rank].buffers:
        if buffer.name in arrays:
            continue
        try:
            arrays[buffer.name] = backend.empty(comm.engine.arena, buffer.shape(extents), buffer.dtype, buffer.place)
        except OutOfMemory as error:
            staged = comm.paths(backend.device).is_staged
            raise out_of_memory(error, plan, plan.problem, extents, {*borrowed}, arrays, staged) from error
    return arrays


def replaced_kernels(plan: Plan, kernels: Mapping[str, Callable[..., object]], backend: Backend) -> list[str]:
    """The kernels of fompi that functions of the user replace. Raises PlanError if `kernels` do not fit the plan."""
    replaced = [name for name in kernels if plan.kernel(name) is None]
    for name in replaced:
        find(name)
        if not callable(kernels[name]):
            raise PlanError(f"kernels={{{name!r}: {kernels[name]!r}}}: give a function of (reads, writes)")
    for kernel in plan.kernels:
        if not callable(kernels.get(kernel.name)):
            raise PlanError(
                f"the plan declares the kernel {kernel.name!r}: bind it with kernels={{{kernel.name!r}: function}}"
            )
    if replaced and backend.asynchronous and backend.device is None:
        raise PlanError(f"kernels= run on the host, but the {backend.name} has its own kernels")
    return replaced


def backend_for(tensors: Mapping[str, Any]) -> Backend:
    """The backend of the device on which the tensors are."""
    found = (device for device in map(dlpack.device_of, tensors.values()) if device is not None)
    device = next(found, default_device())
    backend: Backend = Numpy() if device is None else backend_of(device)
    return backend


def bind(
    plan: Plan,
    *,
    comm: Any = None,
    out: Any = None,
    backend: Backend | None = None,
    kernels: Mapping[str, Callable[..., object]] | None = None,
    announces: bool = True,
    **tensors: Any,
) -> Executor:
    """An Executor of `plan` on these tensors, by the names of its buffers: `bind(plan, comm=tp, x=x, w=w, out=y)`.

    Collective: the ranks agree here, once, and later calls need no handshake. `out` is the output `y`. Outputs that
    are not given get fresh memory. Every call writes its outputs to the same memory. `kernels={"matmul": f}` replaces
    a kernel by `f(reads, writes)` on lists of arrays. A kernel that the plan declares is `f(args, reads, writes)`.

    On a device bind launches `f` once more, on scratch arrays full of zeros: what it compiles and loads must not stop
    the first call. Its error is an error of bind, on all ranks. A kernel that the plan declares is not launched.
    `announces`: one kernel of the device may compute the products and announce them, if it is faster (FOMPI_COUNTERS).
    """
    communicator = Communicator.of(comm)
    if out is not None:
        tensors["y"] = out
    refusal: Exception | None = None
    where = ""
    try:  # every check comes before the handshake, so that a refusal reaches all ranks
        backend = backend or backend_for(tensors)
        device = backend.device
        if device is not None:
            paths = communicator.paths(device)
            where = f" on a {paths.title}"
            always = environment.value("FOMPI_COUNTERS") == "1"
            missing, announces = device.needs_for_announced() if always else "", announces or always
            if missing:
                raise LaunchError(f"FOMPI_COUNTERS=1 cannot be done: {missing}")
            if not any(map(is_mirror, plan.programs[communicator.rank].buffers)):
                small = 0 if communicator.machine is None else communicator.machine.staged_below
                plan = for_device(plan, paths.is_staged, small)
        replaced = replaced_kernels(plan, kernels or {}, backend)
        memory = check_tensors(plan, communicator, tensors, backend)
        name = backend.name if device is None else paths.title
        by_caller = getattr(backend, "is_by_caller", False)
        compiled = Compiled(plan, communicator.rank, name if backend.asynchronous else "", by_caller, announces)
        if device is not None and kernels and replaced:
            starts = compiled.sized(plan.extents(communicator.rank)).starts
            for of, reads, writes in compiled.examples(replaced, memory.arrays, starts):
                backend.launch_once(kernels[of], of, reads, writes)  # type: ignore[attr-defined]
    except Exception as error:
        refusal = error
    text = f"bind({plan.problem} by {plan.schedule}, {parts_in_words(plan)}, window {plan.window}, {plan.sizes}){where}"
    agree(communicator, text, refusal)
    assert backend is not None
    if backend.device is None:
        return Executor(compiled, communicator, memory, backend, kernels)
    try:  # a device may have no more memory, events or streams
        made = Executor(compiled, communicator, memory, backend, kernels)
    except Exception as error:
        refusal = error
    agree(communicator, f"the events of {text}", refusal)
    return made
