"""tools/gpu.py on the fake CUDA: every call is one that CuPy has, and every figure is printed. Values mean nothing."""

from __future__ import annotations

import re

import cupy
import fakecuda
import gpu
import pytest

import fompi
from fompi.backends import cuda
from fompi.backends.cuda.cupy import CudaDevice


class Timed(fakecuda.Runtime):
    """With events that have times, and with what describes a card."""

    def _eventCreateWithFlags(self, flags):
        assert flags in (0, 2)
        return self._made("event")

    def _eventSynchronize(self, event):
        assert event in self.lives["event"]

    def _eventElapsedTime(self, first, last):
        assert {first, last} <= self.lives["event"]
        return 0.5

    def _streamSynchronize(self, stream):
        assert stream in self.lives["stream"]

    def _getDeviceProperties(self, device):
        return {"name": b"no card", "multiProcessorCount": 1, "asyncEngineCount": 2}


pytestmark = pytest.mark.one_mpi


@pytest.mark.parametrize("stage", gpu.STAGES)
def test_a_stage(monkeypatch, capsys, stage):
    monkeypatch.setattr(gpu, "ROUNDS", 2)
    monkeypatch.setattr(gpu, "HOST_CALLS", 3)
    monkeypatch.setattr(gpu, "SIZES_MIB", (1 / 64,))
    monkeypatch.setattr(gpu, "SHAPES", ((64, 32, 16),))
    made = CudaDevice(0, Timed(), cupy, fakecuda.FakeLibrary)
    monkeypatch.setattr(fompi, "Device", lambda kind: made)
    monkeypatch.setitem(cuda._devices, ("cuda", 0), made)
    assert gpu.main([stage]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"-- {stage}" and len(lines) > 2
    for line in lines[1:]:
        assert re.search(r"\S +[\w.,+-]+( [\w/ ]+)?$", line), line


def test_an_unknown_stage(capsys):
    assert gpu.main(["speed"]) == 2 and "there are facts, costs" in capsys.readouterr().err


def test_without_a_gpu(monkeypatch, capsys):
    def none(kind):
        raise fompi.LaunchError("there is no CUDA driver on this host")

    monkeypatch.setattr(fompi, "Device", none)
    assert (
        gpu.main([]) == 0 and capsys.readouterr().out == "Nothing was measured: there is no CUDA driver on this host\n"
    )
