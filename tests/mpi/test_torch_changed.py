"""What a program does to the parameters of a wrapped module between two steps: taken over, or refused on all ranks."""

import copy
import dataclasses
import warnings
from contextlib import nullcontext

import pytest
import torch
from mpi4py import MPI
from torch.multiprocessing import reductions
from torch.nn.utils import parametrizations, prune

import fompi
from fompi.parallel.data import SGD, AdamW
from fompi.torch import DistributedDataParallel, ZeroDataParallel, nn

pytestmark = [pytest.mark.ranks(mpich=[2], openmpi=[]), pytest.mark.usefixtures("float64")]
RATE = 0.1


class Net(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Plain:
    """One process, which trains with SGD."""

    def __init__(self, module, comm):
        self.module, self.comm = module, comm

    def step(self, x):
        self.module.zero_grad()
        self.module(x).square().sum().div(self.comm.size).backward()
        with torch.no_grad():
            for p in self.module.parameters():
                if p.grad is not None:
                    p.sub_(RATE * p.grad)


class Averaged(Plain):
    """DistributedDataParallel with SGD of torch. The optimizer is made anew, as after `assign=True` in torch."""

    def __init__(self, module, comm):
        super().__init__(module, comm)
        self.model = DistributedDataParallel(module, comm, bucket_nbytes=100)

    def step(self, x):
        optimizer = torch.optim.SGD(self.module.parameters(), RATE)
        optimizer.zero_grad()
        rows = x.tensor_split(self.comm.size)[self.comm.rank]
        self.model(rows).square().sum().backward()
        optimizer.step()


class Zero(Plain):
    def __init__(self, module, comm, zero=1, **options):
        super().__init__(module, comm)
        self.model = ZeroDataParallel(module, comm, optimizer=SGD(RATE), zero=zero, bucket_nbytes=100, **options)

    def step(self, x):
        self.model(x.tensor_split(self.comm.size)[self.comm.rank]).square().sum().backward()
        self.model.step()


WRAPPERS = {
    "ddp": Averaged,
    "zero 0": lambda module, comm: Zero(module, comm, 0),
    "zero 1": Zero,
    "zero 2": lambda module, comm: Zero(module, comm, 2),
    "overlap": lambda module, comm: Zero(module, comm, 1, overlap=True),
}


def load(net, **options):
    net.load_state_dict(Net(seed=7).state_dict(), **options)


def new_memory(net):
    for p in net.parameters():
        p.data = p.data + 0.5


def other_strides(net):
    net.a.weight.data = net.a.weight.data.t().contiguous().t()


def other_parameter(net):
    net.b.weight = torch.nn.Parameter(torch.ones(3, 6))


def halved(net):
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)


def through_data(net):
    for p in net.parameters():
        p.data.fill_(0.25)


def swapped(net):
    with torch.no_grad():
        torch.utils.swap_tensors(net.a.bias, torch.nn.Parameter(torch.full((6,), 0.3)))


def shared(net):
    net.share_memory()  # the gradients move, too


def queued(net):
    """What torch.multiprocessing does to tensors that go through a queue."""
    for tensor in net.state_dict().values():
        reductions.reduce_tensor(tensor)


def larger_storage(net):
    for p in net.parameters():
        p.untyped_storage().resize_(4096) if p.untyped_storage().resizable() else p.data.share_memory_()


def other_storage(net):
    with torch.no_grad():
        net.b.weight.set_(net.b.weight.detach().clone() + 0.125)


def pruned(net):
    prune.custom_from_mask(net.a, "weight", torch.arange(24).view(6, 4) % 3 > 0)


def tied(net):
    net.b.bias = torch.nn.Parameter(torch.zeros(3))
    net.b.bias.requires_grad_(False)


def frozen(net):
    net.a.weight.requires_grad_(False)


def taken_out(net):
    net.a.register_parameter("bias", None)


