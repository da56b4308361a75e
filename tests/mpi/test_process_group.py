"""The backend "fompi" of torch.distributed: its verbs, and programs that know nothing of fompi."""

import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor.debug import CommDebugMode

import fompi
from fompi.plans.tree import folded
from fompi.torch import memory, private, process_group, store, work

R = dist.ReduceOp
RELEASE = private.release(torch.__version__)
pytestmark = [pytest.mark.ranks(mpich=[4], openmpi=[2]), pytest.mark.usefixtures("group")]


def test_rank_and_size_come_from_mpi_and_nobody_connects(world, group):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (world.rank, world.size, "fompi")
    (kept,) = store._KEPT
    assert (kept._connection is not None) == (world.rank == 0)


class Crossed(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.add_module(first, torch.nn.Linear(2, 2))
        self.add_module(second, torch.nn.Linear(2, 2))


def test_ddp_of_torch_names_what_differs(world):
    """On all ranks. torch alone gives the number of a parameter, on one rank, and nothing for a dtype or a buffer."""
    frozen, last = torch.nn.Linear(3, 2), world.rank == world.size - 1
    frozen.bias.requires_grad_(False)
    norm = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for here, there, words in (
        (torch.nn.Linear(3, 2), torch.nn.Linear(4, 2), r"'weight': float32 \(2, 3\) on rank.*float32 \(2, 4\) on rank"),
        (torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).double(), r"'bias': float32 \(2,\) on rank.*float64"),
        (torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, bias=False), r"'bias': float32 \(2,\) on rank.*missing on rank"),
        (torch.nn.Linear(3, 2), frozen, r"'bias': float32 \(2,\) on rank.*float32 \(2,\), frozen on rank"),
        (norm, torch.nn.Sequential(norm[0], torch.nn.BatchNorm1d(3)), r"buffer '1.running_mean': float32 \(2,\) on"),
        (Crossed("a", "b"), Crossed("b", "a"), "in the order, number 0: parameter 'a.weight' on rank"),
    ):
        with pytest.raises(fompi.MismatchError, match=words):
            torch.nn.parallel.DistributedDataParallel(there if last else here)
    net = torch.nn.Linear(3, 2)
    net.register_buffer("own", torch.ones(2 + last))
    net._ddp_params_and_buffers_to_ignore = ["own"]
    torch.nn.parallel.DistributedDataParallel(net)(torch.ones(1, 3)).sum().backward()


