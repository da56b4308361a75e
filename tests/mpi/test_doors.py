"""Calls that torch's group and `fompi.mpi.Comm` have made before: they begin by their key, and end as all others do."""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cut_short import CutShort
from mpi4py import MPI

import fompi
from fompi import mpi
from fompi.ops import by_library
from fompi.runtime.native_run import made_call
from fompi.torch.work import Landed

pytestmark = [
    pytest.mark.ranks(mpich=[2, 3], openmpi=[2]),
    pytest.mark.skipif(os.environ.get("FOMPI_ENGINE") == "python", reason="calls run in Python"),
]

TURNS = 9

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@pytest.fixture
def cut(world, monkeypatch):
    """From now on Python takes over calls in C after a few rounds, on each rank after others."""
    draw, made = np.random.default_rng(world.rank), []

    def make(*args):
        made.append(CutShort(made_call(*args), lambda: int(draw.integers(0, 10))))
        return made[-1]

    monkeypatch.setattr("fompi.ops.ticket.made_call", make)
    return made


def verbs(rank, size):
    """(verb, its own tensors, a call on them, what must be in the last of them)."""
    x, whole = torch.arange(4.0) + rank, torch.arange(4.0 * size) + rank
    all_of = [torch.arange(4.0) + r for r in range(size)]
    total = sum(torch.arange(4.0 * size) + r for r in range(size))
    swapped = torch.cat([(torch.arange(4.0 * size) + r)[4 * rank : 4 * rank + 4] for r in range(size)])
    sums = {"SUM": sum(all_of), "AVG": sum(all_of) / size, "PRODUCT": torch.stack(all_of).prod(0)}
    for op, wanted in sums.items():
        yield (
            f"all_reduce {op}",
            (x,),
            lambda t, o, op=op: dist.all_reduce(t, getattr(dist.ReduceOp, op), async_op=o),
            wanted,
        )
    yield "broadcast", (x,), lambda t, o: dist.broadcast(t, size - 1, async_op=o), all_of[-1]
    yield "all_gather", (x, torch.zeros(4 * size)), lambda x, t, o: GATHER(t, x, async_op=o), torch.cat(all_of)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    mine = total[4 * rank : 4 * rank + 4]
    yield "reduce_scatter", (whole, torch.zeros(4)), lambda x, t, o: scatter(t, x, async_op=o), mine
    yield (
        "all_to_all",
        (whole, torch.zeros(4 * size)),
        lambda x, t, o: dist.all_to_all_single(t, x, async_op=o),
        swapped,
    )
    root, zeros = size - 1, torch.zeros(4 * size)
    is_root = rank == root
    yield "reduce", (x,), lambda t, o: dist.reduce(t, root, async_op=o), sum(all_of) if is_root else x
    yield (
        "gather",
        (x, zeros),
        lambda x, t, o: dist.gather(x, list(t.chunk(size)) if is_root else None, root, async_op=o),
        torch.cat(all_of) if is_root else zeros,
    )
    yield (
        "scatter",
        (whole, torch.zeros(4)),
        lambda x, t, o: dist.scatter(t, list(x.chunk(size)) if is_root else None, root, async_op=o),
        (torch.arange(4.0 * size) + root)[4 * rank : 4 * rank + 4],
    )
    yield (
        "all_gather of a list",
        (x, zeros),
        lambda x, t, o: dist.all_gather(list(t.chunk(size)), x, async_op=o),
        torch.cat(all_of),
    )
    yield (
        "all_to_all of lists",
        (whole, zeros),
        lambda x, t, o: dist.all_to_all(list(t.chunk(size)), list(x.chunk(size)), async_op=o),
        swapped,
    )


def each_verb(rank, size):
    for verb, tensors, call, wanted in verbs(rank, size):
        for turn in range(TURNS):
            given = [t.clone() for t in tensors]
            work = call(*given, turn % 3 == 2)
            if work is not None:
                assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
            assert torch.equal(given[-1], wanted), (verb, turn)
            dist.barrier()


def test_every_verb(group, world):
    each_verb(world.rank, world.size)
    assert len(group._shortcuts._known) >= 11


