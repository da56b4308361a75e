"""Unbound calls that were made before run in C, agreement included. Python goes on with what C cannot end well."""

from __future__ import annotations

import os
import sys
import threading
from time import sleep

import calls
import catalogue
import numpy as np
import pytest
from cut_short import CutShort

import fompi
from emulated import Emulated, corner
from fompi.engine.in_flight import ENDED
from fompi.engine.native import engine
from fompi.model.machine import Machine
from fompi.ops.ticket import CountsTicket, Ticket
from fompi.runtime.native_run import InC, made_call
from fompi.runtime.recorder import Recorder
from fompi.traces.record import STEP, load

pytestmark = [
    pytest.mark.ranks(mpich=[2, 3], openmpi=[2]),
    pytest.mark.skipif(os.environ.get("FOMPI_ENGINE") == "python", reason="calls run in Python"),
]


@pytest.fixture
def torch():
    """The leg on the standard ABI of MPI runs without it."""
    return pytest.importorskip("torch")


def tickets(comm):
    return [*{id(ticket): ticket for ticket in comm.tickets.values() if ticket.last_stamp}.values()]


def everything(world, dtype="float64"):
    """(name, a call, its expected results by name) for all operations."""
    for number, (name, problem) in enumerate(catalogue.problems(world.size, dtype).items()):
        if name not in calls.NAMES:
            continue
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


def cut_short(monkeypatch, rounds):
    """From now on tickets have calls that Python takes over. Returns the calls."""
    made = []

    def make(*args):
        made.append(CutShort(made_call(*args), rounds))
        return made[-1]

    monkeypatch.setattr("fompi.ops.ticket.made_call", make)
    return made


def test_python_goes_on_at_every_step(own, monkeypatch):
    """Before the ranks have agreed and after it, on each rank at another point."""
    draw = np.random.default_rng(own.rank)
    made = cut_short(monkeypatch, lambda: int(draw.integers(0, 10)))
    for name, call, wanted in everything(own, "float32"):
        for turn in range(14):
            assert_equal(call(), wanted, (name, turn))
    assert len(made) >= 3
    assert fompi.all_reduce(np.ones(2), comm=own).tolist() == [own.size] * 2


@pytest.mark.parametrize("rounds", [0, 1, 3, 9])
def test_python_goes_on_at_every_step_on_an_emulated_accelerator(own, monkeypatch, rounds):
    """Python runs the kernels where the ticket would, also if the ranks had not agreed."""
    x, w = np.full((3, 6), own.rank + 1.0), np.arange(30.0).reshape(6, 5)
    wanted = np.repeat(np.arange(own.size) + 1.0, 3)[:, None] * corner(w, whole=True).sum(0)
    own.backend = Emulated(Machine.load("laptop"))
    cut_short(monkeypatch, lambda: rounds + own.rank)
    try:
        for _ in range(5):
            np.testing.assert_array_equal(corner(fompi.all_gather_matmul(x, w, comm=own)), wanted)
        np.testing.assert_array_equal(corner(fompi.all_gather_matmul.start(x, w, comm=own).wait()), wanted)
    finally:
        own.backend = None


def test_several_in_flight(own, torch, monkeypatch):
    """Started calls of one form, waited for in any order; Python goes on with some of them."""
    draw = np.random.default_rng(own.rank)
    for hands_over in (False, True):
        with monkeypatch.context() as patch:
            if hands_over:
                cut_short(patch, lambda: int(draw.integers(0, 10)))
                for ticket in tickets(own):
                    ticket._free.clear()
            for turn in range(8):
                tensors = [np.full(6, turn + n + own.rank, np.float64) for n in range(20)]
                pendings = [fompi.all_reduce.start(x, comm=own) for x in tensors]
                in_place = [torch.full((3,), n + 1.0) for n in range(3)]
                pendings += [fompi.all_reduce.start(x, out=x, comm=own) for x in in_place]
                middle = fompi.all_reduce(np.full(6, turn, np.float64), comm=own)
                assert middle.tolist() == [own.size * turn] * 6
                for n in draw.permutation(20):
                    y = pendings[n].wait()
                    assert y.tolist() == [own.size * (turn + n) + sum(range(own.size))] * 6
                    assert pendings[n].done() and pendings[n].number > 0 and len(pendings[n].trace.events) > 1
                for n in range(3):
                    assert pendings[20 + n].wait() is in_place[n] and (in_place[n] == own.size * (n + 1)).all()