def of(rank, dtype=torch.float32, shape=(2, 3)):
    """The tensor of a rank."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + rank + 1
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def strided(t):
    """The same values in memory that is not contiguous."""
    return torch.stack([t, torch.zeros_like(t)], -1)[..., 0]


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_moves(rank, size, dtype):
    """Every verb that moves data, between contiguous tensors and between others."""
    all_of = [of(r, dtype) for r in range(size)]
    last = size - 1
    for made in (torch.clone, strided):
        x, out = made(of(rank, dtype)), made(torch.zeros(2, 3, dtype=dtype))
        t = made(of(rank, dtype))
        dist.broadcast(t, last)
        assert torch.equal(t, all_of[last])
        outs = [made(torch.zeros_like(x)) for _ in range(size)]
        dist.all_gather(outs, x)
        assert all(map(torch.equal, outs, all_of))
        whole = made(torch.zeros(2 * size, 3, dtype=dtype))
        dist.all_gather_into_tensor(whole, x)
        assert torch.equal(whole, torch.cat(all_of))
        outs = [made(torch.zeros_like(x)) for _ in range(size)] if rank == last else None
        dist.gather(x, outs, dst=last)
        assert rank != last or all(map(torch.equal, outs, all_of))
        dist.scatter(out, [made(t) for t in all_of] if rank == 0 else None, src=0)
        assert torch.equal(out, all_of[rank])
        outs = [made(torch.zeros(r + 1, 3, dtype=dtype)) for r in range(size)]
        dist.all_to_all(outs, [made(of(rank, dtype, (rank + 1, 3))) for _ in range(size)])
        assert all(torch.equal(outs[r], of(r, dtype, (r + 1, 3))) for r in range(size))
        whole = made(torch.zeros(size, 3, dtype=dtype))
        dist.all_to_all_single(whole, made(of(rank, dtype, (size, 3))))
        assert torch.equal(whole, torch.stack([of(r, dtype, (size, 3))[rank] for r in range(size)]))
        takes = [(r + rank) % 3 for r in range(size)]  # uneven, some of them zero
        whole = made(torch.zeros(sum(takes), 3, dtype=dtype))
        dist.all_to_all_single(whole, made(of(rank, dtype, (sum(takes), 3))), takes, takes)
        first = [sum((q + r) % 3 for q in range(rank)) for r in range(size)]
        parts = [of(r, dtype, (99, 3))[first[r] : first[r] + takes[r]] for r in range(size)]
        assert torch.equal(whole, torch.cat(parts))


def expected(op, terms):
    """The reduction of the tensors `terms`, in one process."""
    stack = torch.stack(terms)
    if stack.dtype == torch.bool:
        return {R.SUM: stack.any(0), R.PRODUCT: stack.all(0), R.MAX: stack.any(0), R.MIN: stack.all(0)}.get(
            op, {R.BAND: stack.all(0), R.BOR: stack.any(0), R.BXOR: stack.sum(0) % 2 == 1}.get(op)
        )
    if op == R.SUM:
        return stack.sum(0)
    if op == R.AVG:
        return stack.sum(0) / len(terms) if stack.is_floating_point() else stack.sum(0) // len(terms)
    if op == R.PRODUCT:
        return stack.prod(0)
    if op in (R.MAX, R.MIN):
        return stack.amax(0) if op == R.MAX else stack.amin(0)
    out = terms[0]
    for term in terms[1:]:
        out = {R.BAND: out & term, R.BOR: out | term, R.BXOR: out ^ term}[op]
    return out


NUMBERS, BITS = (R.SUM, R.AVG, R.PRODUCT, R.MAX, R.MIN), (R.BAND, R.BOR, R.BXOR)
REDUCTIONS = [
    *((torch.float64, op) for op in NUMBERS),
    *((torch.int64, op) for op in (*NUMBERS, *BITS)),
    *((torch.bool, op) for op in (R.SUM, R.PRODUCT, R.MAX, R.MIN, *BITS)),
]


def test_reductions(rank, size):
    for dtype, op in REDUCTIONS:
        all_of = [of(r, dtype, (2 * size, 3)) for r in range(size)]
        want = expected(op, all_of)
        for made in (torch.clone, strided):
            x = made(all_of[rank])
            dist.all_reduce(x, op)
            assert torch.equal(x, want), (dtype, op)
            x = made(all_of[rank])
            dist.reduce(x, size - 1, op)
            assert torch.equal(x, want if rank == size - 1 else all_of[rank]), (dtype, op)
            if dtype != torch.bool or op != R.SUM:
                out = made(torch.zeros(2, 3, dtype=dtype))
                dist.reduce_scatter_tensor(out, made(all_of[rank]), op)
                assert torch.equal(out, want[2 * rank : 2 * rank + 2]), (dtype, op)
                dist.reduce_scatter(out, [made(part) for part in all_of[rank].split(2)], op)
                assert torch.equal(out, want[2 * rank : 2 * rank + 2]), (dtype, op)


def test_a_factor_before_the_sum(rank, size):
    x = of(rank)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(x, 0.5 * sum(of(r) for r in range(size)))


def test_the_names_of_older_versions(rank, size, group):
    """torch 2.6 to 2.12 calls these methods. Its ReduceOp tells the factor of a sum only to pickle."""
    x, out, part = of(rank), torch.zeros(2 * size, 3), torch.zeros(2, 3)
    group._allgather_base(out, x).wait()
    whole = torch.cat([of(r) for r in range(size)])
    assert torch.equal(out, whole)
    group._reduce_scatter_base(part, out).wait()
    assert torch.equal(part, size * x)
    group.allgather_into_tensor_coalesced([out], [x + 1]).wait()
    group.reduce_scatter_tensor_coalesced([part], [out]).wait()
    assert torch.equal(part, size * (x + 1))
    group.alltoall_base(out, whole, [], []).wait()
    assert torch.equal(out, x.repeat(size, 1))

    class Old:
        def __getstate__(self):
            return R.PREMUL_SUM, 0.5

    assert private.factor_of(Old()) == 0.5


def test_a_work_that_torch_does_not_keep(rank, size, group, monkeypatch):
    """Before torch 2.8 its C++ half outlives the Python half, and would wait for ever."""
    monkeypatch.setattr(private, "KEEPS_WORK", False)
    monkeypatch.setattr(work, "MOST_HELD", 2)
    x = torch.ones(3)
    first = group.allreduce([x])
    assert first in work._HELD
    first.wait()
    assert first not in work._HELD
    future = group.allreduce([x]).get_future()
    future.wait()
    for _ in range(4):
        group.allreduce([x]).is_completed()
    dist.barrier()
    assert not any(each.what == "barrier" for each in work._HELD)
    group.allreduce([x]).wait()
    assert len(work._HELD) <= 2 + 1
    work._HELD.clear()


@pytest.mark.timeout(120)  # torch imports its compiler here
def test_a_work_that_python_code_hands_to_torch(rank, size):
    """DDP's join hands a Work to C++, which waits for it and then asks for its future."""
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    for by_all in (True, False):
        with net.join(divide_by_initial_world_size=by_all):
            for step in range(1 + rank):
                net.zero_grad()
                net(torch.ones(2, 3)).sum().backward()
                present = size if by_all else size - step
                assert torch.allclose(net.module.bias.grad, torch.tensor(2.0 * (size - step) / present))


def test_several_devices(rank, size):
    """From torch 2.14 on fompi may be the backend of one device. Before, all ranks get an error that says so."""
    if RELEASE < (2, 14):
        with pytest.raises(fompi.LaunchError, match=r"'cpu:fompi,cuda:gloo' needs torch 2.14 or later"):
            dist.new_group(backend="cpu:fompi,cuda:gloo")
        return
    mixed = dist.new_group(backend="cpu:fompi,cuda:gloo")
    assert type(mixed) is dist.ProcessGroup and fompi.torch.communicator(mixed).size == size
    x = of(rank)
    dist.all_reduce(x, group=mixed, async_op=True).get_future().wait()
    assert torch.equal(x, sum(of(r) for r in range(size)))
    whole = torch.zeros(2 * size, 3)
    dist.all_gather_into_tensor(whole, of(rank), group=mixed)
    assert torch.equal(whole, torch.cat([of(r) for r in range(size)]))
    found = [None] * size
    dist.all_gather_object(found, rank, group=mixed)
    assert found == list(range(size))
    with pytest.raises(fompi.StateError, match="Name the source"):
        dist.recv(x, group=mixed)
    dist.destroy_process_group(mixed)


