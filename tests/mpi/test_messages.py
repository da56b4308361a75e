"""Messages between two ranks: shapes, dtypes, frameworks, order, refusals, deadlines and gradients."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cut_short import CutShort

import fompi
from fompi.backends import wires
from fompi.base.errors import DtypeError, LayoutError, MismatchError, PeerError, ShapeError, TensorError, WaitTimeout
from fompi.base.layout import FLOAT8
from fompi.base.wires import WIRES
from fompi.ops.messages import MOST_TAG
from fompi.runtime.native_run import called

pytestmark = pytest.mark.ranks(mpich=[1, 2], openmpi=[3])

DTYPES = ["float64", "float16", "bool", "int8", "complex64", ml_dtypes.bfloat16]


def neighbours(world):
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def tensor(rank, shape, dtype, seed=0):
    return np.random.default_rng([rank, seed]).integers(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_dtypes_travel(world, dtype):
    """Small and large ones, empty ones, without dimensions, strided. The shapes differ between the ranks."""
    after, before = neighbours(world)
    for seed, shape in enumerate([(), (0,), (3, 0, 2), (5,), (2, 3, 4), (300, 40)]):
        shapes = [(*shape[:-1], shape[-1] + rank) if shape else () for rank in range(world.size)]
        x = tensor(world.rank, shapes[world.rank], dtype, seed)
        strided = np.stack([x, x], -1)[..., 0]
        for given in (x, strided):
            y = fompi.sendrecv(given, after, before, comm=world)
            np.testing.assert_array_equal(y, tensor(before, shapes[before], dtype, seed), strict=True)


def test_types_of_eight_bits_travel(world):
    """Their names are the longest ones."""
    after, before = neighbours(world)
    for dtype in FLOAT8:
        x = np.array([1.0, 2.0, 4.0]).astype(getattr(ml_dtypes, dtype))
        y = fompi.sendrecv(x, after, before, comm=world)
        np.testing.assert_array_equal(y, x, strict=True)


def carried(x, wire):
    """What a message of this wire brings."""
    block, y = np.empty(WIRES[wire].nbytes(x.size), np.uint8), np.empty_like(x)
    wires.bound(f"encode_{wire}", [x, block], ["float32", "uint8"])()
    wires.bound(f"decode_{wire}", [block, y], ["uint8", "float32"])()
    return y


@pytest.mark.parametrize("wire", WIRES)
def test_messages_with_a_wire(world, wire):
    """Small and large ones, again and again with one tag, among those without a wire, with and without `out=`."""
    after, before = neighbours(world)
    for seed, shape in enumerate([(0,), (3,), (5, 7), (300, 41)]):
        x = np.random.default_rng([world.rank, seed]).standard_normal(shape).astype(np.float32)
        theirs = np.random.default_rng([before, seed]).standard_normal(shape).astype(np.float32)
        out = np.zeros(shape, np.float32)
        for used in (wire, wire, None, wire):
            expected = theirs if used is None else carried(theirs, wire)
            np.testing.assert_array_equal(
                fompi.sendrecv(x, after, before, comm=world, wire=used), expected, strict=True
            )
            assert fompi.sendrecv(x, after, before, comm=world, wire=used, out=out) is out
            np.testing.assert_array_equal(out, expected)
        strided = np.zeros((*shape, 2), np.float32)[..., 0]
        assert fompi.sendrecv(x, after, before, comm=world, wire=wire, out=strided) is strided
        np.testing.assert_array_equal(strided, carried(theirs, wire))
    if world.size > 1 and world.rank < 2:
        if world.rank == 0:
            fompi.send(x, 1, comm=world, wire=wire)
        else:
            y = fompi.recv(0, comm=world)
            assert y.shape == x.shape and y.dtype == np.float32


def test_wires_that_fit_no_message(world):
    after, before = neighbours(world)
    for x, wire in ((np.zeros(3, np.int32), "int8"), (np.zeros(3), "int8"), (np.zeros(3, np.float32), "int3")):
        with pytest.raises(DtypeError if world.rank == 0 else (DtypeError, MismatchError), match="wire="):
            fompi.sendrecv(x, after, before, comm=world, wire=wire)
    out = np.zeros(4, np.float32)
    with pytest.raises(ShapeError, match="sends float32"):
        fompi.sendrecv(np.zeros(3, np.float32), after, before, comm=world, wire="int8", out=out)


def test_the_gradient_of_a_message_has_its_wire(world):
    torch = pytest.importorskip("torch")
    after, before = neighbours(world)
    x = torch.randn(40, generator=torch.Generator().manual_seed(world.rank), requires_grad=True)
    fompi.sendrecv(x, after, before, comm=world, wire="int4").mul(torch.arange(40.0)).sum().backward()
    np.testing.assert_array_equal(x.grad, carried(np.arange(40, dtype=np.float32), "int4"))


def test_send_and_recv_concern_two_ranks(world):
    """The other ranks do nothing. Tags may be received in another order than they were sent."""
    if world.size == 1:
        pending = fompi.send.start(np.arange(3), 0, comm=world)
        assert list(fompi.recv(0, comm=world)) == [0, 1, 2] and pending.wait() is None
        return
    large = np.arange(50_000.0)
    if world.rank == 0:
        sent = [fompi.send.start(large * i, 1, tag=i % 3, comm=world) for i in range(6)]
        assert [pending.wait() for pending in sent] == [None] * 6
        assert list(fompi.recv(1, tag=MOST_TAG, comm=world)) == [7]
    elif world.rank == 1:
        received = [fompi.recv.start(0, tag=i % 3, comm=world) for i in (5, 4, 3, 2, 1, 0)]
        for pending, i in zip(received, (2, 1, 0, 5, 4, 3), strict=True):  # the order of the sends of one tag
            np.testing.assert_array_equal(pending.wait(), large * i)
            assert pending.done()
        fompi.send(np.array([7]), 0, tag=MOST_TAG, comm=world)


@pytest.mark.parametrize("count", [3, 50_000])
def test_messages_are_recorded(world, count):
    """One trace for each call, with an event for each end of a message on this rank."""
    after, before = neighbours(world)
    x = np.ones(count)
    with world.record() as traces:
        pending = fompi.sendrecv.start(x, after, before, comm=world)
        fompi.sendrecv(x, None, None, comm=world)  # moves nothing
        pending.wait()
        sent = fompi.send.start(x, after, comm=world)
        fompi.recv(before, comm=world)
        sent.wait()
    assert sorted(trace.title for trace in traces) == ["recv", "send", "sendrecv"]
    of = {trace.title: trace for trace in traces}
    lanes = [f"recv from {before}", f"send to {after}"]
    assert [event.lane for event in of["sendrecv"].events] == lanes
    assert [event.lane for event in of["recv"].events + of["send"].events] == lanes
    for event in (event for trace in traces for event in trace.events):
        assert (event.rank, event.nbytes) == (world.rank, x.nbytes) and event.is_message
        assert 0 < event.start <= event.end
    assert pending.trace == of["sendrecv"]


def test_messages_and_collectives_do_not_meet(world):
    after, before = neighbours(world)
    x = np.full(2000, world.rank, np.float32)
    pending = [fompi.sendrecv.start(x + i, after, before, comm=world) for i in range(3)]
    total = fompi.all_reduce(x, comm=world)
    again = fompi.sendrecv(x - 1, after, before, tag=1, comm=world)
    assert (total == sum(range(world.size))).all() and (again == before - 1).all()
    for i, each in enumerate(pending):
        assert (each.wait() == before + i).all()


def test_the_ends_of_a_line(world):
    """No neighbour: nothing is sent, or zeros arrive."""
    rank, last = world.rank, world.size - 1
    y = fompi.sendrecv(np.ones(4), None if rank == last else rank + 1, None if rank == 0 else rank - 1, comm=world)
    assert list(y) == [float(rank > 0)] * 4


def test_out_and_like(world):
    torch = pytest.importorskip("torch")
    after, before = neighbours(world)
    x = torch.full((3, 2), float(world.rank))
    y = fompi.sendrecv(x, after, before, comm=world)
    assert type(y) is torch.Tensor and (y == before).all()
    wide = np.zeros((3, 4))
    for out in (np.zeros((3, 2)), wide[:, ::2]):
        pending = fompi.send.start(np.full((3, 2), 1.0 + world.rank), after, comm=world)
        assert fompi.recv(before, out=out, comm=world) is out and (out == before + 1).all()
        pending.wait()
    half = torch.full((2,), world.rank, dtype=torch.bfloat16)
    pending = fompi.send.start(half, after, comm=world)
    y = fompi.recv(before, like=x, comm=world)
    assert y.dtype == torch.bfloat16 and (y == before).all()
    pending.wait()


def test_refusals(world):
    """What a sender refuses is an error of its receiver too. A receiver that refuses takes the message all the same."""
    after, before = neighbours(world)
    with pytest.raises(DtypeError):
        fompi.sendrecv(np.array(["a"]), after, before, comm=world)
    if world.size > 1 and world.rank < 2:
        if world.rank == 0:
            with pytest.raises(TensorError):
                fompi.send("text", 1, tag=3, comm=world)
        else:
            with pytest.raises(MismatchError, match="with tag 3 from rank 0: rank 0 refuses to send it: TensorError"):
                fompi.recv(0, tag=3, comm=world)
    for n in (4, 4000):
        for out, error in ((np.zeros(n + 1), ShapeError), (np.zeros(n, "f4"), DtypeError)):
            pending = fompi.send.start(np.ones(n), after, comm=world)
            with pytest.raises(error, match=f"from rank {before}: out= is .*sends float64"):
                fompi.recv(before, out=out, comm=world)
            pending.wait()
            assert not out.any()
    for bad in (-1, world.size, "x", 1.5):
        with pytest.raises(LayoutError, match="must be a rank from 0"):
            fompi.send(np.ones(1), bad, comm=world)
    for tag in (-1, MOST_TAG + 1, None):
        with pytest.raises(LayoutError, match="tag="):
            fompi.recv(0, tag=tag, comm=world)
    fompi.barrier(world)


def test_a_message_that_never_comes(comm):
    """The deadline holds, and ends the messages of other ranks. The communicator cannot be used any more then."""
    own = fompi.Communicator(comm)
    own.engine.timeout, before = 0.3, own.engine.timeout
    try:
        words = r"rank \d waits for rank 0 to send the message with tag 5 of rank \d"
        with pytest.raises((WaitTimeout, PeerError), match=words):
            fompi.recv(0, tag=5, comm=own)
        with pytest.raises(fompi.StateError, match="cannot be used any more"):
            fompi.send(np.ones(1), 0, comm=own)
    finally:
        own.engine.timeout = before
    comm.Barrier()


def test_gradients_in_torch(world):
    """The gradient of a tensor goes back to the rank that sent it, also twice. The ends of a line get zeros."""
    torch = pytest.importorskip("torch")
    after, before = neighbours(world)
    x = torch.full((3 + world.rank,), 2.0 + world.rank, dtype=torch.float64, requires_grad=True)
    y = fompi.sendrecv(x, after, before, comm=world)
    (dx,) = torch.autograd.grad((y**3).sum() * (before + 1), x, create_graph=True)
    assert torch.allclose(dx, 3 * (world.rank + 1) * x**2)
    (twice,) = torch.autograd.grad(dx.sum(), x)
    assert torch.allclose(twice, 6 * (world.rank + 1) * x)
    last = world.rank == world.size - 1
    y = fompi.sendrecv(x, None if last else after, before if world.rank else None, comm=world)
    (dx,) = torch.autograd.grad((y * y).sum(), x)
    assert torch.allclose(dx, torch.zeros_like(x) if last else 2 * x)
    pending = fompi.send.start(x, world.rank, comm=world)
    with pytest.raises(MismatchError, match="no gradient here"):
        fompi.recv(world.rank, comm=world)
    with pytest.raises(TensorError, match=r"use fompi\.sendrecv"):
        pending.wait()


def test_gradients_in_jax(world):
    jax = pytest.importorskip("jax")
    after, before = neighbours(world)
    x = jax.numpy.full((3,), 2.0 + world.rank)

    def loss(x):
        return (fompi.jax.sendrecv(x, after, before, comm=world) ** 2).sum() * (before + 1)

    np.testing.assert_allclose(jax.grad(loss)(x), 2 * (world.rank + 1) * x)


def test_barrier_and_agree(world):
    fompi.barrier()
    assert world.agree("the values", value=world.rank + 1) == [rank + 1 for rank in range(world.size)]
    if world.size > 1:
        with pytest.raises(MismatchError if world.rank else ShapeError, match="a reason"):
            world.agree("the end", ShapeError("a reason") if world.rank == 0 else None)
        with pytest.raises(MismatchError, match="a barrier"):
            fompi.barrier(world) if world.rank else fompi.all_reduce(np.ones(3), comm=world)


@pytest.mark.parametrize("hands_over", [False, True])
def test_messages_in_c(own, monkeypatch, hands_over):
    """Messages that are known carry on in C; others come between them; Python takes some over, on each rank others."""
    if own.size == 1:
        return
    draw = np.random.default_rng(own.rank)
    if hands_over:
        cut = lambda *given: CutShort(called(*given), lambda: int(draw.integers(0, 4)))  # noqa: E731
        monkeypatch.setattr("fompi.ops.messages_in_c.called", cut)
    after, before = (own.rank + 1) % own.size, (own.rank - 1) % own.size
    for turn in range(48):
        shape = [(5,), (3, 1000), (0,), (2, 3)][turn // 2 % 4]  # each twice: the second one is as expected
        x, wanted = (np.full(shape, float(turn + rank)) for rank in (own.rank, before))
        np.testing.assert_array_equal(fompi.sendrecv(x, after, before, comm=own), wanted, strict=True)
        out = np.zeros(shape)
        assert fompi.sendrecv(x, after, before, out=out, comm=own) is out and (out == wanted).all()
        several = [fompi.sendrecv.start(x + k, after, before, comm=own) for k in range(3)]
        for k, transfer in enumerate(several):
            np.testing.assert_array_equal(transfer.wait(), wanted + k, strict=True)
            assert len(transfer.trace.events) == 2
    assert own.mail is None or not own.mail.expected
    if own.rank == 0:
        fompi.send(np.zeros(7), 1, comm=own)
    elif own.rank == 1:
        with pytest.raises(fompi.ShapeError, match="sends float64"):
            fompi.recv(0, out=np.zeros(4), comm=own)


def test_a_receive_in_c_is_given_up_or_waits(own):
    """A time limit that is too short, and a message that comes later."""
    if own.size == 1:
        return
    for turn in range(3):
        if own.rank == 0:
            transfer = fompi.recv.start(1, out=np.zeros(3), comm=own)
            with pytest.raises(fompi.WaitTimeout):
                transfer.wait(0.02)
            fompi.send(np.ones(1), 1, comm=own)
            assert transfer.wait().tolist() == [turn] * 3
        elif own.rank == 1:
            assert fompi.recv(0, out=np.zeros(1), comm=own).tolist() == [1]
            fompi.send(np.full(3, float(turn)), 0, comm=own)
