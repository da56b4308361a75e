"""Strategies, modules and calls with experts are nodes of a graph of torch.compile: results as without the compiler.

All strategies are in one program, because each one that is compiled takes seconds.
"""

import pytest
import torch
from operators import tensors as flat

import fompi
from fompi.base.layout import split
from fompi.parallel import expert, sequence, tensor
from fompi.torch import nn
from fompi.torch.operators import CALLS, STRATEGIES

pytestmark = [pytest.mark.ranks(mpich=[2], openmpi=[]), pytest.mark.one_mpi, pytest.mark.usefixtures("float64")]


@pytest.fixture(autouse=True)
def fresh():
    torch.set_num_threads(1)
    torch._dynamo.reset()


def compiled(f):
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(tp):
    """The tensors of `program` on this rank."""
    rank, size = tp.rank, tp.size
    heads, keys = (len(part) for part in tensor.heads_of(rank, size, 4, 2))
    experts, words = split(5, size)[rank], split(7, size)[rank]
    rows = 4
    shapes = {
        "x": (3, 4), "w": (4, 6), "bias": (6,), "back": (3, 4), "wide": (3 * size, 4), "weight": (4,),
        "wq": (4, 2 * heads), "wk": (4, 2 * keys), "wv": (4, 2 * keys), "wo": (2 * heads, 4),
        "table": (words, 3), "logits": (3 * size, words),
        "w1": (experts, 4, 6), "w2": (experts, 3, 4), "s1": (4, 2), "s2": (1, 4), "router": (4, 5),
        "q": (rows, 4, 2), "k": (rows, 2, 2), "v": (rows, 2, 3),
    }  # fmt: skip
    same = ("bias", "wide", "weight", "s1", "s2", "router")  # what all ranks hold alike
    return {n: drawn(i if n in same else 100 * rank + i, *s) for i, (n, s) in enumerate(shapes.items())}


def program(tp):
    """A function of these tensors that calls every strategy."""
    sharding, ranks = (sequence.Sharding(4 * tp.size, **{axis: tp.size}) for axis in ("ring", "ulysses")), tp.size
    ring, ulysses = sharding
    numbers = torch.arange(3 * ranks) % 7

    def run(t):
        h = tensor.column_parallel_linear(2 * t["x"], t["w"], t["bias"], activation="swiglu", comm=tp)
        norm = tensor.all_reduce_rmsnorm(t["wide"], 2 * t["wide"], t["weight"], comm=tp)
        how = {"heads": 4, "kv_heads": 2, "causal": True, "comm": tp}
        shared = t["s1"], t["s2"]
        found = [
            h,
            tensor.row_parallel_linear(h, t["back"], comm=tp),
            tensor.row_parallel_linear(h, t["back"], comm=tp, counts=[3 * ranks] + [0] * (ranks - 1)),
            *norm,
            tensor.attention(t["x"], t["wq"], t["wk"], t["wv"], t["wo"], **how),
            tensor.vocab_parallel_embedding(numbers, t["table"], comm=tp),
            tensor.vocab_parallel_cross_entropy(t["logits"], numbers, comm=tp, label_smoothing=0.1),
            expert.moe(t["x"], t["router"], t["w1"], t["w2"], shared, k=2, activation="swiglu", comm=tp),
            sequence.ring_attention(t["q"], t["k"], t["v"], ring, comm=tp, causal=True),
            sequence.ulysses_attention(t["q"], t["k"], t["v"], ulysses, comm=tp),
        ]
        return [torch.tanh(y) for y in found]

    return run


def run(f, given):
    given = {name: t.clone().requires_grad_() for name, t in given.items()}
    results = f(given)
    sum(y.square().sum() for y in results[1:]).backward()  # the first result is used by another node only
    return [y.detach() for y in results] + [t.grad for t in given.values()]


@pytest.mark.timeout(110)
def test_strategies_equal_those_without_the_compiler(tp):
    given = tensors(tp)
    expected, f = run(program(tp), given), compiled(program(tp))
    for _ in range(2):
        for actual, wanted in zip(run(f, given), expected, strict=True):
            assert torch.equal(actual, wanted)
    with torch.no_grad():
        for actual, wanted in zip(f(given), expected, strict=False):
            assert torch.equal(actual, wanted)
    assert not any(call.forwards.kept for call in CALLS.values())


@pytest.mark.timeout(110)
def test_orders_of_sums_are_those_without_the_compiler(tp):
    """Bit by bit, for two numbers of leaves: an operation, a list of leaves, a strategy and a module."""
    size = tp.size
    torch.manual_seed(0)
    given = {"x": drawn(0, 2, 24).float(), "w": drawn(1, 24, 5).float(), "rows": drawn(2, 24, 8).float()}
    for order in (fompi.Canonical(4 * size), fompi.Canonical(6 * size)):
        norm, count = nn.RMSNorm(8, order=order, comm=tp, dtype=torch.float32), order.leaves // size

        def program(t, order=order, norm=norm, count=count):
            found = [
                fompi.all_reduce([t["rows"].detach() * k for k in range(count)], order=order, comm=tp),
                fompi.matmul_all_reduce(t["x"], t["w"], order=order, comm=tp),
                tensor.row_parallel_linear(t["x"], t["w"], order=order, comm=tp, sequence_parallel=False),
                norm(t["rows"]),
            ]
            return [torch.tanh(y) for y in found]

        found = []
        for f in (program, compiled(program)):
            norm.zero_grad()
            found.append([*run(f, given), norm.weight.grad])
        assert all(map(torch.equal, *found)), order


