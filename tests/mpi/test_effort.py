"""effort="measure": what is fastest here is tried, kept, and kept on disk. No figure is judged."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from explained import scatter, whole
from mpi4py import MPI

import fompi
from fompi.backends.numpy import Numpy
from fompi.planner.candidates import UNFUSED, Candidate
from fompi.tuning import autotune

pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="eight ranks on two cores say nothing new, slowly"),
    pytest.mark.usefixtures("few_rounds"),
]


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


def kept_and_spoilt(own, comm, spoilt):
    """A choice was kept on disk, and its file changed: the operands of the call, and its result."""
    _, x, w, y = scatter(own)
    fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure")
    comm.Barrier()
    if own.rank == 0:
        (file,) = autotune.folder().iterdir()
        file.write_text(spoilt(file.read_text()))
    return x, w, y


@pytest.mark.parametrize("slices", [4096, 0, -1, 3])
def test_a_choice_on_disk_that_cannot_be_is_measured_again(own, comm, cache, slices):
    if own.size == 1:
        return
    choice = ["bidirectional", slices, None, None, []]
    x, w, y = kept_and_spoilt(own, comm, lambda kept: json.dumps({**json.loads(kept), "choice": choice}))
    with fompi.Communicator(comm) as other:
        assert (fompi.matmul_reduce_scatter(x, w, comm=other, effort="measure") == y).all()
        (again,) = other.choices.values()
        assert ((again.schedule, again.slices) == ("bidirectional", slices)) == (slices == 3)


@pytest.mark.parametrize("content", ["{", '{"about": 1, "choice": ["direct", 1, null, null]}', "\x00"])
def test_a_spoilt_file_is_measured_again(own, comm, cache, content, monkeypatch):
    if own.size == 1:
        return
    x, w, y = kept_and_spoilt(own, comm, lambda kept: content)
    with fompi.Communicator(comm) as other:
        assert (fompi.matmul_reduce_scatter(x, w, comm=other, effort="measure") == y).all()
    if own.rank == 0:
        (file,) = autotune.folder().iterdir()
        assert json.loads(file.read_text())["choice"]


def test_a_schedule_of_the_user_that_is_wrong_here_is_left_out(own, cache, forgotten):
    """It may be right for other sizes: the call goes on without it."""

    @fompi.schedule("of pairs", "all_gather")
    def of_pairs(problem, work):
        raise fompi.PlanError("for some other number of ranks")

    y = fompi.all_gather(whole((3, 2), own.rank), comm=own, effort="measure")
    assert np.array_equal(y, np.concatenate([whole((3, 2), rank) for rank in range(own.size)]))


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

    assert autotune._fastest(own, list(seconds), timed) == even
    assert [tried.count(candidate) for candidate in seconds] == [1 + autotune.ROUNDS] * 3
    seconds[slow] = 0.5
    assert autotune._fastest(own, list(seconds), timed) == slow


def test_calls_are_told_apart_by_their_problem(own, cache):
    """By what is multiplied, which need not be alike on all ranks, and by how much: each is tried by itself."""
    if own.size == 1:
        return
    for rows, k in ((2, 8), (64, 8), (2, 64)):
        x, w = whole((rows, k), own.rank), whole((k, 4 + own.rank), own.rank, 1)
        expected = np.concatenate([whole((rows, k), r) for r in range(own.size)]) @ w
        for _ in range(2):
            assert np.array_equal(fompi.all_gather_matmul(x, w, comm=own, effort="measure"), expected)
    assert len(own.choices) == 3


@pytest.mark.parametrize("rates", [(), (0.25,)])
def test_a_call_tries_several_that_overlap_on_any_machine(own, machine, rates):
    """Rows by rate, windows and orders of peers are for bound operations, and take no place from what a call can do."""
    explained, *_ = scatter(own, rows=512, k=512, machine=replace(machine, rates=rates))
    if own.size == 1:
        return
    own.machine = explained.machine
    found = autotune.candidates(explained.problem, explained.sizes, own)
    assert all(c.anywhere(own.size) for c in found) and sum(c not in UNFUSED for c in found) >= 2


class Other(Numpy):
    name = "another backend"


def test_backends_and_kernels_are_measured_by_themselves(own, cache):
    explained, x, w, y = scatter(own)
    if own.size == 1:
        return

    def matmul(reads, writes):
        product = np.concatenate(reads[:-1]) @ reads[-1]
        for part in writes:
            part[...], product = product[: len(part)], product[len(part) :]

    for how in ({}, {"backend": Numpy()}, {"kernels": {"matmul": matmul}}, {"kernels": {"matmul": matmul}}):
        with fompi.bind(explained, effort="measure", comm=own, x=x, w=w, **how) as step:
            assert (step() == y).all()
    assert len(own.choices) == 1  # NumPy is what is taken anyway, and nothing is known of kernels that are not ours
    with fompi.bind(explained, effort="measure", comm=own, backend=Other() if own.rank else None, x=x, w=w) as step:
        assert (step() == y).all()
    assert len(own.choices) == 2
    if own.rank == 0:
        assert len(list(autotune.folder().iterdir())) == 2


def test_calls_without_overlap_are_always_tried(own, machine):
    explained, *_ = scatter(own)
    unfused = [one.candidate for one in explained.judged if one.candidate in UNFUSED]
    for found in (autotune.few(explained), list(autotune.candidates(explained.problem, explained.sizes, own))):
        assert unfused[0] in found and (own.size == 1 or len(found) > 2)
    own.machine = machine
    assert unfused[0] in autotune.candidates(explained.problem, explained.sizes, own)


def test_a_choice_holds_for_what_it_was_made_for(own, cache, machine, monkeypatch):
    """Another version, machine, network, way of progress or call is another file."""

    def file():
        return autotune._file(autotune._about(own, key))

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
    monkeypatch.setattr(autotune, "__version__", "999")
    known.add(file())
    assert len(known) == 6


def test_many_ranks_write_one_choice(own, comm, cache):
    """All at once, each another winner: what is read is one of them, whole; nothing else is left in the folder."""
    winners = [Candidate("direct", (1,) * (1 + r), 1 + r) for r in range(own.size)]
    for _ in range(50):
        autotune._store(own, "a call", winners[own.rank])
        assert autotune._load(own, "a call", lambda found: True) in winners
    comm.Barrier()
    assert len(list(autotune.folder().iterdir())) == 1


def test_a_disk_that_is_full(own, comm, cache, monkeypatch):
    """Nothing is kept, and nothing is left."""

    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(autotune.Path, "write_text", full)
    _, x, w, y = scatter(own)
    assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()
    comm.Barrier()
    assert not list(autotune.folder().iterdir())


def test_a_bound_choice_that_is_no_candidate_any_more(own, comm, cache):
    """As another release may have left it: measured again."""
    explained, x, w, y = scatter(own)
    if own.size == 1:
        return
    with fompi.bind(explained, effort="measure", comm=own, x=x, w=w):
        pass
    (key,) = own.choices
    if own.rank == 0:
        autotune._store(own, key, Candidate("direct", (9, 1, 9)))
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


def test_candidates_come_back_from_json():
    listed = [Candidate("direct", 4, 1), Candidate("hierarchical(2)", (1, 2, 4)), Candidate("unfused")]
    listed += [Candidate("direct", 4, None, (1, 0, 3)), Candidate("direct", 1, 2, None, ((1, 2), (2, 0), (0, 1)))]
    for candidate in listed:
        assert autotune._candidate(json.loads(json.dumps(list(candidate)))) == candidate
