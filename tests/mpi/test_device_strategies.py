"""Strategies on the memory of a device give the bits that they give on the host, forward and backward.

The software device has its checker on: a missing wait, a message that leaves early, or memory that is freed early is an
error. The fake CUDA checks every call against those of CuPy.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import strategy_calls

import fompi
from fompi.backends.cuda.software import SoftwareDevice
from fompi.mpi.paths import DIRECT, IPC, STAGED
from fompi.tensors import dlpack

pytestmark = pytest.mark.ranks(mpich=[1, 2, 4], openmpi=[3])

PATHS = (STAGED, DIRECT, IPC)
NAMES = (*strategy_calls.calls(fompi.Communicator()),)


def compare(name, wanted, got):
    assert [a.shape for a in wanted] == [a.shape for a in got], name
    assert [a.tobytes() for a in wanted] == [a.tobytes() for a in got], name


@pytest.mark.parametrize("name", NAMES)
def test_strategies_have_the_bits_of_the_host(world, monkeypatch, name):
    monkeypatch.setenv("FOMPI_PATH", PATHS[NAMES.index(name) % len(PATHS)])
    device = SoftwareDevice(seed=world.rank)
    wanted = strategy_calls.calls(world)[name](np.asarray, np.asarray)
    compare(name, wanted, strategy_calls.calls(world, device)[name](device.array, lambda x: x.get()))
    world.engine.progress_while_waiting()
    gc.collect()
    device.check()
    assert not device.reports


@pytest.mark.skipif(fompi.Communicator().size == 4, reason="four ranks take longer and test nothing new")
def test_without_the_checker(world):
    """Random delays, and nobody looks: the results are right all the same."""
    wanted = {name: call(np.asarray, np.asarray) for name, call in strategy_calls.calls(world).items()}
    names = [*wanted]
    for seed in range(10):
        device = SoftwareDevice(seed=100 * seed + world.rank, check=False)
        for name in names[seed % 5 :: 5]:
            compare(name, wanted[name], strategy_calls.calls(world, device)[name](device.array, lambda x: x.get()))


@pytest.mark.one_mpi
@pytest.mark.skipif(fompi.Communicator().size == 4, reason="four ranks take longer and test nothing new")
@pytest.mark.parametrize("name", NAMES)
def test_strategies_on_the_fake_cuda(world, comm, fakecuda, monkeypatch, name):
    """Arrays of CuPy go in and come out, and every function of NumPy has arguments that CuPy takes."""
    monkeypatch.setenv("FOMPI_PATH", (STAGED, IPC)[NAMES.index(name) % 2])
    device = fakecuda.device()
    monkeypatch.setitem(dlpack.DEVICES, "cuda", lambda: device)
    wanted = strategy_calls.calls(world)[name](np.asarray, np.asarray)

    def up(x):
        return fakecuda.as_cupy(device, x)

    compare(name, wanted, strategy_calls.calls(world, device)[name](up, fakecuda.of_cupy))
    world.engine.progress_while_waiting()
    gc.collect()
    comm.Barrier()
    device.close()
    gc.collect()
    assert device.runtime.memory == {} and device.runtime.lives == {"event": set(), "stream": set()}
