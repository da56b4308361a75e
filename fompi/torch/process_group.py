"""The backend "fompi" of `torch.distributed`: a ProcessGroup whose collectives are operations of fompi.

    # mpirun -n 2 python train.py
    torch.distributed.init_process_group("fompi")      # rank and size come from MPI; no MASTER_ADDR
    model = torch.nn.parallel.DistributedDataParallel(model)

- `memory`: the elements of tensors in one row, and back. `work`: a call in flight. `streams`: its order on a GPU.
- `store`: how the ranks find each other. `autoload`: how torch finds this file.
- `private`: the names of torch that are not public.

`Group` is a subclass of ProcessGroup: it has all devices. A ProcessGroup with several backends, as of
"cpu:fompi,cuda:nccl", takes a Backend for each device. `OfDevices` is that, from torch 2.14 on: before, a Backend
cannot be written in Python.

The methods have the names of torch 2.13, and those of 2.6 to 2.12 as aliases. What they mean is in the documentation of
`torch.distributed`. They write to `t.data`: as with the other backends, autograd does not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fompi.base.errors import DtypeError, LayoutError, ShapeError, StateError, WaitTimeout
from fompi.engine.communicator import Communicator
from fompi.engine.tasks import DONE
from fompi.mpi import environment, launcher
from fompi.ops import messages, operations
from fompi.ops.arguments import SUMS
from fompi.ops.keys import Shortcuts, known_call, place_of
from fompi.ops.message_forms import PlainMemory, said_of
from fompi.parallel.interleave import is_interleaved
from fompi.tensors import dlpack
from fompi.torch import private, streams
from fompi.torch.memory import copy_parts, flat, is_place_for, joined, place_for, rows
from fompi.torch.work import FromAnyone, Landed, Work, in_words_of_torch

MEETING, MONITORED = messages.MOST_TAG, messages.MOST_TAG - 1
"""Tags of messages of this file. Tags of the program are below them."""

_R = dist.ReduceOp


# --------------------------------------------------------------------------------------------------------- reductions


class Reduction(NamedTuple):
    """after(reduce(before(x))) for a ReduceOp: `op` is what fompi reduces by, or `fold` reduces the gathered terms.

    `words`: the ReduceOp, if `op` does not say it. The ranks compare it.
    """

    op: str = "sum"
    words: str = ""
    fold: Callable[[Tensor, Tensor], Tensor] | None = None
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None

    @property
    def in_place(self) -> bool:
        return self.fold is None and self.before is None and self.after is None

    def given(self, x: Tensor) -> Tensor:
        return x if self.before is None else self.before(x)

    def taken(self, y: Tensor) -> Tensor:
        """The result, from what fompi returns: with `fold` the terms of all ranks, one in each row."""
        if self.fold is not None:
            terms, y = y, y[0]
            for term in terms[1:]:
                y = self.fold(y, term)
        return y if self.after is None else self.after(y)


_BY_FOMPI = ((_R.SUM, "sum"), (_R.PRODUCT, "prod"), (_R.MIN, "min"), (_R.MAX, "max"))
_BITS = ((_R.BAND, torch.bitwise_and, "min"), (_R.BOR, torch.bitwise_or, "max"), (_R.BXOR, torch.bitwise_xor, None))
_OF_BOOL = {"sum": "max", "prod": "min"}
"""The sum of truth values is "any", their product is "all"."""


def reduction(op: Any, x: Tensor, size: int) -> Reduction:
    """How `op` reduces tensors like `x` over `size` ranks. Raises ValueError or TypeError if there is no way."""
    is_bool, is_integer = x.dtype == torch.bool, not (x.is_floating_point() or x.is_complex())
    if is_bool and op == _R.AVG:
        raise TypeError("torch.bool has no average")
    for known, name in _BY_FOMPI:
        if op == known:
            return Reduction(_OF_BOOL.get(name, name) if is_bool else name)
    for known, fold, of_bool in _BITS:
        if op == known:
            if not is_integer:
                raise TypeError(f"ReduceOp.{known.name} needs integers or truth values, not {x.dtype}")
            return Reduction(of_bool) if is_bool and of_bool else Reduction(words=known.name, fold=fold)
    if op == _R.AVG:
        if is_integer:
            wide = partial(torch.Tensor.to, dtype=torch.int64)  # the sum need not fit where the mean does
            return Reduction(words="AVG", before=wide, after=lambda y: y.div(size, rounding_mode="trunc"))
        return Reduction("mean")
    if op == _R.PREMUL_SUM:
        return Reduction(words="PREMUL_SUM", before=lambda x: x * private.factor_of(op))
    raise ValueError(f"the backend fompi does not know {op}")


# -------------------------------------------------------------------------------------------------------------- group


def refusing(operation: Any) -> Callable[[Any], Any]:
    """The method of a collective. If it raises before its first call, this rank takes part in that call with the error.

    So the other ranks get an error too, and do not wait for this one.
    """

    def made(method: Any) -> Any:
        @wraps(method)
        def collective(self: Any, *args: Any, **options: Any) -> Any:
            calls = self.comm.calls
            try:
                return method(self, *args, **options)
            except Exception as error:
                if self.comm.calls == calls and not isinstance(error, dist.DistBackendError):  # the group can go on
                    with suppress(Exception):
                        operation.refuse(error, self.comm)
                raise

        return collective

    return made


class _How(NamedTuple):
    """How a method of the group calls an operation of fompi."""

    operation: Any
    counts: Sequence[int] | None
    words: str
    arriving: Sequence[int] | None
    options: dict[str, Any]

    @property
    def compared(self) -> Hashable:
        """What a key must hold besides the options."""
        return self.words, self.arriving and (*self.arriving,), self.counts and (*self.counts,)

    def read(self, args: Any, comm: Communicator, **more: Any) -> tuple[Any, Any]:
        counts = {} if self.counts is None else {"counts": self.counts}
        arguments, _, call_options = self.operation.read(args, {**self.options, **counts, **more, "comm": comm})
        arguments.words = self.words
        if self.arriving is not None:
            arguments.expects, arguments.arriving = sum(self.arriving), self.arriving
        return arguments, call_options


MOST_FORMS = 256
"""At most this many forms of messages are remembered."""


class Collectives:
    """The methods that torch calls, on the ranks of `comm`, for tensors on the host and on the GPU of the rank."""

    def __init__(self, comm: Communicator, name: str, store: Any, timeout: timedelta):
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._name, self._desc, self._store = name, "", store
        self.order = "any"  # of sums (`fompi.torch.ordered`)
        self._parts: list[Work] | None = None  # the calls since `_start_coalescing`
        self._ones = torch.ones(1, dtype=torch.int32)  # what barriers send
        self._use(comm)
        self.set_timeout(timeout)

    def _use(self, comm: Communicator) -> None:
        """From now on its ranks are those of the group."""
        self.comm = comm
        self._shortcuts, self._forms = Shortcuts(), dict[Hashable, tuple[str, bytes, int]]()
        self._reports: dict[int, Any] = {}  # receives of `monitored_barrier` that are still in flight

    # -- how calls begin
    def _start(
        self, operation: Any, *args: Any, words: str = "", arriving: Sequence[int] | None = None, **options: Any
    ) -> Any:
        """Begin a call. The ranks compare `words`, and `arriving` with the elements or rows that each rank sends."""
        if self.order != "any" and operation.name in SUMS:
            options["order"] = self.order
        how = _How(operation, options.pop("counts", None), words, arriving, options)
        try:
            self.comm.check()
            call = known_call(operation.name, args, options, how.compared)
            self._shortcuts.learn(self.comm, call, how)
            arguments, call_options = how.read(args, self.comm)
            arguments.known = call
            return operation.begin(arguments, self.comm, call_options)
        except Exception as error:
            raise in_words_of_torch(error, operation.name) from error

    def _at_once(
        self,
        verb: Hashable,
        x: Any,
        out: Any,
        opts: Any,
        value: Any = None,
        finish: Callable[[Tensor], object] | None = None,
    ) -> Any:
        """The Work of a call that was made before, on tensors like these. None: `_start` must begin it.

        It writes to `out`, which may be `x`. Without `out` it has a new result, which `finish` copies. `value`: the
        tensors that it writes, if they are not `out`.
        """
        self._shortcuts.forget()
        if self._parts is not None or is_interleaved():  # there a call lets others run, in the wait of its Work
            return None
        there = place = place_of(x)
        if out is not x:
            there = (None, 0) if out is None else place_of(out)
        if place is None or there is None:
            return None
        (form, x_at), (out_form, out_at) = place, there
        found = self._shortcuts.find((verb, self.order, form, out_form), x_at, out_at)
        if found is None:
            return None
        ticket, how = found
        y = out
        if y is None:
            y = ticket.make()
            out_at = y.data_ptr()

        def describe() -> Any:
            data = flat(x)
            target = {} if out is None else {"out": data if out is x else out.data.view(-1)}
            return how.operation.described(how.read((data,), self.comm, **target)[0], self.comm)

        is_async, value = getattr(opts, "asyncOp", True), value or ([x] if out is x else out)
        try:
            self.comm.check()
            task = ticket.begin_at((x_at,), out_at, (x, y), describe, not is_async)
            if task is None:
                return None
            if task is not DONE and is_async:
                return self._work(how.operation.name, opts, [task], finish, value)
            if task is not DONE:
                limit = _limit_of(opts)
                y = task.wait(None if limit is None else limit.total_seconds())
            if finish is not None:
                finish(y)
        except Exception as error:
            raise in_words_of_torch(error, how.operation.name) from error
        return Landed(value, is_async)

    def _work(
        self,
        what: str,
        opts: Any,
        pendings: Sequence[Any],
        finish: Callable[..., object] | None = None,
        value: Any = None,
        given: Any = (),
        timeout: timedelta | None = None,
    ) -> Work:
        """The Work of a call on the tensors `value` and `given`.

        If the program does not wait for it at once, it progresses and ends by itself.
        """
        work = Work(what, self.comm, pendings, finish, value, streams.order_of(value, given))
        work.limit = timeout or _limit_of(opts)
        if getattr(opts, "asyncOp", True) or is_interleaved():
            for pending in pendings:
                pending.leave()
            work.watch()
        if self._parts is not None:
            self._parts.append(work)
        return work

    # -- reductions
    def _reduce(self, operation: Any, t: Tensor, op: Any, **options: Any) -> tuple[Any, Callable[[Tensor], object]]:
        """The call of `all_reduce` or `reduce` on `t`, and how its result gets into `t`."""
        x, how = flat(t), reduction(op, t, self.comm.size)
        if how.fold is not None:
            root = options.get("root")
            words = f"for {operation.name} with {how.words}" + (f" to rank {root}" if root is not None else "")
            pending = self._start(operations.all_gather, x.view(1, -1), words=words)
            return pending, lambda y: root in (None, self.comm.rank) and t.data.copy_(how.taken(y).view(t.shape))
        place = how.in_place and x.data_ptr() == t.data_ptr() and options.get("root") in (None, self.comm.rank)
        options |= {"op": how.op, "words": how.words and f"with {how.words}"}
        pending = self._start(operation, how.given(x), out=x if place else None, **options)
        return pending, lambda y: None if place or y.shape != x.shape else t.data.copy_(how.taken(y).view(t.shape))

    def _sum_of_sparse(self, t: Tensor) -> list[tuple[Any, Callable[[Tensor], object]]]:
        """The calls that add tensors in COO format: they gather the entries of all ranks."""
        x, places = t.detach().coalesce(), list[Tensor]()

        def finish(values: Tensor) -> None:
            total = torch.sparse_coo_tensor(places[0].T, values, t.shape, check_invariants=False)  # else torch warns
            t.copy_(total.coalesce())

        calls = ((x.indices().T, places.append), (x.values(), finish))
        words = f"for a sparse sum of the shape {tuple(t.shape)}"
        return [(self._start(operations.all_gather, rows(each), words=words), then) for each, then in calls]

    @refusing(operations.all_reduce)
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors, op, calls = _listed(tensors), _op_of(opts), []
        if len(tensors) == 1 and (done := self._at_once(("all_reduce", hash(op)), tensors[0], tensors[0], opts)):
            return done
        for t in tensors:
            is_sparse_sum = t.layout == torch.sparse_coo and op == _R.SUM
            calls += self._sum_of_sparse(t) if is_sparse_sum else [self._reduce(operations.all_reduce, t, op)]
        return self._work("all_reduce", opts, *_merged(calls), tensors, timeout=timeout)

    allreduce_coalesced = allreduce

    @refusing(operations.reduce)
    def reduce(self, tensors: Any, opts: Any, op: Any = _R.SUM, timeout: Any = None) -> Work:
        tensors, root, op = _listed(tensors), _root_of(opts), getattr(opts, "reduceOp", op)
        if len(tensors) == 1:
            verb, (t,) = ("reduce", hash(op), root), tensors
            if done := self._at_once(verb, t, t if self.comm.rank == root else None, opts, tensors):
                return done
        calls = [self._reduce(operations.reduce, t, op, root=root) for t in tensors]
        return self._work("reduce", opts, *_merged(calls), tensors, timeout=timeout)

    def _reduce_scatter(
        self, x: Tensor, out: Tensor, op: Any, counts: Sequence[int] | None
    ) -> tuple[Any, Callable[[Tensor], object]]:
        _check_same_dtype("reduce_scatter", out, x)
        how = reduction(op, x, self.comm.size)
        counts = counts or [out.numel()] * self.comm.size
        if len(counts) != self.comm.size or sum(counts) != x.numel() or counts[self.comm.rank] != out.numel():
            raise ShapeError(
                f"reduce_scatter: the input has {x.numel()} elements, {list(counts)} for the ranks, and the output of "
                f"rank {self.comm.rank} has {out.numel()}"
            )
        if how.fold is not None:
            words = f"for reduce_scatter with {how.words} of {list(counts)} elements"
            pending = self._start(operations.all_gather, x.view(1, -1), words=words)
            return pending, lambda y: out.data.copy_(how.taken(y).split(list(counts))[self.comm.rank].view(out.shape))
        place = how.after is None and is_place_for(out, x)
        options: dict[str, Any] = {"op": how.op, "words": how.words and f"with {how.words}", "counts": counts}
        given = out.data.view(-1) if place else None
        pending = self._start(operations.reduce_scatter, how.given(x), out=given, **options)
        return pending, lambda y: None if place else out.data.copy_(how.taken(y).view(out.shape))

    @refusing(operations.reduce_scatter)
    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None, timeout: Any = None) -> Work:
        outs, ins, op = _listed(outs), _nested(ins), _op_of(opts)
        calls = [
            self._reduce_scatter(torch.cat([flat(t) for t in parts]), out, op, [t.numel() for t in parts])
            for out, parts in zip(outs, ins, strict=True)
        ]
        return self._work("reduce_scatter", opts, *_merged(calls), outs, timeout=timeout)

    @refusing(operations.reduce_scatter)
    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        calls = [self._reduce_scatter(flat(x), out, _op_of(opts), None) for out, x in zip(outs, ins, strict=True)]
        return self._work("reduce_scatter", opts, *_merged(calls), outs)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        if done := self._at_once(("reduce_scatter", hash(_op_of(opts))), x, out, opts):
            return done
        work = self.reduce_scatter_single_coalesced([out], [x], opts)
        work.value = out
        return work

    # -- moves
    @refusing(operations.broadcast)
    def broadcast(self, tensors: Any, opts: Any, timeout: Any = None) -> Any:
        tensors, root, calls = _listed(tensors), _root_of(opts), []
        if len(tensors) == 1 and (done := self._at_once(("broadcast", root), tensors[0], tensors[0], opts)):
            return done
        for t in tensors:
            x = flat(t)
            place = x.data_ptr() == t.data_ptr()
            pending = self._start(operations.broadcast, x, root=root, out=x if place else None)
            calls.append((pending, lambda y, t=t, place=place: None if place else t.data.copy_(y.view(t.shape))))
        return self._work("broadcast", opts, *_merged(calls), tensors, timeout=timeout)

    def _all_gather(self, out: Tensor, x: Tensor) -> tuple[Any, Callable[[Tensor], object]]:
        _check_same_dtype("all_gather", out, x)
        place = is_place_for(out, x)
        given = out.data.view(-1) if place else None
        pending = self._start(operations.all_gather, flat(x), out=given, arriving=[out.numel()])
        return pending, lambda y: None if place else out.data.copy_(y.view(out.shape))

    def _gather_to(self, parts: Sequence[Tensor], x: Tensor, whole: Tensor | None) -> Any:
        """Start the all-gather of `x` to `parts`, one for each rank. They may have different sizes.

        It writes to `whole`, the memory of all parts, if that is one row.
        """
        sizes = [part.numel() for part in parts]
        if len(sizes) != self.comm.size or sizes[self.comm.rank] != x.numel():
            raise ShapeError(
                f"all_gather: the outputs have {sizes} elements: there must be one for each of {self.comm.size} ranks, "
                f"and that of rank {self.comm.rank} has the size of its input, {x.numel()} elements"
            )
        words = f"to outputs of {sizes} elements" if len({*sizes}) > 1 else ""  # else the sum says it all
        return self._start(operations.all_gather, flat(x), out=whole, words=words, arriving=sizes)

    @refusing(operations.all_gather)
    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        calls = [self._all_gather(out, x) for out, x in zip(outs, ins, strict=True)]
        return self._work("all_gather", opts, *_merged(calls), outs)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        if done := self._at_once("all_gather", x, out, opts):
            return done
        work = self.all_gather_single_coalesced([out], [x], opts)
        work.value = out
        return work

    @refusing(operations.all_gather)
    def allgather(self, outs: Any, ins: Any, opts: Any = None, timeout: Any = None) -> Work:
        outs, ins = _nested(outs), _listed(ins)
        if len(ins) == 1:
            (parts,), (x,) = outs, ins
            verb = "all_gather to parts", *(part.numel() for part in parts)
            if done := self._at_once(verb, x, place_for(parts, x), opts, outs, lambda y: copy_parts(parts, y)):
                return done
        calls = [
            (self._gather_to(parts, x, place_for(parts, x)), lambda y, parts=parts: copy_parts(parts, y))
            for parts, x in zip(outs, ins, strict=True)
        ]
        return self._work("all_gather", opts, *_merged(calls), outs, timeout=timeout)

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        """outs[rank][i] is ins[i] of that rank."""
        work: Work = self.allgather([[parts[i] for parts in outs] for i in range(len(ins))], ins, opts)
        work.value = outs
        return work

    @refusing(operations.gather)
    def gather(self, outs: Any, ins: Any, opts: Any = 0, timeout: Any = None) -> Work:
        outs, ins, root = _nested(outs), _listed(ins), _root_of(opts)
        parts = outs[0] if self.comm.rank == root else []
        arriving = [part.numel() for part in parts] if self.comm.rank == root else None
        verb, whole = ("gather", root, *(arriving or ())), place_for(parts, ins[0])
        if done := self._at_once(verb, ins[0], whole, opts, outs, lambda y: copy_parts(parts, y)):
            return done
        pending = self._start(operations.gather, flat(ins[0]), root=root, out=whole, arriving=arriving)
        return self._work("gather", opts, [pending], lambda y: copy_parts(parts, y), outs, ins, timeout)

    @refusing(operations.scatter)
    def scatter(self, outs: Any, ins: Any, opts: Any = 0, timeout: Any = None) -> Work:
        outs, root, (out, *_) = _listed(outs), _root_of(opts), _listed(outs)
        if self.comm.rank == root:
            parts = _nested(ins)[0]
            x, counts = joined(parts, self.comm.engine.arena), [t.numel() for t in parts]
        else:
            x, counts = torch.empty(0, dtype=out.dtype, device=out.device), None
        arriving = [out.numel() if rank == root else 0 for rank in range(self.comm.size)]
        verb, place = ("scatter", root, out.numel(), *(counts or ())), is_place_for(out, x)
        if place and (done := self._at_once(verb, x, out, opts, outs)):
            return done
        given = out.data.view(-1) if place else None
        pending = self._start(operations.scatter, x, root=root, counts=counts, out=given, arriving=arriving)
        finish = None if place else partial(copy_parts, [out])
        return self._work("scatter", opts, [pending], finish, outs, timeout=timeout)

    @refusing(operations.all_to_all)
    def alltoall(self, outs: Any, ins: Any, opts: Any = None, timeout: Any = None) -> Work:
        x, counts = joined(ins, self.comm.engine.arena), [t.numel() for t in ins]
        arriving, whole = [out.numel() for out in outs], place_for(outs, x)
        verb = "all_to_all to parts", *counts, None, *arriving
        if done := self._at_once(verb, x, whole, opts, outs, lambda y: copy_parts(outs, y)):
            return done
        pending = self._start(operations.all_to_all, x, counts=counts, out=whole, arriving=arriving)
        return self._work("all_to_all", opts, [pending], lambda y: copy_parts(outs, y), outs, timeout=timeout)

    @refusing(operations.all_to_all)
    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: Any, in_splits: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        if done := self._at_once(("all_to_all", *out_splits, None, *in_splits), x, out, opts):
            return done
        size, x_rows, counts = self.comm.size, rows(x), list(in_splits) or None
        _check_same_dtype("all_to_all", out, x)
        for word, t, splits in (("input", x_rows, counts), ("output", out, list(out_splits) or None)):
            if splits is None and len(t) % size:
                raise ShapeError(f"all_to_all: {len(t)} rows of the {word} do not divide evenly over {size} ranks")
        expected = list(out_splits) or [len(out) // size] * size
        if sum(expected) != len(out) or out.shape[1:].numel() != x_rows.shape[1:].numel():
            raise ShapeError(
                f"all_to_all: the output has the shape {tuple(out.shape)}, but takes {expected} rows like those of the "
                f"input, which has the shape {tuple(x_rows.shape)}"
            )
        place = is_place_for(out, x)
        given = out.data.view(-1, *x_rows.shape[1:]) if place else None
        pending = self._start(operations.all_to_all, x_rows, counts=counts, out=given, arriving=expected)
        finish = None if place else (lambda y: out.data.copy_(y.view(out.shape)))
        return self._work("all_to_all", opts, [pending], finish, out, timeout=timeout)

    # -- messages of two ranks
    def _tag(self, tag: int) -> int:
        if not 0 <= tag < MONITORED:
            raise LayoutError(f"tag={tag} must be from 0 to {MONITORED - 1} on the backend fompi")
        return tag

    def _message(self, sends: bool, t: Tensor, peer: int, tag: int) -> Any:
        """The Work of a message that C carries out. None: nothing has begun."""
        place = None if self._parts is not None else place_of(t)
        if place is None:
            return None
        form, address = place
        known = self._forms.get(form)
        if known is None:
            while len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            known = self._forms[form] = said_of(dlpack.borrow(flat(t)))
        what = f"{'send to' if sends else 'recv from'} rank {peer}"
        try:
            plain = PlainMemory(*known, address, t, lambda: dlpack.borrow(flat(t)))
            transfer = messages.Transfer.in_c(self.comm, sends, peer, self._tag(tag), plain)
        except Exception as error:
            raise in_words_of_torch(error, what) from error
        if transfer is None:
            return None
        if not sends:
            dlpack.mark_written(t)
        if transfer.is_through:
            return Landed([t], True)
        transfer.leave()
        return Work(what, self.comm, [transfer], None, [t])

    def send(self, tensors: Any, dest: int, tag: int = 0) -> Any:
        if len(tensors) == 1 and (work := self._message(True, tensors[0], dest, tag)):
            return work
        pendings = [self._start(messages.send, flat(t), dest, tag=self._tag(tag)) for t in _listed(tensors)]
        return self._work(f"send to rank {dest}", None, pendings, None, tensors)

    def _receive(self, t: Tensor, source: int, tag: int) -> Any:
        place = t.is_contiguous() and not (t.is_conj() or t.is_neg())
        out = t.data if place else torch.empty_like(t, memory_format=torch.contiguous_format, requires_grad=False)
        return self._start(messages.recv, source, tag=tag, out=out.view(-1))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        tensors = _listed(tensors)
        if len(tensors) == 1 and (work := self._message(False, tensors[0], source, tag)):
            return work
        pendings = [self._receive(t, source, self._tag(tag)) for t in tensors]
        return self._work(f"recv from rank {source}", None, pendings, _received(tensors), tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        (t,) = tensors = _listed(tensors)
        pending = FromAnyone(self.comm, self._tag(tag), lambda source: self._receive(t, source, tag))
        work = Work("recv from any rank", self.comm, [pending], _received(tensors), tensors, streams.order_of(tensors))
        work.find_source = lambda: pending.source
        return work

    # -- barriers
    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """It waits for all ranks, and for what the current stream of the device that `opts` names has to do."""
        streams.drain(getattr(opts, "device", None))
        if done := self._at_once("barrier", self._ones, self._ones, opts):
            return done
        pending = self._start(operations.all_reduce, self._ones, out=self._ones, words="for a barrier")
        return self._work("barrier", opts, [pending], timeout=timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that raises a DistBackendError on rank 0 which names the rank that does not come, or all of them.

        `torch.distributed.monitored_barrier` refuses all backends but gloo: call this method of the group.
        """
        timeout = getattr(timeout, "timeout", timeout)  # torch gives a Backend the options of a barrier
        comm, seconds = self.comm, self.comm.channel.timeout
        if timeout is not None and timeout >= timedelta(0):
            seconds = timeout.total_seconds()
        note = np.zeros(1, np.uint8)
        late: list[int] = []
        others = [0] if comm.rank else range(1, comm.size)
        for rank in others:
            if rank not in self._reports:  # else one of an earlier barrier, for which that rank was late
                self._reports[rank] = self._start(messages.recv, rank, tag=MONITORED)
        if comm.rank:
            self._work("monitored_barrier", None, [self._start(messages.send, note, 0, tag=MONITORED)])
            try:
                self._reports[0].wait(seconds)
                del self._reports[0]
            except Exception as error:
                words = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from"
                raise dist.DistBackendError(f"[Rank {comm.rank}]: Rank {comm.rank} {words} rank 0: {error}") from error
            return
        for rank in others:
            try:
                self._reports[rank].wait(0.0 if late else seconds)
                del self._reports[rank]
            except WaitTimeout as error:
                late.append(rank)
                if not wait_all_ranks:
                    raise self._late(late, seconds) from error
        if late:
            raise self._late(late, seconds)
        for rank in others:
            self._work("monitored_barrier", None, [self._start(messages.send, note, rank, tag=MONITORED)])

    def _late(self, ranks: Sequence[int], seconds: float | None) -> Exception:
        who = f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        limit = "time" if seconds is None else f"{1e3 * seconds:g} ms"
        error: Exception = dist.DistBackendError(
            f"[Rank 0]: {who} failed to pass monitoredBarrier in {limit}. Rank 0 timed out in monitoredBarrier"
        )
        return error

    # -- several calls as one
    def _start_coalescing(self, device: Any = None) -> None:
        self._parts = []

    def _end_coalescing(self, device: Any = None) -> Work:
        parts, self._parts = self._parts or [], None
        pendings = [pending for part in parts for pending in part._pendings]
        order = streams.order_of([part.value for part in parts])
        return Work("coalesced calls", self.comm, pendings, lambda *_: [part.wait() for part in parts], order=order)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing
    supports_splitting = supports_coalescing = supports_time_estimate = property(lambda self: False)

    # -- what the group is
    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size

    getRank, getSize = rank, size

    def name(self) -> str:
        return "fompi"

    getBackendName = _get_backend_name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """A call fails if it makes no progress for this long. If FOMPI_TIMEOUT is set, the shorter time counts."""
        seconds = timeout.total_seconds()
        own = launcher.timeout() if environment.is_set("FOMPI_TIMEOUT") else seconds
        self.comm.channel.timeout = min(seconds, own)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: the communicator counts its calls."""

    def shutdown(self) -> None:
        """Finish the calls in flight and close the communicator. Collective over the group."""
        KEPT.discard(self)
        for report in self._reports.values():  # nobody sends it: a barrier has failed
            report.give_up()
        self.comm.close()

    def abort(self) -> None:
        """Close the group on this rank alone: waits of the other ranks for it end with an error."""
        KEPT.discard(self)
        error = StateError("the group was aborted")
        self.comm.__exit__(type(error), error, None)


for _new, _old in private.OPERATORS.items():
    setattr(Collectives, _new, private.counted(getattr(Collectives, _new), _old))

for _new, _old in private.ALIASES.items():
    setattr(Collectives, _old, getattr(Collectives, _new))


class Group(Collectives, dist.ProcessGroup):
    """The ranks of `comm` as a ProcessGroup of torch, for tensors on all devices."""

    def __init__(self, comm: Communicator, name: str, store: Any, timeout: timedelta):
        super().__init__(comm, name, store, timeout)
        self._named = private.named(self, name)

    def _get_backend(self, device: Any) -> Any:
        return self

    _device_types = property(
        lambda self: [torch.device(kind) for kind in ("cpu", *["cuda"] * torch.cuda.is_available())]
    )


OfDevices: Any = None
"""The class of a Backend for one device of a ProcessGroup that has several. None: this torch cannot have it."""

if private.BACKEND is not None:

    class OfDevices(Collectives, private.BACKEND):  # type: ignore[no-redef]
        """The ranks of `comm` as a Backend of torch, for the tensors on one device.

        torch hands a Work on without its Python methods: only `wait` and `get_future` are left of it.
        """

        def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
            raise StateError(
                "recv from any rank: torch does not ask a backend for one device which rank has sent. Name the source, "
                'or receive in a group of fompi alone: new_group(backend="fompi")'
            )


KEPT: set[Any] = set()
"""The backends in use. The C++ half of a Backend does not keep its Python half alive."""


def on_device(group: Any, device: str) -> Any:
    """The Group, or the OfDevices of a group for tensors on `device`. None: it has another backend there."""
    own = group if isinstance(group, Collectives) else private.backend_of(group, device)
    return own if isinstance(own, Collectives) else None


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _nested(tensors: Any) -> list[list[Tensor]]:
    """A list of lists: torch's short forms give one list."""
    return [tensors] if tensors and isinstance(tensors[0], Tensor) else tensors


