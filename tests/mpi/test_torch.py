"""Torch tensors and autograd: results, gradients, memory and refusals, compared with one process in float64."""

import weakref

import meanings
import numpy as np
import pytest
import torch
from meanings import BASIC, CASES

import fompi

pytestmark = pytest.mark.ranks(mpich=[1, 2, 3], openmpi=[])

WEIGHTED = [case for case in BASIC if case.weights and case.dim != 1]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]
ADDING = ("reduce", "reduce_scatter", "all_reduce", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def random_tensor(tp, *shape, call=0, rank=None):
    """Random numbers, different on every rank (or those of `rank`) and in every call."""
    random = np.random.default_rng([call, tp.rank if rank is None else rank])
    return torch.from_numpy(random.standard_normal(shape))


def close(actual, expected, within=1e-11):
    """Importing torch.testing takes half a second on every rank, and torch.optim a second. So tests use neither."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.allclose(actual, expected, rtol=within, atol=within), (actual, expected)


# ----------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(tp, case):
    """They equal those of the definition, for every tensor, with uneven rows, and no rows on some ranks."""
    given, results, gradients = meanings.gradients(case, tp.size)
    leaves = [torch.from_numpy(t).requires_grad_() for t in given[tp.rank]]
    actual = case.call(fompi, tp.size, tp.rank, leaves, comm=tp)
    assert all(type(y) is torch.Tensor and y.requires_grad for y in actual)
    meanings.loss(tp.rank, actual).backward()
    for y, expected in zip(actual, results[tp.rank], strict=True):
        close(y.detach(), expected)
    for leaf, expected in zip(leaves, gradients[tp.rank], strict=True):
        close(leaf.grad, expected)


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_each_gradient_by_itself(tp, case):
    """Only x, one weight or one bias requires grad. It gets the same gradient, and the other tensors get none."""
    given, _, gradients = meanings.gradients(case, tp.size)
    for number, expected in enumerate(gradients[tp.rank]):
        leaves = [torch.from_numpy(t).requires_grad_(i == number) for i, t in enumerate(given[tp.rank])]
        actual = case.call(fompi, tp.size, tp.rank, leaves, comm=tp)
        (gradient,) = torch.autograd.grad(meanings.loss(tp.rank, actual), leaves[number])
        close(gradient, expected)
        assert all(leaf.grad is None for leaf in leaves)


def test_gradients_that_are_not_needed_are_not_computed(tp):
    """The gradient of only a weight communicates once. An unused result communicates nothing."""

    def operations(wants_x, uses):
        x, w = random_tensor(tp, 2, 4).requires_grad_(wants_x), random_tensor(tp, 4, 3).requires_grad_()
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
    """The gradients have the dtype of the tensors, and the error is within its precision."""
    given, _, gradients = meanings.gradients(case, tp.size)
    leaves = [torch.from_numpy(t).to(dtype).requires_grad_() for t in given[tp.rank]]
    meanings.loss(tp.rank, case.call(fompi, tp.size, tp.rank, leaves, comm=tp)).backward()
    scale = max(g.abs().max().item() for mine in gradients for g in mine if g.numel())
    for leaf, expected in zip(leaves, gradients[tp.rank], strict=True):
        assert leaf.grad.dtype == dtype
        close(leaf.grad.double(), expected, within=20 * torch.finfo(dtype).eps * scale)


def test_gradients_of_complex_numbers(tp):
    """They equal what torch computes for the unfused meaning. In torch's convention gradients are conjugates."""
    x = torch.complex(random_tensor(tp, 3, 4), random_tensor(tp, 3, 4, call=1)).requires_grad_()
    w = torch.complex(random_tensor(tp, 4, 2), random_tensor(tp, 4, 2, call=1)).requires_grad_()
    fompi.all_gather_matmul(x, w, comm=tp).abs().square().sum().backward()
    (fompi.all_gather(x.detach(), comm=tp) @ (v := w.detach().requires_grad_())).abs().square().sum().backward()
    close(w.grad, v.grad)
    u = x.detach().requires_grad_()
    weights = fompi.all_gather(w.detach().unsqueeze(0), comm=tp)  # the columns of each rank multiply our rows
    sum((u @ v).abs().square().sum() for v in weights).backward()
    close(x.grad, u.grad)


def test_a_model_trains_as_in_one_process(tp):
    """Five steps in float64: losses and weights are compared after each step."""
    batch, features, hidden, classes, steps = 12, 6, 8 + tp.size, 5, 5
    first, second = (random_tensor(tp, *s, rank=99) for s in ((features, hidden), (hidden, classes)))
    inputs, labels = random_tensor(tp, batch, features, rank=98), torch.arange(batch) % classes
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
    up, up_bias, down = single = [p.clone().requires_grad_() for p in (first, bias, second)]
    for _ in range(steps):
        part = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows], reduction="sum") / batch
        whole = torch.nn.functional.cross_entropy(torch.tanh(inputs @ up + up_bias) @ down, labels)
        for loss, params in (part, list(model.parameters())), (whole, single):
            loss.backward()
            with torch.no_grad():
                for p in params:
                    p -= 0.3 * p.grad
                    p.grad = None
        close(fompi.all_reduce(part.detach(), comm=tp), whole.detach())
        with torch.no_grad():
            for actual, expected in zip(
                model.parameters(), (up[:, columns], up_bias[columns], down[columns]), strict=True
            ):
                close(actual, expected)


