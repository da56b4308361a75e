"""Strategies of parallel training, on the public operations and plans: arrays in, arrays out, of any framework.

| file | what it holds |
|---|---|
| `data` | data parallelism: buckets of gradients that leave during the backward, optimizers, ZeRO 1 to 3 |
| `outer` | outer steps: islands that train by themselves, and exchange parameters every few steps |
| `islands` | islands that come and go, of one process or of several ranks |
| `pipeline` | pipeline parallelism: the actions of each rank, and stages that run by them |
| `step` | a whole step as one plan, of layers that a program provides |
| `tensor` | tensor parallelism with sequence parallelism: linear layers, attention, vocabulary |
| `sequence` | long sequences: Ulysses, ring attention, and both together |
| `expert` | a layer of experts, and its parts for experts of the user |

What they have in common: `arrays` (tensors as arrays, and the agreement of the ranks before a strategy),
`differentiable` (a forward, a backward, and the adapters of torch and JAX), `section` (an error in one call ends all
calls of a strategy, on all ranks) and `interleave` (messages of one function travel while another one computes).

Every function has `f(...)`, `f.forward(...) -> (y, saved)` and `f.backward(saved, dy) -> gradients`.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a strategy at the first use of its name: `fompi.parallel.data`."""
    if name in ("data", "pipeline", "tensor", "sequence", "expert", "step", "outer", "shares"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
