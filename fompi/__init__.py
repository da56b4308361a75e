"""fompi hides communication behind computation: a runtime on MPI for NumPy, PyTorch and JAX.

It splits a collective into messages, and runs them between the pieces of the computation that needs or makes the data.

    # mpirun -n 4 python step.py
    import numpy as np
    import fompi

    comm = fompi.Communicator()                               # all ranks; starts MPI
    x = np.ones((128, 64), np.float32)                        # the rows of this rank
    w = np.ones((64, 96), np.float32)                         # the columns of this rank
    y = fompi.all_gather_matmul(x, w, comm=comm)              # all_gather(x) @ w, with overlap

There are three ways to use an operation:

    y = fompi.all_gather_matmul(x, w, comm=comm)              # 1. call it
    pending = fompi.all_gather_matmul.start(x, w, comm=comm)  #    or start it, and wait later
    y = pending.wait()
    step = fompi.all_gather_matmul.bind(x, w, comm=comm)      #    or agree once, and call it often
    y = step()

    S, Shard = fompi.Spec, fompi.Shard                        # 2. plan it: no MPI, no data
    rows, columns = S((512, 64), "float32", Shard(0)), S((64, 384), "float32", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, rows, columns, ranks=4)
    print(plan)                                               #    who sends what, and when
    print(fompi.simulate(plan, fompi.Machine.load("gigabit")))

    step = fompi.bind(plan, comm=comm, x=x, w=w)              # 3. bind it to memory, and call it often
    y = step()

- Operations: `help(fompi.all_gather_matmul)` gives shapes, layouts, dtypes and errors. `fompi.__all__` lists all names.
- PyTorch: tensors that require grad get gradients. JAX: use `fompi.jax.<operation>` in `jax.grad`.
- Command line: `python -m fompi` shows the installation, and what to try next.

`import fompi` does not start MPI. The first Communicator, or the first operation, starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fompi.backends.cuda import Device
from fompi.base.doors import DOORS
from fompi.base.errors import (
    ArgumentError,
    DeviceError,
    DriftWarning,
    DtypeError,
    FompiError,
    LaunchError,
    LayoutError,
    MismatchError,
    OverlapWarning,
    PackageError,
    PeerError,
    PlanError,
    RaceError,
    ShapeError,
    StateError,
    TensorError,
    WaitTimeout,
)
from fompi.base.layout import Partial, Replicate, Shard, Spec
from fompi.base.version import __version__ as __version__
from fompi.engine import frames
from fompi.engine.communicator import Communicator
from fompi.engine.mesh import Mesh
from fompi.engine.native import say_if_missing
from fompi.engine.stop import Stop
from fompi.model.machine import Machine
from fompi.model.simulate import simulate
from fompi.ops import operations
from fompi.ops.bound_call import BoundCall
from fompi.ops.messages import recv, send, sendrecv
from fompi.ops.operations import *  # noqa: F403
from fompi.ops.pending import Pending
from fompi.ops.replicated import sum_replicated
from fompi.planner.explain import Explanation
from fompi.plans.boxes import Box, Boxes
from fompi.plans.plan import Plan
from fompi.plans.staged import staged
from fompi.plans.tree import Canonical
from fompi.plans.verify import verify
from fompi.runtime.executor import Executor
from fompi.schedules.registry import schedule
from fompi.tensors.device_array import DeviceArray
from fompi.traces.proof import Proof
from fompi.traces.timeline import timeline
from fompi.traces.trace import Trace
from fompi.tuning.adaptive import Adaptive, bind

if TYPE_CHECKING:
    from fompi.parallel.checkpoints import load, save
    from fompi.parallel.interleave import interleave
    from fompi.parallel.opened import open_checkpoint
    from fompi.parallel.reshard import reshard
    from fompi.parallel.states import reshard_state
    from fompi.planner.balance import balance
    from fompi.planner.layout import layouts
    from fompi.planner.outer import outer_period
    from fompi.runtime.alignment import gather_traces
    from fompi.runtime.report import mark_step
    from fompi.tuning.calibrate import calibrate

__all__ = [
    # operations, and plan and explain
    *operations.__all__, "sum_replicated", "send", "recv", "sendrecv", "barrier",
    # planning: without MPI and data
    "layouts", "balance", "outer_period", "verify", "simulate", "schedule", "staged",
    # running: communicators, bound operations, measurements
    "Communicator", "Mesh", "Pending", "BoundCall", "Stop", "Device", "DeviceArray", "bind", "Executor",
    "Adaptive", "calibrate", "mark_step", "gather_traces", "timeline", "interleave", "reshard",
    "reshard_state", "save", "load", "open_checkpoint",
    # values
    "Spec", "Shard", "Replicate", "Partial", "Box", "Boxes", "Canonical", "Plan", "Machine", "Explanation", "Trace",
    "Proof",
    # errors and warnings
    "FompiError", "ShapeError", "LayoutError", "DtypeError", "TensorError", "ArgumentError", "DeviceError",
    "RaceError", "PlanError", "MismatchError", "PeerError", "WaitTimeout", "StateError", "LaunchError",
    "PackageError", "OverlapWarning", "DriftWarning",
]  # fmt: skip


def barrier(comm: Any = None) -> None:
    """Return when all ranks of `comm` have come here. Collective.

    Raises PeerError if a rank has left, MismatchError if one calls something else, WaitTimeout after FOMPI_TIMEOUT.
    """
    Communicator.of(comm).barrier()


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function that is imported when it is called: few programs need it, or its framework is optional."""
    return lambda *args: getattr(import_module(module), name)(*args)


