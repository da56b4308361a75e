"""`fompi.torch.fused_compile`: torch's own pass fuses products with collectives, and fompi carries them out.

The pass runs on the graph of torch.compile without inductor's code for kernels, whose compilation takes minutes. The
test marked `soak` has all of it.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fompi.torch
from fompi.base.errors import LaunchError, LayoutError

pytestmark = pytest.mark.one_mpi


@pytest.fixture(scope="module", autouse=True)
def group():
    torch.set_num_threads(1)
    dist.init_process_group("fompi")
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(group):
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Block(nn.Module):
    def __init__(self, width=8, hidden=24):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden, bias=False)
        self.gate, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.gelu(self.up(x)) * self.gate(x))


def fused_graph(graph, _):
    """A backend of torch.compile: the pass, and then the graph as it is."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import config
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    def compiled(graph, _):
        assert config._micro_pipeline_tp
        view_to_reshape(graph)
        micro_pipeline_tp_pass(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiled)(graph, _)


def sharded(mesh, dim):
    """A block, its parallel form, and the input of all ranks."""
    size, rows = mesh.size(), Shard(dim)
    torch.manual_seed(5)
    block = Block(hidden=12 * size)
    plan = {
        "norm": SequenceParallel(sequence_dim=dim),
        **dict.fromkeys(("up", "gate"), ColwiseParallel(input_layouts=rows)),
        "down": RowwiseParallel(output_layouts=rows),
    }
    parallel = parallelize_module(copy.deepcopy(block), mesh, plan)
    return block, parallel, torch.randn(2 * size, 3 * size, 8)


def step(mesh, dim, **options):
    """The calls that were fused in a compiled step, whose gradients must be those of a single process."""
    rank, size = dist.get_rank(), mesh.size()
    block, parallel, x = sharded(mesh, dim)
    x.requires_grad_()
    block(x).square().sum().backward()
    torch._dynamo.reset()
    before = fompi.torch.fused_calls().ran
    mine = x.detach().chunk(size, dim)[rank].requires_grad_()
    with fompi.torch.fused_compile(mesh):
        torch.compile(parallel, fullgraph=True, **options)(mine).square().sum().backward()
    after = fompi.torch.fused_calls().ran
    for p, q in zip(parallel.parameters(), block.parameters(), strict=True):
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(gradient, q.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.grad, x.grad.chunk(size, dim)[rank], rtol=1e-4, atol=1e-5)
    return {name: calls - before.get(name, 0) for name, calls in after.items() if calls > before.get(name, 0)}


@pytest.mark.parametrize("dim", [1])
def test_a_step(mesh, dim):
    """One gather for both weights, and a scatter in each direction. What else torch finds depends on its version."""
    if mesh.size() == 1:
        pytest.skip("torch has no collectives on one rank")
    ran = step(mesh, dim, backend=fused_graph)
    assert ran["all_gather_matmul_many"] >= 1 and ran["matmul_reduce_scatter"] >= 2, ran


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_step_with_kernels_of_inductor(mesh, dim):
    ran = step(mesh, dim)
    assert ran["all_gather_matmul_many"] >= 1 and ran["matmul_reduce_scatter"] >= 2, ran


def reference(x, w, dim, size, group):
    full = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(full, x.contiguous(), group=group)
    full = torch.cat(full, dim)
    return full, full @ w


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_kernels(mesh, dim, op):
    """Each dimension, also the last one, with the strides that the compiler expects."""
    group, size = mesh.get_group(), mesh.size()
    with fompi.torch.fused_compile(group):
        pass  # from now on the operators have kernels
    draw = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2 * size, 3 * size, 4 * size, generator=draw, dtype=torch.float64)
    w = torch.randn(4 * size * (size if dim == 2 else 1), 5 * size, generator=draw, dtype=torch.float64)
    full, product = reference(x, w, dim, size, group)
    gather, scatter = torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter
    got, (y, twice) = gather(x, [w, 2 * w], dim, group.group_name)
    for a, b in ((got, full), (y, product), (twice, 2 * product)):
        torch.testing.assert_close(a, b)
    like = gather(x.to("meta"), [w.to("meta")], dim, group.group_name)
    if size > 1:
        assert got.stride() == like[0].stride() and y.stride() == like[1][0].stride()
    nothing, (y,) = gather(x, [w], dim, group.group_name, return_A=False)
    assert nothing is None and torch.allclose(y, product)

    z = torch.randn(4 * size, 5 * size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    summed = x @ z
    dist.all_reduce(summed)
    found = scatter(x, z, op, dim, group.group_name)
    torch.testing.assert_close(found, summed.chunk(size, dim)[dist.get_rank()] / (size if op == "avg" else 1))
    assert found.is_contiguous()


def test_what_is_refused(mesh):
    """And nothing of torch is changed then, or after a block."""
    available = dist.is_nccl_available
    other = dist.new_group(backend="gloo")
    with pytest.raises(LaunchError, match="the backend gloo, not fompi"), fompi.torch.fused_compile(other):
        pass
    both = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("a", "b"))
    with pytest.raises(LayoutError, match="several groups"), fompi.torch.fused_compile(mesh, both):
        pass
    with fompi.torch.fused_compile(mesh, both["b"]):
        assert dist.is_nccl_available is not available
    assert dist.is_nccl_available is available
    assert mesh.get_group().group_name not in torch.distributed._symmetric_memory._group_name_to_store
