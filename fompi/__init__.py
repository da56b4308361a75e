"""fompi: a runtime on MPI that hides communication behind computation, for any array framework.

    y = fompi.all_gather_matmul(x, w, comm=tp)        # do it
    plan = fompi.plan(fompi.all_gather_matmul, ...)   # see what would be done: no MPI, no arrays
    step = fompi.bind(plan, comm=tp, x=x, w=w)        # bind it to addresses, call it often

MPI starts with the first Communicator or operation, not with the import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fompi.adaptive import Adaptive, bind
from fompi.alignment import gather_traces, read_clocks
from fompi.calibrate import calibrate
from fompi.call import Pending
from fompi.communicator import Communicator, Mesh
from fompi.errors import (
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
from fompi.executor import Executor
from fompi.explain import Explanation
from fompi.layout import Partial, Replicate, Shard, Spec
from fompi.machine import Machine
from fompi.ops import (
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
from fompi.plan import Plan
from fompi.proof import Needs, Proof, prove
from fompi.schedules import schedule
from fompi.simulate import simulate
from fompi.timeline import timeline, timelines
from fompi.trace import Trace
from fompi.verify import verify
from fompi.version import __version__ as __version__

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


def __getattr__(name: str) -> Any:
    """The adapters are loaded when they are first asked for."""
    if name in ("torch", "jax"):
        return import_module(f"fompi.{name}")
    raise AttributeError(f"module 'fompi' has no attribute {name!r}")
