"""Managed groups of torchft on fompi: a replica group is killed and comes again, and the other one never stops."""

from __future__ import annotations

import re
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import job
import pytest

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchft_ddp.py"

KILLED = """
import os, runpy, signal, sys
import torchft

RANK = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "1"))
begin = torchft.Manager.allreduce

def die_in_a_sum(manager, tensor, *args, **options):
    manager.wait_quorum()
    if manager.current_step() >= 5 and manager.num_participants() == 2 and RANK == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return begin(manager, tensor, *args, **options)

torchft.Manager.allreduce = die_in_a_sum
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

WITHIN_MPI = textwrap.dedent("""
    import hashlib, sys, time
    from datetime import timedelta
    import torch, torchft
    import torch.distributed as dist
    from fompi.torch.torchft import ProcessGroupFompi

    limit = timedelta(seconds=20)
    dist.init_process_group("fompi")
    rank, port = dist.get_rank(), [0]
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 4)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)

    def load(state):
        net.load_state_dict(state["net"])
        sgd.load_state_dict(state["sgd"])

    managed = ProcessGroupFompi(limit)
    manager = torchft.Manager(
        pg=managed, load_state_dict=load, state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1, replica_id=sys.argv[1], timeout=limit, init_sync=False,  # the seed makes them equal
        store_addr="localhost", store_port=port[0], rank=rank, world_size=dist.get_world_size(),
    )
    optimizer = torchft.Optimizer(manager, sgd)
    torch.manual_seed(10 * int(sys.argv[1]) + rank)
    while manager.current_step() < int(sys.argv[2]) or manager.num_participants() < 2:
        optimizer.zero_grad()
        x = torch.randn(8, 16)
        (net(x) - x[:, :4]).square().mean().backward()
        for work in [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]:
            work.wait()  # within the replica group, by MPI
        time.sleep(0.1)
        for work in [manager.allreduce(p.grad) for p in net.parameters()]:
            work.wait()  # over the replica groups, by UCX
        optimizer.step()
        line = f"step {manager.current_step()}: {manager.num_participants()} of 2 groups"
        print(line, flush=True)
    assert not managed.comm.link.is_of_process and dist.group.WORLD.comm.link.is_of_process
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"parameters: {digest.hexdigest()}", flush=True)
    manager.shutdown(wait=False)
    dist.destroy_process_group()
""")


def survive(monkeypatch, tmp_path, start, script, seconds):
    """The digests of the parameters of a group that survives, and of one that is killed in a sum and comes again."""
    monkeypatch.setenv("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
    )
    env = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "FOMPI_TIMEOUT": "20", "PYTHONWARNINGS": "ignore"}
    (tmp_path / "killed.py").write_text(KILLED)
    jobs = []

    def begin(*words):
        jobs.append(job.Job([*start, *map(str, words), "20"], seconds, env=env, cwd=tmp_path))
        return jobs[-1]

    try:
        survivor, killed = begin(script, 0), begin(tmp_path / "killed.py", script, 1)
        while not (killed.is_over() or survivor.is_over()):
            time.sleep(0.05)
        again = begin(script, 1)
        while not (survivor.is_over() and again.is_over()):
            time.sleep(0.05)
    finally:
        ends = [each.end() for each in jobs]
        lighthouse.shutdown()
    survivor, killed, again = ends
    said = "\n".join(end.output for end in ends)
    assert killed.returncode != 0 and "parameters" not in killed.stdout, said
    for end in (survivor, again):
        assert end.returncode == 0 and not end.timed_out and not end.left_behind, said
    assert re.search(r": 2 of 2 .*: 1 of 2 .*: 2 of 2 ", survivor.stdout, re.DOTALL), said
    digests = [line for end in (survivor, again) for line in end.stdout.splitlines() if line.startswith("parameters")]
    assert len({*digests}) == 1, said
    return digests


@pytest.mark.one_mpi
@pytest.mark.timeout(100)
def test_a_group_is_killed_and_comes_again(monkeypatch, tmp_path):
    assert len(survive(monkeypatch, tmp_path, [sys.executable], EXAMPLE, 80)) == 2


@pytest.mark.timeout(140)
def test_within_the_groups_the_ranks_use_mpi(monkeypatch, tmp_path):
    """Each rank of a job of two has a managed group with its like in another job, beside the group of its own job."""
    (tmp_path / "train.py").write_text(WITHIN_MPI)
    start = [str(Path(sys.executable).parent / "mpirun"), "-n", "2", sys.executable]
    assert len(survive(monkeypatch, tmp_path, start, tmp_path / "train.py", 120)) == 4


ALONE = textwrap.dedent("""
    import time
    from datetime import timedelta
    from types import SimpleNamespace
    import torch
    import torch.distributed as dist
    import fompi
    from fompi.torch import creation
    from fompi.torch.torchft import ProcessGroupFompi

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupFompi(timedelta(seconds=2))
    here = f"localhost:{store.port}/quorum"
    x = torch.full((3,), 2.0)

    def refused(call):
        try:
            call()
        except dist.DistBackendError as error:
            return str(error)

    assert "not called yet. The next quorum" in refused(lambda: group.allreduce([x])) and group.errored() is None
    for quorum in range(3):
        group.configure(f"{here}/{quorum}", "replica", 0, 1, quorum, 0, 1, [0])
        assert group.allreduce([x]).wait() and group.allreduce([x]).get_future().wait()[0] is x
        assert group.errored() is None and (group.rank(), group.size()) == (0, 1) and x.tolist() == [2.0] * 3
        assert fompi.all_reduce(x, comm=group).tolist() == [2.0] * 3
    begun = time.monotonic()
    group.configure(f"{here}/3", "replica", 1, 3)
    assert 1.5 < time.monotonic() - begun < 10 and "for the handle of rank 0, 2" in str(group.errored())
    assert group.allreduce([x]).wait() and "rank 0, 2" in refused(group.barrier)
    group.configure(f"{here}/4", "replica", 0, 1)
    assert group.errored() is None and group.barrier().wait()
    group.abort()
    assert "it was aborted" in refused(group.barrier)
    options = SimpleNamespace(uuid=5, handles=[group.get_reconfigure_handle()], timeout=None)
    assert group.supports_reconfigure and group.reconfigure(options).wait() and group.barrier().wait()
    assert "already used" in refused(lambda: group.reconfigure(options))
    group.set_timeout(timedelta(seconds=1))
    assert group.comm.channel.timeout == 1.0 and group.getBackendName() == "torchft-fompi"
    group.shutdown()

    kind = dict(enable_reconfigure=True, group_rank=0, group_size=1, group_id="first", timeout=timedelta(seconds=9))
    creation.create(SimpleNamespace(**kind, global_ranks_in_group=[], store=store))
    dist.init_process_group("fompi", store=store, rank=0, world_size=1)
    assert creation._prepare_wrappers.cache_info().currsize == 1  # also if another group was the first one
    print("all right")
""")


@pytest.mark.one_mpi
def test_a_group_by_itself(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    done = job.run([sys.executable, str(tmp_path / "alone.py")], 50, cwd=tmp_path)
    assert done.stdout == "all right\n" and done.returncode == 0 and not done.left_behind, done.output
