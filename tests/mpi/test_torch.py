"""torch in, torch out, by autograd: results, gradients, memory and refusals, against one process in float64."""

import gc
import weakref

import meanings
import numpy as np
import pytest
import torch
from meanings import BASIC, CASES

import fompi

WEIGHTED = [case for case in BASIC if case.weights and not case.dim]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]
ADDING = ("reduce_scatter", "all_reduce", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tp(comm):
    """That of all ranks, which has the plans of other tests already."""
    return fompi.Communicator.of(comm)


@pytest.fixture
def no_collection():
    """Garbage of other tests goes when this one says so."""
    gc.disable()
    yield
    gc.enable()


def drawn(tp, *shape, call=0, rank=None):
    """Numbers that only this rank (or `rank`) has, and only in this call."""
    random = np.random.default_rng([call, tp.rank if rank is None else rank])
    return torch.from_numpy(random.standard_normal(shape))


def close(found, wanted, within=1e-11):
    """Not torch.testing.assert_close: it loads half a second of torch on every rank. Nor torch.optim: a second."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.allclose(found, wanted, rtol=within, atol=within), (found, wanted)


# ----------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(tp, case):
    """Those of the definition, for every tensor, with uneven rows, and none at all on some ranks."""
    given, results, gradients = meanings.gradients(case, tp.size)
    leaves = [torch.from_numpy(t).requires_grad_() for t in given[tp.rank]]
    found = case.call(fompi, tp.size, tp.rank, leaves, comm=tp)
    assert all(type(y) is torch.Tensor and y.requires_grad for y in found)
    meanings.loss(tp.rank, found).backward()
    for y, wanted in zip(found, results[tp.rank], strict=True):
        close(y.detach(), wanted)
    for leaf, wanted in zip(leaves, gradients[tp.rank], strict=True):
        close(leaf.grad, wanted)


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_each_gradient_alone(tp, case):
    """Only x, only one weight, only one bias requires grad: the same gradient, and none for the others."""
    given, _, gradients = meanings.gradients(case, tp.size)
    for alone, wanted in enumerate(gradients[tp.rank]):
        leaves = [torch.from_numpy(t).requires_grad_(i == alone) for i, t in enumerate(given[tp.rank])]
        found = case.call(fompi, tp.size, tp.rank, leaves, comm=tp)
        (gradient,) = torch.autograd.grad(meanings.loss(tp.rank, found), leaves[alone])
        close(gradient, wanted)
        assert all(leaf.grad is None for leaf in leaves)


def test_what_nobody_wants_is_not_computed(tp):
    """The gradient of a weight alone moves x once; that of a result that was not used moves nothing."""

    def operations(wants_x, uses):
        x, w = drawn(tp, 2, 4).requires_grad_(wants_x), drawn(tp, 4, 3).requires_grad_()
        full, (y, z) = fompi.all_gather_matmul_many(x, [w, w.detach()], comm=tp)
        with tp.record() as traces:
            sum(t.sum() for t in [full, y, z] if t is {"full": full, "y": y}[uses]).backward()
        return [trace.title.partition(" ")[0] for trace in traces]

    assert operations(False, "y") == ["all_gather_weight_gradient"]
    assert operations(True, "y") == ["matmul_reduce_scatter", "all_gather_weight_gradient"]
    assert operations(True, "full") == ["reduce_scatter"]
    assert operations(False, "full") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in WEIGHTED if any(case.biased)], ids=str)
def test_gradients_of_other_floats(tp, case, dtype):
    """In the tensors' own dtype, and as good as it is."""
    given, _, gradients = meanings.gradients(case, tp.size)
    leaves = [torch.from_numpy(t).to(dtype).requires_grad_() for t in given[tp.rank]]
    meanings.loss(tp.rank, case.call(fompi, tp.size, tp.rank, leaves, comm=tp)).backward()
    scale = max(g.abs().max().item() for mine in gradients for g in mine if g.numel())
    for leaf, wanted in zip(leaves, gradients[tp.rank], strict=True):
        assert leaf.grad.dtype == dtype
        close(leaf.grad.double(), wanted, within=20 * torch.finfo(dtype).eps * scale)


def test_gradients_of_complex_numbers(tp):
    """torch's convention, the conjugate: that of the unfused meaning by torch itself."""
    x = torch.complex(drawn(tp, 3, 4), drawn(tp, 3, 4, call=1)).requires_grad_()
    w = torch.complex(drawn(tp, 4, 2), drawn(tp, 4, 2, call=1)).requires_grad_()
    fompi.all_gather_matmul(x, w, comm=tp).abs().square().sum().backward()
    (fompi.all_gather(x.detach(), comm=tp) @ (v := w.detach().requires_grad_())).abs().square().sum().backward()
    close(w.grad, v.grad)
    (u := x.detach().requires_grad_(), x.detach() @ w.detach())
    everyone = fompi.all_gather(w.detach().unsqueeze(0), comm=tp)  # each rank's columns see our rows
    sum((u @ theirs).abs().square().sum() for theirs in everyone).backward()
    close(x.grad, u.grad)


def test_a_model_trains_as_in_one_process(tp):
    """Five steps: losses and weights after each of them, in float64."""
    batch, features, hidden, classes, steps = 12, 6, 8 + tp.size, 5, 5
    first, second = (drawn(tp, *s, rank=99) for s in ((features, hidden), (hidden, classes)))
    inputs, labels = drawn(tp, batch, features, rank=98), torch.arange(batch) % classes
    columns = slice(*offsets(hidden, tp.size)[tp.rank : tp.rank + 2])
    rows = slice(*offsets(batch, tp.size)[tp.rank : tp.rank + 2])

    class DistributedTP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Parameter(first[:, columns].clone())
            self.up_bias = torch.nn.Parameter(torch.zeros(hidden, dtype=torch.float64)[columns])
            self.down = torch.nn.Parameter(second[columns].clone())

        def forward(self, x):
            h = torch.tanh(fompi.all_gather_matmul(x, self.up, bias=self.up_bias, comm=tp))
            return fompi.matmul_reduce_scatter(h, self.down, comm=tp)

    model, bias = DistributedTP(), torch.zeros(hidden, dtype=torch.float64)
    up, up_bias, down = alone = [p.clone().requires_grad_() for p in (first, bias, second)]
    for _ in range(steps):
        part = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows], reduction="sum") / batch
        whole = torch.nn.functional.cross_entropy(torch.tanh(inputs @ up + up_bias) @ down, labels)
        for loss, params in (part, list(model.parameters())), (whole, alone):
            loss.backward()
            with torch.no_grad():
                for p in params:
                    p -= 0.3 * p.grad
                    p.grad = None
        close(fompi.all_reduce(part.detach(), comm=tp), whole.detach())
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), (up[:, columns], up_bias[columns], down[columns]), strict=True):
                close(ours, theirs)


