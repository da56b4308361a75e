"""Communicators: all ranks, communicators of mpi4py, splits, axes of a mesh. None of them disturbs another."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from mpi4py import MPI

import fompi

pytestmark = pytest.mark.ranks(mpich=[1, 2, 3, 8], openmpi=[3])


def meshes(size):
    """The sizes of every grid with two axes."""
    return [(a, size // a) for a in range(1, size + 1) if size % a == 0]


def test_comm_of_mpi4py(world):
    """`Communicator.of` returns the same object every time. None means all ranks."""
    known = fompi.Communicator.of(MPI.COMM_WORLD)
    assert known is fompi.Communicator.of(None) is fompi.Communicator.of(known)
    assert (known.rank, known.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    for comm in (None, MPI.COMM_WORLD, known, fompi.Communicator(MPI.COMM_WORLD, "other")):
        assert (fompi.all_reduce(np.ones(2), comm=comm) == world.size).all()


def test_halves_of_mpi4py(world):
    """Communicators that the program has split off, with the ranks in reversed order."""
    color = world.rank % 2
    half = MPI.COMM_WORLD.Split(color, -world.rank)
    members = [r for r in reversed(range(world.size)) if r % 2 == color]
    y = fompi.all_gather(np.array([world.rank]), comm=half)
    np.testing.assert_array_equal(y, members)
    np.testing.assert_array_equal(
        fompi.broadcast(np.array([world.rank]), root=len(members) - 1, comm=half), members[-1]
    )
    fompi.Communicator.of(half).close()
    half.Free()


def test_comm_self():
    assert fompi.all_reduce(np.ones(2), comm=MPI.COMM_SELF).sum() == 2
    assert fompi.all_gather_matmul(np.ones((2, 3)), np.eye(3), comm=MPI.COMM_SELF).sum() == 6


@pytest.mark.parametrize("comm", [MPI.COMM_NULL, 5, "world", np.ones(3)])
def test_objects_that_are_no_communicator(comm):
    with pytest.raises(fompi.LaunchError, match="comm= takes"):
        fompi.all_reduce(np.ones(2), comm=comm)


def test_ranks_with_other_versions(world, monkeypatch):
    monkeypatch.setattr("fompi.engine.communicator.__version__", f"0.{min(world.rank, 1)}")
    if world.size == 1:
        return
    with pytest.raises(
        fompi.MismatchError, match=r"rank 0 calls Communicator of fompi 0\.0; .*Communicator of fompi 0\.1"
    ):
        fompi.Communicator(MPI.COMM_WORLD, "mixed")


def test_a_machine_that_one_rank_does_not_find(world, monkeypatch):
    """All ranks get an error, and can go on without the machine."""
    monkeypatch.setattr(world.engine, "machine", None)
    monkeypatch.setenv("FOMPI_MACHINE", "laptop" if world.rank else "/nowhere.json")
    kind = fompi.MismatchError if world.rank else fompi.LayoutError
    with pytest.raises(kind, match=r"FOMPI_MACHINE: no machine '/nowhere\.json'"):
        fompi.Communicator(MPI.COMM_WORLD, "astray")
    monkeypatch.setenv("FOMPI_MACHINE", "laptop")
    with fompi.Communicator(MPI.COMM_WORLD) as found:
        assert found.machine == fompi.Machine.load("laptop").part(range(world.size), world.size)
        assert (fompi.all_reduce(np.ones(2), comm=found) == world.size).all()
    monkeypatch.setattr(world.engine, "machine", None)


def test_machine_files_that_differ(world, monkeypatch, tmp_path):
    """Each rank reads another file. Every rank gets an error, and no communicator is created."""
    path = tmp_path / "machine.json"
    replace(fompi.Machine.load("laptop"), latency=1e-6 * (1 + world.rank)).save(path)
    monkeypatch.setattr(world.engine, "machine", None)
    monkeypatch.setenv("FOMPI_MACHINE", str(path))
    if world.size > 1:
        with pytest.raises(
            fompi.MismatchError, match=r"FOMPI_MACHINE laptop.* latency=1e-06.* on rank.* latency=2e-06"
        ):
            fompi.Communicator(MPI.COMM_WORLD, "mixed")
        monkeypatch.delenv("FOMPI_MACHINE") if world.rank else None
        monkeypatch.setattr(world.engine, "machine", None)
        with pytest.raises(fompi.MismatchError, match="FOMPI_MACHINE laptop"):
            fompi.Communicator(MPI.COMM_WORLD, "lacking")
    monkeypatch.setattr(world.engine, "machine", None)


def test_split(world):
    with world.split(world.rank % 3, -world.rank, "third") as third:
        members = [r for r in reversed(range(world.size)) if r % 3 == world.rank % 3]
        assert (third.rank, third.size, third.name) == (members.index(world.rank), len(members), "third")
        np.testing.assert_array_equal(fompi.all_gather(np.array([world.rank]), comm=third), members)
        with third.split(0) as again:
            np.testing.assert_array_equal(fompi.all_reduce(np.array([world.rank]), comm=again), sum(members))


def test_mesh(world):
    """The last axis is the innermost. Every axis is a Communicator."""
    for a, b in meshes(world.size):
        with fompi.Mesh(dp=a, tp=b) as mesh:
            assert list(mesh) == ["dp", "tp"] and len(mesh) == 2 and "tp" in mesh
            assert mesh.coordinates == {"dp": world.rank // b, "tp": world.rank % b}
            assert (mesh["dp"].size, mesh["tp"].size) == (a, b)
            x = np.array([world.rank])
            np.testing.assert_array_equal(fompi.all_gather(x, comm=mesh["tp"]), world.rank // b * b + np.arange(b))
            np.testing.assert_array_equal(fompi.all_gather(x, comm=mesh["dp"]), world.rank % b + b * np.arange(a))
            assert f"tp={world.rank % b} of {b}" in repr(mesh)


def test_mesh_of_three_axes(world):
    n = world.size
    shape = {8: (2, 2, 2), 4: (2, 1, 2)}.get(n, (1, n, 1))
    with fompi.Mesh(**dict(zip("abc", shape, strict=True))) as mesh:
        grid = np.arange(n).reshape(shape)
        here = tuple(mesh.coordinates.values())
        assert grid[here] == world.rank
        for dim, name in enumerate("abc"):
            line = grid[tuple(slice(None) if d == dim else i for d, i in enumerate(here))]
            np.testing.assert_array_equal(fompi.all_gather(np.array([world.rank]), comm=mesh[name]), line)
        plane = grid[:, here[1], :].reshape(-1)
        both = mesh["c", "a"]  # in the order of the mesh
        np.testing.assert_array_equal(fompi.all_gather(np.array([world.rank]), comm=both), plane)
        assert mesh["a", "c"] is both and mesh["b",] is mesh["b"] and mesh["a", "b", "c"].size == n
        with pytest.raises(fompi.LayoutError, match="no axis 'd'"):
            _ = mesh["a", "d"]
    with pytest.raises(fompi.StateError):
        fompi.all_reduce(np.ones(1), comm=both)


def test_a_mesh_of_some_ranks(world):
    half = MPI.COMM_WORLD.Split(world.rank % 2, world.rank)
    with fompi.Mesh(half, x=half.size) as mesh:
        assert (fompi.all_reduce(np.ones(1), comm=mesh["x"]) == half.size).all()


@pytest.mark.parametrize("axes", [{}, {"a": 0}, {"a": -1}, {"a": 1.0}, {"a": 1, "b": "2"}])
def test_invalid_axes_of_a_mesh(axes):
    with pytest.raises(fompi.LayoutError, match="a mesh needs axes with integer sizes >= 1"):
        fompi.Mesh(**axes)


def test_a_mesh_that_does_not_fit_the_number_of_ranks(world):
    with pytest.raises(fompi.LayoutError, match=f"2 x {world.size} is not {world.size}, the number of ranks"):
        fompi.Mesh(dp=2, tp=world.size)
    with fompi.Mesh(dp=world.size) as mesh, pytest.raises(fompi.LayoutError, match="no axis 'tp'; it has dp"):
        _ = mesh["tp"]


def test_ranks_create_different_meshes(world):
    if world.size == 1:
        return
    first = world.rank == 0
    with pytest.raises(fompi.MismatchError, match="rank 0 calls Mesh"):
        fompi.Mesh(**({"dp": world.size, "tp": 1} if first else {"tp": world.size, "dp": 1}))
    with pytest.raises(fompi.LayoutError if first else fompi.MismatchError):
        fompi.Mesh(dp=2 * world.size if first else world.size)
    with fompi.Mesh(dp=world.size) as mesh:
        assert mesh["dp"].size == world.size


def test_communicators_in_different_orders(world):
    """Each rank starts and waits in its own order. A call on one communicator does not delay another communicator."""
    axes = meshes(world.size)[len(meshes(world.size)) // 2]
    with fompi.Mesh(a=axes[0], b=axes[1]) as mesh:
        communicators = {"a": mesh["a"], "b": mesh["b"], "world": world}
        for call in range(10):
            draw = Random(10 * call + world.rank)
            names = draw.sample(list(communicators), 3)
            pending = {
                name: [
                    fompi.all_reduce.start(np.full(3, float(i)), comm=communicators[name], schedule=schedule)
                    for i, schedule in enumerate(("auto", "unfused", "ring"))
                ]
                for name in names
            }
            for name in draw.sample(names, 3):
                for i, operation in enumerate(pending[name]):
                    assert (operation.wait() == i * communicators[name].size).all()


def test_blocking_calls_with_another_operation_in_flight(world):
    """Rank 0 creates a communicator while the other ranks wait for its part of a sum. Its wait drives the sum too."""
    pending = fompi.all_reduce.start(np.ones(20000), comm=world, schedule="ring")
    if world.rank:
        assert (pending.wait() == world.size).all()
    other = fompi.Communicator(MPI.COMM_WORLD, "other")
    with fompi.Mesh(a=world.size) as mesh:
        assert (fompi.all_reduce(np.ones(2), comm=mesh["a"]) == world.size).all()
    assert (pending.wait() == world.size).all()
    other.close()


def test_a_closed_communicator(world):
    other = fompi.Communicator(MPI.COMM_WORLD, "other")
    step = fompi.bind(fompi.plan(fompi.all_reduce, fompi.Spec((3,), "float64", fompi.Partial()), ranks=world.size),
                      comm=other, x=np.ones(3))  # fmt: skip
    step()
    other.close()
    other.close()
    with pytest.raises(fompi.StateError, match="the communicator 'other' is closed"):
        fompi.all_reduce(np.ones(3), comm=other)
    with pytest.raises(fompi.StateError, match="closed"):
        step()
    assert (fompi.all_reduce(np.ones(3), comm=world) == world.size).all()


@pytest.mark.ranks(mpich=[1, 2, 3])
def test_many_communicators(world):
    """MPICH has 2048, and each of ours takes two. Every closed one is freed."""
    requests, channels = len(world.engine._requests), len(world.engine.channels)
    for _ in range(1100 if world.size == 2 else 40):
        with world.split(0, world.rank) as other:
            fompi.all_reduce(np.ones(1), comm=other)
    for _ in range(20):
        fompi.Communicator(MPI.COMM_WORLD).close()
        other = MPI.COMM_WORLD.Split(0, world.rank)
        fompi.all_reduce(np.ones(1), comm=other)
        other.Free()  # this closes the Communicator that belongs to it
    gc.collect()
    assert len(world.engine._requests) <= requests and len(world.engine.channels) <= channels


def test_messages_of_the_program(world, comm):
    """The program uses the same MPI communicator for its own messages while an operation is in flight."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for call in range(10):
        pending = fompi.all_gather.start(np.full((10, 3), float(world.rank)), comm=comm)
        request = comm.irecv(source=left, tag=call % 3)
        comm.send(("hello", call), right, tag=call % 3)
        assert comm.allreduce(call) == call * world.size
        assert request.wait() == ("hello", call)
        x, y = np.ones(3), np.empty(3)  # must stay alive: this request of mpi4py does not hold them
        own_sum = comm.Iallreduce(x, y)
        np.testing.assert_array_equal(pending.wait()[:, 0], np.arange(world.size).repeat(10))
        own_sum.Wait()
        assert (y == world.size).all()
    assert comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) is False
