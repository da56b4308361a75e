"""fompi.mpi.Comm: the collectives of mpi4py through fompi give what MPI gives, and only the rest goes to MPI."""

import numpy as np
import pytest
from mpi4py import MPI

import fompi
from fompi import mpi


@pytest.fixture(scope="module")
def ours():
    made = mpi.Comm(MPI.COMM_WORLD.Dup())
    yield made
    made.Free()


@pytest.fixture(scope="module")
def plain(ours):
    return MPI.Intracomm(ours)


def calls(ours):
    return ours.communicator.calls


def rows(ours, dtype=np.float64, count=3):
    """count items for each rank, different on all ranks."""
    return (np.arange(ours.size * count) % 5 + 10 * ours.rank + 1).astype(dtype)


BLOCK = ["Bcast", "Gather", "Scatter", "Allgather", "Alltoall", "Reduce", "Allreduce", "Reduce_scatter_block"]


def arguments(name, comm, dtype):
    """Arguments of a collective, the last one or the only one is what it writes."""
    n, root = comm.size, comm.size - 1
    x, here = rows(comm, dtype), comm.rank == root
    if name == "Bcast":
        return [x.copy()], {"root": root}
    if name == "Gather":
        return [x[:3], np.zeros(3 * n, dtype) if here else None], {"root": root}
    if name == "Scatter":
        return [x if here else None, np.zeros(3, dtype)], {"root": root}
    if name == "Allgather":
        return [x[:3], np.zeros(3 * n, dtype)], {}
    if name == "Alltoall":
        return [x, np.zeros(3 * n, dtype)], {}
    if name == "Reduce":
        return [x, np.zeros(3 * n, dtype) if here else None], {"op": MPI.MAX, "root": root}
    if name == "Allreduce":
        return [x, np.zeros(3 * n, dtype)], {"op": MPI.PROD}
    return [x, np.zeros(3, dtype)], {"op": MPI.SUM}


@pytest.mark.parametrize("name", BLOCK)
@pytest.mark.parametrize("dtype", [np.float64, np.int16])
def test_values_are_those_of_mpi(ours, plain, name, dtype):
    """Blocking and not. Each is one call of fompi."""
    (*inputs, expected), options = arguments(name, ours, dtype)
    getattr(plain, name)(*inputs, expected, **options)
    for form in (name, f"I{name.lower()}"):
        (*inputs, y), options = arguments(name, ours, dtype)
        before = calls(ours)
        request = getattr(ours, form)(*inputs, y, **options)
        if request is not None:
            request.Wait()
        assert np.array_equal(y, expected) if y is not None else expected is None
        assert calls(ours) == before + 1


def test_uneven_counts_and_gaps(ours, plain):
    """The v-forms, with zero counts and with displacements that leave gaps on some ranks only."""
    n, rank = ours.size, ours.rank
    counts = [r % 3 for r in range(n)]
    for gap in (0, rank % 2 + 1):
        displacements = [sum(counts[:r]) + r * gap for r in range(n)]
        room, x = sum(counts) + n * gap, rows(ours)[: counts[rank]]
        results = []
        for comm in (plain, ours):
            y = np.full(room, -1.0)
            comm.Allgatherv(x, [y, counts, displacements, MPI.DOUBLE])
            g = np.full(room, -1.0)
            comm.Gatherv(x, [g, (counts, displacements)] if rank == 0 else None)
            s = np.full(counts[rank], -1.0)
            comm.Scatterv([rows(comm, count=4), counts, displacements, MPI.DOUBLE] if rank == 0 else None, s)
            a = np.full(3 * n, -1.0)
            sent = [counts[r] for r in range(n)]
            came = [counts[rank]] * n
            comm.Alltoallv([rows(comm, count=4), (sent, displacements)], [a, (came, [3 * r for r in range(n)])])
            results.append((y, g, s, a))
        assert all(map(np.array_equal, *results))


def test_a_layout_of_one_rank_only(ours):
    """Rank 0 has every second number, the others have them in one piece. All go through fompi."""
    every_second = MPI.DOUBLE.Create_vector(4, 1, 2).Commit()
    y = np.zeros(8 if ours.rank == 0 else 4)
    if ours.rank == ours.size - 1:
        y[: 8 if ours.rank == 0 else 4 : 2 if ours.rank == 0 else 1] = range(4)
    before = calls(ours)
    ours.Bcast([y, 1, every_second] if ours.rank == 0 else y, root=ours.size - 1)
    assert calls(ours) == before + 1
    assert y.tolist() == ([0, 0, 1, 0, 2, 0, 3, 0] if ours.rank == 0 else [0, 1, 2, 3])
    every_second.Free()
    with pytest.raises((ValueError, BufferError, fompi.FompiError)):
        ours.Allreduce(np.zeros((4, 4))[:, ::2], np.zeros(8))  # as in mpi4py: no such buffer


