"""The plug-in of vLLM: its groups on CPUs use the backend fompi, and between hosts prompts run in halves.

    VLLM_PLUGINS=fompi vllm serve MODEL --tensor-parallel-size 2

vLLM calls `register` in each of its processes, because it is an entry point `vllm.general_plugins`. It can cut a batch
in two ("microbatches"), but does so on GPUs only. Here its workers on CPUs do: what one half sums travels while the
other one computes (`fompi.interleave`).
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import Any

import torch


def register() -> None:
    """Let vLLM use fompi on the CPU, if VLLM_PLUGINS names it."""
    if "fompi" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        type(current_platform).dist_backend = "fompi"
        import_module("fompi.torch.private").after_import("vllm.v1.worker.cpu_model_runner", halve)


OFF = ("speculative_config", "lora_config", "kv_transfer_config", "is_multimodal_model", "has_inner_state")
"""What must be off in the configuration: there a half needs more than its tokens, and the keys before them."""


def halve(module: Any) -> None:
    """Let the model runner of `module` compute batches with many tokens in two halves, if this vLLM can cut them."""
    needs = ("_determine_batch_execution_and_padding", "_model_forward", "_allow_microbatching")
    if all(hasattr(module.CPUModelRunner, name) for name in needs):
        module.CPUModelRunner = in_halves(module.CPUModelRunner)


def is_for_halves(config: Any) -> bool:
    """True if a rank of this configuration of vLLM computes all layers of a decoder, for one group of ranks."""
    ranks, model = config.parallel_config, config.model_config
    is_alone = ranks.world_size == ranks.tensor_parallel_size and ranks.data_parallel_size == 1
    is_off = not any(getattr(each, name, None) for each in (config, model) for name in OFF)
    return is_alone and is_off and model.runner_type == "generate" and not model.is_encoder_decoder


def in_halves(base: type[Any]) -> type[Any]:
    """The model runner `base` of vLLM, which computes batches with many tokens in two halves."""
    contexts, group = import_module("vllm.forward_context"), import_module("vllm.distributed").get_tp_group
    interleave, communicator = import_module("fompi").interleave, import_module("fompi.torch.groups").communicator
    least = import_module("fompi.torch.transformers").LEAST_ROWS

    class HalvingRunner(base):
        def __init__(self, config: Any, *args: Any):
            super().__init__(config, *args)
            if is_for_halves(config) and communicator(group().device_group).network:
                self.parallel_config.ubatch_size = 2

        def _determine_batch_execution_and_padding(self, num_tokens: int, *args: Any, **given: Any) -> Any:
            mode, batch, _, *rest = super()._determine_batch_execution_and_padding(num_tokens, *args, **given)
            may = self.parallel_config.use_ubatching and given.get("allow_microbatching", True)
            has_requests = self.input_batch.num_reqs > 0  # else it warms up
            return mode, batch, may and has_requests and num_tokens >= least, *rest

        def _model_forward(self, **given: Any) -> Any:
            whole = contexts.get_forward_context()
            if whole.ubatch_slices is None:
                return super()._model_forward(**given)
            mine = threading.local()  # vLLM has one context for all threads: here it has other values in each

            def half(number: int) -> Any:
                rows, parts = whole.ubatch_slices[number].token_slice, ("attn_metadata", "slot_mapping")
                vars(mine).update(vars(whole) | {name: getattr(whole, name)[number] for name in parts})
                mine.ubatch_slices, mine.is_padding = None, None if whole.is_padding is None else whole.is_padding[rows]
                of_rows = {name: None if each is None else each[rows] for name, each in given.items()}
                return super(HalvingRunner, self)._model_forward(**of_rows)

            with contexts.override_forward_context(mine):
                return torch.cat(interleave(lambda: half(0), lambda: half(1)))

    return HalvingRunner
