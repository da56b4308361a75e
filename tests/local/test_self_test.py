"""The child process that tries whether MPI takes addresses of a device."""

from __future__ import annotations

import os

import pytest

from fompi.mpi import self_test


def test_a_library_that_does_not_know_the_device():
    """The host cannot read the memory of the software device: a crash becomes a sentence, and this process goes on."""
    reason = self_test.failure("software")
    assert "SIGSEGV" in reason or "Bad address" in reason or "signal 11" in reason, reason


def test_memory_that_the_library_takes(monkeypatch):
    """The same child on memory that the host can read."""
    monkeypatch.setattr(
        self_test,
        "_CHILD",
        self_test._CHILD.replace("a.ptr", "__import__('fompi').backends.cuda.software.seen(a).ctypes.data"),
    )
    assert self_test.failure("software") == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit(3)", "a message of its memory arrived with other bytes"),
        ("raise ValueError('boom')", "a message of its memory failed: ValueError: boom"),
        ("import os; os._exit(9)", "a message of its memory failed: it gave no reason"),
        ("import time; time.sleep(60)", "a message of its memory was not there after 0.5 s"),
    ],
)
def test_what_can_go_wrong(monkeypatch, code, reason):
    monkeypatch.setattr(self_test, "_CHILD", code)
    assert self_test.failure("software", seconds=0.5 if "sleep" in code else 30) == reason


def test_a_device_that_is_not_there():
    assert "there is no device 'tpu'" in self_test.failure("tpu")


def test_the_child_is_a_job_of_its_own(monkeypatch):
    """It must not speak in the name of this rank."""
    names = "PMI_RANK OMPI_COMM_WORLD_RANK PMIX_RANK SLURM_PROCID"
    code = f"import os, sys; sys.exit(3 if set(os.environ) & set({names!r}.split()) else 0)"
    monkeypatch.setattr(self_test, "_CHILD", code)
    given = {**os.environ, **dict.fromkeys(names.split(), "1")}
    assert self_test.failure("software", given) == ""


@pytest.mark.parametrize(
    ("choice", "claims", "reason", "aware"),
    [
        ("0", True, "", False),
        ("1", False, "it crashed", True),  # the user knows better
        ("auto", False, "", False),
        ("auto", True, "", True),
        ("auto", True, "it crashed", False),
    ],
)
def test_a_claim_is_tried(monkeypatch, choice, claims, reason, aware):
    from fompi.mpi import transport
    from fompi.runtime import default_device

    monkeypatch.setenv("FOMPI_GPU_AWARE", choice)
    monkeypatch.setattr(self_test, "failure_once", lambda kind: reason)
    if choice == "auto":
        monkeypatch.setattr(transport, "gpu_awareness", lambda choice: transport.GpuAwareness(claims, "a query"))
    if claims and reason:
        with pytest.warns(UserWarning, match=r"claims to take memory of GPUs \(a query\), but it crashed"):
            assert default_device._is_gpu_aware() is aware
    else:
        assert default_device._is_gpu_aware() is aware