CHANGES = {
    "load": load,
    "load with assign": lambda net: load(net, assign=True),
    "new memory": new_memory,
    "other strides": other_strides,
    "other parameter": other_parameter,
    "written": halved,
    "written through data": through_data,
    "swapped": swapped,
    "share_memory": shared,
    "through a queue": queued,
    "larger storage": larger_storage,
    "other storage": other_storage,
    "pruned": pruned,
    "replaced by a frozen one": tied,
    "frozen": frozen,
    "taken out": taken_out,
}


OTHERS = ("zero 0", "zero 2", "overlap")
IN_TURNS = [
    (wrapper, change) for number, change in enumerate(CHANGES) for wrapper in ("ddp", "zero 1", OTHERS[number % 3])
]
"""Each change with both classes; the other levels of ZeRO take turns."""


@pytest.mark.parametrize(("wrapper", "change"), IN_TURNS)
def test_what_is_taken_over(world, wrapper, change):
    """As one process: two steps, the change, two more steps."""
    x = torch.linspace(-1, 1, 48).view(12, 4).sin()
    whole, mine = Net(), Net(seed=world.rank)
    trained = [Plain(whole, world), WRAPPERS[wrapper](mine, world)]
    for one in trained:
        for number in range(4):
            if number == 2:
                if wrapper == "overlap" and one is not trained[0]:
                    one.model.wait()
                try:
                    CHANGES[change](one.module)
                except RuntimeError as error:  # torch does not swap what has hooks
                    assert change == "swapped", error
                    one.module.a.bias.data = torch.full((6,), 0.3)
            one.step(x)
    if wrapper == "overlap":
        trained[1].model.wait()
    for p, q in zip(mine.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-10, atol=1e-12), (p - q).abs().max()
    assert mine.state_dict().keys() == whole.state_dict().keys()
    trained[1].model.close()


@pytest.mark.parametrize("bucket_nbytes", [100, 1 << 20])
def test_gradients_that_move_while_they_are_summed(world, bucket_nbytes):
    """As where a hook of the program puts p.grad into a queue of torch.multiprocessing."""

    def moves(p):
        p.grad.share_memory_()

    net = torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(3)])
    ddp, means = DistributedDataParallel(net, world, bucket_nbytes=bucket_nbytes), []
    for number in range(3):
        if number == 1:
            for p in net.parameters():
                p.register_post_accumulate_grad_hook(moves)
        net.zero_grad(set_to_none=number < 2)
        ddp(torch.full((4, 400), 1.0 + world.rank)).sum().backward()
        means.append([p.grad.clone() for p in net.parameters()])
    for later in means[1:]:
        assert all(map(torch.equal, later, means[0]))
    ddp.close()


def wider(net):
    net.b.weight.data = torch.zeros(3, 7)


def appended(net):
    net.c = torch.nn.Linear(1, 1)


