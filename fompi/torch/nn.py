"""Modules whose parameters are spread over ranks, on the strategies of `fompi.parallel`.

    up = fompi.torch.nn.ColumnParallelLinear(256, 1024, activation="gelu", comm=tp)
    down = fompi.torch.nn.RowParallelLinear(1024, 256, comm=tp)
    y = down(up(x))                                  # x and y: the rows of this rank

Each rank holds a part of each parameter, or all of it. The same seed gives the same full model on any number of ranks,
and for linear layers and embeddings the same numbers as `torch.nn.Linear` and `torch.nn.Embedding`. `state_dict()` has
the parts of this rank. `full_state_dict` and `load_full_state_dict` have the names and shapes of the unsharded model.

Every module takes `comm`, and `device` and `dtype` as those of torch. Creating one is collective. Wrong arguments are a
LayoutError, ShapeError, PlanError, DtypeError or TensorError. Other arguments or another random state than on other
ranks are a MismatchError.

Gradients are those of the sum of the losses of all ranks. A parameter of these modules that several ranks hold gets the
sum over its holders.

`shares=` says how much each rank gets, if ranks are not equally fast: what `fompi.balance` returns, or a number for
each rank (`fompi.parallel.shares`). A rank may get nothing. Without it all get as much, as evenly as possible. The full
model does not depend on it.

What a module sends has the keywords that its communicator carries (`Communicator.using`), or that the module is given:

    up = fompi.torch.nn.ColumnParallelLinear(256, 1024, comm=tp, order="ranks")     # comm=tp.using(order="ranks")

`wire` is the form in which messages carry elements (`fompi.base.wires`); sums over the holders of a parameter travel as
they are. `order` is that of the sums of linear layers, embeddings and norms: "ranks", or `fompi.Canonical(k)`, with the
same bits on any number of ranks (`examples/same_bits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import init

from fompi.base.errors import LayoutError, PlanError, ShapeError
from fompi.base.layout import offsets
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_reduce
from fompi.parallel import expert, tensor
from fompi.parallel.activations import check_activation
from fompi.parallel.arrays import leaves_of, order_on, same_bits
from fompi.parallel.attention import check_heads
from fompi.parallel.choices import check_choice
from fompi.parallel.heads import held_heads
from fompi.plans.tree import Canonical, folded
from fompi.torch.checkpoint import clip_grad_norm_, full_state_dict, load_full_state_dict, replicated
from fompi.torch.reshard import rebalance, reshard
from fompi.torch.sharded import PartLayout, Sharded, enter_module, fill_linear, runs_of

__all__ = [
    "AllReduceRMSNorm", "ColumnParallelLinear", "LayerNorm", "MoE", "ParallelAttention", "RMSNorm",
    "RowParallelLinear", "VocabParallelEmbedding", "clip_grad_norm_", "full_state_dict", "load_full_state_dict",
    "rebalance", "replicated", "reshard", "sum_gradients",
]  # fmt: skip

# ------------------------------------------------------------------------------------------------- linear layers


class ColumnParallelLinear(Sharded):
    """y = activation(all_gather(x) @ weight.T + bias)

    x: (rows of this rank, ..., in_features), Shard(0). y: (all rows, ..., out_features of this rank), Shard(-1). The
    out_features are dealt out by `shares` (columns). With `sequence_parallel=False` x is (all rows, ..., in_features),
    and its gradient is the term of this rank (`fompi.parallel.tensor.column_parallel_linear`).

    weight: (out_features of this rank, in_features), bias: (out_features of this rank,). The full ones are those of
    `torch.nn.Linear(in_features, out_features)`. activation: "none", "relu", "gelu", "silu", or "swiglu":
    silu(first half) * second half. Then y has out_features / 2, each rank a part of both halves.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "none",
        comm: Any = None,
        sequence_parallel: bool = True,
        **how: Any,
    ):
        sizes = {"in_features": in_features, "out_features": out_features}
        options = {"bias": bool(bias), "activation": activation, "sequence_parallel": sequence_parallel}

        def check(_: Communicator) -> None:
            check_activation(activation, out_features, "w")

        halves = 2 if activation == "swiglu" else 1
        deals = "columns", out_features, halves
        super().__init__(*enter_module("ColumnParallelLinear", comm, sizes, options, how, check, deals))
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.sequence_parallel = sequence_parallel
        runs = runs_of(self.counts, halves)
        full = PartLayout((out_features, in_features), 0, runs)
        _draw_linear(self, full, PartLayout((out_features,), 0, runs), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        how = options_of(self, "activation", "comm", "sequence_parallel")
        return tensor.column_parallel_linear(x, self.weight.T, self.bias, **how)


class RowParallelLinear(Sharded):
    """y = reduce_scatter(x @ weight.T, counts) + bias

    x: (all rows, ..., in_features of this rank), Shard(-1). y: (rows of this rank, ..., out_features), Shard(0). The
    in_features are dealt out by `shares` (columns), as the out_features of `ColumnParallelLinear`. `counts` is the
    number of rows that each rank keeps, by default as even as possible. With `sequence_parallel=False` y has all rows.
    With `reduce=False` y is the term of this rank, without a message, for `AllReduceRMSNorm`. There is no bias then.

    weight: (out_features, in_features of this rank). bias: (out_features,), the same on all ranks; its gradient is
    summed over them. The full ones are those of `torch.nn.Linear(in_features, out_features)`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Any = None,
        sequence_parallel: bool = True,
        reduce: bool = True,
        **how: Any,
    ):
        def check(comm: Communicator) -> None:
            if bias and not reduce:
                raise LayoutError("reduce=False leaves the sum to others, and a bias would be in it once per rank")
            if not reduce and leaves_of(comm):
                raise PlanError(
                    f"order={order_on(comm)}: with reduce=False the product is that of torch, without leaves"
                )

        sizes = {"in_features": in_features, "out_features": out_features}
        options = {"bias": bool(bias), "sequence_parallel": sequence_parallel} | ({} if reduce else {"reduce": False})
        deals = "columns", in_features, 1
        super().__init__(*enter_module("RowParallelLinear", comm, sizes, options, how, check, deals))
        self.reduce = bool(reduce)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        runs = runs_of(self.counts)
        _draw_linear(self, PartLayout((out_features, in_features), 1, runs), PartLayout((out_features,)), bias)

    def forward(self, x: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        if not self.reduce:
            return F.linear(x, self.weight)
        how = options_of(self, "comm", "sequence_parallel")
        return tensor.row_parallel_linear(x, self.weight.T, self.bias, counts=counts, **how)


def options_of(module: torch.nn.Module, *names: str) -> dict[str, Any]:
    """What a module keeps under these names: options of its strategy."""
    return {name: getattr(module, name) for name in names}


def _draw_linear(module: Sharded, weight: PartLayout, bias: PartLayout, has_bias: bool) -> None:
    """weight and bias, drawn as `torch.nn.Linear` does."""
    bound = 1 / sqrt(weight.shape[1])
    module.draw("weight", weight, fill_linear)
    if has_bias:
        module.draw("bias", bias, lambda full: init.uniform_(full, -bound, bound))
    else:
        module.register_parameter("bias", None)


# --------------------------------------------------------------------------------------------------------- norms


class _Summed(torch.autograd.Function):
    """The tensors themselves, once for each leaf of this rank, or once. Their gradients are summed over a communicator.

    Those of a dtype travel in one message.
    """

    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, order: str, copies: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm, ctx.order, ctx.copies = comm, order, copies
        return tuple(t.view_as(t) for _ in range(ctx.copies) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        count = len(gradients) // ctx.copies
        sums: list[torch.Tensor] = list(gradients[:count])
        how = {"schedule": same_bits(ctx.comm)} if ctx.order == "any" else {"order": ctx.order}
        for dtype in dict.fromkeys(g.dtype for g in sums):
            numbers = [i for i, g in enumerate(sums) if g.dtype == dtype]
            terms = [
                torch.cat([gradients[first + i].reshape(-1) for i in numbers])
                for first in range(0, len(gradients), count)
            ]
            if (canonical := Canonical.of(ctx.order)) is not None:  # half types are rounded once, at the end
                leaves = [term.to(torch.promote_types(dtype, torch.float32)) for term in terms]
                ends = offsets(canonical.subtrees(ctx.comm.size)[ctx.comm.rank])
                terms = [folded(leaves[a:b], torch.add) for a, b in pairwise(ends)]
            total = all_reduce(terms if len(terms) > 1 else terms[0], comm=ctx.comm, **how).to(dtype)
            for i, part in zip(numbers, total.split([sums[i].numel() for i in numbers]), strict=True):
                sums[i] = part.view_as(sums[i])
        return None, None, None, *sums


def sum_gradients(*tensors: torch.Tensor, comm: Any = None) -> tuple[torch.Tensor, ...]:
    """tensors, whose gradients are summed over the ranks of `comm` in the backward

    For parameters of your own modules that every rank holds, while it has some rows only: use what is returned in
    `forward`. All gradients of one dtype travel in one message. All ranks get the same bits, and must run the backward.

        def forward(self, x):
            (scale,) = sum_gradients(self.scale, comm=self.tp)
            return x * scale
    """
    group = Communicator.of(comm)
    return tensors if group.size == 1 else _Summed.apply(group, "any", 1, *tensors)


class _Norm(Sharded):
    """A norm over the features of each row, with parameters that every rank holds."""

    def __init__(self, features: int, options: dict[str, Any], names: Sequence[str], comm: Any, how: dict[str, Any]):
        super().__init__(*enter_module(type(self).__name__, comm, {"features": features}, options, how))
        self.features, self.eps = features, options["eps"]
        self._order, self._leaves = order_on(self.comm), leaves_of(self.comm)
        for name in names:
            self.draw(name, PartLayout((features,)), init.ones_ if name == "weight" else init.zeros_)

    def normed(self, x: torch.Tensor, norm: Callable[..., torch.Tensor]) -> torch.Tensor:
        """norm(x, the parameters), whose gradients are summed over the ranks; with leaves, leaf by leaf."""
        parameters, leaves = [getattr(self, name) for name in self.layouts], self._leaves
        if not leaves and self.comm.size == 1:
            return norm(x, *parameters)
        copies = _Summed.apply(self.comm.plain, self._order, leaves or 1, *parameters)
        if not leaves:
            return norm(x, *copies)
        if len(x) % leaves:
            raise ShapeError(
                f"order={self._order}: rank {self.comm.rank} has {leaves} leaves, which do not divide {len(x)} rows"
            )
        runs, count = x.split(len(x) // leaves) if len(x) else [x] * leaves, len(parameters)
        return torch.cat([norm(run, *copies[i * count : (i + 1) * count]) for i, run in enumerate(runs)])


class LayerNorm(_Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension

    x and y: (rows of this rank, ..., features). weight and bias: (features,), the same on all ranks, as those of
    `torch.nn.LayerNorm(features)`; their gradients are summed over the ranks of `comm`. order=Canonical(k) has k leaves
    of the rows of all ranks, of as many rows each.
    """

    def __init__(self, features: int, eps: float = 1e-5, bias: bool = True, *, comm: Any = None, **how: Any):
        names = ("weight", "bias") if bias else ("weight",)
        super().__init__(features, {"eps": eps, "bias": bool(bias)}, names, comm, how)
        if not bias:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x, lambda x, w, b=None: F.layer_norm(x, (self.features,), w, b, self.eps))


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x**2) + eps) * weight, over the last dimension

    Otherwise as `LayerNorm`; weight is that of `torch.nn.RMSNorm(features, eps)`.
    """

    def __init__(self, features: int, eps: float = 1e-6, *, comm: Any = None, **how: Any):
        super().__init__(features, {"eps": eps}, ("weight",), comm, how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x, lambda x, weight: F.rms_norm(x, (self.features,), weight, self.eps))


class AllReduceRMSNorm(_Norm):
    """r = residual + all_reduce(x); y = r / sqrt(mean(r**2) + eps) * weight, over the last dimension: (y, r)

        norm = AllReduceRMSNorm(features, comm=tp)
        down = RowParallelLinear(ffn, features, bias=False, reduce=False, comm=tp)
        y, r = norm(down(h), r)                          # the norm of one half of the rows hides the sum of the other

    x: (rows, ..., features), the term of this rank. residual and r: the same rows on all ranks, or with `sharded` those
    of this rank, Shard(0). y: all rows. weight: (features,), the same on all ranks; its gradient is summed over them.
    `order` is that of the sum (`fompi.parallel.tensor.all_reduce_rmsnorm`).
    """

    def __init__(self, features: int, eps: float = 1e-6, *, sharded: bool = False, comm: Any = None, **how: Any):
        super().__init__(features, {"eps": eps, "sharded": bool(sharded)}, ("weight",), comm, how)
        self.sharded = bool(sharded)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        how = options_of(self, "eps", "sharded", "comm")
        y, r = tensor.all_reduce_rmsnorm(x, residual, self.weight, **how)
        return y, r


# ----------------------------------------------------------------------------------------------------- attention


class ParallelAttention(Sharded):
    """q, k, v = all_gather(x) @ wq.T, wk.T, wv.T; y = reduce_scatter(softmax(q @ k.T * scale) @ v @ wo.T)

    x and y: (rows of this rank, ..., embed_dim), the tokens in order, Shard(0); dimensions between are a batch. The
    query heads are dealt out by `shares` (heads). A key/value head is on every rank that has one of its query heads;
    its gradient is summed over them. `forward(x, cu_seqlens)`: where packed sequences begin, and the end.

    q_proj.weight: (heads * head_dim, embed_dim), k_proj.weight and v_proj.weight: (kv_heads * head_dim, embed_dim),
    o_proj.weight: (embed_dim, heads * head_dim), each without bias: of these a rank holds the rows or columns of its
    heads. head_dim is embed_dim / heads by default, kv_heads is heads.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        causal: bool = False,
        scale: float | None = None,
        query_split: bool = True,
        comm: Any = None,
        **how: Any,
    ):
        keys = heads if kv_heads is None else kv_heads

        def check(_: Communicator) -> None:
            check_heads(heads, keys)
            if head_dim is None and embed_dim % heads:
                raise LayoutError(f"embed_dim={embed_dim} is no multiple of heads={heads}: pass head_dim=")

        sizes = {"embed_dim": embed_dim, "heads": heads, "kv_heads": keys}
        sizes |= {} if head_dim is None else {"head_dim": head_dim}
        options = {"causal": causal, "scale": scale, "query_split": query_split}
        super().__init__(*enter_module("ParallelAttention", comm, sizes, options, how, check, ("heads", heads, 1)))
        self.embed_dim, self.heads, self.kv_heads = embed_dim, heads, keys
        self.head_dim = d = embed_dim // heads if head_dim is None else head_dim
        self.causal, self.scale, self.query_split = causal, scale, query_split
        self.shares = self.counts if "shares" in self.arguments else None
        held = held_heads(self.comm.size, heads, keys, self.shares)
        q, kv = ([[range(part[i].start * d, part[i].stop * d)] for part in held] for i in (0, 1))
        layouts = {
            "q_proj": PartLayout((heads * d, embed_dim), 0, q),
            "k_proj": PartLayout((keys * d, embed_dim), 0, kv),
            "v_proj": PartLayout((keys * d, embed_dim), 0, kv),
            "o_proj": PartLayout((embed_dim, heads * d), 1, q),
        }
        for name, layout in layouts.items():
            self.add_module(name, self.weights(weight=layout))

    def forward(self, x: torch.Tensor, cu_seqlens: Any = None) -> torch.Tensor:
        weights = (getattr(self, f"{name}_proj").weight.T for name in "qkvo")
        how = options_of(self, "heads", "kv_heads", "comm", "causal", "scale", "query_split", "shares")
        return tensor.attention(x, *weights, cu_seqlens=cu_seqlens, **how)


