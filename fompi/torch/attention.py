"""torch's attention with its log-sum-exp, as a kernel of the strategies of sequences (`fompi.parallel.local`)."""

from __future__ import annotations

from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]

LSE_RUN = 32
"""On a GPU the log-sum-exps of this many queries lie in one run."""


def attention_of_torch(dtype: str, is_on_device: bool, is_square: bool) -> Any:
    """The kernel for tensors of `dtype`. None: torch has none. `is_square`: keys and values are equally wide."""
    if not is_square:
        return None
    if is_on_device:
        return None if dtype == "float64" else ON_GPUS
    return ON_HOST if dtype in ("float32", "float64") else IN_FLOAT32


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(tokens, heads, d) as (1, heads, tokens, d)."""
    return [t.transpose(0, 1)[None] for t in tensors]


def _tokens_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t[0].transpose(0, 1) for t in tensors]


def _expanded(q: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """A key head for each query head."""
    return [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in tensors]


def _folded(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradients of such heads, summed up for each head of `like`."""
    if gradient.shape == like.shape:
        return gradient
    return gradient.reshape(*like.shape[:2], -1, like.shape[2]).sum(2)


class AttentionOnHost:
    """`torch.nn.functional.scaled_dot_product_attention` on the CPU, by its two operators."""

    widens = False

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> Tensors:
        if self.widens:
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = _heads_first(q, *_expanded(q, k, v))
        o, lse = self.attended(q, k, v, _bias(mask, q), _is_causal(mask))
        return _blinded(o[0].transpose(0, 1), lse[0, :, : q.shape[2]].transpose(0, 1), mask)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
        mask: Any,
    ) -> Tensors:
        if self.widens:
            q, k, v, o, do = (t.float() for t in (q, k, v, o, do))
        given = _heads_first(do, q, *_expanded(q, k, v), o)
        lse = lse.nan_to_num(neginf=0.0).transpose(0, 1)[None].contiguous()  # such queries see nothing here either
        dq, dk, dv = _tokens_first(*self.gradients(given, lse, _bias(mask, q), _is_causal(mask)))
        return dq, _folded(dk, k), _folded(dv, v)

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, is_causal: bool) -> Tensors:
        """(o, lse), heads first."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        made: Tensors = flash(q, k, v, 0.0, is_causal, attn_mask=bias)
        return made

    def gradients(self, given: list[torch.Tensor], lse: torch.Tensor, bias: Any, is_causal: bool) -> Tensors:
        """(dq, dk, dv), heads first. given: (do, q, k, v, o)"""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        made: Tensors = flash(*given, lse, 0.0, is_causal, attn_mask=bias)
        return made


class AttentionInFloat32(AttentionOnHost):
    """`AttentionOnHost` for half types, which are widened: results of blocks are merged before they are rounded."""

    widens = True


class AttentionOnGpus(AttentionOnHost):
    """The memory-efficient kernel of torch for GPUs. It takes float32 and half types."""

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, is_causal: bool) -> Tensors:
        made: Tensors = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal)
        return made[:2]

    def gradients(self, given: list[torch.Tensor], lse: torch.Tensor, bias: Any, is_causal: bool) -> Tensors:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % LSE_RUN))
        (*first, o), none = given, torch.zeros((), dtype=torch.int64, device=lse.device)
        made: Tensors = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *first, bias, o, padded, none, none, 0.0, [True, True, True, False], is_causal
        )
        return made[:3]


ON_HOST, IN_FLOAT32, ON_GPUS = AttentionOnHost(), AttentionInFloat32(), AttentionOnGpus()


def _blinded(o: torch.Tensor, lse: torch.Tensor, mask: Any) -> Tensors:
    """The results, where queries that see no key have o = 0 and lse = -infinity."""
    if not isinstance(mask, torch.Tensor):
        return o, lse
    blind = ~mask.any(1)
    return o.masked_fill(blind[:, None, None], 0), lse.masked_fill(blind[:, None], float("-inf"))


def _is_causal(mask: Any) -> bool:
    return isinstance(mask, str)


def _bias(mask: Any, q: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores: -infinity where a query does not see a key."""
    if not isinstance(mask, torch.Tensor):
        return None
    seen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    return seen.masked_fill(~mask, float("-inf"))
