"""fompi.mpi.Comm: the collectives of mpi4py through fompi give what MPI gives, and only the rest goes to MPI."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mpi4py import MPI

import fompi
from fompi import mpi
from fompi.ops import by_library
from fompi.plans.tree import folded


@pytest.fixture(autouse=True)
def all_by_fompi(monkeypatch):
    """Small blocking collectives, too."""
    for name in by_library.LIMITS:
        monkeypatch.setitem(by_library.LIMITS, name, -1)


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


def test_memory_at_addresses(ours, plain):
    """MPI.BOTTOM with a type that has addresses: what a rank sends, receives, and both."""
    n, here = ours.size, ours.rank == 0
    for comm in (plain, ours):
        a, every, mine = np.arange(3.0) + ours.rank, np.zeros((n, 3)), np.zeros(3)
        types = [MPI.Datatype.Create_struct([3], [MPI.Get_address(x)], [MPI.DOUBLE]).Commit() for x in (a, mine)]
        comm.Allgather([MPI.BOTTOM, 1, types[0]], every)
        comm.Scatter(every if here else None, [MPI.BOTTOM, 1, types[1]])
        comm.Bcast([MPI.BOTTOM, 1, types[0]])
        for datatype in types:
            datatype.Free()
        assert np.array_equal(every, np.arange(3.0) + np.arange(n)[:, None])
        assert np.array_equal(mine, every[ours.rank]) and a.tolist() == [0, 1, 2]


def test_no_communicator_and_no_type(ours):
    """It says which of them is missing. With no type all ranks get an error."""
    freed = ours.Dup()
    freed.Free()
    for nothing in (freed, mpi.Comm(MPI.COMM_NULL)):
        with pytest.raises(fompi.StateError, match=r"is MPI\.COMM_NULL: it was freed"):
            nothing.Allreduce(np.ones(1), np.ones(1))
    with pytest.raises((MPI.Exception, fompi.MismatchError)):
        ours.Bcast([np.zeros(3), 3, MPI.DATATYPE_NULL if ours.rank == 0 else MPI.DOUBLE])


def test_errors_of_requests(ours):
    """The functions of MPI say only that there is one. The request then has the words."""
    if ours.size == 1:
        return
    requests = [ours.Ibcast(np.zeros(2 + (ours.rank == 0))), ours.Iallreduce(np.ones(1), np.zeros(1))]
    with pytest.raises(MPI.Exception):
        MPI.Request.Waitall(requests)
    for end in (requests[0].Wait, requests[0].Test):
        with pytest.raises(fompi.MismatchError, match="the ranks disagree"):
            end()
    requests[1].Wait()


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


@pytest.mark.parametrize("limit", [-1, 1 << 20], ids=["fompi", "library"])
def test_buffers_of_libraries(ours, monkeypatch, limit):
    """Heat gives addresses, with counts and types, in place and with I in front. Later calls find the first one."""
    for name in by_library.LIMITS:
        monkeypatch.setitem(by_library.LIMITS, name, limit)
    for call in range(5):
        for count in (5, 3, 5):
            y, z = np.arange(5.0) + ours.rank + call, np.full(5, ours.rank + call)
            ours.Allreduce(MPI.IN_PLACE, [MPI.buffer(y), count, MPI.DOUBLE])
            requests = [ours.Ibcast([MPI.buffer(z), count, MPI.LONG], root=ours.size - 1)]
            requests.append(ours.Iallreduce(np.ones(2), total := np.zeros(2)))
            requests[0].Wait()
            MPI.Request.Waitall(requests[1:])
            wanted = np.where(np.arange(5) < count, ours.size * (np.arange(5.0) + call) + sum(range(ours.size)), 0)
            assert (y[:count] == wanted[:count]).all() and (
                y[count:] == np.arange(5.0)[count:] + ours.rank + call
            ).all()
            assert (z[:count] == ours.size - 1 + call).all() and (z[count:] == ours.rank + call).all()
            assert total.tolist() == [ours.size] * 2 and requests == [MPI.REQUEST_NULL] * 2


@pytest.mark.parametrize("several_hosts", [False, True])
def test_what_with_i_is_the_library_s(ours, several_hosts):
    limit = by_library.most_started("Allreduce", several_hosts)
    assert limit == -1  # the fixture
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(by_library.LIMITS, "Allreduce", by_library.SUMS)
        patch.setattr(ours.communicator, "network", several_hosts)
        begun = calls(ours)
        for count in (8, 1 << 15, 1 << 18):
            x, y = np.ones(count, np.float32), np.zeros(count, np.float32)
            request = ours.Iallreduce(x, y)
            assert request.wait() is MPI.Intracomm(ours).Iallreduce(x, x.copy()).wait() is None
            assert (y == ours.size).all()
        assert calls(ours) - begun == 1 + several_hosts
    assert by_library.most_started("Gatherv", several_hosts) == by_library.most_started("Exscan", False) == -1


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
    gathered, moved, total = np.zeros((n, len(x))), x.copy(), x.copy()
    requests.append(ours.Iallgather(x, gathered))
    requests.append(ours.Ibcast(moved, root=n - 1))
    requests.append(ours.Iallreduce(MPI.IN_PLACE, total))
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
        assert sorted(MPI.Request.Waitany(requests) for _ in requests) == list(range(7))
    elif end == "Waitall":
        MPI.Request.Waitall(requests)
    else:
        while not MPI.Request.Testall(requests):
            pass
    assert all(np.array_equal(y, (i + 1) * gathered.sum(0)) for i, y in enumerate(sums))
    assert np.array_equal(moved, gathered[-1]) and np.array_equal(total, gathered.sum(0))


def test_sums_in_an_order(ours):
    """All sums inside of the block are fompi's, in the tree; those of an op of MPI alone are refused on all ranks."""
    rank, size = ours.Get_rank(), ours.Get_size()
    for count in (5 * size, 3000 * size):
        terms = [np.random.default_rng([r, count]).standard_normal(count).astype("f4") for r in range(size)]
        wanted, y = folded(terms, np.add), np.empty(count, "f4")
        part = np.empty(count // size, "f4")
        with ours.ordered("ranks"):
            ours.Allreduce(terms[rank], y)
            assert y.tobytes() == wanted.tobytes()
            over = terms[rank].copy()
            ours.Iallreduce(MPI.IN_PLACE, over).Wait()
            assert over.tobytes() == wanted.tobytes()
            ours.Reduce_scatter_block(terms[rank], part)
            assert part.tobytes() == wanted[rank * len(part) : (rank + 1) * len(part)].tobytes()
            ours.Reduce(terms[rank], y if rank == 0 else None, root=0)
            assert rank or y.tobytes() == wanted.tobytes()
            with pytest.raises(fompi.PlanError, match="this op on this type is MPI's"):
                ours.Allreduce(np.ones(3, "i4"), np.empty(3, "i4"), op=MPI.BOR)
        ours.Allreduce(terms[rank], y)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert ours.order == "any"


def test_a_failed_broadcast_is_an_error(ours):
    """Its result is never read on the root. So is its error, if the call fails after it has begun."""
    request = ours.Ibcast(np.zeros(3))
    request.Wait()
    pending = request.pending
    pending.task.error = fompi.FompiError("lost")
    with pytest.raises(fompi.FompiError, match="lost"):
        ours._bcast(np.zeros(3)).finish(pending)


def test_two_threads_wait_for_a_result_in_place(ours):
    """The second one finds no result to copy. It returns once the first one has copied it."""
    x = np.full(1 << 16, 1.0)
    pending = fompi.all_reduce.start(x, out=x, comm=ours, schedule="unfused")
    while not pending.done():
        pass
    begun, going_on, copy = threading.Event(), threading.Event(), np.copyto

    def slow_copy(target, y):
        begun.set()
        assert going_on.wait(10)
        copy(target, y)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(np, "copyto", slow_copy)
        first = pool.submit(lambda: pending.result)
        if ours.size > 1:
            assert begun.wait(10)
        second = pool.submit(lambda: pending.result[-1])
        with pytest.raises(TimeoutError):
            second.result(0.05)
        going_on.set()
        assert first.result() is x and second.result() == ours.size


def test_memory_that_is_too_small(ours):
    """Also empty memory, and types of the program. The last item may be shorter than its extent."""
    every_second = MPI.DOUBLE.Create_resized(0, 16).Commit()
    column = MPI.DOUBLE.Create_vector(3, 1, 4).Create_resized(0, 8).Commit()
    for memory, count, datatype in (
        (np.empty(0), 5, MPI.DOUBLE),
        (np.empty(0), 5, every_second),
        (np.empty(6), 4, every_second),
        (np.empty(11), 4, column),
        (np.empty(4), (2, -1), MPI.DOUBLE),  # from the item -1 on
    ):
        with pytest.raises(fompi.ShapeError):
            ours.Bcast([memory, count, datatype])
    y = np.arange(7.0) + ours.rank
    ours.Bcast([y, 4, every_second])
    assert y[::2].tolist() == [0, 2, 4, 6] and y[1] == 1 + ours.rank
    y = np.arange(12.0) * (ours.rank == 0)
    ours.Bcast([y, 4, column])
    assert y.tolist() == list(range(12))
    every_second.Free()
    column.Free()


class OnDevice:
    """Says that its memory is on a device. It is not: a test that reads it does not end the process."""

    def __init__(self, x):
        self.x = x
        self.__cuda_array_interface__ = {**x.__array_interface__, "version": 3}


@pytest.mark.parametrize("here", ["sender", "receiver"])
def test_memory_of_a_device(ours, monkeypatch, here):
    """A library that does not take it would end the process."""
    x, y = np.ones(2), np.zeros(2 * ours.size)
    arguments = (OnDevice(x), y) if here == "sender" else (x, OnDevice(y))
    monkeypatch.setenv("FOMPI_GPU_AWARE", "0")
    with pytest.raises(fompi.TensorError if ours.rank == 0 else fompi.MismatchError, match="on a device"):
        ours.Allgather(*(arguments if ours.rank == 0 else (x, y)))
    monkeypatch.setenv("FOMPI_GPU_AWARE", "1")
    ours.Allgather(*arguments)
    assert y.tolist() == [1.0] * len(y)


def test_a_wrong_argument_is_an_error_on_all_ranks(ours):
    """With MPI the other ranks would wait for ever."""
    last = ours.size - 1
    y = np.zeros(3 if ours.rank != last else 2)
    with pytest.raises(fompi.FompiError):
        ours.Allreduce(np.zeros(3), y)
    gathered = np.zeros(2 * ours.size + (ours.rank == last))
    with pytest.raises(fompi.FompiError):
        ours.Allgather(np.zeros(2), gathered)
    gap = 2 * np.arange(ours.size) + np.arange(ours.size)  # memory with gaps, for one item too many on the last rank
    counts = [2] * (ours.size - 1) + [2 + (ours.rank == last)]
    with pytest.raises(fompi.FompiError):
        ours.Allgatherv(np.zeros(2), [np.zeros(4 * ours.size), counts, gap, MPI.DOUBLE])
    with pytest.raises(fompi.FompiError):
        scattered = np.zeros(3 if ours.rank == last else 5)
        ours.Scatter(np.zeros(2 * ours.size), [scattered, 2 if ours.rank != last else 3, MPI.DOUBLE])
    with pytest.raises(fompi.FompiError):
        ours.Reduce_scatter(np.zeros(2 * ours.size), np.zeros(2 - (ours.rank == last)), [2] * ours.size)
    ours.Allreduce(np.zeros(3), np.zeros(3))


def test_counts_with_the_right_sum(ours):
    """Only the root knows what it wants from which rank: it alone gets the error."""
    n, root = ours.size, ours.size - 1
    counts = [3, 1, *[2] * (n - 2)] if n > 1 else [2]
    want = [np.zeros(2 * n), counts] if ours.rank == root else None
    if n > 1 and ours.rank == root:
        with pytest.raises(fompi.ShapeError, match="bytes arrive"):
            ours.Gatherv(np.ones(2), want, root=root)
    else:
        ours.Gatherv(np.ones(2), want, root=root)


def test_creating_one_is_collective(ours, plain):
    """So no call with I waits for the other ranks. Those of `Split` are created at their first call."""
    made = mpi.Comm(plain.Dup())
    last, y, n = made.size - 1, np.zeros(1), made.size
    if made.communicator.engine.helper is None:  # then a call with I waits for its end
        n = 1
    if n > 1 and made.rank == 0:
        request = made.Iallreduce(np.ones(1), y)
        made.Recv(np.zeros(1), last)
    elif n > 1 and made.rank == last:
        made.Ssend(np.zeros(1), 0)
    if n == 1 or made.rank:
        request = made.Iallreduce(np.ones(1), y)
    request.Wait()
    assert y[0] == made.size
    made.Free()
    none = ours.Split(MPI.UNDEFINED if ours.rank == 0 else 0)
    assert (mpi.Comm(none) == MPI.COMM_NULL) == (ours.rank == 0)
    if ours.rank:
        none.Free()


def test_what_it_makes_is_of_its_class(ours):
    """mpi4py makes an Intracomm of each, except of Dup."""
    group = ours.Get_group()
    makers = [ours.Dup, ours.Split, lambda: ours.Split_type(MPI.COMM_TYPE_SHARED), lambda: ours.Create(group)]
    for make in [*makers, lambda: ours.Create_group(group)]:
        made, y = make(), np.zeros(1)
        assert type(made) is mpi.Comm and made.size == ours.size
        made.Allreduce(np.ones(1), y)
        assert y[0] == made.size
        made.Free()
    group.Free()
    none = ours.Split(MPI.UNDEFINED)
    assert type(none) is mpi.Comm and none == MPI.COMM_NULL


def test_it_is_the_communicator(ours):
    assert mpi.Comm() == MPI.COMM_WORLD and (ours.rank, ours.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert fompi.all_reduce(np.ones(1), comm=ours)[0] == ours.size
    half = mpi.Comm(ours.Split(ours.rank % 2))
    y = np.zeros(1)
    half.Allreduce(np.ones(1), y)
    assert y[0] == half.size
    half.Free()


def by_types(comm, rank):
    """The arguments of Alltoallw: every second number to some ranks, three in one piece to the others."""
    every_second = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    odd = [(rank + other) % 2 for other in range(comm.size)]
    counts, displacements = [1 if o else 3 for o in odd], [160 * other for other in range(comm.size)]
    return counts, displacements, [every_second if o else MPI.DOUBLE for o in odd]


def test_each_part_has_a_type(ours, plain):
    """Ialltoallw is an all-to-all of fompi, from memory, from addresses, and in place."""
    counts, displacements, types = by_types(ours, ours.rank)
    x, results = np.arange(20.0 * ours.size) + 100 * ours.rank, []
    addresses = [MPI.Get_address(x) + d for d in displacements]  # too large for Alltoallw of Open MPI
    for form in (plain.Alltoallw, ours.Alltoallw, ours.Ialltoallw):
        y = np.zeros(20 * ours.size)
        for sent in ([x, counts, displacements, types], MPI.IN_PLACE, [MPI.BOTTOM, counts, addresses, types]):
            if sent is MPI.IN_PLACE or sent[0] is x or form == ours.Ialltoallw:
                request = form(sent, [y, (counts, displacements), types])
                if request is not None:
                    request.Wait()
                results.append(y.copy())
    once, again = results[:2]
    wanted = [once, again, once, again, once, again, once]
    assert all(np.array_equal(a, b) for a, b in zip(results, wanted, strict=True))
    before = calls(ours)
    ours.Ialltoallw([x, counts, displacements, types], [y, counts, displacements, types]).Wait()
    assert calls(ours) == before + 1
