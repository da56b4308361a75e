"""The operators `torch.ops.fompi` on one rank: what torch says of them, and what torch.compile makes of a call."""

import subprocess
import sys
from importlib import import_module

import numpy as np
import operators
import pytest
import torch
from operators import CASES, drawn

import fompi
from fompi.base.errors import LaunchError, LayoutError, ShapeError, StateError, TensorError
from fompi.ops.adjoints import DIFFERENTIABLE
from fompi.plans.meaning import MEANING
from fompi.torch import operators as nodes
from fompi.torch.operators import FUNCTIONS, KEPT, NODES, name_of

pytestmark = pytest.mark.timeout(110)  # the first opcheck and the first compilation import half of torch


@pytest.fixture(scope="module")
def comm():
    return fompi.Communicator()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compiled(f, **options):
    return torch.compile(f, **{"fullgraph": True, "backend": "aot_eager", **options})


@pytest.mark.parametrize("name", CASES)
def test_torch_accepts_the_operator(comm, name, monkeypatch):
    """opcheck: schema, aliases, fake results, autograd, and a trace with sizes left open. gradcheck: the backward."""
    given, recorded, operation = drawn(name, comm), [], name.split()[0]
    call = getattr(fompi.torch, operation)

    def results(*tensors):
        return tuple(operators.tensors(CASES[name].call(call, 1, 0, *tensors, comm=comm)))

    operator = NODES[operation]
    monkeypatch.setitem(NODES, operation, lambda *args: recorded.append(args) or operator(*args))
    results(*given)
    monkeypatch.undo()
    checks = torch.library.opcheck(operator, recorded[0])
    assert set(checks.values()) == {"SUCCESS"}, checks
    assert torch.autograd.gradcheck(results, given)


def test_every_operation_with_a_gradient_has_an_operator_and_a_case():
    of_experts = {name for name, meaning in MEANING.items() if meaning.grouped}
    assert {*FUNCTIONS} - {*KEPT} == {*DIFFERENTIABLE} - of_experts == {name.split()[0] for name in CASES}
    for name in DIFFERENTIABLE:
        assert getattr(fompi.torch, name).__doc__ == getattr(fompi, name).__doc__


def test_second_derivatives_and_complex_numbers(comm):
    x, w, _ = drawn("matmul_reduce_scatter", comm)
    assert torch.autograd.gradgradcheck(lambda x, w: fompi.torch.matmul_reduce_scatter(x, w, comm=comm), (x, w))
    x, w, b = (t.detach().to(torch.complex128).mul(1 + 2j).requires_grad_() for t in drawn("all_gather_matmul", comm))
    assert torch.autograd.gradcheck(lambda *t: fompi.torch.all_gather_matmul(*t[:2], bias=t[2], comm=comm), (x, w, b))
    assert torch.autograd.gradcheck(lambda *t: fompi.torch.replicated_matmul(*t[:2], bias=t[2], comm=comm), (x, w, b))


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("eager", torch.float64), ("aot_eager", torch.float32), ("aot_eager", torch.bfloat16), ("eager", torch.float16)],
    ids=str,
)
def test_a_block_is_one_graph(comm, backend, dtype):
    """Forward and backward equal those without the compiler, bit by bit, and no call breaks the graph."""
    random = torch.Generator().manual_seed(1)
    x, up, down, b = (torch.randn(s, generator=random).to(dtype) for s in ((2, 3, 4), (4, 6), (6, 4), (4,)))

    def block(x, up, down, b):
        h = torch.tanh(fompi.all_gather_matmul(x, up, dim=1, comm=comm, schedule="ring", slices=2))
        y = x + fompi.matmul_reduce_scatter(h, down, bias=b, dim=1, comm=comm)
        full, (p, q) = fompi.all_gather_matmul_many(y, (up, up), biases=(None, None), dim=1)
        return full.sum() + (p * q).sum()

    gradients = []
    for call in (block, compiled(block, backend=backend)):
        leaves = [t.clone().requires_grad_() for t in (x, up, down, b)]
        loss = call(*leaves)
        loss.backward()
        gradients.append([loss.detach(), *(t.grad for t in leaves)])
    for actual, expected in zip(*gradients, strict=True):
        assert torch.equal(actual, expected)
    assert torch._dynamo.explain(block)(x, up, down, b).graph_break_count == 0