REFUSED = {
    "another dtype": (lambda net: net.float(), fompi.DtypeError, "'a.weight' was torch.float64"),
    "another shape": (wider, fompi.ShapeError, r"'b.weight' was \(3, 6\)"),
    "another device": (lambda net: net.to("meta"), fompi.TensorError, "'a.weight' was on cpu"),
    "a new module": (appended, fompi.StateError, "'c.weight' is new"),
    "weight norm": (lambda net: parametrizations.weight_norm(net.a), fompi.StateError, "original0' is new"),
    "thawed": (lambda net: net.b.bias.requires_grad_(True), fompi.StateError, "'b.bias' is new"),
}


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("wrapper", ["ddp", "zero 1"])
@pytest.mark.parametrize("who", ["all", "one"])
def test_what_is_refused(world, wrapper, change, who):
    """On all ranks, by name, in the forward or the backward, whoever did it. After it is undone, training goes on."""
    f, error, words = REFUSED[change]
    net = Net()
    net.b.bias.requires_grad_(False)
    trained, x = WRAPPERS[wrapper](net, world), torch.ones(12, 4)
    trained.step(x)
    wrong = who == "all" or world.rank == world.size - 1
    kept = [(module, dict(module._parameters)) for module in net.modules()]
    values = [(p, p.data) for p in net.parameters()]
    if wrong:
        f(net)
    with pytest.raises(error if wrong else fompi.MismatchError, match=words):
        trained.step(x)
    if wrong and change == "a new module":
        del net.c
    if wrong and change == "weight norm":
        torch.nn.utils.parametrize.remove_parametrizations(net.a, "weight")
    for module, parameters in kept:
        module._parameters.clear()
        module._parameters.update(parameters)
    for p, value in values:
        p.data, p.grad = value, None
    net.b.bias.requires_grad_(False)
    trained.step(x)
    trained.model.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_float32_copies_follow_what_is_loaded(world, zero, dtype):
    """The copy in the optimizer would bring the old weights back. What nobody has written keeps its low bits."""
    net = torch.nn.Linear(5, 3, dtype=dtype)
    model = ZeroDataParallel(net, world, optimizer=SGD(1e-4), zero=zero)
    whole = torch.nn.Linear(5, 3)
    whole.load_state_dict(net.state_dict())
    for number in range(12):
        if number == 6:
            for one in (net, whole):
                with torch.no_grad():
                    one.weight[:2] = 3.0
                one.bias.data[0] = -2.0
        model(torch.ones(2, 5, dtype=dtype)).sum().backward()
        model.step()
        whole.zero_grad()
        whole(torch.ones(2, 5)).sum().backward()
        with torch.no_grad():
            for p in whole.parameters():
                p.sub_(1e-4 * p.grad)
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q.to(dtype)), (p, q)
    model.close()


@pytest.mark.parametrize("wrapper", ["ddp", "zero 1"])
def test_a_copy_computes_but_does_not_train(world, wrapper):
    trained, x = WRAPPERS[wrapper](Net(), world), torch.ones(12, 4)
    trained.step(x)
    averaged = torch.optim.swa_utils.AveragedModel(trained.model)
    averaged.update_parameters(trained.model)
    with torch.no_grad():
        assert torch.allclose(averaged.eval()(x), trained.model(x))
    duplicate = copy.deepcopy(trained.model)
    with pytest.raises(fompi.StateError, match=r"this is a copy of a (Dist|Zero)"):
        duplicate.train()(x)
    trained.step(x)
    trained.model.close()


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
def test_backwards_of_different_steps_are_not_averaged(world):
    """Rank 0 runs three backward passes in a step, the others two."""
    trained, x = Averaged(Net(), world), torch.ones(12, 4)
    trained.step(x)
    optimizer = torch.optim.SGD(trained.module.parameters(), RATE)
    with pytest.raises(fompi.MismatchError, match=r"backward 3 of step 2.*backward 1 of step 3"):
        for _ in range(2):
            for _ in range(3 if world.rank == 0 else 2):
                trained.model(x).sum().backward()
            optimizer.step()
    trained.model.close()


@dataclasses.dataclass
class Output:
    """What torch does not look into."""

    y: torch.Tensor

    def sum(self):
        return self.y.sum()


