"""What chooses: a machine that is calibrated, FOMPI_MACHINE, effort="measure", adapt=True. No figure is judged."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from importlib import import_module
from time import sleep

import numpy as np
import pytest
from mpi4py import MPI

import fompi
from fompi import Partial, Shard, Spec, adaptive, call, drift, effort, fit
from fompi.calibrate import slowdown
from fompi.candidates import UNFUSED, Candidate
from fompi.machine import Machine

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="eight ranks on two cores say nothing new, slowly")


def whole(shape, *seed):
    """Whole numbers, so that sums and products are exact."""
    return np.random.default_rng(seed).integers(0, 10, shape).astype(np.float64)


@pytest.fixture
def machine():
    return Machine.load("gigabit")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """No figure is judged here."""
    monkeypatch.setattr(effort, "ROUNDS", 2)
    monkeypatch.setattr(effort, "FEW", 2)
    monkeypatch.setattr(import_module("fompi.calibrate"), "ROUNDS", 2)
    monkeypatch.setattr(import_module("fompi.calibrate"), "SIZES", [1 << 10, 1 << 14, 1 << 18])


@pytest.fixture
def cache(tmp_path_factory, monkeypatch, comm):
    """A folder of rank 0's, on all ranks."""
    folder = comm.bcast(str(tmp_path_factory.mktemp("cache")) if comm.rank == 0 else None)
    monkeypatch.setenv("FOMPI_CACHE", folder)
    return folder


@pytest.fixture
def own(comm):
    """A communicator that knows of no choice yet."""
    with fompi.Communicator(comm) as made:
        yield made


def scatter(own, rows=24, machine="gigabit", k=8):
    """matmul_reduce_scatter: the explanation, x and w of this rank, and its result."""
    size, n = own.size, 6
    x = Spec((rows, k * size), "float64", Shard(1))
    w = Spec((k * size, n), "float64", Shard(0))
    explained = fompi.explain(fompi.matmul_reduce_scatter, x, w, ranks=size, machine=machine)
    xs, ws = ([whole(shape, i, r) for r in range(size)] for i, shape in enumerate(((rows, k), (k, n))))
    total = sum(a @ b for a, b in zip(xs, ws, strict=True))
    own_rows = explained.sizes.rows
    first = sum(own_rows[: own.rank])
    return explained, xs[own.rank], ws[own.rank], total[first : first + own_rows[own.rank]]


@pytest.mark.timeout(100)
def test_calibrate(own, comm, tmp_path):
    said = []
    machine = fompi.calibrate(own, said.append)
    assert comm.allgather(machine) == [machine] * own.size
    assert machine.flops_rate > 1e8 and machine.memory_rate > 1e7 and 0 < machine.overhead < 1e-2
    if own.size > 1:
        assert machine.latency > 0 and machine.curve and len(machine.natives) == 5
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine and machine.source.startswith("measured ")
    assert said[0] == "kernels"
    explained, *_ = scatter(own, machine=machine)
    assert explained.winner.seconds > 0
    slower = slowdown(fit.at_speed(machine, 1e-3), own)
    assert slower > 10 and comm.allgather(slower) == [slower] * own.size


def test_effort_measure(own, cache):
    """Every call is right, the first one included; the second one runs once."""
    _, x, w, y = scatter(own)
    with own.record() as traces:
        assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()
        first = len(traces)
        assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()
        assert len(traces) == first + 1 and (first == 1) == (own.size == 1)
        pending = fompi.matmul_reduce_scatter.start(x, w, comm=own, effort="measure")
        assert (pending.wait() == y).all() and len(traces) == first + 2


def test_a_choice_is_kept_on_disk(own, comm, cache):
    if own.size == 1:
        return
    _, x, w, y = scatter(own)
    fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure")
    (found,) = own.choices.values()
    assert comm.allgather(found) == [found] * own.size
    with fompi.Communicator(comm) as other, other.record() as traces:
        assert (fompi.matmul_reduce_scatter(x, w, comm=other, effort="measure") == y).all()
        (again,) = other.choices.values()
        assert again == found and len(traces) == 3  # what rank 0 knows, in two messages, and the call itself


