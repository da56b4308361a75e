"""Steps of the optimizers of PyTorch, for FOMPI_REPORT and FOMPI_RECORD, of any program."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fompi.runtime.report import mark_update


def watch() -> None:
    """From now on `optimizer.step()` ends a step."""
    register_optimizer_step_post_hook(_end)


def _end(optimizer: Optimizer, args: Any, options: Any) -> None:
    mark_update(id(optimizer))
