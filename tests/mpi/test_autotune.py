"""effort="measure": candidates are measured, the fastest is kept, also on disk. The tests check no measured time."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from explained import scatter, whole
from mpi4py import MPI

import fompi
from fompi.backends.numpy import Numpy
from fompi.base import kept
from fompi.mpi import environment
from fompi.planner.candidates import UNFUSED, Candidate
from fompi.tuning import autotune

pytestmark = [
    pytest.mark.ranks(mpich=[2], openmpi=[]),
    pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="eight ranks on two cores would be slow and test nothing new"),
    pytest.mark.usefixtures("few_rounds"),
]
two_ranks_suffice = pytest.mark.skipif(MPI.COMM_WORLD.size > 2, reason="only rank 0 uses the disk: two ranks show it")


def test_effort_measure(own, cache):
    """Every result is right. Only the first call runs the candidates."""
    _, x, w, y = scatter(own)
    with own.record() as traces:
        assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()
        first = len(traces)
        assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()
        assert len(traces) == first + 1 and (first == 1) == (own.size == 1)
        pending = fompi.matmul_reduce_scatter.start(x, w, comm=own, effort="measure")
        assert (pending.wait() == y).all() and len(traces) == first + 2


@pytest.mark.parametrize("count", [7, 50_000])
def test_a_result_over_x_is_measured_elsewhere(own, cache, count):
    """Each candidate would sum what the one before has summed."""
    for _ in range(3):
        x, z = np.full(count, own.rank + 1.0), np.full(count, float(own.rank))
        assert fompi.all_reduce(x, out=x, comm=own, effort="measure") is x
        assert fompi.broadcast(z, root=own.size - 1, out=z, comm=own, effort="measure") is z
        assert (x == sum(range(own.size + 1))).all() and (z == own.size - 1).all()


def test_a_choice_is_kept_on_disk(own, comm, cache):
    if own.size == 1:
        return
    _, x, w, y = scatter(own)
    fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure")
    (choice,) = own.choices.values()
    assert comm.allgather(choice) == [choice] * own.size
    with fompi.Communicator(comm) as other, other.record() as traces:
        assert (fompi.matmul_reduce_scatter(x, w, comm=other, effort="measure") == y).all()
        (again,) = other.choices.values()
        assert again == choice and len(traces) == 3  # two broadcasts of the choice of rank 0, then the call


def test_a_bound_choice_is_for_one_shape(own, cache):
    """The same messages with other products have another choice."""
    for k in (8, 512):
        explanation, x, w, y = scatter(own, k=k)
        with fompi.bind(explanation, effort="measure", comm=own, x=x, w=w) as step:
            assert (step() == y).all()
    assert len(own.choices) == 2


def keep_and_change(own, comm, change):
    """Keep a choice on disk, and change its file. Returns the operands and the result of the call."""
    _, x, w, y = scatter(own)
    fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure")
    comm.Barrier()
    if own.rank == 0:
        (file,) = environment.cache_folder().iterdir()
        file.write_text(change(file.read_text()))
    return x, w, y


@two_ranks_suffice
@pytest.mark.parametrize("slices", [4096, 0, -1, 3])
def test_an_impossible_choice_on_disk_is_measured_again(own, comm, cache, slices):
    if own.size == 1:
        return
    choice = ["bidirectional", slices, None, None, False]
    x, w, y = keep_and_change(own, comm, lambda text: json.dumps({**json.loads(text), "choice": choice}))
    with fompi.Communicator(comm) as other:
        assert (fompi.matmul_reduce_scatter(x, w, comm=other, effort="measure") == y).all()
        (again,) = other.choices.values()
        assert ((again.schedule, again.slices) == ("bidirectional", slices)) == (slices == 3)


@two_ranks_suffice
@pytest.mark.parametrize("content", ["{", '{"about": 1, "choice": ["direct", 1, null, null]}', "\x00"])
def test_after_a_damaged_file_the_choice_is_measured_again(own, comm, cache, content, monkeypatch):
    if own.size == 1:
        return
    x, w, y = keep_and_change(own, comm, lambda text: content)
    with fompi.Communicator(comm) as other:
        assert (fompi.matmul_reduce_scatter(x, w, comm=other, effort="measure") == y).all()
    if own.rank == 0:
        (file,) = environment.cache_folder().iterdir()
        assert json.loads(file.read_text())["choice"]


def test_a_wrong_schedule_of_the_user_is_left_out(own, cache, forgotten):
    """It may be right for other sizes, so the call does not fail."""

    @fompi.schedule("of pairs", "all_gather")
    def of_pairs(problem, work):
        raise fompi.PlanError("for some other number of ranks")

    y = fompi.all_gather(whole((3, 2), own.rank), comm=own, effort="measure")
    assert np.array_equal(y, np.concatenate([whole((3, 2), rank) for rank in range(own.size)]))


@two_ranks_suffice
@pytest.mark.parametrize("folder", ["/proc/nothing", "/dev/full", "0"])
def test_a_folder_that_cannot_be_written(own, folder, monkeypatch):
    monkeypatch.setenv("FOMPI_CACHE", folder)
    _, x, w, y = scatter(own)
    assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()


def test_the_time_of_the_slowest_rank_counts(own, cache):
    """A candidate that is slow on one rank is not chosen. One without overlap is chosen if it is the fastest."""
    uneven, even, unfused = Candidate("direct"), Candidate("ring", 4), Candidate("unfused")
    last = own.rank == own.size - 1
    seconds = {uneven: 9.0 if last else 1.0, even: 2.0, unfused: 3.0}
    timed = []

    def time_call(candidate):
        timed.append(candidate)
        return seconds[candidate]

    assert autotune._measure(own, list(seconds), time_call) == even
    assert [timed.count(candidate) for candidate in seconds] == [1 + autotune.ROUNDS] * 3
    seconds[unfused] = 0.5
    assert autotune._measure(own, list(seconds), time_call) == unfused


def test_other_problems_and_other_sizes_have_their_own_choice(own, cache):
    """The weights of the ranks have different numbers of columns."""
    if own.size == 1:
        return
    for rows, k in ((2, 8), (64, 8), (2, 64)):
        x, w = whole((rows, k), own.rank), whole((k, 4 + own.rank), own.rank, 1)
        expected = np.concatenate([whole((rows, k), r) for r in range(own.size)]) @ w
        for _ in range(2):
            assert np.array_equal(fompi.all_gather_matmul(x, w, comm=own, effort="measure"), expected)
    assert len(own.choices) == 3


@pytest.mark.parametrize("rates", [(), (0.25,)])
def test_a_call_measures_only_candidates_that_it_can_take(own, machine, rates):
    """Several of them overlap. Rows by rate and windows are only for bound operations."""
    explanation, *_ = scatter(own, rows=512, k=512, machine=replace(machine, rates=rates))
    if own.size == 1:
        return
    own.machine = explanation.machine
    listed = autotune.candidates(explanation.problem, explanation.sizes, own)
    assert all(c.fits_call(own.size) for c in listed) and sum(c not in UNFUSED for c in listed) >= 2


class Other(Numpy):
    name = "another backend"


def test_choices_of_other_backends_and_kernels(own, cache):
    """Each backend has its own choice. With kernels of the user no choice is kept."""
    explanation, x, w, y = scatter(own)
    if own.size == 1:
        return

    def matmul(reads, writes):
        product = np.concatenate(reads[:-1]) @ reads[-1]
        for part in writes:
            part[...], product = product[: len(part)], product[len(part) :]

    for options in ({}, {"backend": Numpy()}, {"kernels": {"matmul": matmul}}, {"kernels": {"matmul": matmul}}):
        with fompi.bind(explanation, effort="measure", comm=own, x=x, w=w, **options) as step:
            assert (step() == y).all()
    assert len(own.choices) == 1  # NumPy is the default backend
    with fompi.bind(explanation, effort="measure", comm=own, backend=Other() if own.rank else None, x=x, w=w) as step:
        assert (step() == y).all()
    assert len(own.choices) == 2
    if own.rank == 0:
        assert len(list(environment.cache_folder().iterdir())) == 2


def test_candidates_without_overlap_are_always_measured(own, machine):
    explanation, *_ = scatter(own)
    problem, sizes, unfused = explanation.problem, explanation.sizes, explanation.unfused.candidate
    for listed in (autotune.best_by_model(explanation), autotune.candidates(problem, sizes, own)):
        assert unfused in listed and (own.size == 1 or len(listed) > 2)
    own.machine = machine
    assert unfused in autotune.candidates(problem, sizes, own)


def test_each_set_of_conditions_has_its_own_file(own, cache, machine, monkeypatch):
    """For example another version, machine, network or call."""

    def file():
        return autotune._file(autotune._conditions(own, key))

    key = "a call"
    files = {file()}
    key = "another call"
    files.add(file())
    own.machine = machine
    files.add(file())
    own.machine = replace(machine, latency=1.0)
    files.add(file())
    own.network = not own.network
    files.add(file())
    monkeypatch.setattr(autotune, "__version__", "999")
    files.add(file())
    assert len(files) == 6


def test_ranks_that_write_one_file_at_the_same_time(own, comm, cache):
    """Each rank writes another choice. What is read is one of them, and no other file is left in the folder."""
    choices = [Candidate("direct", (1,) * (1 + r), 1 + r) for r in range(own.size)]
    for _ in range(50):
        autotune._store(own, "a call", choices[own.rank])
        assert autotune._load(own, "a call", lambda candidate: True) in choices
    comm.Barrier()
    assert len(list(environment.cache_folder().iterdir())) == 1


def test_a_full_disk(own, comm, cache, monkeypatch):
    """The choice is not kept on disk, and no draft is left there."""

    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.Path, "write_text", full)
    _, x, w, y = scatter(own)
    assert (fompi.matmul_reduce_scatter(x, w, comm=own, effort="measure") == y).all()
    comm.Barrier()
    assert not list(environment.cache_folder().iterdir())


def test_a_bound_choice_that_is_not_a_candidate_any_more(own, comm, cache):
    """Another version of the candidates may have left it on disk. It is measured again."""
    explanation, x, w, y = scatter(own)
    if own.size == 1:
        return
    with fompi.bind(explanation, effort="measure", comm=own, x=x, w=w):
        pass
    (key,) = own.choices
    if own.rank == 0:
        autotune._store(own, key, Candidate("direct", (9, 1, 9)))
    comm.Barrier()
    with fompi.Communicator(comm) as other, fompi.bind(explanation, effort="measure", comm=other, x=x, w=w) as step:
        assert (step() == y).all() and explanation.has(step.changes[0].candidate)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "all_reduce", "broadcast"])
def test_effort_for_plain_collectives(own, cache, name):
    operation, size = getattr(fompi, name), own.size
    x = whole((2 * size, 3), own.rank)
    assert np.array_equal(operation(x, comm=own, effort="measure"), operation(x, comm=own))


def test_effort_with_different_rows_on_each_rank(own, cache):
    """Before the call, each rank knows only its own number of rows."""
    x = whole((1 + own.rank, 3), own.rank)
    expected = np.concatenate([whole((1 + r, 3), r) for r in range(own.size)])
    for _ in range(2):
        assert np.array_equal(fompi.all_gather(x, comm=own, effort="measure"), expected)


def test_an_unknown_effort(own):
    with pytest.raises(fompi.FompiError, match="effort='lots'"):
        fompi.all_reduce(np.ones(3), comm=own, effort="lots" if own.rank == 0 else "plan")
    assert (fompi.all_reduce(np.ones(3), comm=own) == own.size).all()


def test_effort_with_gradients(own, cache):
    torch = pytest.importorskip("torch")
    _, x, w, y = scatter(own)
    a, b = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w).requires_grad_()
    for _ in range(2):
        a.grad = b.grad = None
        result = fompi.matmul_reduce_scatter(a, b, comm=own, effort="measure")
        assert (result.detach().numpy() == y).all()
        result.sum().backward()
        assert np.array_equal(a.grad.numpy(), np.ones((len(x), 6)) @ w.T)
        assert np.array_equal(b.grad.numpy(), x.T @ np.ones((len(x), 6)))


def test_candidates_come_back_from_json():
    listed = [Candidate("direct", 4, 1), Candidate("hierarchical(2)", (1, 2, 4)), Candidate("unfused")]
    listed += [Candidate("direct", 4, None, (1, 0, 3))]
    for candidate in listed:
        assert autotune._candidate(json.loads(json.dumps(list(candidate)))) == candidate
