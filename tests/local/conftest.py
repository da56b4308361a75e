"""The CUDA device over a fake runtime. At the end of a test all memory, events and streams have been given back."""

import gc

import pytest

import fompi
from fompi.tensors import dlpack


@pytest.fixture
def device(fakecuda):
    """It does not use monkeypatch: what a test has put there must be gone before the memory is counted."""
    made, before = fakecuda.device(devices=2), dlpack.DEVICES["cuda"]
    dlpack.DEVICES["cuda"] = lambda: made
    yield made
    dlpack.DEVICES["cuda"] = before
    runtime, library = made.runtime, made.library
    made.fault, runtime.sticky = None, 0  # a test may have let a kernel fail
    fompi.Communicator.of(None).engine.progress_while_waiting()  # it drops tokens of calls that have failed
    gc.collect()
    made.close()
    assert runtime.memory == {} and runtime.lives == {"event": set(), "stream": set()} and not runtime.opened
    assert not library._cublas.handles and not library.driver.loaded
