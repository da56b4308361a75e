"""Unbound calls that were made before run in C, agreement included. Python goes on with what C cannot end well."""

from __future__ import annotations

import os
import threading
from time import sleep

import calls
import catalogue
import numpy as np
import pytest
import torch
from cut_short import CutShort

import fompi
from fompi.ops.ticket import Ticket

pytestmark = [
    pytest.mark.ranks(mpich=[2, 3], openmpi=[2, 4]),
    pytest.mark.skipif(os.environ.get("FOMPI_ENGINE") == "python", reason="calls run in Python"),
]


def tickets(comm):
    return [ticket for ticket in comm.tickets.values() if ticket]


def everything(world, dtype="float64"):
    """(name, a call, its expected results by name) for all moves and sums."""
    for number, (name, problem) in enumerate(catalogue.moves(world.size, dtype).items()):
        sizes = calls.row_sizes(problem, "even")
        inputs = catalogue.inputs(problem, sizes, number, catalogue.integers)
        expected = calls.expected(problem, inputs, sizes, world.rank)
        yield name, lambda p=problem, i=inputs, s=sizes: calls.call(p, i[world.rank], s, world), expected


def assert_equal(got, wanted, what):
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, err_msg=str(what), strict=True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32"])
def test_every_operation(own, dtype):
    for name, call, wanted in everything(own, dtype):
        for turn in range(5):
            assert_equal(call(), wanted, (name, turn))
    assert len(tickets(own)) >= 3


def test_python_goes_on_at_every_step(own):
    """Before the ranks have agreed and after it, on each rank at another point."""
    draw, found = np.random.default_rng(own.rank), 0
    for name, call, wanted in everything(own, "float32"):
        for turn in range(14):
            for ticket in tickets(own):
                if not isinstance(ticket.call, CutShort):
                    ticket.call = CutShort(ticket.call, lambda: int(draw.integers(0, 10)))
                    found += 1
            assert_equal(call(), wanted, (name, turn))
        if turn == 13:
            assert fompi.all_reduce(np.ones(2), comm=own).tolist() == [own.size] * 2
    assert found >= 3


def test_results_are_fresh_and_inputs_are_read_at_each_call(own):
    kept = []
    for turn in range(6):
        y = fompi.all_reduce(np.full(5, turn + own.rank), comm=own)
        kept.append(y)
    assert tickets(own)
    for turn, y in enumerate(kept):
        assert (y == own.size * turn + sum(range(own.size))).all()


def test_in_place_and_out(own):
    for turn in range(6):
        x, out = np.full(7, turn + 1.0), np.zeros(7)
        assert fompi.all_reduce(x, comm=own, out=out) is out and (out == own.size * (turn + 1)).all()
        assert (x == turn + 1).all()
        assert fompi.all_reduce(x, comm=own, out=x) is x and (x == own.size * (turn + 1)).all()


def test_tensors_of_torch(own):
    for turn in range(6):
        x = torch.full((4,), turn + 1.0)
        y = fompi.all_reduce(x, comm=own)
        assert isinstance(y, torch.Tensor) and (y == own.size * (turn + 1)).all()
        before = x._version
        assert fompi.all_reduce(x, comm=own, out=x) is x and x._version > before


def test_other_rows_on_one_rank(own):
    """The headers differ from those of the last time: the ranks agree in Python."""
    for turn in range(12):
        rows = [2 + (turn == 7 and rank == 0) for rank in range(own.size)]
        x = np.full((rows[own.rank], 2), float(own.rank))
        y = fompi.all_gather(x, comm=own)
        np.testing.assert_array_equal(y[:, 0], np.repeat(np.arange(own.size), rows))


def test_ranks_that_disagree(own):
    """After calls in C, too, the error quotes what each rank calls, and the next call is right."""
    for turn in range(8):
        if turn in (4, 6):
            with pytest.raises(fompi.MismatchError, match=r"all_gather.*all_reduce|all_reduce.*all_gather"):
                (fompi.all_gather if own.rank else fompi.all_reduce)(np.ones(3), comm=own)
        else:
            assert (fompi.all_reduce(np.ones(3), comm=own) == own.size).all()
            fompi.all_gather(np.ones(3), comm=own)


def test_a_rank_that_refuses(own):
    for turn in range(8):
        if turn in (4, 6) and own.rank == own.size - 1:
            with pytest.raises(fompi.TensorError):
                fompi.all_reduce("x", comm=own)
        elif turn in (4, 6):
            with pytest.raises(fompi.MismatchError, match="TensorError"):
                fompi.all_reduce(np.ones(3), comm=own)
        else:
            assert (fompi.all_reduce(np.ones(3), comm=own) == own.size).all()


def test_a_late_rank(own):
    for turn in range(6):
        if turn == 4 and own.rank == 0:
            sleep(0.05)
        assert (fompi.all_reduce(np.full(3, turn), comm=own) == own.size * turn).all()


def test_calls_between_started_ones(own):
    big = np.full(40_000, own.rank + 1.0)
    for turn in range(6):
        pending = fompi.all_reduce.start(big, comm=own)
        assert (fompi.all_reduce(np.full(3, turn), comm=own) == own.size * turn).all()
        assert (pending.wait() == own.size * (own.size + 1) / 2).all()
        assert (fompi.all_reduce(np.full(3, turn), comm=own) == own.size * turn).all()


def test_traces_are_complete(own):
    for _ in range(5):
        fompi.all_reduce(np.ones(3), comm=own)
    with own.record() as traces:
        fompi.all_reduce(np.ones(3), comm=own)
    assert len(traces) == 1 and len(traces[0].events) > 1


def test_a_schedule_that_the_user_replaces(own, forgotten):
    """A ticket has the plan of the schedule that was registered then."""
    for _ in range(4):
        fompi.broadcast(np.ones(3), comm=own)
    (ticket,) = tickets(own)
    ticket.generator = None
    assert fompi.broadcast(np.ones(3), comm=own).tolist() == [1.0] * 3


def test_several_threads(comm):
    """Each has a communicator of its own."""
    made = [fompi.Communicator(comm) for _ in range(3)]
    failures = []

    def run(each):
        try:
            for turn in range(60):
                assert (fompi.all_reduce(np.full(4, turn), comm=each) == each.size * turn).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for each in made:
        each.close()


def test_the_number_of_tickets_is_limited(own, monkeypatch):
    monkeypatch.setattr("fompi.ops.ticket.MOST_TICKETS", 4)
    for n in range(1, 9):
        for _ in range(4):
            assert (fompi.all_reduce(np.ones(n), comm=own) == own.size).all()
    assert 1 <= len(own.tickets) <= 4 and isinstance(tickets(own)[0], Ticket)
