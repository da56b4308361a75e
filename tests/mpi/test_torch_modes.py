"""Modes of torch around a call: checkpoint, autocast, inference mode; copies; and what a call leaves behind."""

import copy
import io
import pickle

import numpy as np
import pytest
import strategy_calls
import torch
from torch.utils.checkpoint import checkpoint

import fompi
from fompi.parallel.tensor import column_parallel_linear

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])


class Block(torch.nn.Module):
    """Two fused operations with local operations between them, as in tensor parallelism."""

    def __init__(self, tp):
        super().__init__()
        random = np.random.default_rng(tp.rank)
        self.tp = tp
        self.up = torch.nn.Parameter(torch.from_numpy(random.standard_normal((4, 6))))
        self.bias = torch.nn.Parameter(torch.from_numpy(random.standard_normal(6)))
        self.down = torch.nn.Parameter(torch.from_numpy(random.standard_normal((6, 4))))

    def forward(self, x):
        h = torch.tanh(fompi.all_gather_matmul(x, self.up, bias=self.bias, comm=self.tp))
        return x + fompi.matmul_reduce_scatter(h, self.down, comm=self.tp)


def inputs(tp, call=0):
    return torch.from_numpy(np.random.default_rng([call, tp.rank]).standard_normal((3, 4))).requires_grad_()


def gradients(module, call, x):
    """The value, and the gradients of x and of the parameters."""
    x.grad = None
    module.zero_grad()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())]


def same(actual, expected):
    assert all(torch.allclose(a, e, rtol=1e-12, atol=1e-12) for a, e in zip(actual, expected, strict=True))


# ---------------------------------------------------------------------------- checkpoint, autocast, inference mode


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(tp, reentrant):
    """The forward runs again in the backward. Values and gradients are the same, also for nested checkpoints."""
    first, second = Block(tp), Block(tp)
    both = torch.nn.Sequential(first, second)
    expected = gradients(both, both, inputs(tp))
    same(
        gradients(
            both,
            lambda x: checkpoint(second, checkpoint(first, x, use_reentrant=reentrant), use_reentrant=reentrant),
            inputs(tp),
        ),
        expected,
    )
    same(gradients(both, lambda x: checkpoint(both, x, use_reentrant=reentrant), inputs(tp)), expected)


def test_second_derivatives_through_a_checkpoint(tp):
    block, x = Block(tp), inputs(tp)
    found = []
    for call in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        (gradient,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [x, block.up, block.down]))
    same(*found)


