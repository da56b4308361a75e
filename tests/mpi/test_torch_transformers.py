"""Row-wise layers as Hugging Face's transformers makes them, with and without `fompi.torch.install()`."""

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
