"""What the strategies have in common: their tensors as arrays, and the agreement of the ranks before each of them.

A strategy computes with NumPy's functions, on arrays of the host or of a device (`fompi.backends.numbers`). Half types
are widened to float32 for that, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_char
from functools import cache
from math import prod
from operator import is_
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np

from fompi.backends.half import storage
from fompi.backends.numbers import for_numpy, narrow, place, stored
from fompi.base.call_options import CARRIED, in_words
from fompi.base.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    LayoutError,
    PlanError,
    ShapeError,
    TensorError,
    meant,
)
from fompi.base.layout import CARRIERS, HALF
from fompi.base.wires import wire_of
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import begin_agreement
from fompi.ops.messages import MOST_TAG, sendrecv
from fompi.ops.operation import Operation, communicator_of
from fompi.ops.operations import all_reduce
from fompi.ops.pending import Pending, Started
from fompi.parallel import section
from fompi.parallel.interleave import begins_call, give_way, is_interleaved
from fompi.plans.problems import order_of
from fompi.plans.tree import Canonical
from fompi.runtime.default_device import default_device, upload
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray
from fompi.tensors.dlpack import Lent, Tensor

Array = np.ndarray[Any, Any]

FLOATS = ("float64", "float32", *HALF)


class Kept(SimpleNamespace):
    """What a forward keeps for its backward: x, what the gradient of y must be like, and what else the strategy names.

    `dtype` and `shape` are those of y. `comm` is the communicator, or `comms` are the axes of a mesh.
    """

    def __init__(self, x: Tensor, shape: Sequence[int] = (), dtype: str = "", **more: Any):
        super().__init__(x=x, shape=tuple(shape), dtype=dtype or x.dtype, **more)

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of an operation of the backward."""
        return {"dtype": self.dtype, "comm": self.comm}

    def gradient(self, dy: Any) -> Array:
        """dy as an array. The forward's tensors may have moved meanwhile."""
        follow(self)
        return borrow_gradient(dy, self.dtype, self.shape, self.x)


def enter(name: str, comm: Any, check: Callable[[Communicator], tuple[str, int, Any]]) -> tuple[Any, Any, list[int]]:
    """All ranks begin the strategy `name`, or all raise. Returns (the Communicator, the result, the values).

    `check(comm)` looks at the arguments of this rank, and raises if they do not fit. It returns a text that must be the
    same on all ranks, a number that each rank tells all others, and its result. Collective.
    """
    communicator, found, refusal = _checked(comm, check)
    text, value, result = found or ("", 0, None)
    with begins_call():
        agreement = begin_agreement(communicator, f"{name}({text}{in_words(communicator.how)})", refusal, value)
    give_way()
    values = agreement.values()
    section.begin(communicator)
    return communicator, result, list(values)


def carrying(
    name: str, comm: Any, how: Mapping[str, Any], dtypes: Iterable[str], takes: Iterable[str] = CARRIED
) -> Communicator:
    """`comm` with the keywords `how` of `name`, which takes these. Raises the error of one that does not fit."""
    for key in how:
        if key not in takes:
            raise ArgumentError(f"{name} has no argument {key!r}{meant(key, takes, '; did you mean {!r}?')}")
    carrier = Communicator.of(comm).using(**how)
    for dtype in dtypes:
        wire_of(how.get("wire"), dtype)  # one that is carried is left out where elements take none
    if "feedback" in takes and carrier.how.get("feedback") and "wire" not in carrier.how:
        raise LayoutError("feedback=True needs a wire: nothing is lost without one")
    return carrier


def enter_axes(
    axes: Sequence[tuple[str, Any]], check: Callable[[Communicator], tuple[str, int, Any]]
) -> tuple[list[Any], Any]:
    """`enter` on several axes of a mesh: (what begins there, the axis). Returns (the Communicators, the result).

    A refusal of one rank reaches the ranks of its row, and by them all others.
    """
    refusal: Exception | None = None
    groups, result = [], None

    def checked(comm: Communicator) -> tuple[str, int, Any]:
        if refusal is not None:
            raise refusal
        return check(comm)

    for name, axis in axes:
        try:
            group, result, _ = enter(name, axis, checked)
            groups.append(group)
        except Exception as error:
            refusal = refusal or error
            if section.has_ended(error):  # all ranks hear of it by themselves
                break
    if refusal is not None:
        raise refusal
    return groups, result