# ---------------------------------------------------------------------------------------------------- vocabulary


class VocabParallelEmbedding(Sharded):
    """y = reduce_scatter(the full weight [tokens], counts)

    tokens: (all rows, ...), integers, the same on all ranks. y: (rows of this rank, ..., embedding_dim), Shard(0).
    `counts` is the number of rows that each rank keeps, by default as even as possible. With `sequence_parallel=False`
    y has all rows. weight: (num_embeddings of this rank, embedding_dim): the rows of `torch.nn.Embedding`, dealt out by
    `shares` (vocabulary).
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, comm: Any = None, sequence_parallel: bool = True, **how: Any
    ):
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        options = {"sequence_parallel": sequence_parallel}
        deals = "vocabulary", num_embeddings, 1
        super().__init__(*enter_module("VocabParallelEmbedding", comm, sizes, options, how, deals=deals))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel = sequence_parallel
        runs = runs_of(self.counts)
        self.draw("weight", PartLayout((num_embeddings, embedding_dim), 0, runs), init.normal_)

    def forward(self, tokens: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        how = options_of(self, "comm", "sequence_parallel")
        return tensor.vocab_parallel_embedding(tokens, self.weight, counts=counts, **how)


# ------------------------------------------------------------------------------------------------------- experts


class MoE(Sharded):
    """y[i] = sum(weight[i, e] * experts.w2[e] @ activation(experts.w1[e] @ x[i]) for e in the k best experts of x[i])

    x and y: (rows of this rank, ..., features). The weights are the softmax of x @ router.weight.T over all experts,
    divided by the sum of the k if `normalize`. `shared`: the width of an expert for all rows, whose result is added.
    `capacity_factor`, `policy` and `microbatches` are those of `fompi.parallel.expert.moe`.

    router.weight: (experts, features), on every rank. experts.w1: (experts of this rank, ffn, features), experts.w2:
    (experts of this rank, features, ffn): the experts are dealt out by `shares` (experts), each as two
    `torch.nn.Linear` without bias. shared.w1 and shared.w2: (shared, features) and (features, shared), on every rank.
    With "swiglu" w1 has 2 * ffn rows.

    After a forward, `tokens_per_expert` (a NumPy array) and `dropped` count the rows of all ranks: those that each
    expert has computed, and the choices that were dropped. Before it, they are None and 0.
    """

    def __init__(
        self,
        features: int,
        ffn: int,
        experts: int,
        k: int,
        *,
        shared: int | None = None,
        activation: str = "silu",
        normalize: bool = True,
        capacity_factor: float | None = None,
        policy: str = "probs",
        microbatches: int = 1,
        comm: Any = None,
        **how: Any,
    ):
        sizes = {"features": features, "ffn": ffn, "experts": experts, "k": k}
        sizes |= {} if shared is None else {"shared": shared}

        def check(_: Communicator) -> None:
            check_activation(activation)
            check_choice(experts, k, capacity_factor, policy)

        options = {"k": k, "activation": activation, "normalize": normalize}
        options |= {"capacity_factor": capacity_factor, "policy": policy, "microbatches": microbatches}
        super().__init__(*enter_module("MoE", comm, sizes, options, how, check, ("experts", experts, 1)))
        self.options = options | ({"shares": self.counts} if "shares" in self.arguments else {})
        self.features, self.ffn, self.num_experts = features, ffn, experts
        self.tokens_per_expert, self.dropped = None, 0
        wide = 2 if activation == "swiglu" else 1
        runs = runs_of(self.counts)
        self.router = self.weights(weight=PartLayout((experts, features)))
        w1 = PartLayout((experts, wide * ffn, features), 0, runs)
        self.experts = self.weights(w1=w1, w2=PartLayout((experts, features, ffn), 0, runs))
        self.shared: Sharded | None = None
        if shared is not None:
            w1, w2 = PartLayout((wide * shared, features)), PartLayout((features, shared))
            self.shared = self.weights(w1=w1, w2=w2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w1, w2 = (w.transpose(1, 2) for w in (self.experts.w1, self.experts.w2))
        shared = None if self.shared is None else (self.shared.w1.T, self.shared.w2.T)
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        moe = expert.moe if torch.compiler.is_compiling() else expert.moe.watched(self._note)
        y: torch.Tensor = moe(rows, self.router.weight.T, w1, w2, shared, comm=self.comm, **self.options)
        return y.reshape(x.shape) if x.dim() > 2 else y

    def _note(self, saved: Any) -> None:
        self.tokens_per_expert, self.dropped = saved.tokens_per_expert, saved.dropped