def test_python_goes_on_at_every_step(group, world, cut):
    group.comm.tickets.clear()
    group._shortcuts._known.clear()
    each_verb(world.rank, world.size)
    assert len(cut) >= 11


def test_a_work_that_has_landed():
    work = Landed([torch.ones(1)])
    assert work.wait() and work.get_future().wait() == [torch.ones(1)] and work.result() == [torch.ones(1)]
    work.synchronize()
    assert work.exception() is None


def test_several_in_flight(group, world):
    for _ in range(3):
        tensors = [torch.full((5,), float(n + world.rank)) for n in range(20)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for work in reversed(works):
            work.wait()
        for n, t in enumerate(tensors):
            assert t.tolist() == [world.size * n + sum(range(world.size))] * 5


def test_coalesced(group, world):
    from torch.distributed.distributed_c10d import _coalescing_manager

    for _ in range(5):
        tensors = [torch.ones(3), torch.ones(3)]
        with _coalescing_manager():
            for t in tensors:
                dist.all_reduce(t)
        assert all((t == world.size).all() for t in tensors)


def test_memory_that_overlaps(group, world):
    """Keys do not say where tensors lie. What cannot be written in place is copied, as before."""
    size = world.size
    for turn in range(6):
        memory = torch.arange(4.0 * size) + world.rank
        out, x = torch.zeros(4 * size), memory[:4]
        if turn == 4:
            out = memory  # x is a part of the result
        GATHER(out, x.clone() if turn == 5 else x)
        assert torch.equal(out, torch.cat([torch.arange(4.0) + r for r in range(size)]))


def test_ranks_that_disagree(group, world):
    """The order check holds for calls in C: other verbs, other sizes."""
    for _ in range(5):
        dist.all_reduce(torch.ones(6))
        dist.broadcast(torch.ones(6), 0)
    for n in range(2):
        with pytest.raises(fompi.FompiError, match=r"disagree.*broadcast|broadcast.*disagree"):
            dist.all_reduce(torch.ones(6)) if world.rank else dist.broadcast(torch.ones(6), 0)
        with pytest.raises(fompi.FompiError, match=r"disagree|shape"):
            dist.all_reduce(torch.ones(6 + (world.rank == n)))
        t = torch.ones(6)
        dist.all_reduce(t)
        assert (t == world.size).all()


def test_a_time_limit_of_a_group(group, world):
    """A call that no other rank begins fails at its limit, also if it was made before."""
    made = dist.new_group(timeout=timedelta(seconds=0.5))
    for _ in range(5):
        dist.all_reduce(torch.ones(2), group=made)
    if world.rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"Timed out|no progress"):
            dist.all_reduce(torch.ones(2), group=made)
    dist.barrier()
    dist.destroy_process_group(made)


def test_a_message_of_another_size(group, world):
    """It is an error of the receive, also if its header has arrived before."""
    for turn in range(6):
        if world.rank == 0:
            dist.send(torch.ones(8 if turn % 2 else 5), 1)
        dist.barrier()
        if world.rank == 1 and turn % 2:
            t = torch.zeros(8)
            dist.recv(t, 0)
            assert t.tolist() == [1] * 8
        elif world.rank == 1:
            with pytest.raises(fompi.ShapeError, match="sends float32"):
                dist.recv(torch.zeros(8), 0)


# ------------------------------------------------------------------------------------------------------- fompi.mpi.Comm


@pytest.fixture
def ours(monkeypatch):
    """All of its collectives by fompi, also small ones."""
    for name in by_library.LIMITS:
        monkeypatch.setitem(by_library.LIMITS, name, -1)
    made = mpi.Comm(MPI.COMM_WORLD.Dup())
    yield made
    made.Free()