def _prepare() -> None:
    """Prepare for torch.compile. It runs this function where it reads a call, as the mark below says, once."""
    DOORS.traced = import_module("fompi.torch.compile").traced


_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without torch


DOORS.bind, DOORS.prepare = BoundCall, _prepare
DOORS.measure = _late("fompi.tuning.autotune", "measured_schedule")
DOORS.machine = _late("fompi.tuning.calibrate", "measured")
DOORS.differentiable = _late("fompi.torch.autograd", "differentiable")
DOORS.strategy_of_torch = _late("fompi.torch.autograd", "attached")
DOORS.modes_of_torch = _late("fompi.torch.private", "modes")
DOORS.modes_of_jax = _late("fompi.jax.private", "modes")
DOORS.attention_of_torch = _late("fompi.torch.attention", "attention_of_torch")
DOORS.strategy_of_jax = _late("fompi.jax.strategies", "differentiable")
DOORS.parts_of_torch = _late("fompi.torch.checkpoint", "parts_of")
DOORS.products = _late("fompi.torch.products", "bound")
DOORS.comm = lambda: import_module("fompi.ops.intracomm").Comm
DOORS.report = _late("fompi.runtime.report", "of_environment")
DOORS.communicator_of_torch = _late("fompi.torch.groups", "communicator")
DOORS.store_of_torchrun = _late("fompi.torch.store", "of_torchrun")
DOORS.tcp_store = _late("fompi.torch.store", "at_tcp")
frames.install()
say_if_missing()


_PACKAGES = ("torch", "jax", "parallel", "members", "islands", "plans", "model", "planner", "traces")
"""Packages with names that the documents use, besides the names of this module."""


_LATE = {
    "layouts": "fompi.planner.layout",
    "balance": "fompi.planner.balance",
    "outer_period": "fompi.planner.outer",
    "gather_traces": "fompi.runtime.alignment",
    "calibrate": "fompi.tuning.calibrate",
    "mark_step": "fompi.runtime.report",
    "reshard": "fompi.parallel.reshard",
    "reshard_state": "fompi.parallel.states",
    "save": "fompi.parallel.checkpoints",
    "load": "fompi.parallel.checkpoints",
    "open_checkpoint": "fompi.parallel.opened",
    "interleave": "fompi.parallel.interleave",
}
"""The modules of names that few programs use."""


def __dir__() -> list[str]:
    """The public names and packages. Others are details."""
    return [*__all__, *_PACKAGES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import what few programs use at the first use of its name: some functions, and some packages."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    if name in ("torch", "jax", "parallel", "members"):
        return import_module(f"fompi.{name}")
    if name == "islands":
        return import_module("fompi.parallel.islands")
    raise AttributeError(f"module 'fompi' has no attribute {name!r}")