def test_bound_choices_are_of_one_shape(own, cache):
    """What is multiplied counts, not only what travels."""
    for k in (8, 512):
        explained, x, w, y = scatter(own, k=k)
        with fompi.bind(explained, effort="measure", comm=own, x=x, w=w) as step:
            assert (step() == y).all()
    assert len(own.choices) == 2


@pytest.mark.parametrize("content", ["{", '{"about": 1, "choice": ["direct", 1, null, null]}', "\x00"])
def test_a_spoilt_file_is_measured_again(own, comm, cache, content, monkeypatch):
    if own.size == 1:
        return
    _, x, w, y = scatter(own)
    fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure")
    comm.Barrier()
    if own.rank == 0:
        (file,) = effort.folder().iterdir()
        file.write_text(content)
    with fompi.Communicator(comm) as other:
        assert (fompi.matmul_reduce_scatter(x, w, comm=other, effort="measure") == y).all()
    if own.rank == 0:
        assert json.loads(file.read_text())["choice"]


@pytest.mark.parametrize("folder", ["/proc/nothing", "/dev/full", "0"])
def test_a_disk_that_takes_nothing(own, folder, monkeypatch):
    monkeypatch.setenv("FOMPI_CACHE", folder)
    _, x, w, y = scatter(own)
    assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()


def test_what_is_fastest_on_the_slowest_rank_is_kept(own, cache, monkeypatch):
    """One is quick on one rank only, one is even; the fastest of the best few has no say against the unfused call."""
    quick, even, slow = Candidate("direct"), Candidate("ring", 4), Candidate("unfused")
    last = own.rank == own.size - 1
    seconds = {quick: 9.0 if last else 1.0, even: 2.0, slow: 3.0}
    tried = []

    def timed(candidate):
        tried.append(candidate)
        return seconds[candidate]

    assert effort._fastest(own, list(seconds), timed) == even
    assert [tried.count(candidate) for candidate in seconds] == [1 + effort.ROUNDS] * 3
    seconds[slow] = 0.5
    assert effort._fastest(own, list(seconds), timed) == slow


def test_calls_without_overlap_are_always_tried(own, machine):
    explained, *_ = scatter(own)
    unfused = [one.candidate for one in explained.judged if one.candidate in UNFUSED]
    for found in (effort.few(explained), list(effort.candidates(explained.problem, explained.sizes, own))):
        assert unfused[0] in found and (own.size == 1 or len(found) > 2)
    own.machine = machine
    assert unfused[0] in effort.candidates(explained.problem, explained.sizes, own)


def test_a_choice_holds_for_what_it_was_made_for(own, cache, machine, monkeypatch):
    """Another version, machine, network, way of progress or call is another file."""

    def file():
        return effort._file(effort._about(own, key))

    key = "a call"
    known = {file()}
    key = "another call"
    known.add(file())
    own.machine = machine
    known.add(file())
    own.machine = replace(machine, latency=1.0)
    known.add(file())
    own.network = not own.network
    known.add(file())
    monkeypatch.setattr(effort, "__version__", "999")
    known.add(file())
    assert len(known) == 6


def test_many_ranks_write_one_choice(own, comm, cache):
    """All at once, each another winner: what is read is one of them, whole; nothing else is left in the folder."""
    winners = [Candidate("direct", (1,) * (1 + r), 1 + r) for r in range(own.size)]
    for _ in range(50):
        effort._store(own, "a call", winners[own.rank])
        assert effort._load(own, "a call", lambda found: True) in winners
    comm.Barrier()
    assert len(list(effort.folder().iterdir())) == 1


def test_a_disk_that_is_full(own, comm, cache, monkeypatch):
    """Nothing is kept, and nothing is left."""

    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(effort.Path, "write_text", full)
    _, x, w, y = scatter(own)
    assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()
    comm.Barrier()
    assert not list(effort.folder().iterdir())


