"""A kernel that announces its products, as a Numba kernel in Numba's simulator, while the host sends them by MPI.

The kernel is the twin of `multiply_groups` in `fompi.backends.cuda.counters.triton`. Its table, counters and flags are
made by `fompi.backends.cuda.counters.announced`, for the products of a plan. Two ranks run this file, with
NUMBA_ENABLE_CUDASIM=1:

    mpirun -n 2 python tests/counters_twin.py
"""

import ctypes
import os
import threading
import time
from itertools import pairwise
from math import prod

import calls
import catalogue
import numpy as np
from mpi4py import MPI
from numba import cuda

from fompi.backends.cuda.counters import announced
from fompi.backends.numpy import Numpy
from fompi.base.layout import Sizes, offsets
from fompi.plans.dependencies import constraints
from fompi.plans.plan import Recv, Send
from fompi.plans.problems import Form, problem
from fompi.runtime.compiled import Compiled
from fompi.schedules import registry
from fompi.tensors.device_array import DeviceArray

DEPTH, COLUMNS, CALLS, SECONDS = 6, 10, 3, 40
HIGH = BROAD = 4
announced.tile_of = lambda w: (HIGH, BROAD, 1)  # the simulator has a thread of Python for each element of a tile

SIZES = {
    "reduce_scatter": Sizes((7, 5)),
    "all_reduce": Sizes((7, 5)),
    "all_to_all": Sizes(pairs=((5, 9), (2, 6))),  # unequal counts
}


