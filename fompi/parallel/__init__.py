"""Strategies of parallel training, on the public operations and plans: arrays in, arrays out, of any framework.

| file | what it holds |
|---|---|
| `data` | data parallelism: buckets of gradients that leave during the backward, optimizers, ZeRO 1 to 3 |
| `pipeline` | pipeline parallelism: the actions of each rank, and stages that run by them |
| `action_files` | the files of actions that torch writes: are they right? |
| `leaves` | gradients that are added in a tree over micro-batches; sums that no order changes |
| `step` | a whole step as one plan, of layers that a program provides |
| `step_plan`, `step_problem` | this plan: gathers, stages, layers with their messages, sums, updates; what is right |
| `stages`, `planned` | what both plans have in common: who writes them, and how they run and end |
| `tensor` | tensor parallelism with sequence parallelism: linear layers, attention, vocabulary |
| `linear`, `vocabulary` | its layers but attention; `tensor` has them too |
| `sequence` | long sequences: Ulysses, ring attention, and both together, on the shardings of `sharding` |
| `expert` | a layer of experts; `choices`: who chooses which expert; `exchange`: rows that travel |
| `route` | the parts of such a layer, for experts of the user; `expert` has them too |
| `heads`, `ulysses`, `ring` | tokens for heads; the attention of a slice of heads; keys and values that go round |
| `differentiable` | what they have in common: a forward, a backward, and the adapters of torch and JAX |
| `local` | the attention of a rank, by NumPy's functions, torch or a kernel of the user |
| `attention` | attention of some queries over some keys, in tiles, on one rank |
| `activations` | activations and their derivatives |
| `repeated` | a call that a wrapper makes in every step: bound if it is small |
| `interleave` | functions that alternate: the messages of one travel while another one computes |
| `section` | calls that belong together: an error in one ends all of them, on all ranks |
| `arrays` | tensors as arrays, and the agreement of the ranks before a strategy |

Every function has `f(...)`, `f.forward(...) -> (y, saved)` and `f.backward(saved, dy) -> gradients`.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a strategy at the first use of its name: `fompi.parallel.data`."""
    if name in ("data", "pipeline", "tensor", "sequence", "expert", "step"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