def admit(
    operation: Operation[Any], comm: Any, check: Callable[[Communicator], tuple[str, Any]]
) -> tuple[Any, str, Any]:
    """All ranks begin a strategy that is one operation, or all raise. Returns (the Communicator, the text, the result).

    As `enter`, without an agreement of its own: that of the operation compares the text (`begin`).
    """
    communicator, found, refusal = _checked(comm, check)
    text, result = found or ("", None)
    if refusal is not None:
        with begins_call():
            operation.refuse(refusal, communicator)
    return communicator, f"{text}{in_words(communicator.how)}", result


def _checked(comm: Any, check: Callable[[Communicator], Any]) -> tuple[Any, Any, Exception | None]:
    """(the Communicator, what `check` has found, why this rank refuses)"""
    communicator, refusal = communicator_of(comm)
    if refusal is not None:
        return communicator, None, refusal
    try:
        return communicator, check(communicator), None
    except Exception as error:
        return communicator, None, error


def borrow(x: Any, name: str, like: Tensor | None = None, ndim: int | None = None) -> Tensor:
    """The tensor `x`: floating-point numbers, of the dtype and on the device of `like`, with `ndim` dimensions."""
    tensor = borrow_any(x, name)
    if like is not None:
        check_place(name, tensor.array, like.array)
    if tensor.dtype not in FLOATS:
        raise DtypeError(f"{name} has dtype {tensor.dtype}: it must be one of {', '.join(FLOATS)}")
    if like is not None and tensor.dtype != like.dtype:
        raise DtypeError(f"{name} has dtype {tensor.dtype}, but the first tensor has {like.dtype}: convert one of them")
    if ndim is not None and tensor.array.ndim != ndim:
        raise ShapeError(f"{name} has the shape {tensor.array.shape}: it must have {ndim} dimensions")
    return tensor


def borrow_any(x: Any, name: str) -> Tensor:
    """The tensor `x` of any dtype, with an array that NumPy's functions take; one of FOMPI_DEVICE, if it names one."""
    tensor = dlpack.borrow(x, name) if default_device() is None else upload(x, name)
    if (device := tensor.device) is not None:
        device.meet()
        tensor.array = for_numpy(tensor.array)
    return tensor