@cuda.jit
def multiply_groups(memory, base, tiles, w, need, count, flag, epoch, columns, depth, x_row, w_row, y_row):
    """Block t computes the t-th tile of the table in `memory`, which begins at the address `base`."""
    t, i, j = cuda.blockIdx.x, cuda.threadIdx.y, cuda.threadIdx.x
    x, y, column = (tiles[t, 0] - base) // 4, (tiles[t, 1] - base) // 4, tiles[t, 4] * cuda.blockDim.x + j
    if i < tiles[t, 3] and column < columns:
        total = 0.0
        for k in range(depth):
            total += memory[x + i * x_row + k] * memory[(w - base) // 4 + k * w_row + column]
        memory[y + i * y_row + column] = total
    cuda.threadfence()
    cuda.syncthreads()
    if i == 0 and j == 0:
        g = tiles[t, 5]
        if cuda.atomic.add(count, g, 1) == need[g] - 1:
            count[g] = 0
            cuda.threadfence_system()
            flag[g] = epoch


def on_host(page):
    """The memory of the simulator, which is that of the host."""
    memory = (ctypes.c_uint8 * (prod(page.shape) * page.dtype.itemsize)).from_address(page.ctypes.data)
    return np.ndarray(tuple(page.shape), page.dtype, memory)


class Simulator:
    """What `announced.CudaAnnouncer` needs from a device. `enqueue` runs the kernel in a thread."""

    def __init__(self, memory):
        self.library, self.memory, self.pages, self.kernel, self.failed = self, memory, {}, None, []

    def storage(self, dtype):
        return np.dtype(dtype)

    def pinned(self, shape, dtype):
        page = cuda.mapped_array(shape, dtype)
        self.pages[page.ctypes.data] = page
        return on_host(page)

    def array(self, a):
        page = self.pinned(a.shape, a.dtype)
        page[...] = a
        return DeviceArray(None, page)

    def announced(self, form, tiles, arguments):
        at, w, *pointers = arguments[: len(announced.GROUP_POINTERS)]
        epoch, *numbers = arguments[len(announced.GROUP_POINTERS) :]
        base = self.memory.ctypes.data

        def run(epoch):
            pages = [self.pages[pointer] for pointer in pointers]
            try:
                multiply_groups[tiles, (BROAD, HIGH)](
                    self.memory, base, self.pages[at], w, *pages, epoch, *map(int, numbers)
                )
            except BaseException as error:
                self.failed.append(error)

        def enqueue(stream):
            self.kernel = threading.Thread(target=run, args=[int(epoch)])
            self.kernel.start()

        return enqueue


class Host:
    """One rank of a plan: the products in one kernel, all other ops here, each once what it needs is done."""

    def __init__(self, comm, plan):
        self.comm, self.plan = comm, plan
        self.compiled = Compiled(plan, comm.rank, "simulator")
        sized = self.compiled.sized(plan.extents(comm.rank))
        starts, shapes = sized.starts, sized.shapes
        ends = np.cumsum([0, *map(prod, shapes.values())])
        memory = cuda.mapped_array(int(ends[-1]), np.float32)
        self.memory = on_host(memory)
        parts = [self.memory[begin:end] for begin, end in pairwise(ends)]
        self.arrays = {name: a.reshape(shape) for (name, shape), a in zip(shapes.items(), parts, strict=True)}
        self.needs = constraints(self.compiled.ops, plan.pace).needs
        self.actions = self.compiled.resolve(self.arrays, starts, Numpy())
        self.device = Simulator(memory)
        on_device = {name: DeviceArray(None, a) for name, a in self.arrays.items()}
        products = self.compiled.products(on_device, starts)
        self.layout = announced.layout(products, tf32=False)
        self.kernel = announced.CudaAnnouncer(self.device, products, self.layout)
        self.groups = {op: group for group, op in enumerate(self.compiled.announced)}

    def check_owners(self):
        """What a message takes is written by one group. Without sums at the end, it is all of the group.

        Then all of its rows are the receiver's.
        """
        tiles, width = on_host(self.device.pages[self.kernel.tables[0].ptr]), 4 * self.layout.columns
        x, sizes, rank = self.arrays["x"], self.plan.sizes, self.comm.rank
        owned = offsets(sizes.rows or sizes.pairs[rank])
        sends = [
            i for i, op in enumerate(self.compiled.ops) if isinstance(op, Send) and {*self.needs[i]} & {*self.groups}
        ]
        for i in sends:
            (product,), begin = {*self.needs[i]} & {*self.groups}, self.actions[i].ctypes.data
            own = tiles[tiles[:, 5] == self.groups[product]]
            sent = {*range(begin, begin + self.actions[i].nbytes, width)}
            written = {int(y) + r * width for _, y, _, rows, *_ in own for r in range(rows)}
            assert written.issuperset(sent)
            if self.plan.problem.moves != "all_reduce":
                first = (own[:, 0] - x.ctypes.data) // x.strides[0]
                dest = self.compiled.peers[i]
                assert written == sent and (owned[dest] <= first).all() and (first + own[:, 3] <= owned[dest + 1]).all()
        assert len(sends) == 2  # two slices for the other rank

    def run(self):
        """One call. Returns how many messages left while the kernel ran."""
        ops, deadline = self.compiled.ops, time.monotonic() + SECONDS
        assert not any(self.needs[i] for i in self.groups)
        epoch, done, begun, early = self.kernel.enqueue(None), set(), {}, 0
        while len(done) < len(ops):
            assert time.monotonic() < deadline and not self.device.failed, self.device.failed
            for i, op in enumerate(ops):
                if i in done:
                    continue
                if i in self.groups:
                    is_done = self.kernel.is_raised(self.groups[i], epoch)
                elif not done.issuperset(self.needs[i]):
                    continue
                elif isinstance(op, (Send, Recv)):
                    if i not in begun:
                        start = self.comm.Isend if isinstance(op, Send) else self.comm.Irecv
                        begun[i] = start(self.actions[i], self.compiled.peers[i], self.compiled.numbers[i])
                        early += isinstance(op, Send) and self.device.kernel.is_alive()
                    is_done = begun[i].Test()
                else:
                    self.actions[i]()
                    is_done = True
                if is_done:
                    done.add(i)
            time.sleep(1e-4)
        self.device.kernel.join(SECONDS)
        assert not self.device.kernel.is_alive() and not self.device.failed, self.device.failed
        return epoch, early


def whole_numbers(random, shape, dtype):
    return random.integers(-9, 9, shape).astype(dtype)


def main(comm, moves, sizes):
    made = problem(f"matmul_{moves}", comm.size, Form((0, DEPTH), "float32"), [Form((DEPTH, COLUMNS), "float32")])
    host = Host(comm, registry.write(made, "direct", (1, 2), sizes))
    host.check_owners()
    for call in range(CALLS):
        inputs = catalogue.inputs(made, sizes, call, whole_numbers)
        host.memory[...] = np.nan
        for name, array in inputs[comm.rank].items():
            host.arrays[name][...] = array
        epoch, early = host.run()
        wanted = calls.expected(made, inputs, sizes, comm.rank)["y"]
        np.testing.assert_array_equal(host.arrays["y"], wanted)
        counters = on_host(host.device.pages[host.kernel.tables[2].ptr])
        assert epoch == call + 1 and not counters.any()
        line = f"rank {comm.rank}: {moves} {epoch} is right, {early} messages left while the kernel ran\n"
        os.write(1, line.encode())  # one write: the ranks share the output


if __name__ == "__main__":
    for moves, sizes in SIZES.items():
        main(MPI.COMM_WORLD, moves, sizes)
