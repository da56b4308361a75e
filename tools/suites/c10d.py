"""The verbs of torch.distributed over gloo and over fompi, and MPI's own.

    mpirun -n 2 python -m fompi bench tools/suites/c10d.py

| contestant | what it is                                                                                      |
|------------|-------------------------------------------------------------------------------------------------|
| `gloo`     | the verb on a group of gloo. Threads of gloo move the messages                                  |
| `fompi`    | the same verb on a group of the backend "fompi"                                                 |
| `MPI`      | the collective of the MPI library, by mpi4py. It has none for half types, and none for messages |

A size is that of the larger tensor of a rank, in bytes. The results of fompi are compared with those of gloo first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from fompi.bench.measure import Bench
from fompi.engine.communicator import Communicator
from fompi.torch.autoload import register
from fompi.tuning.rounds import Figure, Row, WrongResult, difference, of_all_ranks
from links import rendezvous
from means import repeated

SIZES = (64, 1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 24, 100_000_000)
QUICK_SIZES = (1 << 10,)

SECONDS, MOST_CALLS, WARMUP = 0.02, 200, 2
"""About how long a run takes, how many calls it has at most, and how many calls before it do not count."""

SMALL_NBYTES, MOST_ABOVE_MPI = 1 << 16, 25
"""Asked up to this size: 3 times as fast as gloo, and at most this many microseconds more than MPI."""

LEAST = 0.98

WITHIN, WITHIN_HALF = 1e-3, 2e-2
"""Results may differ by this share of the largest element. gloo rounds half types at each addition, fompi once."""

GLOO, OURS, LIBRARY = "gloo", "fompi", "MPI"


Verb = tuple[Callable[[], object], Callable[[], list[Any]]]
"""A verb on one group: its call, and what it writes on this rank."""


def start_gloo(comm: Any, address: str) -> None:
    """Make a group of gloo over the ranks of `comm` (mpi4py) the default one. They meet at `address`, a port of rank 0.

    The variable GLOO_SOCKET_IFNAME names the network interface.
    """
    torch.set_num_threads(1)  # like the kernels of all contestants
    rank, size, patience = comm.Get_rank(), comm.Get_size(), timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size, timeout=patience)


@contextmanager
def beside_torch(bench: Bench) -> Iterator[tuple[Bench, Any]]:
    """The benchmark beside PyTorch, whose default group is one of gloo, and a group of the backend "fompi"."""
    register()
    start_gloo(bench.mpi, rendezvous(bench.cluster))
    try:
        yield replace(bench, moves="gloo: threads"), dist.new_group(backend="fompi")
    finally:
        dist.destroy_process_group()


def compare(bench: Bench, name: str, ours: Sequence[Any], theirs: Sequence[Any], limit: float = WITHIN) -> None:
    """Raise WrongResult on all ranks if tensors of torch differ by more than `limit` of the largest on one."""
    error = max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(ours, theirs, strict=True))
    worst = float(of_all_ranks(bench.mpi, np.array([error])).max())
    if not worst < limit:
        raise WrongResult(f"fompi and {name} differ by {worst:.2g} of the largest element")


def rows(bench: Bench) -> list[Row]:
    sizes = QUICK_SIZES if bench.quick else SIZES
    cases = [(verb, size) for verb in VERBS for size in ((0,) if verb == "barrier" else sizes)]
    with beside_torch(bench) as (beside, group):
        makers = {f"{verb} {_bytes(size)}".strip(): (verb, size) for verb, size in cases}
        return [measured(beside, group, what, *makers[what]) for what in bench.each([*makers])]


def _bytes(size: int) -> str:
    for unit, step in (("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)):
        if size and size % step == 0:
            return f"{size // step} {unit}"
    return ""


def measured(bench: Bench, group: Any, what: str, verb: str, nbytes: int) -> Row:
    (gloo, theirs), (ours, mine) = (verb_of(each, bench.comm, verb, nbytes) for each in (None, group))
    calls = {GLOO: gloo, OURS: ours}
    for call in calls.values():
        call()
    if theirs():
        compare(bench, GLOO, mine(), theirs(), WITHIN_HALF if verb in HALVES else WITHIN)
    library = of_library(bench.mpi, verb, nbytes)
    if library is not None:
        calls[LIBRARY] = library
    once = bench.times(calls, 1, calls=4, warmup=WARMUP, idle=0.0)
    counts = {name: max(1, min(MOST_CALLS, int(SECONDS / times[0]))) for name, times in once.items()}
    taken = bench.times({name: partial(repeated, call, counts[name]) for name, call in calls.items()}, warmup=1)
    samples = {name: [seconds / counts[name] for seconds in times] for name, times in taken.items()}
    row = bench.row_of(what, samples, base=OURS)
    return replace(row, figures=[*_figures(row, nbytes, bench.cluster.shared)])


def _figures(row: Row, nbytes: int, is_shared: bool) -> Iterator[Figure]:
    is_small = nbytes <= SMALL_NBYTES
    yield row.ratio(GLOO, OURS, least=3.0 if is_small and is_shared else LEAST)
    if LIBRARY in row.samples:
        if is_small and is_shared:
            yield difference("above MPI's own", row.samples[OURS], row.samples[LIBRARY], most=MOST_ABOVE_MPI)
        elif not is_small:
            yield row.ratio(LIBRARY, OURS, least=LEAST)


# -------------------------------------------------------------------------------------------------------------- verbs

HALVES = {"all_reduce bfloat16": "bfloat16", "all_reduce float16": "float16"}


def verb_of(group: Any, comm: Communicator, verb: str, nbytes: int) -> Verb:
    """The verb on a group of torch, on tensors of its own."""
    rank, size = comm.rank, comm.size
    dtype = getattr(torch, HALVES.get(verb, "float32"))
    count = max(1, nbytes // (dtype.itemsize * size))
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(count * size, generator=generator).to(dtype)
    part, last = whole[:count].clone(), size - 1
    parts, wholes = [part.clone() for _ in range(size)], torch.empty_like(whole)
    on_root = rank == last
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, 1, group=group)
            dist.recv(whole, 1, group=group)
        elif rank == 1:
            dist.recv(whole, 0, group=group)
            dist.send(whole, 0, group=group)

    if verb == "barrier":
        return lambda: dist.barrier(group=group), list
    if verb.startswith("all_reduce"):
        waits = not verb.endswith("async")

        def call() -> None:
            work = dist.all_reduce(whole, group=group, async_op=not waits)
            if not waits:
                work.wait()

        call()
        first = whole.clone().float()
        whole.zero_()  # in place: else it grows with every call
        return call, lambda: [first]
    if verb == "reduce":
        return lambda: dist.reduce(whole.zero_(), last, group=group), list
    if verb == "send, recv":
        return there_and_back, list
    calls: dict[str, tuple[Callable[[], object], Any]] = {
        "broadcast": (lambda: dist.broadcast(whole, last, group=group), [whole]),
        "all_gather_single": (lambda: gather(wholes, part, group=group), [wholes]),
        "all_gather": (lambda: dist.all_gather(parts, part, group=group), parts),
        "reduce_scatter_single": (lambda: scatter(part, whole, group=group), [part]),
        "all_to_all_single": (lambda: dist.all_to_all_single(wholes, whole, group=group), [wholes]),
        "gather": (lambda: dist.gather(part, parts if on_root else None, last, group=group), [part, *parts * on_root]),
        "scatter": (lambda: dist.scatter(part, parts if on_root else None, last, group=group), [part]),
    }
    begin, result = calls[verb]
    return begin, lambda: [t.float() for t in result]


def of_library(mpi: Any, verb: str, nbytes: int) -> Callable[[], object] | None:
    """The collective of the MPI library, on arrays of the same size. None: it has none."""
    rank, size = mpi.Get_rank(), mpi.Get_size()
    count = max(1, nbytes // (4 * size))
    whole, other, part = (np.ones(n * count, np.float32) for n in (size, size, 1))  # zeros are not in memory
    last, root = size - 1, rank == size - 1
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: mpi.Allreduce(whole, other),
        "broadcast": lambda: mpi.Bcast(whole, last),
        "reduce": lambda: mpi.Reduce(whole, other if root else None, root=last),
        "all_gather_single": lambda: mpi.Allgather(part, whole),
        "all_gather": lambda: mpi.Allgather(part, whole),
        "reduce_scatter_single": lambda: mpi.Reduce_scatter_block(whole, part),
        "all_to_all_single": lambda: mpi.Alltoall(whole, other),
        "gather": lambda: mpi.Gather(part, whole if root else None, root=last),
        "scatter": lambda: mpi.Scatter(whole if root else None, part, root=last),
        "barrier": mpi.Barrier,
        "all_reduce async": lambda: mpi.Iallreduce(whole, other).Wait(),
    }
    return calls.get(verb)


VERBS = (
    *("all_reduce", "all_reduce async", *HALVES, "broadcast", "all_gather_single", "reduce_scatter_single"),
    *("all_to_all_single", "reduce", "gather", "scatter", "all_gather", "send, recv", "barrier"),
)