def test_unknown_reductions_are_refused_on_all_ranks(rank):
    for dtype, op in ((torch.complex64, R.MAX), (torch.float32, R.BAND), (torch.bool, R.AVG)):
        with pytest.raises((ValueError, TypeError)):
            dist.all_reduce(of(rank, dtype), op)
    with pytest.raises(TypeError, match="to_dense"):
        dist.all_reduce(of(rank).to_sparse(), R.MAX)
    dist.barrier()  # and the group is usable


def test_coalesced(rank, size, group):
    tensors = [of(rank), of(rank, torch.float64, (4,)), of(rank, shape=())]
    with _coalescing_manager():
        for t in tensors:
            dist.all_reduce(t)
    assert torch.equal(tensors[1], sum(of(r, torch.float64, (4,)) for r in range(size)))
    outs = [torch.zeros(size, 2, 3) for _ in range(2)]
    with _coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_into_tensor(out, of(rank))
    manager.wait()
    assert all(torch.equal(out, torch.stack([of(r) for r in range(size)])) for out in outs)
    with _coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(tensors[2])
    assert tensors[2] == size * sum(r + 1 for r in range(size))
    group.allreduce_coalesced(tensors).wait()
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    group.allgather_coalesced(lists, [torch.full((2,), rank), torch.full((3,), rank)]).wait()
    assert all((one == r).all() for r, parts in enumerate(lists) for one in parts)


def test_torch_counts_the_calls(rank, size):
    """CommDebugMode, torch's own counter of collectives, counts each call once and changes nothing."""
    seen = torch.ops.c10d
    x, parts, out = of(rank), [of(0) for _ in range(size)], torch.empty(2 * size, 3)
    with CommDebugMode() as outer, CommDebugMode() as mode:
        dist.all_reduce(x)
        dist.broadcast(of(rank), 0)
        dist.all_gather(parts, of(rank))
        dist.all_gather_into_tensor(out, of(rank))
        dist.reduce_scatter_tensor(of(0), out.clone())
        dist.scatter(of(0), parts if rank == 0 else None)
        dist.all_to_all_single(torch.empty(size), torch.ones(size))
    assert torch.equal(x, sum(of(r) for r in range(size))) and torch.equal(out, torch.cat([of(r) for r in range(size)]))
    calls = [seen.allreduce_, seen.broadcast_, seen.allgather_, seen._allgather_base_, seen._reduce_scatter_base_]
    wanted = dict.fromkeys([*calls, seen.scatter_, seen.alltoall_base_], 1)
    assert dict(mode.get_comm_counts()) == dict(outer.get_comm_counts()) == wanted
    assert "_allgather_base_" in mode.generate_comm_debug_tracing_table(noise_level=2)
    dist.all_reduce(x)
    assert mode.get_total_counts() == len(wanted)


def test_autograd_does_not_see_what_is_written(rank, size):
    """As with every backend of torch: a program may write to what its backward has saved, and to a parameter."""
    parts, whole = [torch.ones(size, 3) for _ in range(size)], torch.ones(size * size, 3)
    after, before = (rank + 1) % size, (rank - 1) % size
    writes = (
        dist.all_reduce,
        lambda y: dist.reduce(y, 0),
        lambda y: dist.broadcast(y, 0),
        lambda y: dist.all_gather([y, *parts[1:]], parts[0]),
        lambda y: dist.all_gather_into_tensor(y, torch.ones(1, 3)),
        lambda y: dist.reduce_scatter_tensor(y, whole),
        lambda y: dist.scatter(y, parts if rank == 0 else None),
        lambda y: dist.all_to_all_single(y, parts[0]),
        lambda y: size > 1 and [w.wait() for w in (dist.isend(parts[0], after), dist.irecv(y, before))],
    )
    for write in writes:
        for kind in (lambda y: y, strided):
            y = kind(torch.ones(size, 3, requires_grad=True).exp())
            loss = (y * y).sum()
            write(y)
            loss.backward()
        write(torch.nn.Parameter(torch.ones(size, 3)))


def test_a_call_ends_by_itself(rank, size):
    """Nobody waits: the tensor is written, the future is fulfilled, and what hangs on it has run."""
    x, seen = torch.full((1 << 18,), float(rank)), []
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda done: seen.append(done.value()[0].sum().item()))
    end = time.monotonic() + 10
    while not future.done() and time.monotonic() < end:
        time.sleep(0.002)
    assert seen == [x.numel() * sum(range(size))] and x[-1] == sum(range(size))
    assert work.is_completed() and work.is_success() and work.exception() is None and work.result()[0] is x
    assert work.get_future().value()[0] is x


