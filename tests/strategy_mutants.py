"""Bugs that are planted in what strategies do on a device, one by one: mpirun -n 2 python strategy_mutants.py NAME ...

The results of the host are computed before. Then each of the named calls of `strategy_calls` runs on the software
device, until some rank finds the bug: by the checker, as wrong data, or as any other error.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
from device_mutants import plant
from mpi4py import MPI
from strategy_calls import calls

import fompi
from fompi.backends.cuda.software import SoftwareDevice
from fompi.mpi.paths import STAGED

STAGING, SOFTWARE = "fompi.backends.cuda.staging", "fompi.backends.cuda.software"
BACKEND, DISPATCH = "fompi.backends.cuda.backend", "fompi.runtime.dispatch"
COMPUTING, MESSAGES, PARALLEL = "fompi.backends.cuda.computing", "fompi.ops.messages", "fompi.parallel"

OWN = "(lambda run, *arrays: run(self._own))"
"""In place of `self.for_caller`: the kernel runs in another stream, and nothing orders it."""

MUTANTS = {
    # functions of NumPy, and kernels beside them
    "a cast is in another stream": (("column, half",), f"{STAGING}:Staging.cast", "self.for_caller", OWN),
    "a product is in another stream": (("column of all rows, swiglu",), f"{STAGING}:Staging.multiply",
        "self.for_caller", OWN),
    "an upload is in another stream": (("experts",), f"{STAGING}:Staging.upload", "self.for_caller", OWN),
    "the memory of an upload is not kept": (("experts", "ring"), f"{STAGING}:Staging.upload",
        "self._uploads.append((self.mark(), staging))", "pass"),
    "a fetch is in another stream": (("experts", "ring"), f"{STAGING}:Staging.fetch", "self.for_caller", OWN),
    "a fetch is done at once": (("experts", "ring"), f"{STAGING}:Marked.done", "bool(self.event.done())", "True"),
    "the mark of a fetch comes before the copy": (("experts", "ring"), f"{STAGING}:Staging.fetch",
        "self.for_caller(self.copy(target, source), source)\n    return Fetched(self, target, source, self.mark())",
        "mark = self.mark()\n    self.for_caller(self.copy(target, source), source)\n"
        "    return Fetched(self, target, source, mark)"),
    "operations do not follow functions of NumPy": (("column, gelu", "row"), f"{SOFTWARE}:SoftwareDevice.for_caller",
        "if chosen is None:", "if False:"),
    "functions of NumPy do not follow operations": (("row", "column, gelu"), f"{SOFTWARE}:SoftwareDevice.leave",
        "stream.wait(event)", "pass"),
    "an array in place is not written": (("norm",), f"{COMPUTING}:Computing._into",
        "self._run(name, work, operands, [out])",
        "self._run(name, work, operands, [self._new(out.shape, out.dtype)])"),
    # messages between two ranks
    "a message leaves before its data has come": (("ring",), f"{MESSAGES}:Sending._leave", "self.fetched.get()",
        "np.zeros_like(self.fetched._target)"),
    "a message does not wait for its device": (("ring", "attention"), f"{MESSAGES}:Sending.start",
        "if self.fetched is None and (self.peer, self.tag) not in leaving:", "if True:"),
    # pipelines
    "a stage does not wait for what it reads": (("pipeline",), f"{BACKEND}:ByCaller.bind_user",
        "if events:", "if False:"),
    "a stage waits for the first event only": (("pipeline", "pipeline, interleaved"), f"{BACKEND}:ByCaller.bind_user",
        "in after if", "in after[:0] if"),
    "the mark comes before the stage": (("pipeline",), f"{BACKEND}:ByCaller.bind_user",
        "function(reads, writes)\n        device.meet()\n        return Enqueued(queue, device.mark())",
        "mark = device.mark()\n        function(reads, writes)\n        device.meet()\n"
        "        return Enqueued(queue, mark)"),
    "a stage is done when it has returned": (("pipeline",), f"{DISPATCH}:Dispatch._ran_by_caller",
        "self.tokens[i] = token\n        self.comm.engine.launched(token, self, i)\n    queue: list[int] = []",
        "self.unfinished -= 0\n    queue: list[int] = self._complete(i)"),
    "a stage follows nothing": (("pipeline",), f"{DISPATCH}:Dispatch._run_by_caller",
        "in self.compiled.follows[i]", "in ()"),
    "a slot is not copied": (("pipeline",), f"{PARALLEL}.pipeline:Pipeline._put",
        "np.copyto(for_numpy(slot), given.array)", "pass"),
    # data parallelism
    "an optimizer does not wait for its sum": (("data 0", "data 2"), f"{PARALLEL}.sums:Gradients.collect",
        "self.total = waits.result(self.call)",
        "waits.result(self.call)\n        self.total = self.gradient[self.bucket.begin:self.bucket.end]"),
    "a gradient is overwritten while it is sent": (("data 0",), f"{PARALLEL}.sums:Sums.leave",
        "summed.call.start(x=x)", "summed.call.start(x=x)\n    summed.gradient.fill(0)"),
    "gradients are not clipped": (("data 0",), f"{PARALLEL}.data:clip_factor",
        "np.where(factor > 1.0, factor.dtype.type(1), factor)",
        "factor * 0 + 1"),
    "the norm has one bucket": (("data 0",), f"{PARALLEL}.data:DataParallel._squares",
        "for gradients in self.gradients:",
        "for gradients in self.gradients[:1]:"),
    "all parameters count as written": (("data 1", "data 1, int8"), f"{PARALLEL}.gathers:Bucket.take_what_was_written",

        ", where=written", ""),
    "what was lost is given back twice": (("data 1, int8",), "fompi.backends.wires:Feedback.give_back",
        "np.add(total, self.lost, out=total)", "np.add(total, self.lost + self.lost, out=total)"),
    # sequences and experts
    "lse is merged twice": (("ring",), f"{PARALLEL}.ring:merge",
        "lse[...] = new", "lse[...] = np.logaddexp(new, more_lse)"),
    "a block is used before it has come": (("ring",), f"{PARALLEL}.ring:AttentionRing._circle",
        "k, v = map(arrived, travels)",
        "list(map(arrived, travels))"),
    "results leave before they have seen all keys": (("ulysses",), f"{PARALLEL}.ulysses:UlyssesSlice.forward",
        "if run is not runs[last]:", "if False:"),
    "rows stay in the order of arrival": (("experts in parts",), f"{PARALLEL}.exchange:Exchange.came",
        "[self.order]", ""),
    "dropped rows are added": (("experts, full",), f"{PARALLEL}.exchange:Exchange.add",
        "np.where(self._kept[:, slot][:, None], terms, terms.dtype.type(0))", "terms"),
    "an answer is written to the wrong rows": (("experts",), f"{PARALLEL}.exchange:Exchange.answered",
        "self.first[behind] :", "self.first[behind] * 0 :"),
    "both halves of the rows are the first one": (("experts",), f"{PARALLEL}.expert:halves",
        "np.flatnonzero(~is_first)", "np.flatnonzero(is_first)"),
    "tokens of other ranks are looked up": (("embedding",), f"{PARALLEL}.vocabulary:_ours",
        "np.where(ours, local, np.int64(0)), ours",
        "np.where(ours, local, np.int64(0)), ours | True"),
}  # fmt: skip


def found_by(names, comm, wanted, device):
    """What finds the planted bug: the first error of this rank, or of another one. Empty: nothing."""
    for name in names:
        if name not in wanted:
            continue
        error = ""
        try:
            got = calls(comm, device)[name](device.array, lambda x: x.get())
            assert [a.tobytes() for a in got] == [a.tobytes() for a in wanted[name]], f"{name} gives wrong data"
            comm.engine.progress_while_waiting()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        gathered = MPI.COMM_WORLD.allgather(error or "".join(map(str, device.reports[:1])))
        if any(gathered):
            return next(filter(None, gathered))
    return ""


def main(names):
    os.environ["FOMPI_PATH"] = STAGED
    first = fompi.Communicator(MPI.COMM_WORLD, "host")
    needed = {call for name in names if name != "none" for call in MUTANTS[name][0]} | {
        "row",
        "ring",
        "experts",
        "pipeline",
    }
    wanted = {name: call(np.asarray, np.asarray) for name, call in calls(first).items() if name in needed}
    for name in names:
        comm = fompi.Communicator(MPI.COMM_WORLD, f"mutant {name}")
        device = SoftwareDevice(seed=comm.rank, delay=2e-4)
        if name == "none":
            found = found_by(wanted, comm, wanted, device)
        else:
            used, *mutation = MUTANTS[name]
            undo = plant(*mutation)
            found = found_by(used, comm, wanted, device)
            undo()
        if comm.rank == 0:
            print(f"{name}: {'found: ' + found if found else 'not found'}", flush=True)
    MPI.COMM_WORLD.Barrier()
    time.sleep(0.5)  # the launcher reads the output
    MPI.COMM_WORLD.Abort(0)  # messages of broken calls may be in flight


if __name__ == "__main__":
    main(sys.argv[1:])
