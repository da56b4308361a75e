"""torch.compile: a call of an operation or a strategy is a node of its graph. All else that communicates is left alone.

Programs do not call this file. An operation and a strategy call `traced` where the compiler reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fompi.engine.communicator import Communicator
from fompi.ops.messages import Transfer
from fompi.ops.operation import Operation
from fompi.ops.pending import Pending
from fompi.parallel import interleave
from fompi.runtime.executor import Executor
from fompi.torch.operators import PUBLIC, of_call
from fompi.tuning.adaptive import Adaptive

HIDDEN: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (Operation, ("start",)),
    (Pending, ("done", "wait")),
    (Transfer, ("done", "wait")),
    (Communicator, ("agree", "barrier")),
    (Executor, ("__call__", "start", "wait")),
    (Adaptive, ("__call__", "start", "wait")),
    (interleave, ("run_interleaved",)),
)
"""What communicates, and a compiled function may call. torch.compile reads neither them nor what they
call: a call is a graph break.
"""


def _eager(
    f: Any, args: Sequence[Any], options: dict[str, Any], gradient: str | None = None, arriving: Any = None
) -> Any:
    if gradient is None:
        return f(*args, **options)
    return PUBLIC[f.__name__](*args, gradient=gradient, arriving=arriving, **options)


OUTSIDE: dict[str, Callable[..., Any]] = {
    reason: torch.compiler.disable(_eager, reason=f"fompi communicates: {why}")
    for reason, why in {
        "unknown": "the compiler cannot know what fompi.send and fompi.recv bring; fompi.sendrecv is a node",
        "route": "only the other ranks know the rows that come; fompi.parallel.expert.moe is a node",
        "out": "out= is written by the call; leave it out",
        "counts": "only the other ranks know how many rows the counts= of an all-to-all bring; leave counts= out if "
        "all are equal, or use fompi.torch.<operation>(..., counts=..., arriving=[the rows from each rank])",
        "experts": "rows that go to experts take no gradient='replicated' and no arriving=",
        "value": "an option is a tensor: pass a Python value",
        "tensor": "all tensors must be torch tensors",
        "old": "torch before 2.12 cannot read a fompi.Communicator: use fompi.torch.<operation>(..., comm=a group of "
        "torch)",
        "comm": "comm= must be a fompi.Communicator: use fompi.torch.communicator(group)",
        "certify": "the error of certify=True is a number of the program",
        "wrong": "these arguments are refused",
    }.items()
}
"""The calls that the compiler does not take into its graph, by the reason that it reports: graph breaks."""


def traced(
    f: Any, args: Sequence[Any], options: dict[str, Any], gradient: str | None = None, arriving: Any = None
) -> Any:
    """What a call of an operation or a strategy is in the graph. With a gradient: one of `fompi.torch.<operation>`.

    The compiler reads this function.
    """
    result, reason = of_call(f, args, options, gradient, arriving)
    return result if reason is None else OUTSIDE[reason](f, args, options, gradient, arriving)


for _owner, _names in HIDDEN:
    for _name in _names:
        setattr(_owner, _name, torch.compiler.disable(getattr(_owner, _name), reason="fompi communicates"))
