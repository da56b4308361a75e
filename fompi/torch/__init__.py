"""PyTorch: an operation on tensors that require grad becomes a node of the autograd graph.

- `nn`: modules whose parameters are spread over ranks, on the strategies of `fompi.parallel`.
- `data_parallel`: `fompi.torch.DistributedDataParallel` and `ZeroDataParallel`, gradients that leave in the backward.
- `pipeline`: `fompi.torch.Pipeline`, whose stages are modules.
- `autograd`: the node. `fompi.<operation>(...)` calls it by itself.
- `compile`: what `torch.compile` must not read.
- `strategies`: a strategy of `fompi.parallel` as a node.
- `process_group`: the backend "fompi" of `torch.distributed`. The import of this room registers it (`autoload`).

This room may import the package torch, and all rooms from `base` to `parallel`. Only this room and `bench` import
torch.
"""

from importlib import import_module
from typing import Any

from fompi.torch.autoload import register


def __getattr__(name: str) -> Any:
    """Import `nn` and the names of `data_parallel` and `pipeline` at their first use."""
    if name == "nn":
        return import_module("fompi.torch.nn")
    if name in ("DistributedDataParallel", "ZeroDataParallel"):
        return getattr(import_module("fompi.torch.data_parallel"), name)
    if name == "Pipeline":
        return import_module("fompi.torch.pipeline").Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