def test_works_are_waited_for_in_any_order(rank, size):
    tensors = [torch.full((5,), float(rank + i)) for i in range(6)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for i in (3, 0, 5, 1) if rank % 2 else (5, 4, 3, 0):
        works[i].wait()
    [work.wait() for work in works]
    assert [t[0].item() for t in tensors] == [sum(r + i for r in range(size)) for i in range(6)]


def test_what_alternates_gives_way_in_every_call(rank, size):
    """Also if the call was made before and is done at once. The first function is always one call ahead."""
    said = []

    def calls(name, count):
        found = []
        for number in range(count):
            said.append(f"{name}{number}")
            t = torch.full((3,), float(rank + number))
            dist.all_reduce(t)
            found.append(t[0].item())
        work = dist.all_reduce(t, async_op=True)
        said.append(f"{name} waits")
        work.wait()
        return [*found, t[0].item()]

    one = [float(sum(range(size)) + size * number) for number in range(3)]
    for _ in range(3):
        said.clear()
        assert fompi.interleave(lambda: calls("a", 3), lambda: calls("b", 3)) == [[*one, size * one[-1]]] * 2
        assert said == ["a0", "b0", "a1", "b1", "a2", "b2", "a waits", "b waits"]


def test_a_callback_may_wait_for_another_call(rank, size):
    """It runs in the thread that drives fompi: its own wait must drive fompi too."""
    x = torch.full((3,), float(rank + 1))

    def again(done):
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    total = dist.all_reduce(x, async_op=True).get_future().then(again).wait()
    assert total[0] == size * sum(r + 1 for r in range(size))


def test_groups_of_members_only(rank, size, group):
    """new_group for half of the ranks does not wait for the other half."""
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    for ranks in halves:
        if ranks and rank in ranks:
            half = dist.new_group(ranks, use_local_synchronization=True, timeout=timedelta(seconds=7))
            x = of(rank)
            dist.all_reduce(x, group=half)
            assert torch.equal(x, sum(of(r) for r in ranks)) and half.size() == len(ranks)
            assert half.comm.channel.timeout == 7 and dist.get_process_group_ranks(half) == ranks
            dist.destroy_process_group(half)
    pairs = [dist.new_group(ranks) for ranks in halves if ranks]  # by all ranks, as most programs do
    mine = pairs[rank % 2]
    x = torch.full((1,), rank)
    dist.broadcast(x, halves[rank % 2][-1], group=mine)
    assert x == halves[rank % 2][-1]


def test_members_that_torch_gives_other_names(rank, size):
    """With use_local_synchronization the name has the number of groups of this rank in it."""
    own = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    group = dist.new_group(list(range(size)), use_local_synchronization=True)
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x == size
    for each in (group, *own):
        dist.destroy_process_group(each)


def test_members_that_mean_other_groups(rank, size):
    if size > 2 and rank < 3:
        with pytest.raises(fompi.MismatchError, match="makes another group"):
            dist.new_group([0, 1] if rank == 1 else [0, 1, 2], use_local_synchronization=True)
    dist.barrier()


def test_objects(rank, size):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(size)]
    out = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert out == [f"for {rank}"]


def test_messages(rank, size):
    """Round the ring: tags keep messages apart, and tensors may be strided."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [
        dist.isend(made(of(rank, shape=(tag + 2, 3))), after, tag=tag) for tag, made in ((0, strided), (7, torch.clone))
    ]
    late, early = torch.zeros(9, 3), strided(torch.zeros(2, 3))
    dist.recv(late, before, tag=7)
    assert dist.recv(early, before) == before
    assert torch.equal(late, of(before, shape=(9, 3))) and torch.equal(early, of(before))
    [work.wait() for work in sends]
    x, y = of(rank), torch.zeros(2, 3)
    ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
    [work.wait() for work in dist.batch_isend_irecv(ops)]
    assert torch.equal(y, of(before))


def test_a_message_from_any_rank(rank, size):
    if rank:
        dist.send(of(rank), 0, tag=3)
    else:
        found = {}
        for _ in range(1, size):
            y = torch.zeros(2, 3)
            source = dist.recv(y, tag=3)
            found[source] = y
        assert all(torch.equal(found[r], of(r)) for r in range(1, size))


def test_monitored_barrier(rank, size, group):
    """It names the ranks that do not come, and works again once they have come. The words are those of gloo."""
    group.monitored_barrier(timedelta(seconds=5))
    if size > 1:
        late = r"Ranks? 1.* failed to pass monitoredBarrier.*Rank 0 timed out in monitoredBarrier"
        if rank == 0:
            for limit in (timedelta(milliseconds=20), timedelta(0)):  # 0 is a limit, too
                with pytest.raises(dist.DistBackendError, match=late):
                    group.monitored_barrier(limit, wait_all_ranks=True)
        dist.barrier()
        group.monitored_barrier(timedelta(seconds=5))


@pytest.mark.parametrize("is_closed", [False, True], ids=["used on", "closed"])
def test_a_monitored_barrier_that_fails(rank, size, is_closed):
    """Only rank 0 and the last one come. The group can be used after it, and closed at once, whatever its time-out."""
    group = dist.new_group(timeout=timedelta(minutes=20))
    words = f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv"
    if size > 2 and rank in (0, size - 1):
        with pytest.raises(dist.DistBackendError, match=r"Rank 1 failed" if rank == 0 else f"{words} from rank 0"):
            group.monitored_barrier(timedelta(milliseconds=20))
    dist.barrier()
    for _ in range(0 if is_closed else 3):
        group.monitored_barrier(timedelta(seconds=60))
    dist.destroy_process_group(group)


def test_a_wait_with_a_limit(rank, size):
    """It says so in torch's words, and the call goes on."""
    if size > 1:
        y = torch.zeros(3)
        if rank == 0:
            work = dist.irecv(y, 1)
            with pytest.raises(dist.DistBackendError, match=r"recv from rank 1: Timed out waiting"):
                work.wait(timedelta(milliseconds=20))
        dist.barrier()
        if rank == 1:
            dist.send(torch.ones(3), 0)
        if rank == 0:
            work.wait()
            assert y.sum() == 3


