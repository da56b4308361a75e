"""The planner of outer steps: against brute force, the simulator and the formulas by hand."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

import fompi
from fompi import Partial, Spec
from fompi.base.errors import DtypeError, FompiError, LayoutError
from fompi.base.wires import WIRES
from fompi.cli.main import main
from fompi.model.machine import Level, Machine
from fompi.parallel.outer import OuterSchedule
from fompi.planner.layers import MODELS, Transformer
from fompi.planner.outer import BACKWARD, DELAYS, EXPOSED, HOPS, USED, outer_period, smallest

SMALL = Transformer(6, 384, 1536, 2, 256, "made up", 6, 6, 512)
FAR = (6e6, 0.08)
FOUR = {"islands": 4, "between": FAR}


def brute(step, exchanges):
    """The first H, then delay, then P that fit, of all."""
    for period in range(1, 10_000):
        for delay in range(period):
            for fragments in range(1, min(period, len(exchanges)) + 1):
                fits = period % fragments == 0 and delay < period // fragments and DELAYS * delay <= period
                if fits and exchanges[fragments - 1] - delay * step <= EXPOSED * step:
                    return period, delay, fragments
    raise AssertionError("none")


def test_the_smallest_period_is_that_of_brute_force():
    chance, seen = random.Random(7), set()
    for _ in range(150):
        latency, whole, most = chance.choice([0, 0.004, 0.3, 1.7]), 10 ** chance.uniform(-3, 0.9), chance.randint(1, 12)
        exchanges = [latency + whole / p for p in range(1, most + 1)]
        found = smallest(1.0, exchanges)
        assert found == brute(1.0, exchanges), exchanges
        seen.add(found)
    assert (1, 0, 1) in seen and len(seen) > 20


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_exposed_and_no_smaller_period_fits(seed):
    """On random machines and links: what is planned is a schedule, and its parts are those of the formulas."""
    chance = random.Random(seed)
    islands, ranks, step = chance.randint(2, 9), chance.choice([1, 4, 8]), 10 ** chance.uniform(-1, 1)
    rate, round_trip = 10 ** chance.uniform(6, 9), chance.choice([0.0, 0.001, 0.08, 0.3])
    found, away = (
        outer_period("gigabit", SMALL, islands=islands, ranks=ranks, between=(rate, round_trip), seconds=step),
        HOPS / 2 * round_trip,
    )
    assert [each.sync_every for each in found.best] == sorted(each.sync_every for each in found.best)
    for each in found.best:
        OuterSchedule(each.sync_every, each.fragments, each.delay)
        item = WIRES[each.wire].each if each.wire else 4
        whole = 2 * (islands - 1) / islands * SMALL.parameters * item
        assert each.nbytes == pytest.approx(whole / each.fragments)
        assert each.exchange == pytest.approx(away + each.nbytes / rate / USED)
        assert each.exposed == max(0, each.exchange - each.delay * step) <= EXPOSED * step * (1 + 1e-9)
        summed = step + max(0, away + whole / rate / USED - BACKWARD * step)
        assert each.ddp_seconds == pytest.approx(summed) and each.seconds == step
        days = 86400 / (each.sync_every * step + each.fragments * each.exposed)
        assert each.nbytes_a_day == pytest.approx(whole * days)
        most = SMALL.parameters // (384 * 1536)
        times = [away + whole / p / rate / USED for p in range(1, most + 1)]
        if each.sync_every < 300:
            assert brute(step, times) == (each.sync_every, each.delay, each.fragments)


@pytest.mark.parametrize("islands", [2, 3, 4])
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_an_exchange_takes_what_the_simulator_says(islands, wire):
    """On a link that carries its rate, without an agreement, and with messages that nobody asks for."""
    period = outer_period("gigabit", SMALL, islands=islands, between=FAR, seconds=5.0, wire=wire).best[0]
    far = replace(Machine.load("gigabit"), latency=FAR[1] / 2, bandwidth=FAR[0])
    n, how = SMALL.parameters // period.fragments, {"order": "ranks"} if wire == "float32" else {"wire": wire}
    explained = fompi.explain("all_reduce", Spec((n,), "float32", Partial()), ranks=islands, machine=far, **how)
    ideal = (period.exchange - HOPS * far.latency) * USED + 2 * far.latency
    assert ideal == pytest.approx(explained.winner.seconds, rel=0.01, abs=1.01 * far.latency)


# ---------------------------------------------------------------------------------------------------------- the ends


def test_a_link_so_fast_that_every_step_is_an_outer_step():
    """Then no wire is needed: of equal periods that with the most bits comes first."""
    found = outer_period("gigabit", SMALL, islands=2, between=(1e12, 0), seconds=1.0).best
    assert [(each.wire, each.sync_every, each.fragments, each.delay) for each in found] == [
        (wire, 1, 1, 0) for wire in ("", "bfloat16", "int8", "int4")
    ]
    assert all(each.ddp_seconds == each.seconds for each in found)


def test_a_link_so_slow_that_a_period_has_thousands_of_steps():
    found = outer_period("gigabit", "llama-8b", islands=4, between=(1e5, 0.5), seconds=60.0)
    wide = next(each for each in found.best if not each.wire)
    assert found.best[0].wire == "int4" and 1000 < found.best[0].sync_every < wide.sync_every > 8000
    assert wide.nbytes_a_day <= 86400 * 1e5 and wide.fragments >= DELAYS  # a link has no more


def test_one_island_exchanges_nothing():
    best = outer_period("gigabit", SMALL, islands=1, seconds=2.0).best[0]
    assert (best.sync_every, best.fragments, best.delay, best.nbytes, best.ddp_seconds) == (1, 1, 0, 0, 2.0)
    assert "<svg" in best.picture()


def test_latency_alone_needs_a_delay():
    """Fragments do not help there: all of them take as long."""
    best = outer_period("gigabit", SMALL, islands=2, between=(1e12, 0.4), seconds=0.5, wire="int4").best[0]
    assert (best.sync_every, best.fragments, best.delay) == (30, 1, 3) and best.exchange == pytest.approx(1.4, rel=1e-3)


# ------------------------------------------------------------------------------------- an island and its link


def test_an_island_is_the_best_layout():
    found = outer_period("h100-ndr", "llama-8b", ranks=8, batch=256, **FOUR)
    (best,) = fompi.layouts("llama-8b", 8, "h100-ndr", batch=256, top=1).best
    assert {each.seconds for each in found.best} == {best.seconds} and f"= {best.layout} (" in found.title
    assert "copies" not in found.remark


def test_copies_of_data_parallelism_travel_too():
    """Of experts there are fewer copies, because ep deals them."""
    how = {"ranks": 8, "wire": "int4", "batch": 64, "tp": 1, "pp": 1, "cp": 1} | FOUR
    one, eight = (outer_period("h100-ndr", "gpt2-1.5b", zero=zero, **how) for zero in (3, 1))
    a, b = (each.best[0].nbytes * each.best[0].fragments for each in (one, eight))
    assert b == pytest.approx(8 * a) and "; 8 copies of the parameters travel" in eight.remark
    assert one.best[0].gradients == eight.best[0].gradients and one.best[0].sync_every < eight.best[0].sync_every
    model = MODELS["deepseek-moe-16b"]
    experts = model.layers * model.experts * model.ffn_weights
    best = outer_period("h100-ndr", model, **how | {"ranks": 16, "ep": 8}, zero=1).best[0]
    held = 16 * (model.parameters - experts) + 2 * experts
    assert best.nbytes * best.fragments == pytest.approx(1.5 * held * WIRES["int4"].each)


def test_the_link_may_be_a_level_of_the_machine():
    """A port that all ranks of an island share, or one for each rank."""
    gigabit = Machine.load("gigabit")
    shared, own = (replace(gigabit, levels=(Level(4, FAR[1] / 2, FAR[0], each),)) for each in (True, False))
    how = {"islands": 3, "ranks": 4, "seconds": 2.0, "wire": "int8"}
    given = outer_period(gigabit, SMALL, between=FAR, **how).best
    assert outer_period(shared, SMALL, **how).best == given
    assert (
        outer_period(own, SMALL, **how).best == outer_period(gigabit, SMALL, between=(4 * FAR[0], FAR[1]), **how).best
    )


def test_a_picture_has_each_step_and_each_fragment():
    best = outer_period("gigabit", SMALL, islands=2, between=(1e6, 0.08), seconds=1.0, wire="int8").best[0]
    trace = best.trace()
    steps = [each for each in trace.events if each.is_compute]
    sent = [each for each in trace.events if each.is_message]
    assert [each.name for each in steps] == [f"step {t}" for t in range(1, best.sync_every + 1)]
    order = [best.fragments - 1, *range(best.fragments - 1)]
    assert [each.name for each in sent] == [f"fragment {p}" for p in order]
    schedule = OuterSchedule(best.sync_every, best.fragments, best.delay)
    begins = [t for t in range(best.sync_every) if schedule.begins(t + best.sync_every) is not None]
    assert [each.start for each in sent] == pytest.approx([steps[t].start for t in begins], abs=1e-6)
    assert trace.summary(0).exposed <= best.fragments * EXPOSED and trace.summary(0).nbytes == pytest.approx(
        best.nbytes * best.fragments, rel=1e-6
    )
    assert best.picture().count("<text") > 10 and "DDP, one step" in best.picture()


def test_a_period_without_end_is_not_drawn():
    best = outer_period("gigabit", "llama-405b", islands=2, between=(1e5, 1), seconds=1e-3).best[0]
    with pytest.raises(LayoutError, match=f"a period of {best.sync_every} steps is not drawn"):
        best.picture()


# ---------------------------------------------------------------------------------------------------- wrong input

WRONG = [
    ({"islands": 0}, LayoutError, "islands=0"),
    ({"islands": 2.5}, LayoutError, "islands=2.5"),
    ({"ranks": -1}, LayoutError, "ranks=-1"),
    ({"between": "50mbit,80ms"}, LayoutError, "between='50mbit,80ms' must be bytes per second"),
    ({"between": (0, 0.1)}, LayoutError, "between="),
    ({"between": (1e6, -1)}, LayoutError, "between="),
    ({"between": (float("nan"), 0)}, LayoutError, "between="),
    ({"seconds": 0}, LayoutError, "seconds=0 must be"),
    ({"seconds": 1.0, "tp": 2}, LayoutError, "without options of a layout"),
    ({"wire": "int3"}, DtypeError, "'int3'"),
    ({"zero": 7}, LayoutError, "zero=7"),
]


@pytest.mark.parametrize(("given", "kind", "words"), WRONG)
def test_a_wrong_argument(given, kind, words):
    with pytest.raises(kind, match=words.replace("(", r"\(")) as raised:
        outer_period("gigabit", SMALL, **{"islands": 2} | given)
    assert isinstance(raised.value, FompiError) and "\n" not in str(raised.value)


COMMAND = "layout --islands 4 --between 50mbit,80ms --seconds 3 --model gpt2-1.5b --machine gigabit"


def test_the_command_prints_what_the_function_returns(capsys, tmp_path):
    words = COMMAND.split()
    found = outer_period("gigabit", "gpt2-1.5b", islands=4, between=(50e6 / 8 * 1448 / 1514, 0.08), seconds=3.0)
    assert main(words) == 0 and capsys.readouterr().out == f"{found}\n"
    assert main([*words, "--json", "--picture", str(tmp_path / "period.svg")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(found)))
    assert (tmp_path / "period.svg").read_text() == found.best[0].picture()