def test_parts_of_a_call_in_c(own):
    for turn in range(5):
        pending = fompi.all_gather.start(np.full((own.rank + 1, 2), turn + own.rank), comm=own)
        for rank in reversed(range(own.size)):
            assert pending.part(rank).tolist() == [[turn + rank] * 2] * (rank + 1)
        y = pending.wait()
        assert pending.counts == tuple(range(1, own.size + 1)) and y.shape == (sum(pending.counts), 2)


def test_a_started_call_progresses_without_a_wait(own):
    x = np.full(9, own.rank, np.float64)
    for _ in range(4):
        pending = fompi.all_reduce.start(x, comm=own)
        called = threading.Event()
        pending.then(called.set)
        if own.engine.helper is not None:
            assert called.wait(5)
        assert pending.wait().tolist() == [sum(range(own.size))] * 9


def test_keys(own, torch):
    """Calls that differ only in what their key holds."""
    x = np.arange(6.0).reshape(3, 2)
    forms = [x, x.T, x[:, :1], x.astype("f4"), torch.from_numpy(x), torch.from_numpy(x).T, x[::-1]]
    for _ in range(5):
        for form in forms:
            y = fompi.all_reduce(form, comm=own)
            assert type(y) is type(form) and y.shape == form.shape
            np.testing.assert_array_equal(y, own.size * np.asarray(form))
            np.testing.assert_array_equal(fompi.all_reduce(form, op="max", comm=own), form)
        grown = torch.ones(2, requires_grad=True)
        assert fompi.all_reduce(grown, comm=own).requires_grad
        with torch.no_grad():
            assert not fompi.all_reduce(grown, comm=own).requires_grad
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        with pytest.raises(fompi.TensorError, match="read-only"):
            fompi.all_reduce(np.ones(3), out=frozen, comm=own)
        memory = np.ones(5)
        fompi.all_reduce(memory[:3], out=np.empty(3), comm=own)
        with pytest.raises(fompi.TensorError, match="shares memory"):
            fompi.all_reduce(memory[:3], out=memory[2:], comm=own)
    assert any(isinstance(key[0], str) for key in own.tickets)


INTERLEAVED = {os.path.join("parallel", "interleave.py")}
"""What calls of a program enter besides, once it has used `fompi.interleave`."""


def test_a_product_enters_few_files(own):
    """Those of a call that is repeated, in C, and of one that is bound."""

    def files_of(call):
        entered = set()
        sys.setprofile(lambda frame, event, _: entered.add(frame.f_code.co_filename) if event == "call" else None)
        try:
            call()
        finally:
            sys.setprofile(None)
        inside = {os.path.relpath(name, os.path.dirname(fompi.__file__)) for name in entered} - INTERLEAVED
        return {name for name in inside if not name.startswith(os.pardir)}

    x, w = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
    bound = fompi.all_gather_matmul.bind(x, w, comm=own)
    for call, most in ((lambda: fompi.all_gather_matmul(x, w, comm=own), 12), (bound, 8)):
        for _ in range(4):
            call()
        entered = min((files_of(call) for _ in range(10)), key=len)  # a call that waits enters more
        assert 0 < len(entered) <= most, " ".join(sorted(entered))


def test_a_closed_communicator(comm):
    with fompi.Communicator(comm) as own:
        for _ in range(5):
            fompi.all_reduce(np.ones(3), comm=own)
    with pytest.raises(fompi.StateError, match="closed"):
        fompi.all_reduce(np.ones(3), comm=own)


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


@pytest.mark.parametrize("count", [1, 5, 70_000])
def test_a_broadcast_in_place(own, torch, count):
    """It arrives in the memory of the program, not in a copy."""
    for turn in range(6):
        root = turn // 3 % own.size
        x = np.arange(count) + 10.0 * own.rank
        assert fompi.broadcast(x, root=root, out=x, comm=own) is x and (x == np.arange(count) + 10.0 * root).all()
        z = torch.full((count,), own.rank)
        assert fompi.broadcast.start(z, root=root, out=z, comm=own).wait() is z and (z == root).all()


def test_tensors_of_torch(own, torch):
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


def exchange(comm, counts, make=np.asarray, **how):
    """An all-to-all of counts[source][dest] rows, whose result is right."""
    mine, number = [*map(int, counts[comm.rank])], np.arange(comm.size)
    x = make(np.repeat(10.0 * comm.rank + number, mine)[:, None] + np.zeros((1, 3)))
    y = np.asarray(fompi.all_to_all(x, counts=mine, comm=comm, **how))
    np.testing.assert_array_equal(y[:, 0], np.repeat(10.0 * number + comm.rank, counts[:, comm.rank]))