def test_in_place(ours):
    n, rank = ours.size, ours.rank
    y = np.arange(2.0 * n) + rank
    ours.Allreduce(MPI.IN_PLACE, y)
    assert np.array_equal(y, n * np.arange(2.0 * n) + sum(range(n)))
    y = np.where(np.arange(2 * n) // 2 == rank, rank, -1)
    ours.Allgather(MPI.IN_PLACE, y)
    assert np.array_equal(y, np.arange(2 * n) // 2)
    y = np.arange(float(n)) + 10 * rank
    ours.Reduce_scatter_block(MPI.IN_PLACE, y)
    assert y[0] == n * rank + 10 * sum(range(n))
    y = np.full(2, rank)
    ours.Reduce(MPI.IN_PLACE if rank == 0 else y, y if rank == 0 else None)
    assert y[0] == (sum(range(n)) if rank == 0 else rank)


def test_what_goes_to_mpi(ours, plain):
    """What all ranks know decides: the op, the type, and `recvcounts=None`."""
    n, x, before = ours.size, rows(ours, np.int32), calls(ours)
    for op in (MPI.BXOR, MPI.LAND):
        y, expected = np.zeros_like(x), np.zeros_like(x)
        ours.Iallreduce(x, y, op=op).Wait()
        plain.Allreduce(x, expected, op=op)
        assert np.array_equal(y, expected)
    long = np.ones(2, np.longdouble)
    ours.Allreduce(MPI.IN_PLACE, long)
    assert long.tolist() == [n, n]
    y = np.zeros(3, np.int32)
    ours.Reduce_scatter(x, y)
    assert ours.bcast("text") == "text" and ours.allreduce(1) == n
    assert calls(ours) == before
    ours.Reduce_scatter(x, y, [3] * n)
    assert calls(ours) == before + 1


@pytest.mark.parametrize("end", ["Wait", "wait", "Test", "test", "Waitall", "Testall", "Waitany"])
def test_requests_end_in_any_order(ours, end):
    x, n = rows(ours), ours.size
    sums = [np.zeros_like(x) for _ in range(4)]
    requests = [ours.Iallreduce((i + 1) * x, y) for i, y in enumerate(sums)]
    gathered = np.zeros((n, len(x)))
    requests.append(ours.Iallgather(x, gathered))
    if ours.rank % 2:
        requests.reverse()
    if end in ("Wait", "wait"):
        for request in requests:
            getattr(request, end)()
    elif end in ("Test", "test"):
        left = list(requests)
        while left:
            done = [getattr(request, end)() for request in left]
            left = [r for r, is_done in zip(left, done, strict=True) if not (is_done if end == "Test" else is_done[0])]
    elif end == "Waitany":
        assert sorted(MPI.Request.Waitany(requests) for _ in requests) == list(range(5))
    elif end == "Waitall":
        MPI.Request.Waitall(requests)
    else:
        while not MPI.Request.Testall(requests):
            pass
    assert all(np.array_equal(y, (i + 1) * gathered.sum(0)) for i, y in enumerate(sums))


def test_a_wrong_argument_is_an_error_on_all_ranks(ours):
    """With MPI the other ranks would wait for ever."""
    last = ours.size - 1
    y = np.zeros(3 if ours.rank != last else 2)
    with pytest.raises(fompi.FompiError):
        ours.Allreduce(np.zeros(3), y)
    gathered = np.zeros(2 * ours.size + (ours.rank == last))
    with pytest.raises(fompi.FompiError):
        ours.Allgather(np.zeros(2), gathered)
    ours.Allreduce(np.zeros(3), np.zeros(3))


def test_it_is_the_communicator(ours):
    assert mpi.Comm() == MPI.COMM_WORLD and (ours.rank, ours.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert fompi.all_reduce(np.ones(1), comm=ours)[0] == ours.size
    half = mpi.Comm(ours.Split(ours.rank % 2))
    y = np.zeros(1)
    half.Allreduce(np.ones(1), y)
    assert y[0] == half.size
    half.Free()
