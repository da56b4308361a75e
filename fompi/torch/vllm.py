"""The plug-in of vLLM: its groups on CPUs use the backend fompi.

    VLLM_PLUGINS=fompi vllm serve MODEL --tensor-parallel-size 2

vLLM calls `register` in each of its processes, because it is an entry point `vllm.general_plugins`.
"""

from __future__ import annotations

import os


def register() -> None:
    """Let vLLM make its groups of processes by fompi, if VLLM_PLUGINS names it and the platform is the CPU."""
    if "fompi" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        type(current_platform).dist_backend = "fompi"