def test_the_time_limit_of_a_call(rank, size, group):
    """Rank 0 waits for the others, which wait for its message. Its calls go on after the error."""
    limit, x = timedelta(milliseconds=20), torch.ones(2)
    options = dist.distributed_c10d.BarrierOptions()
    options.timeout = limit
    begin = [lambda: group.barrier(options), lambda: group.barrier(limit), lambda: group.allreduce([x], R.SUM, limit)]
    if rank and size > 1:
        dist.recv(torch.zeros(1), 0)
    works = [call() for call in begin]
    if rank == 0 and size > 1:
        for work in works:
            with pytest.raises(dist.DistBackendError, match=r"Timed out waiting: .* is not finished after"):
                work.wait()
        for other in range(1, size):
            dist.send(torch.zeros(1), other)
    for work in works:
        work.wait(timedelta(seconds=60))
    assert x.tolist() == [size, size]


def test_the_time_limit_of_a_group(rank, size):
    """Rank 0 does not come. The others get the error of torch that names it, also in a future that nobody drives."""
    if size > 1:
        lost = dist.new_group(timeout=timedelta(seconds=0.4))
        if rank:
            future = dist.all_reduce(torch.ones(2), group=lost, async_op=True).get_future()
            with pytest.raises(RuntimeError, match=r"Timed out waiting|abandoned"):
                torch.futures.collect_all([future]).wait()[0].value()
            with pytest.raises(dist.DistBackendError, match="cannot be used any more"):
                dist.all_reduce(torch.ones(2), group=lost)
        dist.barrier()


def test_mismatches(rank, size):
    """Ranks that disagree all get an error instead of wrong data."""
    if size > 1:
        with pytest.raises(fompi.MismatchError, match="the ranks disagree"):
            dist.all_reduce(torch.zeros(2 + rank))
        with pytest.raises(ValueError):
            dist.all_to_all_single(torch.zeros(3 * size), torch.zeros(3 * size), [3] * size, [2 + rank] * size)
        dist.barrier()


def strided_of(*shape, dtype=torch.float32):
    return strided(torch.zeros(shape, dtype=dtype))


def on_rank_0(rank, wrong, right):
    return wrong if rank == 0 else right


SIZES = {  # the sums of the sizes are right, the sizes are not
    "all_gather": lambda rank, n: dist.all_gather([torch.zeros(2)] * n, torch.ones(2 + (rank == 1) - (rank == 0))),
    "gather": lambda rank, n: dist.gather(
        torch.ones(2 + (rank == 1) - (rank == 0)), [torch.zeros(2)] * n if rank == 0 else None
    ),
    "all_to_all": lambda rank, n: dist.all_to_all(
        [torch.zeros(2)] * n, [torch.ones(2 + (rank == 1) - (rank == 0))] * n
    ),
    "all_to_all_single": lambda rank, n: dist.all_to_all_single(
        torch.zeros(2 * n), torch.ones(2 * n), on_rank_0(rank, [3, 1, *[2] * (n - 2)], None), None
    ),
    "scatter": lambda rank, n: dist.scatter(
        torch.zeros(2), on_rank_0(rank, [torch.ones(1), torch.ones(3), *[torch.ones(2)] * (n - 2)], None)
    ),
    "all_gather_single": lambda rank, n: dist.all_gather_into_tensor(strided_of(2 * n + (rank == 0)), torch.ones(2)),
    "reduce_scatter": lambda rank, n: dist.reduce_scatter(strided_of(2 + (rank == 0)), [torch.ones(2)] * n),
    "reduce_scatter of bits": lambda rank, n: dist.reduce_scatter(
        strided_of(2 + (rank == 0), dtype=torch.int32), [torch.ones(2, dtype=torch.int32)] * n, R.BXOR
    ),
}


@pytest.mark.parametrize("call", SIZES.values(), ids=SIZES)
def test_sizes_that_disagree(rank, size, call):
    """What a rank sends must be as large as the tensor that it goes to, on all ranks."""
    if size > 1:
        with pytest.raises((fompi.ShapeError, fompi.MismatchError)):
            call(rank, size)
        dist.barrier()  # the group is usable


def ints(*shape):
    return torch.ones(shape, dtype=torch.int32)