def test_feedback_is_in_the_state_of_the_optimizer(world):
    """Also into other buckets, and into a wrapper that has none. A parameter that no rank uses keeps its own."""
    x, how = torch.randn(12, 4, dtype=torch.float32), {"optimizer": SGD(RATE), "wire": "int4"}
    model = ZeroDataParallel(Net().float(), world, feedback=True, zero=2, **how)
    model(x).square().sum().backward()
    model.step()
    state = model.optimizer_state_dict()
    assert state.keys() == dict(model.module.named_parameters()).keys()
    assert world.size == 1 or state["a.weight"]["feedback"].abs().max() > 0
    (model.module.a(x).sum() * 0).backward()
    model.step()
    assert torch.equal(model.optimizer_state_dict()["b.weight"]["feedback"], state["b.weight"]["feedback"])
    other = ZeroDataParallel(Net().float(), world, feedback=True, zero=1, bucket_nbytes=64, **how)
    other.load_optimizer_state_dict(state)
    for name, kept in other.optimizer_state_dict().items():
        torch.testing.assert_close(kept["feedback"], state[name]["feedback"], rtol=1e-6, atol=1e-6)
    plain = ZeroDataParallel(Net().float(), world, **how)
    plain.load_optimizer_state_dict(state)
    assert "feedback" not in plain.optimizer_state_dict()["a.weight"]
    for one in (model, other, plain):
        one.close()


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
@pytest.mark.parametrize("which", ["training", "evaluation", "another", "without tensors"])
def test_a_forward_without_its_backward_on_one_rank(world, which):
    """The gradients of one forward are not summed with those of another one. Afterwards the ranks go on together."""
    net, x, is_last = Net(), torch.ones(12, 4), world.rank == world.size - 1
    if which == "without tensors":
        net.register_forward_hook(lambda module, given, y: Output(y))
    model = DistributedDataParallel(net, world).train(which != "evaluation")
    for _ in range(2):
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), RATE).step()
        made = [model(x) for _ in range(2 if is_last or which == "another" else 1)]
        with pytest.raises(fompi.MismatchError, match=r"forward 1 .*forward 2 |forward 2 .*forward 1 "):
            made[-1 if is_last else 0].sum().backward()
    model.close()


@pytest.mark.parametrize("wrapper", ["zero 0", "zero 1", "zero 2", "overlap"])
def test_a_forward_without_backward_and_step_under_zero(world, wrapper):
    """Refused once on all ranks. A rank may leave out a backward alone, a forward, or run more of them behind it."""
    trained, x, is_last = WRAPPERS[wrapper](Net(), world), torch.ones(12, 4), world.rank == world.size - 1
    trained.step(x)
    if is_last and world.size > 1:
        trained.model(x)
    with pytest.raises(fompi.MismatchError, match=r"forward \[1, 2\]") if world.size > 1 else nullcontext():
        trained.step(x)
    trained.step(x)
    for leaves_out in (
        lambda: trained.model(x),
        lambda: None,
        lambda: (trained.model(x).sum().backward(), trained.model(x)),
    ):
        leaves_out() if is_last else trained.model(x).sum().backward()
        trained.model.step()
        trained.step(x)
    trained.model.close()


def test_forwards_and_backwards_that_all_ranks_run_alike(world):
    """Without a backward, without gradients, in evaluation by one rank, several for one backward, and again in one."""
    net, whole, x = Net(), Net(), torch.ones(12, 4)
    whole.load_state_dict(net.state_dict())
    model = DistributedDataParallel(net, world)

    def run(model, rank):
        model(x)
        (model(x).sum() * model(2 * x).sum()).backward()
        loss = model(x).sum()
        for _ in range(rank):
            model.eval()(x)
            model.train()
            with torch.no_grad():
                model(x)
        loss.backward(retain_graph=True)
        first, second = model(x).sum(), model(3 * x).sum()
        loss.backward()
        first.backward()
        second.backward()
        for again in (False, True):
            given = x.clone().requires_grad_()
            torch.utils.checkpoint.checkpoint(model, given, use_reentrant=again).sum().backward()

    for _ in range(2):
        run(model, world.rank)
        run(whole, 0)
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad)
        for one in (net, whole):
            torch.optim.SGD(one.parameters(), RATE / 100).step()
    model.close()


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
def test_a_backward_that_ends_in_the_middle(world):
    """The others hear of it when the rank begins its next forward, and nothing of that step is averaged."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise MemoryError("no memory for the backward")

    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), world)
    x, wrong = torch.ones(3, 4), world.rank == 0
    if wrong:
        handle = model.module[0].register_forward_hook(lambda module, inputs, y: Fails.apply(y))
    with pytest.raises(MemoryError if wrong else fompi.PeerError, match=r"no memory|ended by an exception"):
        model(x).sum().backward()
        model(x)  # of the rank that has failed, if it was not caught before
    if wrong:
        handle.remove()
    model.zero_grad()
    model(x).sum().backward()
    model.close()


def test_two_forwards_before_one_backward(world):
    """A batch norm, whose buffers each forward copies from rank 0, as in torch's own class."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)

        def forward(self, x, training=True):
            return self.out(self.norm.train(training)(x))

    model = DistributedDataParallel(Twice(), world)
    x = torch.arange(12.0).view(3, 4)
    (model(x, False).sum() + model(2 * x, False).sum() + model(x).square().sum() + model(3 * x).sum()).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.close()


