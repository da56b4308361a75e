"""Groups of torch whose members are connected again: `dist._reconfigure` from torch 2.14 on, before that the object."""

from __future__ import annotations

import sys
import textwrap

import job
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.one_mpi

START = """
import os, signal, subprocess, sys, time
from datetime import timedelta
from types import SimpleNamespace
place, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if rank == 0:
    others = [subprocess.Popen([sys.executable, __file__, place, str(r), str(size)]) for r in range(1, size)]
import torch
import torch.distributed as dist
import fompi

store, limit = dist.FileStore(place, size), timedelta(seconds=20)
if hasattr(dist, "_reconfigure"):
    dist.init_process_group("fompi", rank=rank, world_size=size, store=store, timeout=limit, enable_reconfigure=True)
    group = dist.group.WORLD
    assert dist._supports_reconfigure() and dist.get_backend_impl(group, torch.device("cpu")) is group
    handle, reconfigure = dist._get_reconfigure_handle, dist._reconfigure
else:  # what torch 2.14 calls
    from fompi.torch.creation import Reconfigurable
    group = Reconfigurable(rank, size, "0", store, limit)
    handle = group.get_reconfigure_handle
    def reconfigure(uuid, handles, timeout=limit):
        return group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout))

def collect(key):
    store.set(f"{key} {rank}", handle())
    return [store.get(f"{key} {other}").decode() for other in range(size)]

def summed(value):
    x = torch.full((4,), float(value))
    group.allreduce([x], dist.AllreduceOptions()).wait()
    return x[0].item()

def refused(call, *words):
    try:
        call()
    except RuntimeError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("no error")
"""

MEMBERS = START + textwrap.dedent("""
    assert (group.rank(), group.size(), group.supports_reconfigure) == (rank, size, True)
    refused(lambda: summed(1), "the group has no members: _reconfigure was not called yet", "dist._reconfigure(uuid, ")
    handles = collect("first")
    begun = reconfigure(1, handles)
    assert begun.wait() and begun.is_completed() and begun.is_success()
    assert summed(rank + 1) == 6 and (group.rank(), group.size()) == (rank, 3)
    refused(lambda: reconfigure(1, handles).wait(), "uuid 1 was already used")
    if group.rank() == 2:  # left out, and told so by the next wait
        refused(lambda: [summed(1) for _ in range(100)], "rank")
    else:
        reconfigure(2, handles[:2]).wait()
        assert summed(rank + 1) == 3 and group.size() == 2
    reconfigure(3, {*handles}).wait()  # a set: in any order
    assert summed(rank + 1) == 6 and group.rank() == sorted(handles).index(handles[rank])
    group.abort()
    assert group.get_error().name == "SUCCESS"
    refused(lambda: summed(1), "the group has no members: it was aborted")
    refused(lambda: reconfigure(4, handles[:1] if rank else handles[1:]).wait(), "is not in the list")
    refused(lambda: reconfigure(5, ["fompi-1-AAAA"]).wait(), "is not whole")
    if rank == 0:
        refused(lambda: reconfigure(6, handles, timeout=timedelta(seconds=0.5)).wait(), "epoch 6: rank 0 waited 0.5 s")
    reconfigure(7, [*reversed(handles)]).wait()  # turned round
    assert summed(rank + 1) == 6 and group.rank() == 2 - rank
    if hasattr(dist, "_reconfigure"):
        part = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
        if part is not None:
            x = torch.ones(3)
            dist.all_reduce(x, group=part)
            assert x.tolist() == [2.0] * 3
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        model = torch.nn.parallel.DistributedDataParallel(model)
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert model.module.weight.grad.tolist() == [[2.0, 2.0]]
        dist.barrier()
        dist.destroy_process_group()
    else:
        group.shutdown()
    print(f"rank {rank} is right", flush=True)
    if rank == 0:
        [other.wait(20) for other in others]
""")

KILLED = START + textwrap.dedent("""
    handles = collect("first")
    reconfigure(1, handles).wait()
    assert summed(1) == size
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    refused(lambda: [summed(1) for _ in range(1000)], "rank 1 is lost")
    assert group.get_error().name == "REMOTE_ERROR"
    reconfigure(2, [handles[0], handles[2]]).wait()
    assert summed(1) == 2 and group.get_error().name == "SUCCESS"
    group.shutdown()
    print(f"rank {rank} is right", flush=True)
    if rank == 0:
        [other.wait(20) for other in others]
""")


def start(tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store"), "0", "3"]
    return job.run(command, 60, env={"FOMPI_TIMEOUT": "20", "OMP_NUM_THREADS": "1"}, cwd=tmp_path)


@pytest.mark.parametrize(("program", "count"), [(MEMBERS, 3), (KILLED, 2)], ids=["members", "killed"])
def test_reconfigure(tmp_path, program, count):
    done = start(tmp_path, program)
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    assert done.stdout.count("is right") == count, done.output
