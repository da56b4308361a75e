"""Row-wise layers as Hugging Face's transformers makes them, with and without `fompi.torch.install()`."""

import copy
import sys
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fompi.torch
from fompi.torch import parallel, transformers

pytestmark = pytest.mark.ranks(mpich=[2, 3], openmpi=[])

NAME = "transformers.distributed.tensor_parallel"


class RowwiseParallel:
    """The style of transformers 5.24, as far as its inference goes."""

    input_layouts, output_layouts, use_local_output = Shard(-1), Replicate(), True

    def install_forward(self, module, mesh):
        def forward(x):
            y = x @ module.weight.to_local().t()
            dist.all_reduce(y, group=mesh.get_group())
            return y if module.bias is None else y + module.bias

        module.forward = forward
        return module


@pytest.fixture
def made(group, monkeypatch):
    """A function: (bias, dtype) -> a row-wise layer, the whole Linear that it is a part of, and its rows of x."""
    styles = types.ModuleType(NAME)
    styles.RowwiseParallel = type("RowwiseParallel", (RowwiseParallel,), {})
    monkeypatch.setitem(sys.modules, NAME, styles)
    transformers.fuse(styles, parallel.is_installed)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")

    def layer(bias, dtype=torch.float32, wide=True):
        torch.manual_seed(3)
        whole = torch.nn.Linear(12 * mesh.size(), 10, bias=bias, dtype=dtype)
        part = torch.nn.Linear(1, 1, bias=bias, dtype=dtype)
        part.weight = torch.nn.Parameter(
            distribute_tensor(whole.weight.detach(), mesh, [Shard(-1)], src_data_rank=None)
        )
        part.bias = whole.bias
        styles.RowwiseParallel().install_forward(part, mesh)
        if isinstance(part.forward, transformers.Rowwise):
            part.forward.has_wire = wide
        return part, whole

    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 300), (2, 150), (300,)])
def test_many_rows_are_fused(made, bias, shape):
    with fompi.torch.install(), torch.inference_mode():
        part, whole = made(bias)
        x = torch.randn(*shape, whole.in_features, generator=torch.Generator().manual_seed(1))
        rank, size = dist.get_rank(), dist.get_world_size()
        columns = x.chunk(size, -1)[rank].contiguous()
        before = fompi.torch.fused_calls().ran.get("matmul_all_reduce", 0)
        torch.testing.assert_close(part(columns), whole(x))
        assert fompi.torch.fused_calls().ran["matmul_all_reduce"] == before + 1


@pytest.mark.parametrize("why", ["few rows", "one host", "half", "training", "not installed"])
def test_what_gains_nothing_is_left_to_transformers(made, why):
    def run():
        part, whole = made(True, torch.bfloat16 if why == "half" else torch.float32, why != "one host")
        x = torch.ones(4 if why == "few rows" else 300, whole.in_features, dtype=whole.weight.dtype)
        columns = x.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()
        before = fompi.torch.fused_calls().ran
        with torch.inference_mode(why != "training"):
            y = part(columns)
        assert fompi.torch.fused_calls().ran == before
        np.testing.assert_allclose(y.detach().float().numpy(), whole(x).detach().float().numpy(), rtol=2e-2, atol=2e-2)

    if why == "not installed":
        run()
    else:
        with fompi.torch.install():
            run()


def test_a_module_without_such_a_class_is_left(group):
    other = types.ModuleType(NAME)
    transformers.fuse(other, parallel.is_installed)
    assert not hasattr(other, "RowwiseParallel")


class Llama(torch.nn.Module):
    """Attention and an MLP as transformers writes them: heads by -1, so a rank may have any number of them."""

    def __init__(self, heads=8, kv_heads=8, head_dim=2, hidden=6, columns=11, vocabulary=13):
        super().__init__()
        names = {**dict.fromkeys(("q", "k", "v", "gate", "up"), "colwise"), "o": "rowwise", "down": "rowwise"}
        self.tp_plan = {f"layers.*.{name}_proj": style for name, style in names.items()}
        self.tp_plan["lm_head"] = "colwise_gather_output"
        self.head_dim, self.groups = head_dim, heads // kv_heads
        widths = {"q": heads, "k": kv_heads, "v": kv_heads}
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.layers:
            for name, count in widths.items():
                layer.add_module(f"{name}_proj", torch.nn.Linear(hidden, count * head_dim, bias=False))
            layer.o_proj = torch.nn.Linear(heads * head_dim, hidden, bias=False)
            layer.gate_proj, layer.up_proj = (torch.nn.Linear(hidden, columns, bias=False) for _ in range(2))
            layer.down_proj = torch.nn.Linear(columns, hidden, bias=False)
        self.lm_head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x):
        for layer in self.layers:
            shape = (*x.shape[:-1], -1, self.head_dim)
            q, k, v = (p(x).view(shape).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
            k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))
            x = x + layer.down_proj(torch.nn.functional.silu(layer.gate_proj(x)) * layer.up_proj(x))
        return self.lm_head(x)


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_a_plan_by_shares(group, kv_heads):
    """8 key heads on 3 ranks, and a rank that has nothing: the numbers of one process."""
    size = dist.get_world_size()
    torch.manual_seed(6)
    whole, x = Llama(kv_heads=kv_heads), torch.randn(2, 5, 6)
    shares = {"heads": [6, 0, 2], "columns": [0, 7, 4]} if size == 3 else {"heads": [6, 2], "columns": [11, 0]}
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    dealt = fompi.torch.by_tp_plan(copy.deepcopy(whole), mesh, shares)
    assert dealt.layers[0].down_proj.weight.shape[1] == shares["columns"][dist.get_rank()]
    torch.testing.assert_close(dealt(x), whole(x))
    dealt(x).square().sum().backward()
    whole(x).square().sum().backward()
    torch.testing.assert_close(dealt.lm_head.weight.grad, whole.lm_head.weight.grad)
    full = fompi.torch.nn.full_state_dict(dealt)
    assert all(torch.equal(value, full[name]) for name, value in whole.state_dict().items())