OTHER_CALLS = {  # the messages of both calls are the same, their meanings are not
    "BOR or BXOR": lambda r: dist.all_reduce(ints(3), on_rank_0(r, R.BOR, R.BXOR)),
    "AVG or SUM": lambda r: dist.all_reduce(ints(3), on_rank_0(r, R.AVG, R.SUM)),
    "a factor or none": lambda r: dist.all_reduce(torch.ones(3), on_rank_0(r, dist._make_nccl_premul_sum(2.0), R.SUM)),
    "roots": lambda r: dist.reduce(ints(3), on_rank_0(r, 0, 1), R.BOR),
    "barrier or sum": lambda r: on_rank_0(r, dist.barrier, lambda: dist.all_reduce(ints(1)))(),
    "sparse shapes": lambda r: dist.all_reduce(torch.eye(on_rank_0(r, 3, 4)).to_sparse()),
    "sparse or not": lambda r: dist.broadcast(on_rank_0(r, torch.eye(3).to_sparse(), torch.eye(3)), 0),
    "another dtype": lambda r: dist.all_gather_into_tensor(
        torch.zeros(2 * dist.get_world_size(), dtype=on_rank_0(r, torch.float64, torch.float32)), torch.ones(2)
    ),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_calls_that_look_alike(rank, size, call):
    if size > 1:
        with pytest.raises((fompi.MismatchError, TypeError)):
            call(rank)
        dist.barrier()


def test_outputs_of_different_sizes(rank, size):
    outs = [torch.zeros(r) for r in range(size)]
    dist.all_gather(outs, torch.full((rank,), float(rank)))
    assert all((one == r).all() for r, one in enumerate(outs))


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
def test_lists_of_neighbours(rank, size, async_op):
    """Large parts that are neighbours in one tensor are sent and received where they are, uneven ones and others."""
    rows = [5000 + 1000 * r for r in range(size)]
    last, total = size - 1, sum(rows)

    def whole_of(r):
        return torch.arange(total * 2.0).reshape(total, 2) + r

    for call in range(2):  # the second one is known
        ins, held = whole_of(rank + call), torch.zeros(total, 2)
        parts = list(held.split(rows))

        def run(verb, *args, **options):
            work = verb(*args, **options, async_op=async_op)
            if async_op:
                work.wait()

        run(dist.all_gather, parts, ins[: rows[rank]])
        assert torch.equal(held, torch.cat([whole_of(r + call)[: rows[r]] for r in range(size)]))
        held.zero_()
        run(dist.gather, ins[: rows[rank]].contiguous(), parts if rank == last else None, dst=last)
        assert rank != last or torch.equal(held, torch.cat([whole_of(r + call)[: rows[r]] for r in range(size)]))
        out = torch.zeros(rows[rank], 2)
        run(dist.scatter, out, list(ins.split(rows)) if rank == 0 else None, src=0)
        assert torch.equal(out, whole_of(call).split(rows)[rank])
        mine = torch.zeros(size * rows[rank], 2)
        run(dist.all_to_all, list(mine.chunk(size)), list(ins.split(rows)))
        assert torch.equal(mine, torch.cat([whole_of(r + call).split(rows)[rank] for r in range(size)]))
        run(dist.all_to_all, list(held.split(rows)), [held[: rows[rank]].clone() for _ in range(size)])
        run(dist.all_gather, list(held.split(rows)), held.split(rows)[rank].fill_(rank + call))  # in place
        assert torch.equal(held, torch.cat([torch.full((rows[r], 2), r + call + 0.0) for r in range(size)]))


def test_which_lists_are_one_tensor():
    whole = torch.zeros(4, 5000)
    rows = list(whole)
    assert memory.as_one(rows).data_ptr() == memory.joined(rows, None).data_ptr() == whole.data_ptr()
    assert memory.as_one(rows).shape == (20000,)
    others = [rows[::-1], rows[:1] * 2, list(whole.T), [rows[0], rows[2]], list(whole[:, :4500])]
    others += [[rows[0], rows[1].int()], list(torch.zeros(4, 8))]
    others += [[rows[0].to_sparse()], [rows[0], rows[1].to_sparse()], [rows[0], None], ["x"]]
    assert [memory.as_one(each) for each in [*others, []]] == [None] * 12
    assert memory.place_for(rows, torch.zeros(5000)) is not None
    assert memory.place_for(rows, rows[0]) is None


@pytest.mark.timeout(60)
def test_a_mismatch_does_not_wait_for_calls_behind_it(rank, size):
    """A sparse sum is two calls. The other ranks make one."""
    if size > 1:
        group = dist.new_group()
        with pytest.raises(fompi.MismatchError):
            dist.all_reduce(on_rank_0(rank, torch.eye(3).to_sparse(), torch.eye(3)), group=group)
        dist.barrier()  # of all ranks: the group itself is out of step
        process_group.on_device(group, "cpu").abort()


# ------------------------------------------------------------------------------------- programs that know only torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def model(blocks):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block() for _ in range(blocks)]).double()


@pytest.fixture
def data(size):
    x = torch.linspace(-2, 2, 6 * 4 * size, dtype=torch.float64).view(-1, 6).sin()
    return x, x.flip(1)


def train(step, parameters, full=lambda t: t, steps=20):
    """(losses, gradients of the last step, parameters)."""
    optimizer, losses = torch.optim.SGD(parameters, 0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(step())
        optimizer.step()
    return losses, [full(p.grad) for p in parameters], [full(p.detach()) for p in parameters]


def alone(net, x, y, steps=20):
    """The same training in one process."""

    def step():
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss.item()

    return train(step, list(net.parameters()), steps=steps)


def assert_equal(found, whole):
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def step_on_rows(net, x, y, rank, size):
    def step():
        loss = F.mse_loss(net(x.chunk(size)[rank]), y.chunk(size)[rank])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, R.AVG)
        return mean.item()

    return step


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}], ids=["plain", "views"]
)
@pytest.mark.timeout(120)  # torch imports its compiler here
def test_distributed_data_parallel(rank, size, data, options):
    """Many small buckets: all of them in flight at once, completed by futures."""
    net = torch.nn.parallel.DistributedDataParallel(model(4), bucket_cap_mb=0.001, **options)
    assert_equal(train(step_on_rows(net, *data, rank, size), list(net.parameters())), alone(model(4), *data))


