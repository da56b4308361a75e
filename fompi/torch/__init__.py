"""PyTorch: an operation on tensors that require grad becomes a node of the autograd graph.

- `nn`: modules whose parameters are spread over ranks, on the strategies of `fompi.parallel`.
- `data_parallel`: `fompi.torch.DistributedDataParallel`, gradients that leave in the backward.
- `zero`: `fompi.torch.ZeroDataParallel`, the same with shards of the state of the optimizer.
- `outer`: `fompi.torch.DiLoCo` and `LocalSGD`, islands that communicate seldom.
- `pipeline`: `fompi.torch.Pipeline`, whose stages are modules.
- `whole_step`: `fompi.torch.TrainingStep`, whose layers are modules.
- `autograd`: the node. `fompi.<operation>(...)` and a strategy call it by themselves.
- `operators`: operations and strategies as operators of torch, for `torch.compile` and `fompi.torch.<operation>`.
- `shapes`: the shapes of their results, before the ranks meet.
- `compile`: what `torch.compile` must not read, and which calls are graph breaks.
- `parallel`: `fompi.torch.install`, fused operations for the tensor parallelism of torch.
- `fully_sharded`: `fompi.torch.overlap`, FSDP2 whose communication runs behind the backward.
- `products`: products on host memory by torch's kernels.
- `transformers`: prompts in halves, in models that Hugging Face's transformers spreads.
- `vllm`: the plug-in of vLLM, with prompts in halves.
- `comm_hook`: `fompi.torch.wire`, smaller gradients for torch's DistributedDataParallel.
- `memory`: the elements of tensors in one row.
- `groups`: the Communicator of a ProcessGroup or DeviceMesh.
- `swap`: groups of other backends run on fompi (`python -m fompi.torch`).
- `process_group`: the backend "fompi" of `torch.distributed`. The import of this room registers it (`autoload`).

This room may import the package torch, and all rooms from `base` to `parallel`. Only this room and `bench` import
torch.
"""

from importlib import import_module
from typing import Any

from fompi.base.extras import need

need("torch")

from fompi.torch.autoload import register  # noqa: E402


def __getattr__(name: str) -> Any:
    """Import the other names at their first use."""
    if name == "nn":
        return import_module("fompi.torch.nn")
    if name == "DistributedDataParallel":
        return import_module("fompi.torch.data_parallel").DistributedDataParallel
    if name == "ZeroDataParallel":
        return import_module("fompi.torch.zero").ZeroDataParallel
    styles = "ColwiseParallel", "RowwiseParallel", "PrepareModuleInput"
    if name in (*styles, "install", "uninstall", "fused_calls", "by_tp_plan"):
        return getattr(import_module("fompi.torch.parallel"), name)
    if name == "overlap":
        return import_module("fompi.torch.fully_sharded").overlap
    if name == "ordered":
        return import_module("fompi.torch.groups").ordered
    if name == "wire":
        return import_module("fompi.torch.comm_hook").wire
    if name in ("DiLoCo", "LocalSGD"):
        return getattr(import_module("fompi.torch.outer"), name)
    if name == "Pipeline":
        return import_module("fompi.torch.pipeline").Pipeline
    if name == "TrainingStep":
        return import_module("fompi.torch.whole_step").TrainingStep
    if name in ("communicator", "replicated_matmul", *import_module("fompi").__all__):
        operators = import_module("fompi.torch.operators")
        if name in operators.PUBLIC:
            return operators.PUBLIC[name]
    gone = "fompi.torch.fused_compile is gone: fompi.torch.install() fuses the same products"
    raise AttributeError(gone if name == "fused_compile" else f"module {__name__!r} has no attribute {name!r}")


register()
