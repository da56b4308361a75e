"""Where operations run: all ranks, MPI's communicators, splits, the axes of a mesh; and that none disturbs another."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from mpi4py import MPI

import fompi


def meshes(size):
    """Every grid of two axes."""
    return [(a, size // a) for a in range(1, size + 1) if size % a == 0]


def test_comm_of_mpi4py(world):
    """The same Communicator every time; None is all ranks."""
    known = fompi.Communicator.of(MPI.COMM_WORLD)
    assert known is fompi.Communicator.of(None) is fompi.Communicator.of(known)
    assert (known.rank, known.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    for comm in (None, MPI.COMM_WORLD, known, fompi.Communicator(MPI.COMM_WORLD, "other")):
        assert (fompi.all_reduce(np.ones(2), comm=comm) == world.size).all()


def test_halves_of_mpi4py(world):
    """A Split of the user's; ranks in reversed order."""
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
def test_no_communicator(comm):
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
    """All ranks hear of it, and may go on without it."""
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
    """Each rank reads a file of its own: no communicator is made on any of them, before anything moves."""
    path = tmp_path / "machine.json"
    replace(fompi.Machine.load("laptop"), latency=1e-6 * (1 + world.rank)).save(path)
    monkeypatch.setattr(world.engine, "machine", None)
    monkeypatch.setenv("FOMPI_MACHINE", str(path))
    if world.size > 1:
        with pytest.raises(fompi.MismatchError, match=r"fompi \S+, FOMPI_MACHINE laptop \(\w{12}\)"):
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
            mine = np.array([world.rank])
            np.testing.assert_array_equal(fompi.all_gather(mine, comm=mesh["tp"]), world.rank // b * b + np.arange(b))
            np.testing.assert_array_equal(fompi.all_gather(mine, comm=mesh["dp"]), world.rank % b + b * np.arange(a))
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


def test_a_mesh_of_some_ranks(world):
    half = MPI.COMM_WORLD.Split(world.rank % 2, world.rank)
    with fompi.Mesh(half, x=half.size) as mesh:
        assert (fompi.all_reduce(np.ones(1), comm=mesh["x"]) == half.size).all()


@pytest.mark.parametrize("axes", [{}, {"a": 0}, {"a": -1}, {"a": 1.0}, {"a": 1, "b": "2"}])
def test_no_mesh(axes):
    with pytest.raises(fompi.LayoutError, match="a mesh has axes with whole sizes >= 1"):
        fompi.Mesh(**axes)


def test_a_mesh_of_another_size(world):
    with pytest.raises(fompi.LayoutError, match=f"2 x {world.size} is not {world.size}, the number of ranks"):
        fompi.Mesh(dp=2, tp=world.size)
    with fompi.Mesh(dp=world.size) as mesh, pytest.raises(fompi.LayoutError, match="no axis 'tp'; it has dp"):
        _ = mesh["tp"]


def test_the_ranks_ask_for_different_meshes(world):
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
    """Each pair of ranks has its own turn: what a rank starts on one communicator does not hold up another."""
    axes = meshes(world.size)[len(meshes(world.size)) // 2]
    with fompi.Mesh(a=axes[0], b=axes[1]) as mesh:
        communicators = {"a": mesh["a"], "b": mesh["b"], "world": world}
        for call in range(10):
            draw = Random(10 * call + world.rank)
            names = draw.sample(list(communicators), 3)
            pending = {
                name: [
                    fompi.all_reduce.start(np.full(3, float(i)), comm=communicators[name], schedule=how)
                    for i, how in enumerate(("auto", "unfused", "ring"))
                ]
                for name in names
            }
            for name in draw.sample(names, 3):
                for i, one in enumerate(pending[name]):
                    assert (one.wait() == i * communicators[name].size).all()


def test_blocking_calls_while_others_are_in_flight(world):
    """Rank 0 makes a communicator while the others wait for its part of a sum: whoever waits drives everything."""
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


def test_communicators_come_and_go(world):
    """MPI has some thousand of them; every one that is closed comes back."""
    requests = len(world.engine._requests)
    for _ in range(1500 if world.size == 2 else 40):
        with world.split(0, world.rank) as other:
            fompi.all_reduce(np.ones(1), comm=other)
    for _ in range(20):
        fompi.Communicator(MPI.COMM_WORLD).close()
        other = MPI.COMM_WORLD.Split(0, world.rank)
        fompi.all_reduce(np.ones(1), comm=other)
        other.Free()  # ours goes with it
    gc.collect()
    assert len(world.engine._requests) <= requests and len(world.engine.channels) < 10


def test_messages_of_the_user(world, comm):
    """The program's own messages and collectives, on the same MPI communicator, while ours are in flight."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for call in range(10):
        pending = fompi.all_gather.start(np.full((10, 3), float(world.rank)), comm=comm)
        request = comm.irecv(source=left, tag=call % 3)
        comm.send(("hello", call), right, tag=call % 3)
        assert comm.allreduce(call) == call * world.size
        assert request.wait() == ("hello", call)
        ones, here = np.ones(3), np.empty(3)  # held here: mpi4py does not, for this one
        everything = comm.Iallreduce(ones, here)
        np.testing.assert_array_equal(pending.wait()[:, 0], np.arange(world.size).repeat(10))
        everything.Wait()
        assert (here == world.size).all()
    assert comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) is False
