"""Bugs that are planted in the code for devices, one by one: mpirun -n 2 python device_mutants.py NAME ...

A mutant replaces a piece of the source of one function. It runs with the operations below, over each path that it
concerns, until some rank finds it: by the checker, or as wrong data. A line for each says what was found. "none" plants
nothing.
"""

from __future__ import annotations
import __future__

import inspect
import os
import sys
import textwrap
import time
from importlib import import_module

import numpy as np
from mpi4py import MPI

import fompi
from fompi import Partial, Shard, Spec
from fompi.backends.cuda.software import SoftwareDevice
from fompi.mpi.paths import DIRECT, IPC, STAGED

BACKEND, SOFTWARE = "fompi.backends.cuda.backend", "fompi.backends.cuda.software"
STAGING = "fompi.backends.cuda.staging"
DISPATCH, PROGRAM, COMPILED = "fompi.runtime.dispatch", "fompi.runtime.program", "fompi.runtime.compiled"
PLANS, PATHS, ENGINE = "fompi.plans", "fompi.mpi.paths", "fompi.engine.in_flight"
ANY = (STAGED, DIRECT, IPC)
UNSTAGED = (DIRECT, IPC)

TILE_SECONDS = 2e-3

ADDS = "if block in writer:\n                    before.add(writer[block])\n                "