def test_a_step_is_a_write_that_autograd_sees(world):
    """A graph from before the step would compute gradients with the weights from after it."""
    model = ZeroDataParallel(Net(), world, optimizer=AdamW(0.01))
    loss = model(torch.ones(2, 4)).sum()
    model(torch.ones(2, 4)).sum().backward()
    model.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), warnings.catch_warnings():
        loss.backward()
    model.close()


def sharded(comm):
    torch.manual_seed(3)
    layers = nn.ColumnParallelLinear(4, 6, comm=comm), nn.RowParallelLinear(6, 4, comm=comm)
    return torch.nn.Sequential(*layers)


def unsharded():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))


def test_a_layout_belongs_to_a_parameter_and_not_to_its_name(tp):
    """Pruning renames it: whole masks, whole values and the norm are those of one process."""
    parts, whole = sharded(tp), unsharded()
    whole.load_state_dict(nn.full_state_dict(parts))
    keep = torch.arange(24).view(6, 4) % 3 > 0
    rows = parts[0].layouts["weight"].shard(keep, tp.rank)
    for module, mask in ((whole, keep), (parts, rows)):
        prune.custom_from_mask(module[0], "weight", mask)
    x = torch.ones(2, 4)
    state = nn.full_state_dict(parts)
    assert state.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name
    whole(x.repeat(tp.size, 1)).square().sum().backward()
    parts(x).square().sum().backward()
    assert torch.allclose(nn.clip_grad_norm_(parts, 0.1), torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
    nn.load_full_state_dict(parts, {name: value + 1 for name, value in state.items()})
    assert torch.equal(nn.full_state_dict(parts)["1.bias"], state["1.bias"] + 1)


def test_a_parameter_that_a_plain_module_shares(tp):
    """It is found first under the name of the plain module, and is a part all the same."""
    parts = sharded(tp)
    both = torch.nn.ModuleDict({"a": torch.nn.Module(), "b": parts})
    both["a"].shared = parts[0].weight
    assert nn.full_state_dict(both)["a.shared"].shape == (6, 4)
    parts[0].weight.grad = torch.ones_like(parts[0].weight)
    assert nn.clip_grad_norm_(both, 1e9) == pytest.approx(24**0.5)


@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight", "spectral"]
)
def test_a_parametrization_of_a_part_is_refused(tp, who, norm):
    parts = sharded(tp)
    state = nn.full_state_dict(parts)
    wrong = who == "all" or tp.rank == tp.size - 1
    if wrong:
        norm(parts[0])
    for call in (
        lambda: nn.full_state_dict(parts),
        lambda: nn.load_full_state_dict(parts, state, strict=False),
        lambda: nn.clip_grad_norm_(parts, 1.0),
    ):
        with pytest.raises(fompi.LayoutError if wrong else fompi.MismatchError, match="has no layout"):
            call()
    if who == "all":
        with pytest.raises(fompi.LayoutError, match="has no layout"):
            nn.replicated(parts)


