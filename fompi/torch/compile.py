"""torch.compile leaves the operations alone: a call is a graph break, and the compiler does not read fompi's code.

Programs do not call this file. An operation calls `hide` when the compiler reads it for the first time.
"""

from __future__ import annotations

import torch

from fompi.engine.communicator import Communicator
from fompi.ops.messages import Transfer
from fompi.ops.operation import Operation
from fompi.ops.pending import Pending
from fompi.runtime.executor import Executor
from fompi.tuning.adaptive import Adaptive

HIDDEN = (
    (Operation, ("__call__", "start")),
    (Pending, ("done", "wait")),
    (Transfer, ("done", "wait")),
    (Communicator, ("agree", "barrier")),
    (Executor, ("__call__", "start", "wait")),
    (Adaptive, ("__call__", "start", "wait")),
)
"""The methods that communicate, and that a compiled function may call."""


def hide() -> None:
    """From now on, torch.compile runs the methods of HIDDEN, and reads neither them nor what they call."""
    for owner, names in HIDDEN:
        for name in names:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name), reason="fompi communicates"))