MUTANTS = {
    # the backend
    "kernels wait for no event": (ANY, f"{BACKEND}:OnDevice._enqueuer", "if token.queue is not queue:", "if False:"),
    "kernels do not wait for the first event": (ANY, f"{BACKEND}:OnDevice._enqueuer", "in after:", "in after[1:]:"),
    "the event comes before the kernel": (ANY, f"{BACKEND}:OnDevice._enqueuer",
        "enqueue(stream)\n        return Enqueued(queue, stream.record(event))",
        "stream.record(event)\n        enqueue(stream)\n        return Enqueued(queue, event)"),
    "a token names another stream": (ANY, f"{BACKEND}:OnDevice._enqueuer", "return Enqueued(queue,",
        "return Enqueued(self.queues['compute'],"),
    "a kernel is done at once": (ANY, f"{BACKEND}:Enqueued.done", "if not self.event.done():", "if False:"),
    "the caller's stream is not awaited": (ANY, f"{BACKEND}:OnDevice.enter", "queue.stream.wait(entry.event)", "pass"),
    "the caller's stream is forgotten": (ANY, f"{BACKEND}:OnDevice.enter", "if entry is None:", "if True:"),
    "a copy is not awaited": (ANY, f"{BACKEND}:OnDevice.copy", "self.device.leave([event])", "pass"),
    "a copy does not wait": (ANY, f"{BACKEND}:OnDevice.copy", "self.enter()", "pass"),
    "the memory of a copy is not kept": (ANY, f"{BACKEND}:OnDevice.copy", "self._kept.append((event, pairs))", "pass"),
    # the result of a call whose kernels still run
    "the result does not wait for its kernels": (ANY, f"{BACKEND}:OnDevice.leave", "if last:", "if False:"),
    "the result waits for the first kernel of a stream": (ANY, f"{BACKEND}:OnDevice.leave", "for token in tokens}",
        "for token in reversed(tokens)}"),
    "the current stream of the program waits for nothing": (ANY, f"{SOFTWARE}:SoftwareDevice.leave",
        "stream.wait(event)", "pass"),
    "messages do not wait for the kernels of the last call": ((STAGED,), "fompi.runtime.executor:Executor._enter",
        "holds_all = self._leave()", "self._leave()\n    holds_all = False"),
    "the memory of kernels in flight is given back": (ANY, f"{DISPATCH}:Dispatch.end_for_program",
        "self.is_enqueued = self.finished = True",
        "self.is_enqueued = self.finished = True\n        self.actions = []"),
    "a call returns before its last message": (ANY, f"{DISPATCH}:Dispatch.end_for_program",
        "self.unfinished == len(self.tokens)", "self.unfinished <= len(self.tokens) + 1"),
    "all scratch is one array": (ANY, f"{BACKEND}:OnDevice.empty", "return make(tuple(shape), storage(dtype))",
        "self.kept = getattr(self, 'kept', {})\n"
        "    return self.kept.setdefault((tuple(shape), dtype, place), make(tuple(shape), storage(dtype)))"),
    # products that one kernel announces
    "a message leaves before its flag was seen": (ANY, f"{BACKEND}:AnnouncedProduct.done",
        "if self.is_raised():", "if True:"),
    "a flag is raised before its product is written": (ANY, f"{SOFTWARE}:SoftwareAnnouncer._stored",
        "if self.counters[group] == len(self.tiles[group]):", "if True:"),
    "a counter is not set back": (ANY, f"{SOFTWARE}:SoftwareAnnouncer._stored", "self.counters[group] = 0", "pass"),
    "the flag of the last call counts": (ANY, "fompi.backends.cuda.counters.signal:Signals.is_raised",
        "return behind <= (self.epoch - epoch) % MOST_EPOCHS", "return True"),
    "an epoch is used twice": (ANY, "fompi.backends.cuda.counters.signal:Signals.next",
        "self.epoch = self.epoch % MOST_EPOCHS + 1", "self.epoch = 1"),
    "a kernel that announces follows nothing": (ANY, f"{DISPATCH}:Dispatch._is_gathered",
        "launch([tokens[j] for j in dict.fromkeys(j for k in ops for j in follows[k]) if j in tokens])", "launch([])"),
    "the end of a kernel that announces comes before it": (ANY, f"{BACKEND}:OnDevice.bind_announced",
        "epoch = made.enqueue(stream)\n        stream.record(event)",
        "stream.record(event)\n        epoch = made.enqueue(stream)"),
    "a kernel that announces waits for no event": (ANY, f"{BACKEND}:OnDevice.bind_announced",
        "if token.queue is not queue:", "if False:"),
    # the engine, and a call
    "the host takes any kernel for done": (ANY, f"{ENGINE}:InFlight._finish_launched",
        "if not token.done():\n                    break", "token.done()"),
    "kernels follow nothing": (ANY, f"{DISPATCH}:Dispatch._enqueue", "for j in self.compiled.follows[i]",
        "for j in ()"),
    "a kernel is done when it is enqueued": (ANY, f"{DISPATCH}:Dispatch._enqueue",
        "self.comm.engine.launched(token, self, i)", "queue.extend(self._complete(i))"),
    "messages never end": (ANY, f"{DISPATCH}:Dispatch._complete", "if self.notes and i in self.notes:", "if False:"),
    "messages do not wait for the caller's stream": (UNSTAGED, f"{PROGRAM}:Run._start_first", "if entry is not None:",
        "if False:"),
    "kernels do not wait for a part that is still written": (ANY, f"{DISPATCH}:Dispatch._enqueue",
        "*self.entries.pop(i, ())", ""),
    "messages do not wait for a part that is still written": (UNSTAGED, f"{DISPATCH}:Dispatch.ready_part",
        "self.hold(entry, messages)", "pass"),
    "a part is not followed": (ANY, "fompi.runtime.executor:Executor.ready", "ready_part(each, block, entry)",
        "ready_part(each, block)"),
    "no message counts as one of device memory": (UNSTAGED, f"{COMPILED}:Compiled.moves_device_memory",
        "return moved is not None and", "return False and"),
    "the next call starts early": (ANY, f"{DISPATCH}:Dispatch.completed", "if self.unfinished == 0:",
        "if self.unfinished <= 1:"),
    # what an op waits for
    "sends follow kernels": (ANY, f"{COMPILED}:device_constraints", "if j in kernels] if i in kernels else []",
        "if j in kernels]"),
    "kernels do not wait for messages": (ANY, f"{COMPILED}:device_constraints",
        "needs = [[j for j in needs if j not in follows[i]] for i, needs in enumerate(found.needs)]",
        "needs = [[] if i in kernels else list(needs) for i, needs in enumerate(found.needs)]"),
    "a read does not wait for a write": (ANY, f"{PLANS}.dependencies:dependencies", f"{ADDS}readers", "readers"),
    # staged plans
    "nothing is downloaded": ((STAGED,), f"{PLANS}.staged:_Stager._down",
        "if not self._current.issuperset(chunk.blocks):", "if False:"),
    "nothing is uploaded": ((STAGED,), f"{PLANS}.staged:_Stager._ops", 'yield Compute("upload", (mirror,), (chunk,))',
        "pass"),
    "the upload goes to the mirror of another chunk": ((STAGED,), f"{PLANS}.staged:_Stager._ops",
        'yield Compute("upload", (mirror,), (chunk,))',
        'yield Compute("upload", (_mirrored(op.writes)[0],), (chunk,))'),
    "a download takes the mirror of another chunk": ((STAGED,), f"{PLANS}.staged:_Stager._down",
        "(chunk,), _mirrored((chunk,))", "_mirrored((chunk,)), (chunk,)"),
    # messages by ipc
    "the answer comes before the copy": ((IPC,), f"{PATHS}:Pull._copied", "return bool(self._event.done())",
        "return True"),
    "the event comes before the copy": ((IPC,), f"{PATHS}:Pull._copied",
        "device.copy(self._data, self._source)(self._path.stream)\n"
        "        self._event = self._path.stream.record(device.event())",
        "self._event = self._path.stream.record(device.event())\n"
        "        device.copy(self._data, self._source)(self._path.stream)"),
    "nothing is copied": ((IPC,), f"{PATHS}:Pull._copied", "device.copy(self._data, self._source)(self._path.stream)",
        "pass"),
    "an offer is taken before it has come": ((IPC,), f"{PATHS}:Pull._copied", "if not self._offered.Test():",
        "Pull.kept = [*getattr(Pull, 'kept', []), self]\n        if self._offered.Test() is None:"),
    "no answer": ((IPC,), f"{PATHS}:Pull.done",
        "self._answered = self._path.link.blocking.Isend(np.zeros(1, np.uint8), self._peer, self._tag)",
        "return True"),
    "a handle without an offset": ((IPC,), f"{SOFTWARE}:SoftwareDevice.export", "offset = array.ptr - memory.ptr",
        "offset = 0"),
    "new memory behind an old handle": ((IPC,), f"{SOFTWARE}:SoftwareDevice.open", 'key = path + b" " + number',
        "key = path"),
    # the device
    "array() does not wait": (ANY, f"{STAGING}:Staging.run_once", ".wait()", ""),
    "array() does not wait for the caller's stream": (ANY, f"{STAGING}:Staging._copied",
        "if entry is not None:", "if False:"),
    "a wait of a stream is lost": (ANY, f"{SOFTWARE}:Stream.wait", "join(self.actor, event.clock)", "lock"),
}  # fmt: skip


