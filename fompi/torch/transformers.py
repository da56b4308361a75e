"""Prompts in two halves, in models that Hugging Face's transformers spreads over ranks.

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=...)      # its tensor parallelism

Each layer sums two products over the ranks. A prompt is computed as two halves of its tokens that alternate
(`fompi.interleave`): what one half sums travels while the other one computes. The first half is always one product
ahead, so the second one finds its keys and values in the cache.

This is so between hosts, under `python -m fompi.torch` and `fompi.torch.install()`. What would gain nothing runs whole:
few tokens, training. So does what is no plain decoder: sliding windows, masks and outputs of other kinds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from fompi.parallel.interleave import give_way, interleave
from fompi.torch.groups import communicator
from fompi.torch.process_group import on_device

SPREAD = "apply_tensor_parallelism"
"""The function of transformers that spreads a model over the ranks of a mesh."""

LEAST_ROWS = 256
"""With fewer rows the products of a half are too short to hide anything."""

OF_TOKENS = ("input_ids", "inputs_embeds", "position_ids")
"""The arguments of a decoder with a row for each token of each sequence."""

OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""With one of these in its configuration a decoder returns more than the hidden states behind its last layer."""


def halve(styles: Any, is_on: Callable[[], bool]) -> None:
    """Let models that the module `styles` spreads while `is_on()` compute prompts in halves."""
    original = getattr(styles, SPREAD, None)
    if original is None:
        return

    def spread(model: Any, mesh: Any, *plan: Any, **options: Any) -> Any:
        model = original(model, mesh, *plan, **options)
        base, group = model.base_model, mesh.get_group()
        if is_on() and on_device(group, "cpu") is not None and not isinstance(base.forward, PromptInHalves):
            base.forward = PromptInHalves(base, communicator(group).network)
        return model

    for module in [m for name, m in sys.modules.items() if name.startswith("transformers.distributed")]:
        if vars(module).get(SPREAD) is original:
            setattr(module, SPREAD, spread)


class PromptInHalves:
    """The forward of `decoder`, which computes a prompt in two halves if there is a wire between its ranks."""

    def __init__(self, decoder: Any, has_wire: bool):
        self.theirs, self.config, self.has_wire = decoder.forward, decoder.config, has_wire
        self.cache = "cache" if "cache" in signature(self.theirs).parameters else "past_key_values"  # before 5.24

    def __call__(self, *args: Any, **given: Any) -> Any:
        cache = None if args or not self.has_wire or torch.compiler.is_compiling() else self.cache_of(given)
        if cache is None:
            return self.theirs(*args, **given)
        rows = {name: given[name] for name in OF_TOKENS if given.get(name) is not None}
        before, end = cache.get_seq_length(), next(iter(rows.values())).shape[1]
        middle, mask = end // 2, given.get("attention_mask")

        def of_tokens(begin: int, end: int) -> Any:
            part = {name: each[:, begin:end] for name, each in rows.items()}
            part["attention_mask"] = None if mask is None else mask[:, : before + end]
            return self.theirs(**part, **{self.cache: cache}, use_cache=True)

        def second() -> Any:
            if cache.get_seq_length() == before:  # the first half waits for its embedding, and has no keys yet
                give_way()
            return of_tokens(middle, end)

        one, two = interleave(lambda: of_tokens(0, middle), second)
        two.last_hidden_state = torch.cat([one.last_hidden_state, two.last_hidden_state], 1)
        return two

    def cache_of(self, given: dict[str, Any]) -> Any:
        """The cache of a prompt to be halved. None: it runs whole."""
        known = (*OF_TOKENS, "attention_mask", "use_cache", self.cache)
        others = [name for name, value in given.items() if name not in known and value is not None]
        x = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if others or x is None or x.shape[1] < 2 or x.shape[0] * x.shape[1] < LEAST_ROWS:
            return None
        two = [each for name in ("attention_mask", "position_ids") if (each := given.get(name)) is not None]
        if not all(isinstance(each, torch.Tensor) and each.dim() == 2 for each in two):
            return None
        if torch.is_grad_enabled() or any(getattr(self.config, name, False) for name in OUTPUTS):
            return None
        kinds: Any = import_module("transformers.cache_utils")
        cache: Any = given.get(self.cache)
        is_plain = type(cache) is kinds.DynamicCache
        return cache if is_plain and {*map(type, cache.layers)} <= {kinds.DynamicLayer} else None