def offsets(total, pieces):
    return [0, *np.cumsum([total // pieces + (i < total % pieces) for i in range(pieces)]).tolist()]


# ---------------------------------------------------------------------------------------------- autograd's own rules


def graph(tp):
    x, w = drawn(tp, 2, 4).requires_grad_(), drawn(tp, 4, 3).requires_grad_()
    return x, w, fompi.all_gather_matmul(x, w, comm=tp).square().sum()


def test_the_second_use_of_a_graph(tp):
    x, w, total = graph(tp)
    total.backward(retain_graph=True)
    once = x.grad.clone(), w.grad.clone()
    total.backward()
    close(x.grad, 2 * once[0])
    close(w.grad, 2 * once[1])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        total.backward()


def test_no_second_derivative(tp):
    """torch's clear error, where others would give a wrong number."""
    x, _, total = graph(tp)
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_what_changed_since_the_forward_is_noticed(tp):
    x, w, total = graph(tp)
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    x = drawn(tp, 2, 4).requires_grad_()
    inner = 2 * x
    total = fompi.all_reduce(inner, comm=tp).sum()
    inner.detach().zero_()  # its backward does not read it
    total.backward()
    close(x.grad, torch.full_like(x, 2.0 * tp.size))


def test_what_a_later_call_overwrote_is_noticed(tp):
    """Memory that a graph has saved, and that is then given as out= or belongs to a bound operation."""
    plan = fompi.plan("all_gather", fompi.Spec((2 * tp.size, 4), "float64", fompi.Shard(0)), ranks=tp.size)
    x, out = drawn(tp, 2, 4), torch.zeros(2 * tp.size, 4, dtype=torch.float64)
    with fompi.bind(plan, comm=tp, x=x) as bound, fompi.bind(plan, comm=tp, x=x, out=out) as into:
        calls = [(out, lambda: fompi.all_gather(x, out=out, comm=tp)), (out, into), (bound(), bound)]
        for written, call in calls:
            call()
            w = torch.ones_like(out, requires_grad=True)
            total = (w * written).sum()
            total.backward(retain_graph=True)
            close(w.grad, written)
            call()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()


def test_results_may_be_changed_in_place(tp):
    x, w = drawn(tp, 2, 4).requires_grad_(), drawn(tp, 4, 3).requires_grad_()
    y = fompi.all_gather_matmul(x, w, comm=tp)
    plain = torch.relu(y.detach() + 1)
    y.add_(1).relu_()
    close(y.detach(), plain)
    y.sum().backward()
    close(w.grad, fompi.all_gather(x.detach(), comm=tp).T @ (plain > 0).double())


def test_gradients_that_are_expanded_or_strided(tp):
    """What comes back from sum(), a transpose or a slice is no plain memory; the result is the same."""
    x = drawn(tp, 3, 2 * tp.size, 4).requires_grad_()
    for use in (lambda y: y.sum(), lambda y: (y.transpose(0, 2) * 2).sum(), lambda y: y[..., ::2].square().sum()):
        (gradient,) = torch.autograd.grad(use(fompi.all_gather(x, dim=1, comm=tp)), x)
        leaf = fompi.all_gather(x.detach(), dim=1, comm=tp).contiguous().requires_grad_()
        (wanted,) = torch.autograd.grad(use(leaf), leaf)
        begin = tp.rank * 2 * tp.size
        close(gradient, tp.size * wanted[:, begin : begin + 2 * tp.size])


def test_under_no_grad_nothing_is_recorded(tp):
    """Parameters are plain tensors there: out=, start() and the weight gradients take them too."""
    x, w = drawn(tp, 2, 4).requires_grad_(), torch.nn.Parameter(drawn(tp, 4, 3))
    wanted = fompi.all_gather_matmul(x.detach(), w.detach(), comm=tp)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = fompi.all_gather_matmul(x, w, comm=tp)
            assert not y.requires_grad and y.grad_fn is None
            out = torch.empty_like(wanted)
            assert fompi.all_gather_matmul(x, w, out=out, comm=tp) is out
            later = fompi.all_gather_matmul.start(x, w, comm=tp).wait()
            assert fompi.all_gather_weight_gradient(x, wanted, comm=tp).shape == w.shape
        for found in (y, out, later):
            close(found, wanted)


def test_a_parameter_that_is_frozen_gets_no_gradient(tp):
    x, w = drawn(tp, 2, 4), drawn(tp, 4, 3)
    y = fompi.all_gather_matmul(x, w, comm=tp)
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_dtypes(tp, dtype):
    """Every operation gives what it got, exactly: whole numbers that no sum rounds."""
    for case in BASIC:
        given = meanings.tensors(case, tp.size, meanings.small)
        if dtype == torch.bool:
            if case.operation in ADDING or case.weights:
                continue
            given = [[t % 2 for t in mine] for mine in given]
        wanted = meanings.means(case, [[torch.from_numpy(t) for t in mine] for mine in given])[tp.rank]
        mine = [torch.from_numpy(t).to(dtype) for t in given[tp.rank]]
        found = case.call(fompi, tp.size, tp.rank, mine, comm=tp)
        for y, exact in zip(found, wanted, strict=True):
            assert type(y) is torch.Tensor and y.dtype == dtype and y.shape == exact.shape
            assert torch.equal(y.to(torch.int64), exact), case


def test_what_comes_out_is_memory_of_ours(tp, no_collection):
    """No copy is made of a result: it is the arena's block, aligned, and goes back at once when the tensor dies."""
    arena, nbytes = tp.engine.arena, tp.size * 8 << 14
    before = arena.stats().lent_nbytes
    y = fompi.all_gather(torch.ones(1 << 14, dtype=torch.float64), comm=tp)
    assert y.data_ptr() % 64 == 0 and y.nbytes == nbytes
    lent = arena.stats().lent_nbytes
    assert lent >= before + nbytes
    view = y[5:7]
    del y
    assert arena.stats().lent_nbytes == lent and view.tolist() == [1, 1]
    del view
    assert arena.stats().lent_nbytes == before


def test_out_is_filled_where_it_lies(tp):
    for case in BASIC:
        if case.operation.endswith("_many"):
            continue
        given = [[torch.from_numpy(t) for t in mine] for mine in meanings.tensors(case, tp.size, meanings.normal)]
        wanted = meanings.means(case, given)[tp.rank][0]
        out = torch.full_like(wanted, float("nan"))
        address = out.data_ptr()
        (found,) = case.call(fompi, tp.size, tp.rank, given[tp.rank], out=out, comm=tp)
        assert found is out and out.data_ptr() == address
        close(out, wanted)


def test_only_what_is_strided_is_packed(tp):
    """The trace shows it: a contiguous x and a transposed weight are read where they lie."""
    x, w = drawn(tp, 4, 6), drawn(tp, 3, 6).T
    with tp.record() as traces:
        straight = fompi.all_gather_matmul(x, w, comm=tp)
        packed = fompi.all_gather_matmul(drawn(tp, 4, 6).T.contiguous().T, w, comm=tp)
    assert torch.equal(straight, packed)
    names = [[event.name for event in trace.events if event.is_compute] for trace in traces]
    assert not any("pack" in name for name in names[0])
    assert tp.size == 1 or any("pack" in name for name in names[1])


def test_results_that_are_kept_stay(tp):
    """Fifty calls, all results and graphs alive: no block is used twice, and every gradient is its own."""
    kept = []
    for call in range(50):
        x, w = drawn(tp, 2, 4, call=call).requires_grad_(), drawn(tp, 4, 3, call=call).requires_grad_()
        h = fompi.all_gather_matmul(x, w, comm=tp)
        y = fompi.matmul_reduce_scatter(torch.tanh(h), w.T, comm=tp)
        kept.append((x, w, h, h.detach().clone(), y, y.detach().clone()))
    addresses = {t.data_ptr() for _, _, h, _, y, _ in kept for t in (h, y)}
    assert len(addresses) == 100
    for _, _, h, h_then, y, y_then in kept:
        assert torch.equal(h, h_then) and torch.equal(y, y_then)
    for entry in kept:
        entry[4].sum().backward()
    for call in (0, 23, 49):
        _, w, *_ = kept[call]
        xs, ws = ([drawn(tp, *s, call=call, rank=r) for r in range(tp.size)] for s in ((2, 4), (4, 3)))
        ws = [v.requires_grad_() for v in ws]
        sum((torch.tanh(torch.cat(xs) @ v) @ v.T).sum() for v in ws).backward()
        close(w.grad, ws[tp.rank].grad)


def test_a_graph_keeps_only_what_its_backward_reads(tp):
    w = drawn(tp, 4, 3).requires_grad_()

    def alive(operation):
        x = drawn(tp, 2, 4).requires_grad_()
        inner = 2 * x
        seen, y = weakref.ref(inner), operation(inner)
        del inner
        before = seen() is not None
        y.sum().backward()
        return before, seen() is not None

    assert alive(lambda x: fompi.all_gather(x, comm=tp)) == (False, False)
    assert alive(lambda x: fompi.all_gather_matmul(x, w, comm=tp)) == (True, False)


# -------------------------------------------------------------------------------------------------------- refusals


def refused(tp, rank_refuses, call):
    """The error of a call that `rank_refuses` cannot make: its own there, a MismatchError that quotes it elsewhere."""
    mine = tp.rank == rank_refuses
    with pytest.raises(fompi.TensorError if mine else fompi.MismatchError) as caught:
        call(mine)
    assert fompi.all_reduce(torch.ones(1), comm=tp).item() == tp.size  # it goes on
    return str(caught.value)


def test_out_with_a_gradient_is_refused_on_all_ranks(tp):
    """Also if it is one rank alone that wants the gradient."""
    out = torch.zeros(2 * tp.size, 4, dtype=torch.float64)
    for origin in {0, tp.size - 1}:
        text = refused(
            tp, origin, lambda mine: fompi.all_gather(drawn(tp, 2, 4).requires_grad_(mine), out=out, comm=tp)
        )
        assert "out= cannot be given where a gradient is wanted" in text
    assert not out.any()


def test_start_with_a_gradient_is_refused_on_all_ranks(tp):
    """Also if it is one rank alone that wants it."""
    for origin in {0, tp.size - 1}:
        text = refused(
            tp, origin, lambda mine: fompi.all_gather.start(drawn(tp, 2, 4).requires_grad_(mine), comm=tp).wait()
        )
        assert "start has no gradient" in text


def test_gradients_of_gradients_are_refused_on_all_ranks(tp):
    h = drawn(tp, 2 * tp.size, 3)
    text = refused(
        tp, 0, lambda mine: fompi.all_gather_weight_gradient(drawn(tp, 2, 4).requires_grad_(mine), h, comm=tp)
    )
    assert "all_gather_weight_gradient is a gradient itself and has none" in text


def test_arrays_beside_tensors_that_require_grad_are_refused(tp):
    def call(mine):
        w = drawn(tp, 4, 3).requires_grad_(mine)
        return fompi.all_gather_matmul(drawn(tp, 2, 4).numpy() if mine else drawn(tp, 2, 4), w, comm=tp)

    assert "ndarray beside a torch tensor that requires grad" in refused(tp, tp.size - 1, call)


def test_a_gradient_that_one_rank_alone_wants(tp):
    """Told in the forward: no other rank would come to its backward, and their part of the gradient would be lost."""
    if tp.size == 1:
        return
    with pytest.raises(
        fompi.MismatchError, match=r"rank 0 calls broadcast\(.*\) with the shape \(2,\) for a gradient; "
    ):
        fompi.broadcast(drawn(tp, 2).requires_grad_(tp.rank == 0), comm=tp)
    with torch.no_grad():
        close(fompi.broadcast(drawn(tp, 2).requires_grad_(tp.rank == 0), comm=tp), drawn(tp, 2, rank=0))


def test_ranks_that_want_other_gradients_are_told(tp):
    """Each rank runs another backward: an error on all of them, and the communicator goes on."""
    if tp.size == 1:
        return
    x, w = drawn(tp, 2, 4).requires_grad_(tp.rank == 0), drawn(tp, 4, 3).requires_grad_()
    total = fompi.all_gather_matmul(x, w, comm=tp).sum()
    with pytest.raises(fompi.MismatchError, match=r"matmul_reduce_scatter.*all_gather_weight_gradient"):
        total.backward()
    assert fompi.all_reduce(torch.ones(1), comm=tp).item() == tp.size