def follow(saved: Any) -> None:
    """Let what the forward of a strategy has kept be where torch has it now, as saved tensors of autograd are.

    torch may move a tensor between a forward and its backward: FSDP frees weights behind a forward, and gathers them
    anew. Arrays that are views of a tensor follow it. Raises TensorError for one that is freed, or is on a device.
    """
    tensors: list[Any] = []
    _mapped(saved, lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None, set())
    runs = [_run(tensor) for tensor in tensors if tensor.at and tensor.owner.data_ptr() != tensor.at]

    def follows(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf.array = follows(leaf.array)
            return None
        at = leaf.__array_interface__["data"][0] if isinstance(leaf, np.ndarray) else 0
        for begin, memory in runs:
            if begin <= at < begin + len(memory):
                return np.ndarray(leaf.shape, leaf.dtype, memory, at - begin, leaf.strides)
        return leaf

    if runs:
        _mapped(saved, follows, set())


def _run(tensor: Tensor) -> tuple[int, Any]:
    """Where a tensor of torch was, and its memory now."""
    if tensor.device is not None and tensor.host is None:
        raise TensorError("a tensor of a device has other memory than in the forward: its backward cannot read it")
    owner: Any = tensor.owner
    array = dlpack.borrow(owner.detach(), "a tensor that a forward has kept").array
    nbytes = sum([(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]) + array.itemsize
    begin, tensor.at = tensor.at, owner.data_ptr()
    memory: Any = (c_char * nbytes).from_address(tensor.at)
    memory.owner = owner
    return begin, memory


@cache
def _has_parts(kind: type) -> bool:
    """True for the classes of strategies."""
    return kind.__module__.startswith("fompi.parallel") and hasattr(kind, "__dict__")


def _mapped(kept: Any, of: Callable[[Any], Any], seen: set[int]) -> Any:
    """Put `of(leaf)` in the place of each array and tensor in `kept`, a nest of sequences and objects of strategies.

    None: it stays.
    """
    if isinstance(kept, (np.ndarray, Tensor)):
        found = of(kept)
        return kept if found is None else found
    kind: Any = type(kept)
    is_sequence = isinstance(kept, (list, tuple))
    if not (is_sequence or _has_parts(kind)) or id(kept) in seen:
        return kept
    seen.add(id(kept))
    if is_sequence:
        parts = [_mapped(each, of, seen) for each in kept]
        if isinstance(kept, list):
            kept[:] = parts
        return kept if all(map(is_, parts, kept)) else getattr(kind, "_make", tuple)(parts)
    for name, value in [*vars(kept).items()]:
        if (now := _mapped(value, of, seen)) is not value:
            object.__setattr__(kept, name, now)
    return kept


def check_place(name: str, array: Array, other: Array) -> None:
    """Raise TensorError if a tensor is on another device than the first tensor."""
    if (here := place(array)) is not (there := place(other)):
        where = [f"the {device.name}" if device is not None else "the host" for device in (here, there)]
        raise TensorError(f"{name} is on {where[0]}, but the first tensor is on {where[1]}: copy one of them")


def borrow_integers(x: Any, name: str, like: Tensor | None = None) -> Array:
    """The tensor `x` of integers as an array, on the device of `like`."""
    tensor = borrow_any(x, name)
    if like is not None:
        check_place(name, tensor.array, like.array)
    if tensor.array.dtype.kind not in "iu" or tensor.dtype in CARRIERS:
        raise DtypeError(f"{name} has dtype {tensor.dtype}: it must be an integer dtype")
    return tensor.array


def borrow_gradient(dy: Any, dtype: str, shape: Sequence[int], like: Tensor) -> Array:
    """The gradient of a result with this dtype and shape, as an array of that dtype, on the device of `like`."""
    tensor = borrow(dy, "dy")
    check_place("dy", tensor.array, like.array)
    if tensor.dtype != dtype:
        raise DtypeError(f"dy has dtype {tensor.dtype}, but the result has {dtype}")
    if tensor.array.shape != tuple(shape):
        raise ShapeError(f"dy has the shape {tensor.array.shape}, but the result has {tuple(shape)}")
    return tensor.array


def give(array: Array, like: Tensor) -> Any:
    """The numbers as a tensor with the framework and the dtype of `like`."""
    return lent(narrow(array, like.dtype), like)


def call(operation: Operation[Any], *arrays: Any, dtype: str, **options: Any) -> Any:
    """The result of an operation on arrays that hold the logical dtype `dtype`, as such arrays."""
    if is_interleaved():
        return arrived(start(operation, *arrays, dtype=dtype, **options))
    return array_of(operation(*_tensors(arrays, options, dtype), **options))


def start(operation: Operation[Any], *arrays: Any, dtype: str, **options: Any) -> Pending:
    """The operation on arrays that hold the logical dtype `dtype`, in flight."""
    with begins_call():
        return _of_section(operation.start(*_tensors(arrays, options, dtype), **options))


def start_with(operation: Operation[Any], text: str, *arrays: Any, dtype: str, **options: Any) -> Pending:
    """`start`, in which the ranks also compare `text`."""
    pending, _ = _with_words(operation, text, arrays, dtype, options)
    pending.leave()
    return _of_section(pending)


def begin(operation: Operation[Any], text: str, *arrays: Any, dtype: str, **options: Any) -> Pending:
    """The operation with which a strategy begins, finished. The ranks also compare `text` in it."""
    pending, comm = _with_words(operation, text, arrays, dtype, options)
    give_way()
    try:
        pending.wait()
    except Exception as error:
        if getattr(error, "raised_by_all", None) is None:  # other ranks may have ended this call, and go on
            section.begin(comm, pending.number)
        raise
    section.begin(comm, pending.number)
    return pending


def _with_words(
    operation: Operation[Any], text: str, arrays: Sequence[Any], dtype: str, options: dict[str, Any]
) -> tuple[Started, Communicator]:
    arguments, comm, how = operation.read(tuple(_tensors(arrays, options, dtype)), options)
    arguments.words = text
    with begins_call():
        return operation.begin(arguments, comm, how), comm


def _of_section(pending: Any) -> Any:
    """A call of a strategy. If the strategy ends by an error, it is no mistake that nobody waits for the call."""
    pending._is_unread = False
    return pending


def same_bits(comm: Communicator) -> str:
    """A schedule in which fompi sums: all ranks get the same bits, so that what they hold alike stays alike."""
    return "ring" if comm.network else "direct"


def held_alike(comm: Communicator) -> dict[str, Any]:
    """The keywords of a sum that all ranks hold. An order has the same bits anyway."""
    return {"comm": comm} if "order" in comm.how else {"comm": comm, "schedule": same_bits(comm)}


def start_sum(array: Array, dtype: str, comm: Communicator) -> Pending:
    """The sum over all ranks of what they hold alike, in flight. All ranks get the same bits.

    Where the result has an order of leaves, each rank has one term here.
    """
    return start(all_reduce, array, dtype=dtype, **held_alike(comm))


def unrounded(comm: Communicator) -> Communicator:
    """The communicator for what travels as it is: sums over the holders of a parameter."""
    return comm.using(wire=None)


def over_losses(comm: Communicator) -> Communicator:
    """The communicator for sums over the losses of the ranks: in the order of ranks, if others have an order."""
    return comm.using(order="ranks") if "order" in comm.how else comm


def check_leaves(comm: Communicator, features: int, adds_subtrees: bool) -> int:
    """How many leaves this rank has of a sum over features, if the order has leaves; else 0.

    Raises the error of an order that a strategy with this many features on this rank cannot have. `adds_subtrees`: the
    features of a rank must be one subtree.
    """
    canonical = Canonical.of(order_on(comm))
    if canonical is None:
        return 0
    mine, terms = canonical.counts(comm.size)[comm.rank], canonical.subtrees(comm.size)
    if features % mine:
        why = f"rank {comm.rank} has {mine} of {canonical.leaves} leaves, equal parts of its {features} features"
        raise ShapeError(f"order={canonical}: {why}, which {mine} does not divide")
    if adds_subtrees and max(map(len, terms)) > 1:
        why = f"ranks have several subtrees, because {canonical.leaves} / {comm.size} is no power of two"
        raise PlanError(f"order={canonical}: {why}: choose another order, or sequence_parallel=True")
    return mine


def order_on(comm: Communicator) -> str:
    """The order of sums on this communicator. Raises PlanError if there is no such order."""
    return order_of(comm.how.get("order", "any"))


def in_leaves(comm: Communicator, counts: Sequence[float]) -> Communicator:
    """The communicator for sums over units of which rank r has counts[r]: it has the leaves of an order of theirs.

    Raises PlanError if a leaf has units of two ranks.
    """
    canonical = Canonical.of(order_on(comm))
    if canonical is None:
        return comm
    shares = [n * canonical.leaves / sum(counts) for n in counts]
    if any(round(n, 9) % 1 for n in shares):  # shares of rows are fractions
        raise PlanError(f"order={canonical}: shares={[*counts]} cut a leaf: ranks would have {shares} leaves")
    return comm.using(order=Canonical(canonical.leaves, tuple(map(round, shares))))


def on_any_ranks(how: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a communicator carries, for other ranks: these have the leaves of an order anew."""
    canonical = Canonical.of(order_of(how.get("order", "any")))
    return dict(how) if canonical is None else {**how, "order": Canonical(canonical.leaves)}


def leaves_of(comm: Communicator) -> int:
    """How many leaves this rank has, if the order has leaves; else 0."""
    canonical = Canonical.of(order_on(comm))
    return 0 if canonical is None else canonical.counts(comm.size)[comm.rank]


def transfer(array: Array, dest: int | None, source: int | None, dtype: str, comm: Communicator) -> Any:
    """`array` travels to rank `dest`, and one of rank `source` comes: in flight. Its tag is that of all strategies."""
    return start(sendrecv, array, dest=dest, source=source, tag=MOST_TAG, dtype=dtype, comm=comm)


def arrived(pending: Pending) -> Any:
    """The result of an operation in flight, as an array or a tuple of arrays."""
    give_way()
    return array_of(pending.wait())


def read(fetched: Any, comm: Communicator) -> Array:
    """The numbers that `fompi.backends.numbers.fetch` has asked for. Messages go on while this rank waits for them."""
    give_way()
    engine, until = comm.engine, perf_counter() + comm.engine.timeout
    while not fetched.done():
        if perf_counter() > until:
            raise DeviceError(f"rank {comm.rank} waits for numbers of its device for {engine.timeout:g} s")
        engine.progress_while_waiting()
        sleep(POLL_SECONDS)
    return fetched.get()


POLL_SECONDS = 2e-5


def arrived_from(pending: Pending, rank: int) -> Array:
    """The rows of the result that come from `rank`, as an array, as soon as they are there."""
    give_way()
    return array_of(pending.part(rank))


def tensor_of(array: Any, dtype: str) -> Any:
    """An array that holds `dtype`, as a tensor for operations. `array_of` undoes it."""
    return dlpack.lend(stored(array), dtype, "dlpack" if place(array) is None else "device")


def _tensors(arrays: Sequence[Any], options: dict[str, Any], dtype: str) -> list[Any]:
    for name in ("bias", "out"):
        if options.get(name) is not None:
            options[name] = _tensor(options[name], dtype)
    return [_tensor(array, dtype) for array in arrays]


def _tensor(array: Any, dtype: str) -> Any:
    if isinstance(array, list):
        return [_tensor(a, dtype) for a in array]
    if place(array) is not None:
        return dlpack.lend(stored(array), dtype, "device")
    if dtype not in CARRIERS:
        return array
    return Lent(array if array.flags.writeable else array.copy(), dtype)


def array_of(result: Any) -> Any:
    """The array of a result of an operation on such tensors. Of a tuple: a tuple."""
    if isinstance(result, tuple):
        return tuple(map(array_of, result))
    if isinstance(result, DeviceArray):
        return for_numpy(result.view(storage(result.dtype.name)))
    return result.array if isinstance(result, Lent) else result


def enter_backward(name: str, saved: Kept, dy: Any) -> Array:
    """dy as an array, once all ranks have begun this backward."""
    return enter(f"the backward of {name}", saved.comm, lambda _: ("", 0, saved.gradient(dy)))[1]


def memory(comm: Communicator, shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """`np.empty(shape, dtype)` where `like` is, in memory that was used before: new memory costs as much as a copy."""
    if place(like) is not None:
        return np.empty(shape, dtype, like=like)
    return comm.engine.arena.take(shape, dtype)


def zeros(comm: Communicator, shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """`np.zeros(shape, dtype)` where `like` is, in such memory."""
    array = memory(comm, shape, dtype, like)
    array.fill(0)
    return array


def gathered(comm: Communicator, rows: Array, numbers: Array) -> Array:
    """rows[numbers]"""
    if place(rows) is not None:
        return rows[numbers]
    out = memory(comm, (len(numbers), *rows.shape[1:]), rows.dtype, rows)
    return np.take(rows, numbers, 0, out=out, mode="clip")


def as_rows(a: Array) -> Array:
    """All dimensions but the last become one."""
    return a.reshape(prod(a.shape[:-1]), a.shape[-1])


def lent(array: Array, like: Tensor, dtype: str | None = None) -> Any:
    """An array that holds `dtype`, by default that of `like`, as a tensor of the framework of `like`."""
    if (device := place(array)) is not None:
        device.meet()
    return dlpack.lend(stored(array), dtype or like.dtype, like)


# -- kernels of strategies are functions, so that a benchmark can put emulated ones in their place


def add(into: Array, other: Array) -> None:
    """into += other"""
    into += other