def test_a_bound_choice_that_is_no_candidate_any_more(own, comm, cache):
    """As another release may have left it: measured again."""
    explained, x, w, y = scatter(own)
    if own.size == 1:
        return
    with fompi.bind(explained, effort="measure", comm=own, x=x, w=w):
        pass
    (key,) = own.choices
    if own.rank == 0:
        effort._store(own, key, Candidate("direct", (9, 1, 9)))
    comm.Barrier()
    with fompi.Communicator(comm) as other, fompi.bind(explained, effort="measure", comm=other, x=x, w=w) as step:
        assert (step() == y).all() and explained.has(step.changes[0].candidate)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "all_reduce", "broadcast"])
def test_effort_for_what_only_moves(own, cache, name):
    operation, size = getattr(fompi, name), own.size
    x = whole((2 * size, 3), own.rank)
    assert np.array_equal(operation(x, comm=own, effort="measure"), operation(x, comm=own))


def test_effort_with_ranks_of_other_sizes(own, cache):
    """Rows that only their rank knows beforehand."""
    x = whole((1 + own.rank, 3), own.rank)
    expected = np.concatenate([whole((1 + r, 3), r) for r in range(own.size)])
    for _ in range(2):
        assert np.array_equal(fompi.all_gather(x, comm=own, effort="measure"), expected)


def test_effort_that_is_none(own):
    with pytest.raises(fompi.FompiError, match="effort='lots'"):
        fompi.all_reduce(np.ones(3), comm=own, effort="lots" if own.rank == 0 else "plan")
    assert (fompi.all_reduce(np.ones(3), comm=own) == own.size).all()


def test_effort_with_gradients(own, cache):
    torch = pytest.importorskip("torch")
    _, x, w, y = scatter(own)
    a, b = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w).requires_grad_()
    for _ in range(2):
        a.grad = b.grad = None
        found = fompi.matmul_reduce_scatter(a, b, comm=own, effort="measure")
        assert (found.detach().numpy() == y).all()
        found.sum().backward()
        assert np.array_equal(a.grad.numpy(), np.ones((len(x), 6)) @ w.T)
        assert np.array_equal(b.grad.numpy(), x.T @ np.ones((len(x), 6)))


# ------------------------------------------------------------------------------------------------ FOMPI_MACHINE


def test_the_machine_of_the_environment_chooses(own, machine):
    """Calls of about the same size are done alike, whatever each rank would think of it."""
    own.machine = machine
    size = own.size
    with own.record() as traces:
        x = whole((4 * size, 3), own.rank)
        assert np.array_equal(fompi.all_reduce(x, comm=own), sum(whole((4 * size, 3), r) for r in range(size)))
        fompi.all_to_all(x, comm=own)
    assert len(traces) == 2
    if size > 1:
        sums = Spec((12 * size,), "float64", Partial())
        explained = fompi.explain(fompi.all_reduce, sums, ranks=size, machine=machine)
        assert explained.winner.candidate.schedule in traces[0].title


def test_an_all_to_all_is_chosen_by_how_much_it_moves_in_all(own, machine, monkeypatch):
    """Each rank tells how many rows it has, to a power of two: all choose alike, whatever their own part is."""
    own.machine, asked, choose = machine, [], call.choose

    def noted(problem, rows, *rest):
        asked.append((rows, choose(problem, rows, *rest)))
        return asked[-1][1]

    monkeypatch.setattr(call, "choose", noted)
    x, w = whole((3 * (own.rank + 1), 3), own.rank), whole((3, 4), 5)
    counts = [3 * (own.rank + 1) if dest == 0 else 0 for dest in range(own.size)]
    y = fompi.all_to_all_matmul(x, w, counts=counts, comm=own)
    if own.rank == 0:
        assert np.array_equal(y, np.concatenate([whole((3 * (r + 1), 3), r) for r in range(own.size)]) @ w)
    total = sum(1 << (3 * (r + 1)).bit_length() - 1 for r in range(own.size))
    if own.size > 1:
        assert [rows for rows, _ in asked] == [total] and len(set(own.link.comm.allgather(asked[0]))) == 1


