"""The names of torch that are not public, and that the backend "fompi" needs. Checked on torch 2.13.

Other files of fompi use these names through this one. `missing` says what a version of torch has changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

CHECKED = ("2.13",)
"""The versions of torch with which the backend has been tested."""

NAMES: tuple[tuple[str, Any, str], ...] = (
    ("torch._C._distributed_c10d.Work", c10d, "Work"),
    ("torch._C._distributed_c10d.Store", c10d, "Store"),
    ("torch.distributed.DistBackendError", dist, "DistBackendError"),
    (
        "torch.distributed.rendezvous._rendezvous_handlers",
        sys.modules["torch.distributed.rendezvous"],
        "_rendezvous_handlers",
    ),
)
"""In words, and where: what must exist."""

WORK: Any = c10d.Work
"""What a backend returns for a call in flight. `torch.distributed.Work` is the same class."""

ALIASES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods of a ProcessGroup: the name in torch 2.13, and that in 2.6 to 2.12."""


def missing() -> list[str]:
    """The names that this version of torch does not have. "env://" must also have a handler."""
    lost = [f"{words} is gone" for words, place, name in NAMES if not hasattr(place, name)]
    return lost or ([] if "env" in _handlers() else ["_rendezvous_handlers has no handler of env:// any more"])


def _handlers() -> dict[str, Callable[..., Any]]:
    handlers: dict[str, Callable[..., Any]] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    return handlers


def extend_env_method(meet: Callable[..., Any]) -> None:
    """Let `env://`, the default init method, use `meet` where torch would raise an error: without MASTER_ADDR."""
    handlers = _handlers()
    known = handlers["env"]

    def env(url: str, **options: Any) -> Any:
        return (known if "MASTER_ADDR" in os.environ else meet)(url, **options)

    handlers["env"] = env