def test_autocast_does_not_change_an_operation(tp):
    """The operation computes in the dtype of its tensors. Mixed dtypes are an error in words on all ranks."""
    block, x = Block(tp).float(), inputs(tp).float().detach().requires_grad_()
    expected = gradients(block, block, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(gradients(block, block, x), expected)
        half = torch.nn.functional.linear(x, torch.eye(4))
        assert half.dtype == torch.bfloat16
        with pytest.raises(fompi.DtypeError, match=r"x is bfloat16, but w is float32; convert one"):
            fompi.all_gather_matmul(half, block.up, comm=tp)
        y = fompi.all_gather_matmul(half, block.up.to(half.dtype), comm=tp)
        assert y.dtype == torch.bfloat16
        x.grad = block.up.grad = None
        y.sum().backward()
    assert x.grad.dtype == block.up.grad.dtype == torch.float32
    ones = torch.ones(6)
    same([x.grad.bfloat16().float()], [x.grad])
    assert torch.allclose(
        x.grad, (fompi.all_reduce(block.up.detach() @ ones, comm=tp)).expand(3, 4), rtol=0.05, atol=0.05
    )


def test_tensors_of_inference_mode(tp):
    """They are ordinary tensors for operations without a gradient, and refused where a backward would read them."""
    w = inputs(tp)[:, :4].T.detach().contiguous()
    with torch.inference_mode():
        x = torch.ones(2, 4, dtype=torch.float64)
        y = fompi.all_gather_matmul(x, w, comm=tp)
        assert y.is_inference()
    same([fompi.all_gather_matmul(x, w, comm=tp)], [y])
    w.requires_grad_()
    with pytest.raises(fompi.TensorError, match=r"made under torch.inference_mode"):
        fompi.all_gather_matmul(x, w, comm=tp)
    fompi.all_gather_matmul(x.clone(), w, comm=tp).sum().backward()
    assert w.grad.shape == w.shape


# --------------------------------------------------------------------------------------- what a call leaves behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_the_storage_of_a_tensor_can_be_resized_after_a_call(tp, dtype):
    """As before the call: FSDP frees memory so. It holds for x, weights, out= and parameters under no_grad."""
    x, out = torch.ones(2, 4, dtype=dtype), torch.ones(2 * tp.size, 4, dtype=dtype)
    given = [x, out]
    fompi.all_gather(x, out=out, comm=tp)
    if dtype == torch.float32:
        w = torch.nn.Parameter(torch.ones(4, 3))
        given += [w, bias := torch.nn.Parameter(torch.ones(3))]
        fompi.all_gather_matmul(x, w, bias=bias, comm=tp).sum().backward()
        with torch.no_grad():
            fompi.all_gather_matmul(x, w, bias=bias, comm=tp)
    for tensor in given:
        assert tensor.untyped_storage().resizable()
        tensor.untyped_storage().resize_(0)


CALLS = [name for name in strategy_calls.calls(fompi.Communicator()) if "data" not in name and "pipeline" not in name]


@pytest.mark.parametrize("name", CALLS)
def test_memory_that_moves_between_a_forward_and_its_backward(tp, name):
    """FSDP frees weights behind a forward, and gathers them anew. The bits are those of memory that stays."""
    given, dust = [], []

    def up(x):
        x = np.array(x)
        tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == strategy_calls.HALF else x
        given.append(torch.as_tensor(tensor).clone())
        return given[-1]

    def down(x):
        x = x.clone()
        return x.view(torch.int16).numpy().view(strategy_calls.HALF) if x.dtype == torch.bfloat16 else x.numpy()

    def moving(x):
        """A result is read: what was given by then moves."""
        before = down(x)
        for tensor in given[: -1 if dust else None]:  # without the gradient, which is given last
            storage = tensor.untyped_storage()
            storage.resize_(storage.nbytes() + 4096)
        dust.extend(torch.full((n,), torch.nan) for n in range(16, 2048, 16))
        return before

    stays = strategy_calls.calls(tp)[name](up, down)
    given.clear()
    for one, other in zip(strategy_calls.calls(tp)[name](up, moving), stays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_weight_that_is_freed_before_its_backward_is_refused_on_all_ranks(tp):
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    y, last = column_parallel_linear(x, w, comm=tp), tp.rank == tp.size - 1
    if last:
        w.untyped_storage().resize_(0)
    with pytest.raises(fompi.TensorError if last else (fompi.MismatchError, fompi.PeerError)):
        y.sum().backward()
    w = torch.ones(3, 2, requires_grad=True)
    column_parallel_linear(x, w, comm=tp).sum().backward()
    assert torch.equal(w.grad, torch.full((3, 2), 4.0 * tp.size))


def test_tensors_without_plain_memory_are_refused(tp):
    """Subclasses that keep their values elsewhere, and lazy views: never the memory behind them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    z = torch.ones(2, 4, dtype=torch.complex64)
    tensors = [FakeTensorMode().from_tensor(torch.ones(2, 4)), z.conj(), z.conj().imag, torch.ones(2, 4).to_sparse()]
    tensors += [torch.ones(2, 4, device="meta")]
    for tensor in tensors:
        with pytest.raises(fompi.TensorError, match=r"^x (has no plain memory|has the layout|is on meta)"):
            fompi.all_gather(tensor, comm=tp)


def test_an_array_on_the_memory_of_a_tensor_keeps_it_alive():
    x = torch.arange(6.0)
    array = fompi.tensors.dlpack.borrow(x[2:]).array
    del x
    assert array.flags.writeable and array.tolist() == [2, 3, 4, 5]


def test_copies_of_a_module_run_on_the_same_communicator(tp):
    block = Block(tp)
    other = copy.deepcopy(block)
    assert other.tp is tp and copy.copy(tp) is tp and other.up is not block.up
    same([other(inputs(tp))], [block(inputs(tp))])


def test_a_module_is_saved_and_loaded(tp):
    """The file has the name and the ranks of the communicator. Loading gives the open one, or an error in words."""
    with fompi.Communicator(name="a") as own, fompi.Communicator(name="a"), fompi.Mesh(own, dp=1, tp=tp.size) as mesh:
        block = Block(mesh["tp"])
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded.tp is mesh["tp"]
        same([loaded(inputs(tp))], [block(inputs(tp))])
        assert copy.deepcopy(mesh) is copy.copy(mesh) is mesh
        saved = pickle.dumps([mesh, mesh["dp"]])
        assert pickle.loads(saved)[0] is mesh and pickle.loads(saved)[1] is mesh["dp"]
        of_own = pickle.dumps(own)
    with pytest.raises(fompi.StateError, match=r"no open mesh 'dp=1, tp=\d' of the ranks 0"):
        pickle.loads(saved)
    with pytest.raises(fompi.StateError, match=r"no open communicator 'a' of the ranks 0.*create it before"):
        pickle.loads(of_own)
    with fompi.Communicator(name="a") as again:
        assert pickle.loads(of_own) is again