def test_sizes_stay_open(comm):
    """The second size compiles once more, and no other size does."""
    counted = import_module("torch._dynamo.testing").CompileCounterWithBackend("aot_eager")
    call = compiled(lambda x, w: fompi.matmul_reduce_scatter(x, w, comm=comm).sum(), backend=counted)
    for rows in (3, 4, 5, 9, 17):
        x, w = torch.ones(rows, 4, requires_grad=True), torch.ones(4, 2, requires_grad=True)
        call(x, w).backward()
        assert torch.equal(x.grad, torch.full((rows, 4), 2.0)) and torch.equal(w.grad, torch.full((4, 2), float(rows)))
    assert counted.frame_count == 2


OUTSIDE = {
    "out= is written": lambda x, comm: fompi.all_reduce(x, out=torch.empty(2, 3), comm=comm),
    "counts= of an all-to-all": lambda x, comm: fompi.all_to_all(x, counts=[2], comm=comm),
    "must be torch tensors": lambda x, comm: fompi.all_gather(x.numpy(), comm=comm),
    "must be a fompi.Communicator": lambda x, comm: fompi.all_gather(x, comm=3),
    "these arguments are refused": lambda x, comm: fompi.all_gather(x, dmi=1, comm=comm),
    "fompi.send and fompi.recv": lambda x, comm: fompi.send(x, 0, comm=comm),
}


@pytest.mark.parametrize("reason", OUTSIDE)
def test_what_the_compiler_cannot_know_is_outside_of_the_graph_and_it_says_why(comm, reason):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        compiled(lambda x: OUTSIDE[reason](x, comm))(torch.ones(2, 3))


def test_calls_outside_of_the_graph_give_their_results_and_errors(comm):
    x, given = torch.ones(2, 3), {"fullgraph": False}
    for reason in list(OUTSIDE)[:3]:
        call = OUTSIDE[reason]
        assert np.array_equal(compiled(lambda x, call=call: call(x, comm), **given)(x), x)
    assert compiled(lambda x: fompi.all_gather.start(2 * x, comm=comm).wait(), **given)(x).sum() == 12
    errors = {LaunchError: "comm= takes", TypeError: "did you mean 'dim'"}
    for call, (kind, words) in zip(list(OUTSIDE.values())[3:5], errors.items(), strict=True):
        with pytest.raises(kind, match=words):
            compiled(lambda x, call=call: call(x, comm), **given)(x)
    with pytest.raises(TensorError, match="has no gradient"):
        compiled(lambda x: fompi.all_reduce(x, op="prod", comm=comm), **given)(x.requires_grad_())


def test_errors_of_compiled_calls_are_those_of_the_operation(comm):
    x, w = torch.ones(2, 3), torch.ones(4, 2)
    with pytest.raises(ShapeError, match=r"x has 3 columns, so w needs the shape \(3, n\)"):
        compiled(lambda x, w: fompi.all_gather_matmul(x, w, comm=comm))(x, w)
    with pytest.raises(ShapeError, match="no dimension dim=7"):
        compiled(lambda x: fompi.all_gather(x, dim=7, comm=comm))(x)
    with pytest.raises(LayoutError, match="op='xor'"):
        compiled(lambda x: fompi.all_reduce(x, op="xor", comm=comm))(x)
    with pytest.raises(LayoutError, match="gradient='mean' must be 'sum' or 'replicated'"):
        fompi.torch.all_reduce(x, gradient="mean", comm=comm)
    with pytest.raises(TensorError, match="all tensors must be torch tensors"):
        fompi.torch.all_reduce(x.numpy(), comm=comm)
    with pytest.raises(TensorError, match="takes no out="):
        fompi.torch.all_reduce(x, out=x, comm=comm)


def test_a_communicator_that_is_closed_or_gone(comm):
    part = comm.split(0)
    call = compiled(lambda x: fompi.all_reduce(x, comm=part) + 1)
    assert call(torch.ones(2)).tolist() == [2, 2]
    name = name_of(part)
    assert name == name_of(part) and f"rank {comm.rank} of {comm.size}" in name
    part.close()
    with pytest.raises(StateError, match="is closed"):
        call(torch.ones(2))
    with pytest.raises(StateError, match="does not exist any more"):
        nodes.named(name.replace("world", "gone"))
    with pytest.raises(LaunchError, match="no group of the name 'nobody'"):
        fompi.torch.communicator("nobody")


LOADS = """
import sys
import torch, fompi.torch
assert "torch._dynamo" not in sys.modules
call = fompi.torch.all_reduce
before = {*sys.modules}
assert call(torch.ones(2)).tolist() == [1, 1] and "torch._dynamo" in before
print("loaded", sorted(name for name in {*sys.modules} - before if name.startswith("torch._dynamo")))
"""


def test_no_call_loads_the_compiler_of_torch():
    """It takes seconds, in which other ranks would wait: it is loaded when the name of an operator is looked up."""
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "loaded []\n", done.stdout + done.stderr
