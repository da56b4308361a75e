"""Directories of torch.distributed.checkpoint, from other checkpoints: torch plans and writes them.

Reading them needs no torch: `fompi.parallel.torch_files`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
import torch.distributed.checkpoint as dcp

from fompi.parallel.arrays import Array
from fompi.parallel.stored import Checkpoint


class ReadWhenWritten(dcp.DefaultSavePlanner):
    """A planner for tensors of the device "meta": each is read when torch writes it, and dropped then."""

    def __init__(self, read: Callable[[str], Array]):
        super().__init__()
        self.read = read

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        if isinstance(found, torch.Tensor):
            return torch.from_numpy(self.read(index.fqn)).view(found.dtype)
        return found


def write(found: Checkpoint, read: Callable[[str], Array], directory: str, files: int) -> None:
    """Write the arrays and values of a checkpoint, for `dcp.load` on any number of ranks."""
    state: dict[str, Any] = dict(found.values)
    for name, stored in found.arrays.items():
        state[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
    writer = dcp.FileSystemWriter(directory, thread_count=files)
    with catch_warnings():
        simplefilter("ignore")  # torch warns of what no_dist asks for
        dcp.save(state, storage_writer=writer, planner=ReadWhenWritten(read), no_dist=True)