# ------------------------------------------------------------------------------------------------ saved and loaded


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_state_of_the_optimizer_goes_to_another_number_of_ranks(world, zero, dtype):
    """Steps, a checkpoint, and more steps on one rank alone: as without the checkpoint."""

    def wrapped(comm, zero, seed=0):
        net = Net(seed).to(dtype)
        return net, ZeroDataParallel(net, comm, optimizer=AdamW(1e-2), zero=zero, bucket_nbytes=100)

    def steps(model, count):
        for i in range(count):
            model(torch.linspace(-1, 1, 8, dtype=dtype).view(2, 4) * (i + 1)).square().sum().backward()
            model.step()

    net, model = wrapped(world, zero)
    steps(model, 3)
    saved = copy.deepcopy((net.state_dict(), model.optimizer_state_dict()))
    assert saved[1]["b.weight"]["mean"].shape == (3, 6) and saved[1]["b.weight"]["steps"] == 3
    assert ("master" in saved[1]["a.bias"]) == (dtype == torch.bfloat16)
    steps(model, 3)
    with fompi.Communicator(MPI.COMM_SELF, "alone") as alone:
        for comm, other in ((alone, 1), (world, 2), (world, 0)):
            again, resumed = wrapped(comm, other, seed=9)
            again.load_state_dict(saved[0])
            resumed.load_optimizer_state_dict(saved[1])
            steps(resumed, 3)
            for p, q in zip(again.parameters(), net.parameters(), strict=True):
                assert torch.allclose(p, q, rtol=1e-12) if world.size % 2 else torch.equal(p, q)  # a mean of three
            resumed.close()
    assert model.optimizer_state_dict(rank0_only=True).keys() == (saved[1].keys() if world.rank == 0 else {*()})
    model.close()


def test_the_state_of_parts_is_whole(tp):
    """Tensor parallelism: the parts of both axes become one."""
    with fompi.Mesh(dp=1, tp=tp.size) as mesh:
        parts, whole = sharded(mesh["tp"]), unsharded()
        whole.load_state_dict(nn.full_state_dict(parts))
        models = [ZeroDataParallel(parts, mesh["dp"], optimizer=AdamW(1e-2))]
        alone = fompi.Communicator(MPI.COMM_SELF, "alone")
        models.append(ZeroDataParallel(whole, alone, optimizer=AdamW(1e-2)))
        x = torch.ones(2, 4)
        parts(x).square().sum().backward()
        whole(x.repeat(tp.size, 1)).square().sum().backward()
        for model in models:
            model.step()
        states = [model.optimizer_state_dict() for model in models]
        for name, kept in states[1].items():
            for key, value in kept.items():
                assert torch.allclose(torch.as_tensor(states[0][name][key]), torch.as_tensor(value)), (name, key)
        models[0].load_optimizer_state_dict(states[1])
        for model in models:
            model.close()
        alone.close()


@pytest.mark.parametrize("who", ["all", "one"])
def test_states_that_do_not_fit(world, who):
    model = ZeroDataParallel(Net(), world, optimizer=AdamW(1e-2))
    state, wrong = model.optimizer_state_dict(), who == "all" or world.rank == world.size - 1
    for change, error, words in (
        (lambda s: s.pop("a.bias"), fompi.LayoutError, "1 missing names: a.bias"),
        (lambda s: s.update(c={}), fompi.LayoutError, "1 unknown names: c"),
        (lambda s: s["a.bias"].pop("mean"), fompi.LayoutError, "'a.bias' has .*this optimizer keeps"),
        (
            lambda s: s["a.bias"].update(mean=torch.ones(5)),
            fompi.ShapeError,
            r"'mean' of 'a.bias' has the shape \(5,\)",
        ),
    ):
        given = copy.deepcopy(state)
        if wrong:
            change(given)
        with pytest.raises(error if wrong else fompi.MismatchError, match=words):
            model.load_optimizer_state_dict(given)
    model.load_optimizer_state_dict(state)
    model.close()