def _check_same_dtype(what: str, out: Tensor, x: Tensor) -> None:
    if out.dtype != x.dtype:
        raise DtypeError(f"{what}: the output is {out.dtype}, but the input is {x.dtype}: make them the same")


def _op_of(opts: Any) -> Any:
    """The ReduceOp of an options object, or `opts` itself if it is one."""
    return getattr(opts, "reduceOp", _R.SUM if opts is None else opts)


def _limit_of(opts: Any) -> timedelta | None:
    """The time limit in an options object, or `opts` itself if it is one. torch writes -1 ms for none."""
    limit = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    return limit if limit and limit > timedelta(0) else None


def _root_of(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts if isinstance(opts, int) else 0))


def _merged(calls: Sequence[tuple[Any, Callable[..., object]]]) -> tuple[list[Any], Callable[..., object]]:
    """Several calls as one: the pendings, and a function that gives each result to its own function."""
    finishes = [finish for _, finish in calls]

    def finish(*results: Any) -> None:
        for each, result in zip(finishes, results, strict=True):
            each(result)

    return [pending for pending, _ in calls], finish


def _received(tensors: Sequence[Tensor]) -> Callable[..., None]:
    """Copy what has arrived to the tensors that MPI could not write to."""

    def finish(*arrived: Tensor) -> None:
        for t, y in zip(tensors, arrived, strict=True):
            if y.data_ptr() != t.data_ptr():
                t.data.copy_(y.view(t.shape))

    return finish
