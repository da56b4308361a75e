"""Shares for unequal ranks: the optimum of exhaustive search, never slower than equal shares or than one rank alone."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import combinations, product

import pytest

import fompi
from fompi.base.errors import DtypeError, LayoutError
from fompi.model.machine import Machine
from fompi.planner.balance import TASKS, Balance
from fompi.planner.demands import Demands
from fompi.planner.layers import MODELS, Transformer
from fompi.planner.shares import Phase, Ring, cut_by_slowest, cut_layers, deal, deal_in_memory, deal_in_rounds

SMALL = Transformer(8, 1024, 4096, 3, 512, "made up", 16, 16, 8192)
BASE = Machine("m", 1e-4, 1e8, 5e10, 1e10, 2e-6)


def splits(total, ranks):
    if ranks == 1:
        yield (total,)
        return
    for n in range(total + 1):
        yield from ((n, *rest) for rest in splits(total - n, ranks - 1))


def two_lines(draw, kinds=1):
    """Overhead, and a share that computes, or reads from memory."""
    speed = draw.choice([1, 1, 0.5, 0.25, 0.05]) * draw.uniform(0.8, 1.2)
    flops, moved = ([draw.uniform(0.5, 2) / speed for _ in range(kinds)] for _ in range(2))
    return (draw.uniform(0, 0.3), tuple(flops)), (draw.uniform(0, 3), tuple(moved))


SPLITS = [*splits(16, 4)]


def test_the_shares_of_exhaustive_search_on_a_thousand_machines():
    """16 heads on 4 ranks. Each set of ranks has messages of its own, and a rank without heads is left out of them."""
    draw = random.Random(7)
    for _ in range(1000):
        lines = [two_lines(draw) for _ in range(4)]
        messages = [0, 0, *sorted(draw.uniform(0, 20) for _ in range(3))]
        sets = [each for n in (1, 2, 3, 4) for each in combinations(range(4), n)]
        found = []
        for ranks in sets:
            late = tuple(tuple((a + messages[len(ranks)], b) for a, b in each) for each in lines)
            phase = Phase(("heads",), (16,), late, (1.0,))
            counts = deal(phase, ranks)
            assert sum(n for (n,) in counts) == 16 and all(counts[r] == (0,) for r in range(4) if r not in ranks)
            found.append(phase.slowest(counts))
        seconds = [[max(a + b * n for a, (b,) in each) if n else 0.0 for n in range(17)] for each in lines]
        best = min(max(map(list.__getitem__, seconds, counts)) + messages[sum(map(bool, counts))] for counts in SPLITS)
        assert min(found) == pytest.approx(best, rel=1e-9)


def test_several_kinds_share_the_time_of_a_rank():
    draw = random.Random(3)
    for _ in range(40):
        phase = Phase(("experts", "columns"), (5, 9), tuple(two_lines(draw, 2) for _ in range(3)), (1.0, 1.0))
        room = [draw.uniform(3, 8) for _ in range(3)] if draw.random() < 0.5 else [99.0] * 3
        times = [
            phase.slowest(counts)
            for coarse, fine in product(splits(5, 3), splits(9, 3))
            for counts in [[*zip(coarse, fine, strict=True)]]
            if all(sum(own) <= left for own, left in zip(counts, room, strict=True))
        ]
        found = deal(phase, range(3), room)
        assert (found is None) == (not times)
        if found:
            assert [sum(n) for n in zip(*found, strict=True)] == [5, 9]
            assert all(sum(own) <= left for own, left in zip(found, room, strict=True))
            assert phase.slowest(found) == pytest.approx(min(times), rel=1e-6)


def test_phases_that_share_a_memory():
    draw = random.Random(5)
    for _ in range(25):
        phases = [
            Phase(("a",), (6,), tuple(two_lines(draw) for _ in range(3)), (draw.uniform(1, 2),), 3),
            Phase(("b",), (8,), tuple(two_lines(draw) for _ in range(3)), (draw.uniform(0.5, 1),)),
        ]
        room = [draw.uniform(3, 12) for _ in range(3)]

        def total(first, second, phases=phases):
            """As the program counts it: a rank that takes part pays the constants of all phases."""
            pairs = zip(phases, (first, second), strict=True)
            return sum(
                phase.repeats
                * max(max(a + b * n for a, (b,) in each) for each, n in zip(phase.lines, counts, strict=True))
                for phase, counts in pairs
            )

        def used(first, second, phases=phases):
            return [phases[0].stored[0] * a + phases[1].stored[0] * b for a, b in zip(first, second, strict=True)]

        pairs = product(splits(6, 3), splits(8, 3))
        times = [total(*pair) for pair in pairs if all(n <= left for n, left in zip(used(*pair), room, strict=True))]
        found = deal_in_memory(phases, range(3), room)
        assert (found is None) == (not times)
        if found:
            first, second = (tuple(n for (n,) in counts) for counts in found)
            assert all(n <= left * (1 + 1e-6) for n, left in zip(used(first, second), room, strict=True))
            assert total(first, second) == pytest.approx(min(times), rel=1e-4)


def test_runs_of_layers_of_exhaustive_search():
    draw = random.Random(11)
    for _ in range(60):
        layer, room = [draw.uniform(1, 9) for _ in range(4)], [draw.randint(1, 7) for _ in range(4)]
        hops, back = [draw.uniform(0, 2) for _ in range(4)], draw.uniform(0, 2)

        def stage(rank, first, end, layer=layer, room=room, hops=hops, back=back):
            seconds = layer[rank] * (end - first) + hops[rank] * (first > 0) + (5 + back) * (end == 7)
            return seconds if end - first <= room[rank] else float("inf")

        def of(counts, stage=stage):
            ends = [sum(counts[: rank + 1]) for rank in range(4)]
            stages = [stage(rank, ends[rank] - counts[rank], ends[rank]) for rank in range(4) if counts[rank]]
            return max(stages), sum(stages)

        times = [of(counts) for counts in splits(7, 4) if sum(map(bool, counts)) > 1]
        seconds, _ = cut_layers(7, 4, stage)
        least = min(total for _, total in times)
        assert seconds == (least if least == float("inf") else pytest.approx(least))
        total, counts = cut_by_slowest(7, 4, stage)
        if counts:
            assert of(counts) == (pytest.approx(min(times)[0]), pytest.approx(total))
            assert total == pytest.approx(min(s for most, s in times if most <= min(times)[0] * (1 + 1e-12)))


def test_layers_in_rounds_of_exhaustive_search():
    """8 layers on 3 ranks: which of them a rank keeps, which it reads again, and who has the output layer."""
    draw = random.Random(13)
    for rounds in (1, 2, 4) * 4:
        ring = Ring(
            [draw.uniform(1, 5) for _ in range(3)], [draw.uniform(0, 3) for _ in range(3)],
            [draw.choice([float("inf"), draw.uniform(1, 30)]) for _ in range(3)],
            [draw.uniform(2, 6) for _ in range(3)], 1.0, 0.5, draw.uniform(0, 1),
        )  # fmt: skip
        best = float("inf")
        for one in splits(8 // rounds, 3):
            if sum(map(bool, one)) < 2:
                continue
            for last in (rank for rank in range(3) if one[rank]):
                seconds = [sum(rounds * n * s for n, s in zip(one, ring.seconds, strict=True)) + ring.outputs[last]]
                seconds[0] += rounds * ring.hop * sum(map(bool, one))
                for rank, n in enumerate(one):
                    fits = [
                        kept for kept in range(rounds * n + 1)
                        if kept + (rounds * n - kept) / rounds + 0.5 * (rank == last) <= ring.room[rank]
                        and (kept == rounds * n or ring.reads[rank] < float("inf"))
                    ]  # fmt: skip
                    again = min((rounds * n - kept for kept in fits), default=float("inf"))
                    seconds.append(again * ring.reads[rank] if again else 0.0)
                best = min(best, max(seconds))
        assert deal_in_rounds(ring, 8, rounds)[0] == (best if best == float("inf") else pytest.approx(best, rel=1e-4))


# --------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("task", TASKS)
def test_equal_ranks_get_equal_shares(task):
    machine = replace(BASE, bandwidth=1e9, memory=64e9)
    found = fompi.balance(machine, SMALL, 4, task=task, batch=8 if task == "train" else None)
    tensor = found.ways[0]
    assert tensor.best == tensor.equal and found.counts["heads"] == (4,) * 4 and found.counts["columns"] == (1024,) * 4
    if task == "train":
        assert found.counts["rows"] == (2,) * 4 and max(found.counts["state"]) - min(found.counts["state"]) <= 1 << 20


def test_never_slower_than_equal_shares_or_one_rank_and_within_the_memory():
    draw = random.Random(17)
    for i in range(12):
        machine = replace(
            BASE,
            bandwidth=10 ** draw.uniform(7, 10),
            latency=10 ** draw.uniform(-6, -3),
            speeds=tuple(draw.choice([1.0, 0.5, 0.2, 0.05]) for _ in range(4)),
            memories=tuple(draw.uniform(0.7, 4) * 1e8 for _ in range(4)),
        )
        task = [*TASKS][i % 2]
        found = fompi.balance(machine, SMALL, task=task)
        assert isinstance(found, Balance) and sum(found.counts.get("heads", (16,))) == 16
        for each in found.ways:
            for shares in (each.equal, each.together, each.alone):
                if shares is not None:
                    assert each.best.seconds <= shares.seconds * (1 + 1e-9)
                    assert all(n <= 0.9 * m * (1 + 1e-6) for n, m in zip(shares.nbytes, machine.memories, strict=True))


def test_tensor_shares_of_a_machine_are_those_of_exhaustive_search():
    """Heads of random machines, with the seconds of the whole model: the search over all sets and splits."""
    draw = random.Random(23)
    model = SMALL._replace(ffn=1, vocabulary=1)
    for _ in range(5):
        speeds = tuple(draw.choice([1.0, 0.5, 0.3, 0.05]) for _ in range(4))
        machine = replace(BASE, speeds=speeds, latency=draw.choice([1e-6, 1e-4]))
        best = fompi.balance(machine, model).ways[0].best
        demands = Demands(model, machine, 4, "decode", 1, 2, 1)
        least = float("inf")
        for ranks in (each for n in (1, 2, 3, 4) for each in combinations(range(4), n)):
            heads, *others = demands.tensor(ranks)
            rest = sum(phase.repeats * min(max(a + b for a, (b,) in phase.lines[r]) for r in ranks) for phase in others)
            least = min([least, *(heads.slowest([(n,) for n in each]) + rest for each in SPLITS
                                  if all(bool(n) <= (r in ranks) for r, n in enumerate(each)))])  # fmt: skip
        assert best.seconds == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("task", TASKS)
def test_a_rank_at_a_twentieth_of_the_speed_gets_nothing_where_that_is_faster(task):
    slow = replace(BASE, latency=3e-4, speeds=(1.0, 1.0, 1.0, 0.05), bandwidth=1e8)
    found, without = (fompi.balance(replace(slow, speeds=slow.speeds[:n]), SMALL, task=task) for n in (4, 3))
    assert found.best.seconds <= without.best.seconds
    if task == "decode":
        assert 3 not in found.best.ranks and "nothing: faster without it" in str(found)


def test_two_unequal_hosts_and_a_slow_link():
    """The question of distributed-llama: is two slower than one? It is said beforehand, and by how much."""
    two = replace(BASE, name="two hosts", latency=2e-3, bandwidth=1e7, speeds=(1.0, 0.4), memories=(8e9, 4e9))
    found = fompi.balance(two, "llama-1b")
    together = min((each.together for each in found.ways), key=lambda shares: shares.seconds)
    assert found.best.ranks == (0,) and together.seconds > found.best.seconds
    assert found.verdict.startswith("best is rank 0 alone: ")
    assert f"two ranks or more: {together.seconds / found.best.seconds:.2f} times as long" in found.verdict
    assert found.counts["heads"] == (32, 0)
    large = fompi.balance(replace(two, latency=1e-5, bandwidth=1e9), "llama-1b")
    assert large.best.ranks == (0, 1)


def test_few_rows_run_at_the_speed_of_the_memory():
    """Two ranks whose memories are equally fast, one of which computes four times as fast."""
    curves = tuple(((1.0, 1e-3), (8.0, 1e-3), (1024.0, 1e-3 * 1024 / 8 / speed)) for speed in (4, 1))
    machine = replace(BASE, latency=1e-6, bandwidth=1e11, speeds=curves)
    decode, prefill = (fompi.balance(machine, SMALL, task=task).counts["heads"] for task in ("decode", "prefill"))
    assert decode == (8, 8) and prefill[0] >= 12


def test_layers_that_do_not_fit_are_read_again():
    machine = Machine.load("laptops")
    found = fompi.balance(machine, "llama-70b")
    assert found.best.way == "layers" and found.best.rounds > 1 and sum(found.counts["layers"]) == 80
    with pytest.raises(LayoutError, match=r"^llama-70b does not fit: .* Take more ranks") as caught:
        fompi.balance(replace(machine, disk_rates=()), "llama-70b")
    assert "\n" not in str(caught.value)


def test_training_deals_rows_by_speed_and_state_by_memory():
    machine = replace(BASE, memories=(4e9, 4e9, 2.9e9, 4e9), speeds=(1.0, 0.5, 1.0, 0.25), bandwidth=1e10)
    found = fompi.balance(machine, SMALL, task="train", batch=22)
    data = next(each.best for each in found.ways if each.way == "data")
    rows, state = data.units["rows"], data.units["state"]
    assert sum(rows) == 22 and rows[0] == rows[2] == 8 and rows[1] == 4 and rows[3] == 2
    assert state[2] < state[0] and sum(state) == pytest.approx(12 * SMALL.parameters, abs=1 << 20)
    assert all(n <= 0.9 * m for n, m in zip(data.nbytes, machine.memories, strict=True))


def test_it_prints_itself_and_is_a_value():
    found = fompi.balance("laptops", "llama-1b")
    lines = str(found).splitlines()
    assert lines[0] == "llama-1b on 4 ranks of laptops: decode, 1 sequence of 8192 tokens, bfloat16"
    assert lines[1].split() == ["rank", "heads", "columns", "vocabulary", "layers", "ms", "GB", "why"]
    assert len(lines) == 11 and lines[-1].startswith("best is tensor: ") and "equal shares: 1." in lines[-1]
    assert sum(found.counts["heads"]) == 32 and sum(found.counts["vocabulary"]) == MODELS["llama-1b"].vocabulary
    assert all(title in found.plot() for title in ("equal shares, tensor", "balanced, tensor", "one rank alone"))
    assert "<table>" in found._repr_html_() and found == fompi.balance("laptops", "llama-1b")
    with pytest.raises(FrozenInstanceError):
        found.task = "train"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"machine": "gigabit"}, "gigabit does not say how many ranks it has"),
        ({"ranks": 0}, "ranks=0 must be an integer from 1 to 64"),
        ({"ranks": 2.5}, "ranks=2.5 must be an integer"),
        ({"task": "decod"}, "did you mean decode"),
        ({"batch": -1}, "batch=-1 must be"),
        ({"zero": 4}, "zero=4 must be"),
        ({"model": "llama-1"}, "no model 'llama-1'"),
        ({"machine": "laptop s"}, "no machine 'laptop s'"),
    ],
    ids=str,
)
def test_wrong_input_is_one_line(how, said):
    with pytest.raises(LayoutError) as caught:
        fompi.balance(**({"machine": "laptops", "model": "llama-1b"} | how))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_dtype():
    with pytest.raises(DtypeError):
        fompi.balance("laptops", "llama-1b", dtype="floot")


def test_without_scipy_one_sentence():
    code = "import sys; sys.modules['scipy'] = None; import fompi; fompi.balance('laptops', 'llama-70b')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("shares that memory decides need SciPy, which is missing: pip install scipy"), done.stderr