def test_large_products_are_dealt_out_in_slices_over_a_network(own, monkeypatch):
    """Also where ranks have other numbers of rows: they tell each other how many, about."""
    own.network, own.crowded, chosen, choose = own.size > 1, False, [], call.choose
    monkeypatch.setattr(call, "choose", lambda *asked: chosen.append(choose(*asked)) or chosen[-1])
    x, w = np.ones((128 * own.size**2 + own.rank, 2)), np.ones((2, 2048))
    counts = [len(x) - 128 * (own.size - 1)] + [128] * (own.size - 1)
    y = fompi.matmul_all_to_all(x, w, counts=counts, comm=own)
    assert (y == 2).all()
    if own.size > 1:
        assert chosen == [("direct", 4)] and len(set(own.link.comm.allgather(chosen[0]))) == 1


@pytest.mark.parametrize(("more", "schedule"), [(1, "pairwise"), (300, "direct")])
def test_a_plain_all_to_all_goes_in_slices_over_a_network(own, more, schedule):
    """Two under way at a time, where there are several peers; in step, unless a rank has far more for one of them."""
    own.network, own.crowded = own.size > 1, False
    x = np.arange((512 * own.size + more * own.rank) * 256.0).reshape(-1, 256) + own.rank
    counts = [len(x) - 512 * (own.size - 1)] + [512] * (own.size - 1)
    everyone = own.link.comm.allgather((x, counts))
    y = fompi.all_to_all(x, counts=counts, comm=own)
    parts = [np.split(given, np.cumsum(cut)[:-1])[own.rank] for given, cut in everyone]
    assert np.array_equal(y, np.concatenate(parts))
    (made,) = (found.plan for found in own.plans.values())
    assert (made.schedule, made.parts, made.window) == ((schedule, 4, 2) if own.size > 2 else ("direct", 1, None))


def test_columns_that_differ_take_the_rule(own, machine):
    """Ranks with other weights might choose differently by the model: none of them does."""
    own.machine = machine
    x, w = whole((4, 5), own.rank), whole((5, 1000 if own.rank else 1), 7)
    y = fompi.all_gather_matmul(x, w, comm=own)
    assert np.array_equal(y, np.concatenate([whole((4, 5), r) for r in range(own.size)]) @ w)


def test_ranks_with_other_machines(own, machine):
    own.machine = machine if own.rank == 0 else replace(machine, latency=1.0)
    if own.size == 1:
        return
    with pytest.raises(fompi.MismatchError, match="machine"):
        fompi.all_reduce(np.ones(3), comm=own)


# ------------------------------------------------------------------------------------------------ bound


@pytest.mark.parametrize("how", [{}, {"effort": "measure"}, {"adapt": True}, {"adapt": True, "same_bits": True}])
def test_bind_an_explanation(own, cache, how):
    explained, x, w, y = scatter(own)
    step = fompi.bind(explained, comm=own, x=x, w=w, **how)
    for _ in range(20):
        assert (step() == y).all()
    step.start()
    assert (step.wait() == y).all() and step.trace.events and step.plan.problem == explained.problem
    step.close()


def test_bind_refuses(own):
    explained, x, w, _ = scatter(own)
    with pytest.raises(fompi.PlanError, match=r"fompi\.explain"):
        fompi.bind(explained.plan, comm=own, x=x, w=w, adapt=True)
    with pytest.raises(fompi.FompiError, match="effort"):
        fompi.bind(explained, comm=own, x=x, w=w, effort="lots" if own.rank == 0 else "plan")
    more = replace(explained, problem=replace(explained.problem, size=own.size + 1))
    with pytest.raises(fompi.PlanError, match="ranks"):
        fompi.bind(more, comm=own, x=x, w=w)