@pytest.mark.parametrize("hands_over", [False, True])
def test_new_counts(own, torch, monkeypatch, hands_over):
    """One ticket for all counts. Python goes on at any point: before and after the rows are known."""
    draw, mine = np.random.default_rng(3), np.random.default_rng(own.rank)
    made = cut_short(monkeypatch, lambda: int(mine.integers(0, 12))) if hands_over else []
    for turn in range(40):
        make = torch.from_numpy if turn % 3 == 1 else np.asarray
        exchange(own, draw.integers(0, (2, 40, 4000)[turn % 3], (own.size, own.size)), make)
        if turn % own.size == own.rank and 20 < turn < 36:
            own.tickets.clear()  # this rank makes the next call in Python
    for _ in range(3):
        exchange(own, np.zeros((own.size, own.size), int))
    assert made or not hands_over
    assert {type(ticket) for ticket in tickets(own)} == {CountsTicket}


def test_new_counts_that_do_not_fit(own):
    """Errors are those of Python, on all ranks, and the next calls are right. With out= on a rank Python goes on."""
    draw, last = np.random.default_rng(3), own.rank == own.size - 1
    for turn in range(24):
        counts = draw.integers(1, 9, (own.size, own.size))
        x, mine = np.ones((counts[own.rank].sum(), 3)), counts[own.rank].tolist()
        if turn == 6 and last:
            sleep(0.05)
        if turn == 8:
            with pytest.raises(fompi.MismatchError, match=r"all_gather.*all_to_all|all_to_all.*all_gather"):
                fompi.all_gather(x, comm=own) if last else fompi.all_to_all(x, counts=mine, comm=own)
        elif turn == 10:
            with pytest.raises(fompi.LayoutError if last else fompi.MismatchError, match="add up to"):
                fompi.all_to_all(x, counts=[n + last for n in mine], comm=own)
        elif turn == 18:
            out = np.empty((counts[:, own.rank].sum() + 1, 3)) if last else None
            with pytest.raises(fompi.ShapeError if last else fompi.MismatchError, match="arrive here"):
                fompi.all_to_all(x, counts=mine, out=out, comm=own)
        else:
            exchange(own, counts, **({"out": np.empty((counts[:, own.rank].sum(), 3))} if last and turn > 20 else {}))
    assert sum(isinstance(ticket, CountsTicket) for ticket in own.tickets.values()) == 1


def test_headers_carry_small_messages(own):
    """The first message to each rank, if it waits for nothing, is small, and all ranks know what it is."""
    small, large = np.full(256, own.rank + 1.0), np.ones(40_000)
    for _ in range(4):
        assert (fompi.all_reduce(small, comm=own) == own.size * (own.size + 1) / 2).all()
        fompi.all_reduce(large, comm=own)
        fompi.all_to_all(np.ones((own.size, 2)), comm=own)
        fompi.broadcast(small, root=own.size - 1, comm=own)
    everywhere = [rank != own.rank for rank in range(own.size)]
    known = {
        (t.program.plan.problem.moves, t.sized.shapes["x"][0] > 256): t.lowered.agreed.carries for t in tickets(own)
    }
    carried = {key: [*map(bool, words)] for key, words in known.items()}
    assert carried["all_reduce", False] == everywhere
    assert not any(carried["all_reduce", True] + carried["all_to_all", False])
    assert any(carried["broadcast", False]) == (own.rank == own.size - 1)


def test_ranks_in_c_and_in_python(own):
    """What a header has carried is taken in by Python, and not sent again. Each rank is in Python in some turns."""
    for name, call, wanted in everything(own, "float32"):
        for turn in range(4 + 2 * own.size):
            if turn > 3 and (own.rank - turn) % own.size == 0:
                own.tickets.clear()
            assert_equal(call(), wanted, (name, turn))


def test_a_refusal_after_small_messages(own):
    """Data of calls that fail are not taken for those of later ones, which have the same tags after a while."""
    for turn in range(600):
        x = np.full(4, float(turn))
        if turn % 7 == 6:
            with pytest.raises(fompi.MismatchError):
                (fompi.broadcast if own.rank else fompi.all_reduce)(x, comm=own)
        assert (fompi.all_reduce(x, comm=own) == own.size * turn).all()
        assert (fompi.broadcast(x, comm=own) == turn).all()


def test_ranks_that_disagree(own):
    """After calls in C, too, the error quotes what each rank calls, and the next call is right."""
    for turn in range(8):
        if turn in (4, 6):
            with pytest.raises(fompi.MismatchError, match=r"all_gather.*all_reduce|all_reduce.*all_gather"):
                (fompi.all_gather if own.rank else fompi.all_reduce)(np.ones(3), comm=own)
        else:
            assert (fompi.all_reduce(np.ones(3), comm=own) == own.size).all()
            fompi.all_gather(np.ones(3), comm=own)
    assert len(tickets(own)) == 2  # they are used again


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