def collectives(comm):
    """(name, arguments, options): the last argument is written."""
    n, x = comm.size, np.arange(4.0) + comm.rank
    whole = np.arange(4.0 * comm.size) + comm.rank
    return [
        ("Allreduce", [x, np.zeros(4)], {}),
        ("Allreduce", [x, np.zeros(4), MPI.PROD], {}),
        ("Allreduce", [x.astype("f4"), np.zeros(4, "f4")], {"op": MPI.MAX}),
        ("Allreduce", [MPI.IN_PLACE, x], {}),
        ("Allreduce", [[x, MPI.DOUBLE], [np.zeros(4), MPI.DOUBLE]], {}),
        ("Bcast", [x], {"root": n - 1}),
        ("Allgather", [x, np.zeros(4 * n)], {}),
        ("Alltoall", [whole, np.zeros(4 * n)], {}),
        ("Reduce_scatter_block", [whole, np.zeros(4)], {}),
        ("Gather", [x, np.zeros(4 * n)], {"root": 0}),
        ("Gather", [x, np.zeros(4 * n) if comm.rank == n - 1 else None, n - 1], {}),
        ("Reduce", [x, np.zeros(4)], {"root": n - 1}),
        ("Reduce", [x, np.zeros(4) if not comm.rank else None], {}),
        ("Reduce", [MPI.IN_PLACE if not comm.rank else x, x if not comm.rank else None], {"op": MPI.SUM}),
        ("Scatter", [whole, np.zeros(4)], {"root": n - 1}),
        ("Scatter", [whole if not comm.rank else None, np.zeros(4)], {}),
        ("Allgather", [[x, MPI.DOUBLE], [np.zeros((4, n))[:, 0].copy().repeat(n), MPI.DOUBLE]], {}),
    ]


def each_collective(comm):
    plain = MPI.Intracomm(comm)
    for name, args, options in collectives(comm):
        for _ in range(TURNS):
            given, wanted = ([copied(a) for a in args] for _ in range(2))
            getattr(plain, name)(*wanted, **options)
            getattr(comm, name)(*given, **options)
            for a, b in zip(given, wanted, strict=True):
                a, b = (x[0] if isinstance(x, list) else x for x in (a, b))
                if isinstance(a, np.ndarray):
                    np.testing.assert_allclose(a, b, err_msg=name)


def copied(argument):
    if isinstance(argument, list):
        return [argument[0].copy(), argument[1]]
    return argument.copy() if isinstance(argument, np.ndarray) else argument


@pytest.mark.parametrize("limit", [40, 4 << 20])
def test_collectives_of_the_library(ours, monkeypatch, limit):
    """Small ones are its own, and all ranks agree which: whatever form their arguments have."""
    for name in by_library.SIZED:
        monkeypatch.setitem(by_library.LIMITS, name, limit)
    before = ours.communicator.calls
    each_collective(ours)
    assert (ours.communicator.calls == before) == (limit > 40)
    with pytest.raises((ValueError, TypeError)):  # the words of mpi4py
        ours.Allreduce(np.zeros(3), np.zeros(2))
    size = ours.size  # each rank decides for itself
    wholes = [np.arange(9.0 * size), [np.arange(9.0 * size), MPI.DOUBLE], [np.arange(9.0 * size), 9 * size, MPI.DOUBLE]]
    for root in range(min(size, 3)):
        ours.Bcast(wholes[(ours.rank + root) % 3], root=root)
        counts = [9] * size
        sent = MPI.IN_PLACE if ours.rank == root else np.ones(9)
        ours.Allgatherv(sent, [np.ones(9 * size), counts])
        ours.Gather(sent, np.ones(9 * size) if ours.rank == root else None, root=root)
        ours.Scatter(np.ones(9 * size) if ours.rank == root else None, sent, root=root)
        ours.Reduce_scatter_block(wholes[root % 2], np.zeros(9))


def test_every_collective(ours):
    each_collective(ours)
    assert len(ours._shortcuts._known) >= 14


def test_python_goes_on_with_collectives(ours, cut):
    each_collective(ours)
    assert len(cut) >= 6


def test_buffers_that_do_not_fit(ours):
    """After calls in C, too, it is an error on all ranks."""
    x, y = np.ones(4), np.zeros(4 * ours.size)
    for _ in range(5):
        ours.Allgather(x, y)
    for wrong in range(2):
        with pytest.raises(fompi.FompiError):
            ours.Allgather(np.ones(4 + (ours.rank == wrong)), y)
        ours.Allgather(x, y)
        assert (y == 1).all()