def test_it_goes_over_to_another_plan(own, cache, monkeypatch):
    """When calls take longer the links are measured again; results stay right, and the change is told."""
    explained, x, w, y = scatter(own)
    if own.size == 1:
        return
    other = next(one for one in explained.judged if one.proof is not None and one != explained.winner)
    found = replace(explained, judged=(other, *(one for one in explained.judged if one is not other)))
    monkeypatch.setattr(adaptive, "refit", lambda machine, comm, computes: machine)
    monkeypatch.setattr(adaptive, "explain", lambda *given: found)
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)  # whatever they take
    with fompi.bind(explained, comm=own, x=x, w=w, adapt=True) as step:
        for _ in range(adaptive.CHECK_CALLS):
            assert (step() == y).all()
        assert [change.call for change in step.changes] == [1]
        assert (step() == y).all()
        assert [change.call for change in step.changes] == [1, adaptive.CHECK_CALLS + 1]
        assert step.changes[-1].candidate == other.candidate and step.plan.schedule == other.candidate.schedule
        assert f"from call {adaptive.CHECK_CALLS + 1} on {other.candidate}" in step.trace.title


def test_same_bits_keep_the_schedule(own, cache, monkeypatch):
    explained, x, w, y = scatter(own)
    if own.size == 1:
        return
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)
    monkeypatch.setattr(adaptive, "refit", lambda machine, *_: replace(machine, bandwidth=1e3, latency=0.1))
    monkeypatch.setattr(adaptive, "LOOK_SHARE", 1e9)
    with fompi.bind(explained, comm=own, x=x, w=w, adapt=True, same_bits=True) as step:
        for _ in range(2 * adaptive.CHECK_CALLS):
            assert (step() == y).all()
        first = step.changes[0].candidate
        assert all(adaptive.sums_alike(explained.problem, change.candidate, first) for change in step.changes)


def test_looking_takes_no_more_than_its_share(own, cache, monkeypatch):
    """Times that differ at every look: after one, the next waits until calls have taken some times as long."""
    explained, x, w, y = scatter(own)
    looked = []
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)
    monkeypatch.setattr(adaptive, "refit", lambda machine, *_: looked.append(sleep(0.1)) or machine)
    for share, most in ((1e9, 5), (1e-3, 1)):
        monkeypatch.setattr(adaptive, "LOOK_SHARE", share)
        looked.clear()
        with fompi.bind(explained, comm=own, x=x, w=w, adapt=True) as step:
            for _ in range(5 * adaptive.CHECK_CALLS + 1):
                assert (step() == y).all()
        assert len(looked) == most


def test_those_that_adapt_are_called_in_one_order(own, cache):
    """Times of one beside times of another would say nothing: an error on all ranks."""
    explained, x, w, _ = scatter(own)
    if own.size == 1:
        return
    a, b = (fompi.bind(explained, comm=own, x=x, w=w, adapt=True) for _ in range(2))
    for _ in range(adaptive.CHECK_CALLS):
        a(), b()
    first, second = (b, a) if own.rank == 0 else (a, b)
    with pytest.raises(fompi.MismatchError, match="the times of"):
        first.start()
    with pytest.raises(fompi.MismatchError, match="the times of"):
        second.start()


def test_slower_cores_are_seen(own, monkeypatch):
    """Kernels that take thrice as long as the machine says, beside links as they were."""
    calibrated = import_module("fompi.calibrate")
    explained, *_ = scatter(own)
    monkeypatch.setattr(calibrated, "slowdown", lambda machine, comm: 3.0)
    machine = replace(explained.machine, name="fast")
    assert calibrated.refit(machine, own, True).flops_rate == pytest.approx(machine.flops_rate / 3)
    assert calibrated.refit(machine, own, False).flops_rate == machine.flops_rate