def plant(where, old, new):
    """Replace `old` by `new` in the source of a function. Returns a function that undoes it."""
    module, _, path = where.partition(":")
    owner = import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{where} has no single {old!r}"
    made = {}
    code = compile(source.replace(old, new), where, "exec", __future__.annotations.compiler_flag)
    exec(code, function.__globals__, made)
    setattr(owner, name, made[name])
    return lambda: setattr(owner, name, function)


class Slow(SoftwareDevice):
    """The host sees the flag of a product before the kernel is done."""

    def tiles(self, product):
        for tile, places in super().tiles(product):
            yield (lambda tile=tile: (time.sleep(TILE_SECONDS), tile())), places


def cases(comm, device):
    """Functions that compare results on the device with those on the host. Each takes some milliseconds."""
    rank, size = comm.rank, comm.size
    random = np.random.default_rng(rank)
    x, w = random.standard_normal((6, 12)).astype("f4"), np.ones((12, 4), "f4")
    up = device.array

    def unbound(operation, *tensors, **options):
        def run():
            wanted = operation(*tensors, comm=comm, **options)
            for _ in range(2):
                got = operation(*map(up, tensors), comm=comm, **options)
                assert got.get().tobytes() == wanted.tobytes()

        return run

    def bound(operation, *specs, **tensors):
        def run():
            plan = fompi.plan(operation, *specs, ranks=size, schedule="ring", slices=2)
            with fompi.bind(plan, comm=comm, **tensors) as step:
                wanted = step()
            own = {name: up(a) for name, a in tensors.items()}
            step = fompi.bind(plan, comm=comm, **own)
            for _ in range(2):
                got = step()
            assert got.get().tobytes() == wanted.tobytes()

        return run

    def announced(dtype, packed=False):
        own = Spec((8 * size, 12 * size), dtype, Shard(1)), Spec((12 * size, 4), dtype, Shard(0))
        plan = fompi.plan(fompi.matmul_reduce_scatter, *own, ranks=size, schedule="direct", slices=2, packed=packed)
        operands = {"x": (rows % 7).astype(dtype), "w": w.astype(dtype)}

        def run():
            with fompi.bind(plan, comm=comm, **operands) as step:
                wanted = step()
            os.environ["FOMPI_COUNTERS"] = "1"
            step = fompi.bind(plan, comm=comm, **{name: up(a) for name, a in operands.items()})
            del os.environ["FOMPI_COUNTERS"]
            assert step.announced == 2 * size - 1
            for _ in range(2):
                assert step().get().tobytes() == wanted.tobytes()

        return run

    def after_a_kernel():
        stream, own = device.stream("mine"), up(x)

        def kernel(reads, writes):
            writes[0][...] = 3

        with device.using(stream):
            device.call(kernel, "fill", [], [own])(stream)
            assert (fompi.all_gather(own, comm=comm, schedule="ring").get() == 3).all()
            device.call(kernel, "fill", [], [own])(stream)
            assert (fompi.all_gather_matmul(own, up(w), comm=comm, schedule="direct").get() == 36).all()

    def in_parts():
        plan = fompi.plan(fompi.all_gather, gathered[0], ranks=size, schedule="direct", slices=2)
        stream, own, source = device.stream("mine"), up(x), up(x)
        wanted = fompi.all_gather(x, comm=comm).tobytes()
        step = fompi.bind(plan, comm=comm, x=own)
        for _ in range(2):
            step.start("x")  # it follows nothing: no message waits for what it follows
            with device.using(stream):
                for part in (slice(3, 6), slice(0, 3)):
                    device.call(lambda r, w: np.copyto(w[0], r[0]), "fill", [source[part]], [own[part]])(stream)
                    step.ready("x", part.start // 3)
                assert step.wait().get().tobytes() == wanted

    def read_after_a_kernel():
        stream, own = device.stream("mine"), up(x)
        with device.using(stream):
            device.call(lambda reads, writes: np.copyto(writes[0], 5), "fill", [], [own])(stream)
            assert (own.get() == 5).all()

    def in_place():
        own = up(x[0])
        wanted = fompi.all_reduce(x[0], comm=comm, schedule="ring")
        fompi.all_reduce(own, comm=comm, out=own, schedule="ring")
        assert own.get().tobytes() == wanted.tobytes()

    gathered = Spec((6 * size, 12), "float32", Shard(0)), Spec((12, 4 * size), "float32", Shard(1))
    summed = Spec((8 * size, 12 * size), "float32", Shard(1)), Spec((12 * size, 4), "float32", Shard(0))
    rows = np.arange(8 * size * 12, dtype="f4").reshape(8 * size, 12)
    return [
        bound(fompi.all_gather_matmul, *gathered, x=x, w=w),
        bound(fompi.matmul_reduce_scatter, *summed, x=rows, w=w),
        bound(fompi.all_reduce, Spec((8 * size, 12), "float32", Partial()), x=rows),
        unbound(fompi.all_gather, x, schedule="ring"),
        unbound(fompi.reduce_scatter, rows, schedule="ring"),
        unbound(fompi.all_reduce, rows, schedule="unfused"),
        unbound(fompi.matmul_all_reduce, rows, w, schedule="direct", slices=2),
        unbound(fompi.all_to_all, rows, schedule="direct"),
        unbound(fompi.all_reduce, np.asfortranarray(x), schedule="ring"),
        unbound(fompi.all_gather, x, schedule="unfused"),
        announced("float32"),
        announced("float16", packed=True),  # copies in another stream come before the products
        after_a_kernel,
        in_place,
        in_parts,
        read_after_a_kernel,
    ]


def found_by(path):
    """What finds the planted bug over this path: the first error of this rank, or of another one. Empty: nothing."""
    os.environ["FOMPI_PATH"] = path
    comm = MPI.COMM_WORLD
    own = fompi.Communicator(comm, f"mutant on {path}")
    device = Slow(seed=own.rank, delay=0)
    for case in cases(own, device):
        error = ""
        try:
            case()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        gathered = comm.allgather(error or "".join(map(str, device.reports[:1])))
        if any(gathered):
            return next(filter(None, gathered))
    own.close()
    return ""


def main(names):
    for name in names:
        paths, undo = ANY, lambda: None
        if name != "none":
            paths, *mutation = MUTANTS[name]
            undo = plant(*mutation)
        found = next(filter(None, map(found_by, paths)), "")
        undo()
        if MPI.COMM_WORLD.rank == 0:
            print(f"{name}: {'found: ' + found if found else 'not found'}", flush=True)
    MPI.COMM_WORLD.Barrier()
    time.sleep(0.5)  # the launcher reads the output
    MPI.COMM_WORLD.Abort(0)  # messages of broken calls may be in flight


if __name__ == "__main__":
    main(sys.argv[1:])