def offsets(total, pieces):
    return [0, *np.cumsum([total // pieces + (i < total % pieces) for i in range(pieces)]).tolist()]


# ------------------------------------------------------------------------------------------- the rules of autograd


def graph(tp):
    x, w = random_tensor(tp, 2, 4).requires_grad_(), random_tensor(tp, 4, 3).requires_grad_()
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


def test_a_tensor_that_changed_since_the_forward_is_an_error(tp):
    x, w, total = graph(tp)
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    x = random_tensor(tp, 2, 4).requires_grad_()
    inner = 2 * x
    total = fompi.all_reduce(inner, comm=tp).sum()
    inner.detach().zero_()  # the backward of all_reduce does not read it
    total.backward()
    close(x.grad, torch.full_like(x, 2.0 * tp.size))


def test_memory_that_a_later_call_overwrote_is_an_error(tp):
    """A graph has saved this memory, and a later call writes it: as out=, or as the output of a bound operation."""
    plan = fompi.plan("all_gather", fompi.Spec((2 * tp.size, 4), "float64", fompi.Shard(0)), ranks=tp.size)
    x, out = random_tensor(tp, 2, 4), torch.zeros(2 * tp.size, 4, dtype=torch.float64)
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
    x, w = random_tensor(tp, 2, 4).requires_grad_(), random_tensor(tp, 4, 3).requires_grad_()
    y = fompi.all_gather_matmul(x, w, comm=tp)
    plain = torch.relu(y.detach() + 1)
    y.add_(1).relu_()
    close(y.detach(), plain)
    y.sum().backward()
    close(w.grad, fompi.all_gather(x.detach(), comm=tp).T @ (plain > 0).double())


def test_gradients_that_are_expanded_or_strided(tp):
    """The gradient of sum(), a transpose or a slice is not contiguous. The result is the same."""
    x = random_tensor(tp, 3, 2 * tp.size, 4).requires_grad_()
    for use in (lambda y: y.sum(), lambda y: (y.transpose(0, 2) * 2).sum(), lambda y: y[..., ::2].square().sum()):
        (gradient,) = torch.autograd.grad(use(fompi.all_gather(x, dim=1, comm=tp)), x)
        leaf = fompi.all_gather(x.detach(), dim=1, comm=tp).contiguous().requires_grad_()
        (expected,) = torch.autograd.grad(use(leaf), leaf)
        begin = tp.rank * 2 * tp.size
        close(gradient, tp.size * expected[:, begin : begin + 2 * tp.size])


def test_no_graph_under_no_grad(tp):
    """Under no_grad, parameters are plain tensors: out=, start() and the weight gradients accept them."""
    x, w = random_tensor(tp, 2, 4).requires_grad_(), torch.nn.Parameter(random_tensor(tp, 4, 3))
    expected = fompi.all_gather_matmul(x.detach(), w.detach(), comm=tp)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = fompi.all_gather_matmul(x, w, comm=tp)
            assert not y.requires_grad and y.grad_fn is None
            out = torch.empty_like(expected)
            assert fompi.all_gather_matmul(x, w, out=out, comm=tp) is out
            later = fompi.all_gather_matmul.start(x, w, comm=tp).wait()
            assert fompi.all_gather_weight_gradient(x, expected, comm=tp).shape == w.shape
        for actual in (y, out, later):
            close(actual, expected)


def test_a_parameter_that_is_frozen_gets_no_gradient(tp):
    x, w = random_tensor(tp, 2, 4), random_tensor(tp, 4, 3)
    y = fompi.all_gather_matmul(x, w, comm=tp)
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_dtypes(tp, dtype):
    """Results have the dtype of x, and exact values: whole numbers are not rounded."""
    for case in BASIC:
        given = meanings.tensors(case, tp.size, meanings.small_integers)
        if dtype == torch.bool:
            if case.operation in ADDING or case.weights:
                continue
            given = [[t % 2 for t in mine] for mine in given]
        expected = meanings.expected(case, [[torch.from_numpy(t) for t in mine] for mine in given])[tp.rank]
        mine = [torch.from_numpy(t).to(dtype) for t in given[tp.rank]]
        actual = case.call(fompi, tp.size, tp.rank, mine, comm=tp)
        for y, exact in zip(actual, expected, strict=True):
            assert type(y) is torch.Tensor and y.dtype == dtype and y.shape == exact.shape
            assert torch.equal(y.to(torch.int64), exact), case


def test_results_are_memory_of_the_arena(tp, no_collection):
    """A result is aligned and not copied. Its memory goes back to the arena as soon as the tensor is freed."""
    arena, nbytes = tp.engine.arena, tp.size * 8 << 14
    before = arena.lent_nbytes
    y = fompi.all_gather(torch.ones(1 << 14, dtype=torch.float64), comm=tp)
    assert y.data_ptr() % 64 == 0 and y.nbytes == nbytes
    lent = arena.lent_nbytes
    assert lent >= before + nbytes
    view = y[5:7]
    del y
    assert arena.lent_nbytes == lent and view.tolist() == [1, 1]
    del view
    assert arena.lent_nbytes == before


def test_out_is_filled_in_place(tp):
    for case in BASIC:
        if case.operation.endswith("_many"):
            continue
        given = [[torch.from_numpy(t) for t in mine] for mine in meanings.tensors(case, tp.size, meanings.normal)]
        expected = meanings.expected(case, given)[tp.rank][0]
        out = torch.full_like(expected, float("nan"))
        address = out.data_ptr()
        (actual,) = case.call(fompi, tp.size, tp.rank, given[tp.rank], out=out, comm=tp)
        assert actual is out and out.data_ptr() == address
        close(out, expected)


def test_only_strided_inputs_are_packed(tp):
    """The trace shows no packing of a contiguous x and of a transposed weight."""
    x, w = random_tensor(tp, 4, 6), random_tensor(tp, 3, 6).T
    with tp.record() as traces:
        straight = fompi.all_gather_matmul(x, w, comm=tp)
        packed = fompi.all_gather_matmul(random_tensor(tp, 4, 6).T.contiguous().T, w, comm=tp)
    assert torch.equal(straight, packed)
    names = [[event.name for event in trace.events if event.is_compute] for trace in traces]
    assert not any("pack" in name for name in names[0])
    assert tp.size == 1 or any("pack" in name for name in names[1])


def test_results_that_are_kept_do_not_change(tp):
    """Fifty calls with all results and graphs alive: no memory is used twice, and every gradient is correct."""
    kept = []
    for call in range(50):
        x, w = random_tensor(tp, 2, 4, call=call).requires_grad_(), random_tensor(tp, 4, 3, call=call).requires_grad_()
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
        xs, ws = ([random_tensor(tp, *s, call=call, rank=r) for r in range(tp.size)] for s in ((2, 4), (4, 3)))
        ws = [v.requires_grad_() for v in ws]
        sum((torch.tanh(torch.cat(xs) @ v) @ v.T).sum() for v in ws).backward()
        close(w.grad, ws[tp.rank].grad)


def test_a_graph_keeps_only_what_its_backward_reads(tp):
    w = random_tensor(tp, 4, 3).requires_grad_()

    def alive(operation):
        x = random_tensor(tp, 2, 4).requires_grad_()
        inner = 2 * x
        seen, y = weakref.ref(inner), operation(inner)
        del inner
        before = seen() is not None
        y.sum().backward()
        return before, seen() is not None

    assert alive(lambda x: fompi.all_gather(x, comm=tp)) == (False, False)
    assert alive(lambda x: fompi.all_gather_matmul(x, w, comm=tp)) == (True, False)


# -------------------------------------------------------------------------------------------------------- refusals


def refused(tp, origin, call):
    """The text of the error if rank `origin` refuses a call. The other ranks quote it in a MismatchError."""
    mine = tp.rank == origin
    with pytest.raises(fompi.TensorError if mine else fompi.MismatchError) as caught:
        call(mine)
    assert fompi.all_reduce(torch.ones(1), comm=tp).item() == tp.size  # later calls work
    return str(caught.value)


def test_out_with_a_gradient_is_refused_on_all_ranks(tp):
    """One rank is enough: only its x requires grad."""
    out = torch.zeros(2 * tp.size, 4, dtype=torch.float64)
    for origin in {0, tp.size - 1}:
        text = refused(
            tp, origin, lambda mine: fompi.all_gather(random_tensor(tp, 2, 4).requires_grad_(mine), out=out, comm=tp)
        )
        assert "out= cannot be used in a call that is differentiated" in text
    assert not out.any()


def test_start_with_a_gradient_is_refused_on_all_ranks(tp):
    """One rank is enough: only its x requires grad."""
    for origin in {0, tp.size - 1}:
        text = refused(
            tp,
            origin,
            lambda mine: fompi.all_gather.start(random_tensor(tp, 2, 4).requires_grad_(mine), comm=tp).wait(),
        )
        assert "start has no gradient" in text


def test_arrays_beside_tensors_that_require_grad_are_refused(tp):
    def call(mine):
        w = random_tensor(tp, 4, 3).requires_grad_(mine)
        return fompi.all_gather_matmul(random_tensor(tp, 2, 4).numpy() if mine else random_tensor(tp, 2, 4), w, comm=tp)

    assert "ndarray together with a torch tensor that requires grad" in refused(tp, tp.size - 1, call)


def test_a_gradient_on_one_rank_only(tp):
    """The forward raises: no other rank would run the backward, and their part of the gradient would be lost."""
    if tp.size == 1:
        return
    with pytest.raises(
        fompi.MismatchError, match=r"rank 0 calls broadcast\(.*\) with the shape \(2,\) for the gradient of x; "
    ):
        fompi.broadcast(random_tensor(tp, 2).requires_grad_(tp.rank == 0), comm=tp)
    with torch.no_grad():
        close(fompi.broadcast(random_tensor(tp, 2).requires_grad_(tp.rank == 0), comm=tp), random_tensor(tp, 2, rank=0))