def test_a_drift_is_said_once(own, machine, monkeypatch):
    monkeypatch.setattr(drift, "LEAST_SECONDS", 0.0)
    rates = dict.fromkeys(("bandwidth", "flops_rate", "memory_rate", "pack_rate"), 1e300)
    explained, x, w, y = scatter(own, machine=replace(machine, latency=0.0, overhead=0.0, **rates))
    with fompi.bind(explained, comm=own, x=x, w=w) as step, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3 * drift.WARN_CALLS):
            assert (step() == y).all()
    told = [one for one in caught if issubclass(one.category, fompi.DriftWarning)]
    assert len(told) == (own.rank == 0)
    fresh = fompi.Communicator(own.link.comm, name="with a machine")
    fresh.machine = explained.machine
    plan = explained.plan_of(Candidate("unfused_p2p"))
    for kernels in (None, {"matmul": lambda reads, writes: np.matmul(*reads, out=writes[0])}):
        with (
            fompi.bind(plan, comm=fresh, x=x, w=w, kernels=kernels) as step,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for _ in range(3 * drift.WARN_CALLS):
                step()
        told = [str(one.message) for one in caught if issubclass(one.category, fompi.DriftWarning)]
        assert len(told) == (own.rank == 0 and kernels is None), "of kernels of the user nothing is predicted"
        assert all(f"predicted on {fresh.machine.name}: calibrate again" in words for words in told)
    fresh.close()


def test_candidates_come_back_from_json():
    listed = [Candidate("direct", 4, 1), Candidate("hierarchical(2)", (1, 2, 4)), Candidate("unfused")]
    listed += [Candidate("direct", 4, None, (1, 0, 3)), Candidate("direct", 1, 2, None, ((1, 2), (2, 0), (0, 1)))]
    for candidate in listed:
        assert effort._candidate(json.loads(json.dumps(list(candidate)))) == candidate


def test_an_all_reduce_by_rate(own):
    """The slow rank sums nothing, or less; the result is that of any other plan."""
    if own.size < 3:
        return
    slow = replace(Machine.load("gigabit"), rates=(0.25,))
    x = Spec((1000, 3), "float64", Partial())
    explained = fompi.explain(fompi.all_reduce, x, ranks=own.size, machine=slow)
    rated = [one.candidate for one in explained.judged if one.candidate.rows is not None]
    assert rated and all(one.rows[0] < min(one.rows[1:]) for one in rated)
    given = whole((1000, 3), own.rank)
    total = sum(whole((1000, 3), r) for r in range(own.size))
    for candidate in rated:
        fompi.verify(explained.plan_of(candidate))
        with fompi.bind(explained.plan_of(candidate), comm=own, x=given) as step:
            assert (step() == total).all()


def test_ranks_that_wait_in_different_ways(own):
    """Some ask progress() and never wait: all come to the comparison of times before the same call."""
    explained, x, w, _ = scatter(own)
    with fompi.bind(explained, comm=own, x=x, w=w, adapt=True) as step:
        for _ in range(3 * adaptive.CHECK_CALLS):
            if own.rank == 0:
                step.start()
                while not step.progress():
                    pass
            else:
                step()


def test_what_cannot_be_bound_is_an_error_on_all_ranks(own):
    explained, x, w, _ = scatter(own)
    with pytest.raises(fompi.FompiError, match=r"takes a fompi\.Plan"):
        fompi.bind("plan" if own.rank == 0 else explained.plan, comm=own, x=x, w=w)


def test_a_measurement_has_a_deadline(own, comm, monkeypatch):
    """Somebody does not come: an error that says so, in place of a core that spins for ever."""
    if own.size == 1:
        return
    calibrated = import_module("fompi.calibrate")
    monkeypatch.setenv("FOMPI_TIMEOUT", "0.3")
    private = comm.Dup()
    if own.rank == 0:
        with pytest.raises(fompi.WaitTimeout, match=r"not all ranks came to a measurement within 0\.3 s"):
            calibrated.meet(private)
        monkeypatch.setattr(own.engine, "timeout", 0.3)
        measured = calibrated._Calibration.__new__(calibrated._Calibration)
        measured.comm, measured.rank, measured.inbox, measured.outbox = own, 0, np.zeros(1), np.zeros(1)
        with pytest.raises(fompi.WaitTimeout, match="to measure a link"):
            measured._complete([private.Irecv(measured.inbox, 1, 7)])
        monkeypatch.undo()
        private.Send(np.zeros(1), 1, 8)
    elif own.rank == 1:
        private.Recv(np.zeros(1), 0, 8)
        private.Send(np.zeros(1), 0, 7)
    comm.Barrier()
    if own.rank:
        private.Ibarrier().Wait()  # what rank 0 has begun ends
    comm.Barrier()