@pytest.mark.parametrize(("dtype", "number"), [("int8", 100), ("uint8", 200), ("int32", 2**31 - 9)])
def test_a_mean_of_integers_whose_sum_does_not_fit(size, dtype, number):
    for _ in range(2):
        x = torch.full((3,), number, dtype=getattr(torch, dtype))
        dist.all_reduce(x, R.AVG)
        assert x.tolist() == [number] * 3 and x.dtype == getattr(torch, dtype)
    part = torch.empty_like(x)
    dist.reduce_scatter_tensor(part, x.repeat(size), R.AVG)
    assert part.tolist() == [number] * 3


def test_sums_in_an_order(rank, size):
    """In the `with` block, for calls that were made before and not; outside it nothing has changed."""
    terms = [torch.from_numpy(np.random.default_rng(r).standard_normal(3000).astype("f4")) for r in range(size)]
    wanted = torch.from_numpy(folded([t.numpy() for t in terms], np.add))
    for _ in range(3):
        with fompi.torch.ordered("ranks"):
            x = terms[rank].clone()
            dist.all_reduce(x)
            assert torch.equal(x, wanted)
            mean = terms[rank].clone()
            dist.all_reduce(mean, R.AVG, async_op=True).wait()
            assert torch.equal(mean, wanted / size)
            part = torch.empty(3000 // size)
            dist.reduce_scatter_tensor(part, terms[rank][: 3000 // size * size].clone())
            assert torch.equal(part, wanted[rank * len(part) : (rank + 1) * len(part)])
        with fompi.torch.ordered(fompi.Canonical(4 * size)):
            x = terms[rank].clone()
            dist.all_reduce(x)
            assert torch.equal(x, wanted)
        torch.testing.assert_close(dist_sum(terms[rank]), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(fompi.PlanError, match="must be one of"), fompi.torch.ordered("tree"):
        pass


def dist_sum(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("wire", ["int8", "bfloat16"])
def test_smaller_gradients(rank, size, data, wire, feedback):
    """Near the training alone, and the same bits on all ranks; gradients that take no wire are refused everywhere."""

    def narrow(dtype):
        net = torch.nn.parallel.DistributedDataParallel(model(4).to(dtype), bucket_cap_mb=0.001)
        net.register_comm_hook(None, fompi.torch.wire(wire, feedback=feedback))
        return net, [t.to(dtype) if t.is_floating_point() else t for t in data]

    net, given = narrow(torch.float32)
    found = train(step_on_rows(net, *given, rank, size), list(net.parameters()))
    exact = alone(model(4).float(), *given)
    leaves = torch.utils._pytree.tree_leaves
    for mine, wanted in zip(leaves(found), leaves(exact), strict=True):
        mine, wanted = torch.as_tensor(mine), torch.as_tensor(wanted)
        torch.testing.assert_close(mine, wanted, rtol=0.05, atol=0.05, check_dtype=False)
    for p in net.parameters():
        every = [torch.empty_like(p.data) for _ in range(size)]
        dist.all_gather(every, p.data)
        assert all(torch.equal(each, every[0]) for each in every)
    net, given = narrow(torch.float64)
    with pytest.raises(Exception, match="float64 is sent as it is"):
        train(step_on_rows(net, *given, rank, size), list(net.parameters()))


class Products(torch.nn.Module):
    """The gradient of parameter i is `gradients[i]`. The first ones are used first, so torch cuts other buckets."""

    def __init__(self, gradients):
        super().__init__()
        self.gradients = gradients
        self.weights = torch.nn.ParameterList(torch.zeros_like(g) for g in reversed(gradients))

    def forward(self, used, factor):
        pairs = zip(reversed(self.weights), self.gradients, strict=True)
        return sum(((w * g).sum() * factor for i, (w, g) in enumerate(pairs) if i in used), torch.zeros(()))


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_what_a_parameter_has_lost_is_given_back_to_it(rank, size, options):
    """Also in other buckets, with a second model, and after a step without it. Magnitudes differ between parameters."""
    random, hook = torch.Generator().manual_seed(rank), fompi.torch.wire("int8")
    gradients = [10.0**k * torch.randn(64 * size, generator=random) for k in (-3, 1, -1, 3)]
    means, steps = [dist_sum(g) / size for g in gradients], [(0, 1, 2, 3)] * 3
    if "find_unused_parameters" in options:
        steps[2] = (0, 3)
    for order in (1, -1):
        net = torch.nn.parallel.DistributedDataParallel(Products(gradients[::order]), bucket_cap_mb=1e-3, **options)
        net.register_comm_hook(None, hook)
        totals = [torch.zeros(64 * size) for _ in gradients]
        for used, factor in [(used, 1.0) for used in steps] + [((0, 1, 2, 3), 0.0)]:  # at last what was lost alone
            net.zero_grad()
            net(used, factor).backward()
            for total, w in zip(totals, reversed(net.module.weights), strict=True):
                total += 0 if w.grad is None else w.grad
        for i, (total, mean) in enumerate(zip(totals, means[::order], strict=True)):
            off = (total - sum(i in used for used in steps) * mean).abs().max() / mean.abs().max()
            assert off < 0.03, (order, i, off)


def test_sums_of_sparse_tensors(rank, size):
    """Entries at one place are added. Ranks may have entries at other places, several at one place, or none."""
    places, many = [[rank, rank, size]], 3 * (rank % 2)
    for values in (torch.ones(3), torch.full((3, 2), rank + 1.0), torch.arange(3)):
        shape = (size + 1, *values.shape[1:])
        t = torch.sparse_coo_tensor(torch.tensor(places)[:, :many], values[:many], shape)
        whole = t.to_dense()
        dist.all_reduce(whole)
        dist.all_reduce(t)
        assert t.is_sparse and torch.equal(t.to_dense(), whole)


def test_distributed_data_parallel_with_a_sparse_gradient(rank, size):
    ids, goal = torch.arange(3 * size).view(size, 3) * 5 % 7, torch.linspace(0, 1, size, dtype=torch.float64)

    def trained(wrap, rows):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.EmbeddingBag(7, 4, sparse=True), torch.nn.Linear(4, 1)).double()
        wrapped = wrap(net)

        def step():
            F.mse_loss(wrapped(ids[rows]).flatten(), goal[rows]).backward()

        return train(step, list(net.parameters()), torch.Tensor.to_dense, steps=3)[1:]

    found = trained(torch.nn.parallel.DistributedDataParallel, slice(rank, rank + 1))
    for mine, theirs in zip(found, trained(lambda net: net, slice(None)), strict=True):
        assert_equal(mine, theirs)


@pytest.mark.skipif(RELEASE < (2, 8), reason="FSDP2 of this torch needs a GPU")
@pytest.mark.parametrize("ahead", [False, True], ids=["in order", "gathers ahead"])
def test_fully_sharded(rank, size, data, ahead):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, net = init_device_mesh("cpu", (size,)), model(3)
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net._set_unshard_async_op(ahead)
    found = train(step_on_rows(net, *data, rank, size), list(net.parameters()), lambda t: t.full_tensor())
    assert_equal(found, alone(model(3), *data))


def test_pipeline(rank, size, data):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    (x, y), part = data, model(size)[rank]

    def loss_fn(y, target):  # before torch 2.8 the gradients are those of the sum of the losses
        return F.mse_loss(y, target) / (1 if RELEASE >= (2, 8) else 2 * size)

    schedule = Schedule1F1B(PipelineStage(part, rank, size, torch.device("cpu")), 2 * size, loss_fn=loss_fn)

    def step():
        losses = []
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y, "losses": losses} if rank == size - 1 else {}))
        return torch.stack(losses).mean().item() * (1 if RELEASE >= (2, 8) else 2 * size) if losses else None

    losses, gradients, weights = train(step, list(part.parameters()))
    whole = model(size)
    whole_losses, *_ = alone(whole, x, y)
    mine = whole[rank]
    assert_equal(gradients, [p.grad for p in mine.parameters()])
    assert_equal(weights, [p.detach() for p in mine.parameters()])
    if rank == size - 1:
        assert_equal(losses, whole_losses)


def test_groups_and_meshes_of_torch_as_comm(rank, size):
    """Everywhere where `comm=` is, also with another backend."""
    half = size // 2
    mesh = dist.init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "tp"))
    others = dist.new_group(list(range(half)), backend="gloo"), dist.new_group(list(range(half, size)), backend="gloo")
    same = list(range(half * (rank // half), half * (rank // half + 1)))
    x, w = of(rank), torch.eye(3, requires_grad=True)
    expected = torch.cat([of(r) for r in same])
    for comm in (mesh["tp"], mesh.get_group("tp"), others[rank // half]):
        assert torch.equal(fompi.all_gather(x, comm=comm), expected)
        y = fompi.all_gather_matmul(x, w, comm=comm)
        y.sum().backward()
        assert torch.equal(y, expected) and w.grad is not None
        step = fompi.all_reduce.bind(x, comm=comm)
        assert torch.equal(step(), sum(of(r) for r in same))
        assert fompi.torch.nn.ColumnParallelLinear(3, 2 * half, comm=comm)(x).shape == (2 * half, 2)
        fompi.barrier(comm)
    assert torch.equal(fompi.all_gather(x, comm=dist.group.WORLD), torch.cat([of(r) for r in range(size)]))
    with pytest.raises(fompi.LayoutError, match="choose a dimension"):
        fompi.all_gather(x, comm=mesh)
    with pytest.raises(fompi.LaunchError, match="or a ProcessGroup or DeviceMesh of torch, not 'tp'"):
        fompi.all_gather(x, comm="tp")