def test_usp(tp):
    q, k, v = (tensors(tp)[name] for name in "qkv")
    with fompi.Mesh(tp, ring=1, ulysses=tp.size) as mesh:
        sharding = sequence.Sharding(4 * tp.size, ring=1, ulysses=tp.size)

        def attend(t):
            return sequence.usp_attention(2 * t, k, v, sharding, ring=mesh["ring"], ulysses=mesh["ulysses"])

        assert torch.equal(compiled(attend)(q), attend(q))


class Model(torch.nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm = nn.VocabParallelEmbedding(11, 8, comm=tp), nn.RMSNorm(8, comm=tp)
        self.attention = nn.ParallelAttention(8, 4, 2, causal=True, comm=tp)
        self.mlp = torch.nn.Sequential(
            nn.ColumnParallelLinear(8, 12, activation="swiglu", comm=tp), nn.RowParallelLinear(6, 8, comm=tp)
        )
        self.experts, self.out = nn.MoE(8, 4, 5, 2, shared=3, comm=tp), nn.ColumnParallelLinear(8, 11, comm=tp)
        self.tp = tp

    def forward(self, tokens, targets):
        x = self.words(tokens)
        x = x + self.attention(self.norm(x))
        x = x + self.experts(x + self.mlp(x))
        return tensor.vocab_parallel_cross_entropy(self.out(x), targets, comm=self.tp).mean()


@pytest.mark.timeout(110)
def test_a_model_of_modules_is_one_graph(tp):
    """Also for other numbers of tokens, and where several forwards wait for their backwards."""
    model = Model(tp)
    f = compiled(model)
    for rows in (12, 24, 36):
        found = []
        for call in (model, f):
            model.zero_grad()
            losses = [call((torch.arange(rows) * k) % 11, (torch.arange(rows) + k) % 11) for k in (3, 5)]
            sum(losses).backward()
            found.append([*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())])
        for actual, wanted in zip(*found, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_rows_that_differ(tp):
    """Of experts a rank may have other rows than the others. Of a gather all ranks raise, and go on."""
    given = tensors(tp)

    def experts(x):
        return expert.moe(x, given["router"], given["w1"][..., :3], given["w2"], k=2, comm=tp)

    f = compiled(experts)
    for rows in (2, 3 + tp.rank, 5 * tp.rank):
        x = drawn(rows, rows, 4)
        assert torch.equal(f(x), experts(x))
    gather = compiled(lambda x: tensor.column_parallel_linear(x, given["w"], comm=tp))
    with pytest.raises(fompi.FompiError, match="as many rows on all ranks"):
        gather(drawn(1, 3 if tp.rank else 2, 4))
    assert gather(drawn(1, 2, 4)).shape == (2 * tp.size, 6)


@pytest.mark.timeout(110)
def test_rows_that_go_to_experts(tp):
    """The counts are those of the program, or numbers that it computes."""
    size = tp.size
    torch.manual_seed(0)
    counts = [[(tp.rank + i + e) % 3 for e in range(2)] for i in range(size)]
    w, v = drawn(tp.rank, 2, 4, 3), drawn(tp.rank + 9, 2, 3, 4)
    x = drawn(tp.rank, sum(map(sum, counts)), 4)
    pending = fompi.all_to_all_grouped_matmul.start(x, w, counts=counts, comm=tp)
    pending.wait()
    back = [[int(n) for n in runs] for runs in pending.counts]

    def both(x, w, v):
        h = torch.tanh(fompi.all_to_all_grouped_matmul(2 * x, w, counts=counts, comm=tp))
        return fompi.torch.grouped_matmul_all_to_all(h, v, counts=back, comm=tp)

    def computed(x, w, numbers):
        each = numbers.tolist()
        for n in each:
            torch._check(n >= 0)
        return fompi.all_to_all_grouped_matmul(x, w, counts=[each[2 * i : 2 * i + 2] for i in range(size)], comm=tp)

    for f, rest in ((both, v), (computed, torch.tensor(counts).reshape(-1))):
        found = []
        for call in (f, compiled(f)):
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            with torch._dynamo.config.patch(capture_scalar_outputs=True):
                y = call(*leaves, rest)
            y.square().sum().backward()
            found.append(flat([y.detach(), *(t.grad for t in leaves)]))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_wrong_calls_are_errors_or_graph_breaks(tp):
    given = tensors(tp)

    def call(**options):
        return lambda x: tensor.column_parallel_linear(x, given["w"], comm=tp, **options)

    with pytest.raises(fompi.PlanError, match="must be one of none, relu"):
        compiled(call(activation="gleu"))(given["x"])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="these arguments are refused"):
        compiled(call(activaton="gelu"))(given["x"])
    with pytest.raises(fompi.ArgumentError, match="activaton"):
        torch.compile(call(activaton="gelu"), backend="aot_eager")(given["x"])


def test_every_strategy_is_an_operator():
    of_modules = {f.__name__ for m in (tensor, sequence, expert) for f in vars(m).values() if hasattr(f, "tensors")}
    needs_route = {"dispatch", "experts", "combine", "route"}
    assert {*STRATEGIES} >= of_modules - needs_route