def test_a_wait_does_not_spin_on_news_of_another_call(own, monkeypatch):
    """The thread of C has ended another call, and nobody has asked for it yet. A wait leaves its core to late ranks."""
    x = np.ones(3)
    for _ in range(4):
        fompi.all_reduce(x, comm=own)
    drives, drive = [], InC.drive
    monkeypatch.setattr(InC, "drive", lambda task: drives.append(task) or drive(task))
    if own.rank:
        sleep(0.05)
    engine().library.news = ENDED
    assert fompi.all_reduce(x, comm=own).tolist() == [own.size] * 3
    assert len(drives) < 2500  # at most one in 20 us; tens of thousands if each one returns at once


def test_calls_between_started_ones(own):
    big = np.full(40_000, own.rank + 1.0)
    for turn in range(6):
        pending = fompi.all_reduce.start(big, comm=own)
        assert (fompi.all_reduce(np.full(3, turn), comm=own) == own.size * turn).all()
        assert (pending.wait() == own.size * (own.size + 1) / 2).all()
        assert (fompi.all_reduce(np.full(3, turn), comm=own) == own.size * turn).all()


@pytest.mark.parametrize("hands_over", [False, True])
def test_a_record_has_each_call_once(own, torch, monkeypatch, tmp_path, hands_over):
    """C carries them out as without a record, and Python notes those with which it goes on."""
    draw, recorder, x = np.random.default_rng(own.rank), Recorder(str(tmp_path)), np.ones(8)
    if hands_over:
        cut_short(monkeypatch, lambda: int(draw.integers(0, 10)))
    bound, (after, before) = fompi.all_reduce.bind(x, comm=own), ((own.rank + by) % own.size for by in (1, -1))
    own.engine.report = own.engine.recorder = recorder
    try:
        for _ in range(8):
            fompi.all_reduce(x, comm=own)
            started = fompi.all_reduce.start(torch.ones(4), comm=own)
            started.wait()
            bound()
            bound.start()
            bound.wait()
            fompi.sendrecv(x, after, source=before, comm=own)
    finally:
        own.engine.report = own.engine.recorder = None
    assert len(tickets(own)) == 2
    recorder.mark(recorder.steps)
    recorder.finish()
    (rank,) = load(tmp_path)
    rows, group = rank.calls[rank.calls["kind"] != STEP], tuple(own.link.world_ranks)
    sums = rows[[rank.kinds[kind].moves == "all_reduce" for kind in rows["kind"]]]
    assert {kind.group for kind in rank.kinds if kind.moves == "all_reduce"} == {group}
    assert len(sums) == 8 * 4 == len(np.unique(sums["number"])) and len(rows) == len(sums) + 8 * 2
    assert (rows["end"] >= rows["begin"]).all() and (rows["wait"] >= rows["begin"]).all()  # somebody waits for each
    late = sums["late"][sums["late"] >= 0]  # a bound call does not agree
    assert len(late) == 8 * 2 and {*late.tolist()} <= {*group} - {own.link.world_ranks[own.rank]}


def test_traces_are_complete(own):
    for _ in range(5):
        fompi.all_reduce(np.ones(3), comm=own)
    (ticket,) = tickets(own)
    with own.record() as traces:
        for turn in range(3):
            calls_before = ticket.last_stamp
            fompi.all_reduce(np.ones(3), comm=own)
            fompi.all_reduce.start(np.ones(3), comm=own).wait()
            assert ticket.last_stamp == calls_before + 2 and len(traces) == 2 * turn + 2
    for trace in traces:
        assert len(trace.events) > 1 and any(event.op < 0 for event in trace.events)  # the agreement
        assert all(0 < event.start <= event.end for event in trace.events)


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


def test_the_backend_of_a_communicator_changes(own):
    """A ticket is for the backend with which the call ran, also if its result is taken later."""
    machine, x = Machine("short kernels", 0.0, 1e9, 1e12, 1e12, 1e-5), np.full((2, 3), own.rank + 1.0)
    for turn in range(16):
        own.backend = Emulated(machine) if turn % 4 > 1 else None
        pending = fompi.all_reduce.start(x, comm=own, schedule="direct")
        while not pending.done():
            pass
        own.backend = None if turn % 3 else own.backend
        y = pending.wait()
        assert (corner(y) == own.size * (own.size + 1) / 2).all(), turn
    own.backend = None
