"""fompi: a runtime on MPI that hides communication behind computation, for any array framework.

    y = fompi.all_gather_matmul(x, w, comm=tp)        # do it
    plan = fompi.plan(fompi.all_gather_matmul, ...)   # see what would be done: no MPI, no arrays
    step = fompi.bind(plan, comm=tp, x=x, w=w)        # bind it to addresses, call it often

MPI starts with the first Communicator or operation, not with the import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fompi.base.errors import (
    DriftWarning,
    DtypeError,
    FompiError,
    LaunchError,
    LayoutError,
    MismatchError,
    OverlapWarning,
    PeerError,
    PlanError,
    ShapeError,
    StateError,
    TensorError,
    WaitTimeout,
)
from fompi.base.layout import Partial, Replicate, Shard, Spec
from fompi.base.version import __version__ as __version__
from fompi.engine.communicator import Communicator, Mesh
from fompi.model.machine import Machine
from fompi.model.simulate import simulate
from fompi.ops.operation import HOOKS, Pending
from fompi.ops.operations import (
    all_gather,
    all_gather_matmul,
    all_gather_matmul_many,
    all_gather_matmul_weight_gradient,
    all_gather_weight_gradient,
    all_reduce,
    all_to_all,
    all_to_all_matmul,
    all_to_all_matmul_weight_gradient,
    all_to_all_weight_gradient,
    broadcast,
    explain,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
    plan,
    reduce_scatter,
)
from fompi.planner.explain import Explanation
from fompi.plans.plan import Plan
from fompi.plans.verify import verify
from fompi.runtime.alignment import gather_traces, read_clocks
from fompi.runtime.executor import Executor
from fompi.schedules.registry import schedule
from fompi.traces.proof import Needs, Proof, prove
from fompi.traces.timeline import timeline, timelines
from fompi.traces.trace import Trace
from fompi.tuning.adaptive import Adaptive, bind
from fompi.tuning.calibrate import calibrate

__all__ = [
    "Adaptive",
    "Communicator",
    "DriftWarning",
    "DtypeError",
    "Executor",
    "Explanation",
    "FompiError",
    "LaunchError",
    "LayoutError",
    "Machine",
    "Mesh",
    "MismatchError",
    "Needs",
    "OverlapWarning",
    "Partial",
    "PeerError",
    "Pending",
    "Plan",
    "PlanError",
    "Proof",
    "Replicate",
    "ShapeError",
    "Shard",
    "Spec",
    "StateError",
    "TensorError",
    "Trace",
    "WaitTimeout",
    "all_gather",
    "all_gather_matmul",
    "all_gather_matmul_many",
    "all_gather_matmul_weight_gradient",
    "all_gather_weight_gradient",
    "all_reduce",
    "all_to_all",
    "all_to_all_matmul",
    "all_to_all_matmul_weight_gradient",
    "all_to_all_weight_gradient",
    "bind",
    "calibrate",
    "broadcast",
    "gather_traces",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "explain",
    "plan",
    "prove",
    "read_clocks",
    "reduce_scatter",
    "schedule",
    "simulate",
    "timeline",
    "timelines",
    "verify",
]


def _differentiable(*call: Any) -> Any:
    """PyTorch is loaded by then: a tensor of its own requires grad."""
    return import_module("fompi.torch.autograd").differentiable(*call)


HOOKS.differentiable = _differentiable


def __getattr__(name: str) -> Any:
    """The adapters are loaded when they are first asked for."""
    if name in ("torch", "jax"):
        return import_module(f"fompi.{name}")
    raise AttributeError(f"module 'fompi' has no attribute {name!r}")
