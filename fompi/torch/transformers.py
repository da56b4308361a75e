"""The row-wise layers of Hugging Face's transformers with a fused operation, behind `fompi.torch.install()`.

    fompi.torch.install()
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=...)      # its tensor parallelism

Such a layer sums its product over the ranks: `linear`, then `all_reduce`. Between hosts both are one operation,
`matmul_all_reduce`, whose messages move while the next rows are computed. What would gain nothing stays as it is: few
rows (a token is one), ranks on one host, half types (their products would travel in float32), training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fompi.torch.groups import communicator
from fompi.torch.operators import node
from fompi.torch.process_group import on_device

LEAST_ROWS = 256
"""With fewer rows a product is too short to hide anything."""


def fuse(styles: Any, is_installed: Callable[[], bool]) -> None:
    """Let row-wise layers that the module `styles` makes while `install` is in force run fused."""
    row = getattr(styles, "RowwiseParallel", None)
    if row is None or not hasattr(row, "install_forward"):
        return
    original = row.install_forward

    def install_forward(style: Any, module: torch.nn.Module, mesh: Any) -> Any:
        installed = original(style, module, mesh)
        layouts = [getattr(style, name, None) for name in ("input_layouts", "output_layouts", "use_local_output")]
        is_plain = type(style) is row and type(module) is torch.nn.Linear and mesh.ndim == 1 and is_installed()
        if is_plain and layouts == [Shard(-1), Replicate(), True] and on_device(mesh.get_group(), "cpu") is not None:
            module.forward = Rowwise(module, module.forward, mesh.get_group())
        return installed

    row.install_forward = install_forward


class Rowwise:
    """The forward of a row-wise Linear. `theirs` is that of transformers."""

    def __init__(self, module: torch.nn.Module, theirs: Any, group: Any):
        self.module, self.theirs, self.group = module, theirs, group.group_name
        self.has_wire = communicator(group).network

    def __call__(self, x: Any) -> Any:
        w, bias, rows = self.module.weight, self.module.bias, x.shape[:-1]
        is_local = not isinstance(x, DTensor) and isinstance(w, DTensor)
        if (
            not (self.has_wire and is_local and rows.numel() >= LEAST_ROWS)
            or x.dtype in (torch.bfloat16, torch.float16)
            or torch.is_grad_enabled()
        ):
            return self.theirs(x)
        b = bias.to_local() if isinstance(bias, DTensor) else bias
        given = {"x": x.flatten(0, -2), "w": w.to_local().t(), "bias": b, "comm": self.group}
        y: torch.Tensor = node("matmul_all_reduce", {**given, "gradient": "sum", "words": ""})
        return y.unflatten(0, rows)
