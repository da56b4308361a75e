"""Predicted layouts: their parts add up, and agree with formulas by hand, with fompi's simulator, and with papers."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from scale import _spec

import fompi
from fompi.base.errors import DtypeError, LayoutError
from fompi.model import pipeline
from fompi.model.machine import Level, Machine
from fompi.parallel import actions
from fompi.parallel.pipeline_plan import plan
from fompi.planner.axis import Axis
from fompi.planner.layers import DTYPE, MODELS, Transformer, predicted_call
from fompi.planner.layout import _candidates, layouts
from fompi.planner.step import AXES, GRADIENT, ITEM, RECOMPUTE, StepLayout, StepParts

NDR, NVLINK = Machine.load("h100-ndr"), Machine.load("h100-nvlink")
SMALL = Transformer(8, 1024, 4096, 2, 512, "made up", 16, 16, 8192)
ROOT = Path(__file__).resolve().parents[2]


def made(layout: StepLayout, model=SMALL, machine=NDR, batch=64):
    step = StepParts(model, machine, layout.ranks, batch)
    return step.predicted(layout, step.memory(layout))


def test_models_have_the_parameters_that_their_papers_say():
    said = {"gpt2-1.5b": 1.54, "gpt3-175b": 175, "llama-7b": 6.7, "llama-8b": 8.0, "llama-70b": 70.6, "llama-405b": 405}
    said |= {"llama-1b": 1.24, "mixtral-8x7b": 46.7, "deepseek-moe-16b": 16.4}
    said |= {"ul2-20b": 17.4}  # without attention of the decoder
    assert {name: pytest.approx(model.parameters / 1e9, rel=0.03) for name, model in MODELS.items()} == said
    assert MODELS["mixtral-8x7b"].active / 1e9 == pytest.approx(12.9, rel=0.02)


# ------------------------------------------------------------------------------------------------- the parts add up

SOME = [
    ("llama-8b", 64, "h100-ndr", {}),
    ("mixtral-8x7b", 16, "a800-hdr", {"batch": 64}),
    ("deepseek-moe-16b", 32, "h100-ndr", {"batch": 256, "tp": 1}),
    ("gpt2-1.5b", 12, "gigabit", {"batch": 48}),
]


@pytest.mark.parametrize(("model", "ranks", "machine", "more"), SOME, ids=str)
def test_seconds_are_compute_bubble_and_exposed_times(model, ranks, machine, more):
    found = layouts(model, ranks, machine, top=1000, **more)
    limit = Machine.load(machine).memory
    times = [each.seconds for each in found.best]
    assert len({each.layout.sizes for each in found.best}) == len(times) >= 10
    assert all(a <= b * (1 + 1e-5) for a, b in pairwise(times))
    for each in found.best:
        sizes = dict(zip(AXES, each.layout.sizes, strict=True))
        assert each.seconds == pytest.approx(each.compute + each.bubble + sum(each.exposed.values()))
        assert min(each.compute, each.bubble, *each.exposed.values()) >= 0 and set(each.exposed) == set(AXES)
        for axis, seconds in each.exposed.items():
            data = sizes["dp"] * sizes["cp"] if axis == "dp" else sizes[axis]
            assert data > 1 or seconds == 0, (axis, each)
        assert (each.bubble > 0) <= (sizes["pp"] > 1)
        assert sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"] == ranks == each.layout.ranks
        assert each.memory.total <= 0.9 * limit and 0 < each.mfu <= 1
        assert each.flops_rate * ranks * each.seconds == pytest.approx(
            MODELS[model].step_flops(each.tokens_rate * each.seconds)
        )


def test_one_rank_has_nothing_exposed():
    (only,) = layouts(SMALL, 1, "h100-nvlink", batch=8).best
    assert only.seconds == only.compute > 0 and not any(only.exposed.values())


def test_the_text_has_a_row_for_each_layout():
    found = layouts("llama-8b", 64, "h100-ndr", top=3)
    lines = str(found).splitlines()
    assert len(found.best) == 3 and len(lines) == 6
    assert lines[0] == "llama-8b on 64 ranks of h100-ndr, 512 sequences of 8192 tokens, 4.2 million tokens a step"
    assert all(str(each.layout) in line for each, line in zip(found.best, lines[2:], strict=False))


LAYOUTS = [
    StepLayout(4, 2, 2, 1, 1, zero=1),
    StepLayout(2, 2, 2, 1, 2, schedule="zb-h1", zero=1),
    StepLayout(8, 1, 1, 1, 2, zero=3),
    StepLayout(16, 1, 1, 1, 1, zero=2, recompute="full"),
    StepLayout(1, 16, 1, 1, 1),
    StepLayout(4, 1, 4, 1, 1, schedule="interleaved", chunks=2, zero=1),
]
EXPERTS = SMALL._replace(experts=8, top_k=2, ffn=1024, shared=1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each} {each.how}")
def test_faster_links_are_never_slower(layout):
    """Twice the bandwidth, half of the latency, and a port that is not shared."""
    inner, outer = replace(NDR, bandwidth=8e11), replace(NDR, levels=(NDR.levels[0]._replace(bandwidth=96e9),))
    near = replace(NDR, latency=1e-6, levels=(NDR.levels[0]._replace(latency=3e-6),))
    shared = replace(NDR, levels=(NDR.levels[0]._replace(shared=True),))
    for model, given in ((SMALL, layout), (EXPERTS, layout._replace(ep=2 if layout.dp > 1 else 1))):
        base = made(given, model).seconds
        assert base < made(given, model, shared).seconds or layout.tp == 16
        for machine in (inner, outer, near):
            assert made(given, model, machine).seconds <= base * (1 + 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each} {each.how}")
def test_smaller_messages(layout):
    """On a link that is slow enough the smaller wire is faster, on every axis. Half types shrink gradients only."""
    slow = replace(NDR, levels=(NDR.levels[0]._replace(bandwidth=1e8),), bandwidth=1e9)
    exposed = {}
    for wire in (None, "bfloat16", "int8", "int4"):
        step = StepParts(SMALL, slow, layout.ranks, 64, wire)
        exposed[wire] = step.predicted(layout, step.memory(layout)).exposed
    for axis in AXES:
        wide, half, byte, nibble = (each[axis] for each in exposed.values())
        if axis != "dp":
            assert half == wide and (wide == 0 or 1.6 < wide / byte < 1.89)
        assert wide == 0 or wide >= half > byte > nibble
    assert StepParts(SMALL, NDR, 8, 64, "int8")._coded(1e6, 4)[1] == 0  # beside kernels
    one_lane = StepParts(SMALL, replace(NDR, lanes=1), 8, 64, "int8")
    assert one_lane._coded(1e6, 4)[0] == 0 < one_lane._coded(1e6, 4)[1]


# ------------------------------------------------------------------------------------------------- memory


def test_memory_falls_with_the_stage_of_zero_and_with_recomputation():
    for model in (SMALL, EXPERTS):
        stages = [StepParts(model, NDR, 16, 64).memory(StepLayout(16, zero=zero)) for zero in range(4)]
        assert stages[0].parameters == pytest.approx(ITEM * model.parameters, rel=1e-3)
        assert stages[0].optimizer == pytest.approx(16 * stages[1].optimizer)
        assert stages[1].gradients == pytest.approx(16 * stages[2].gradients)
        assert stages[2].parameters == pytest.approx(16 * stages[3].parameters)
        totals = [stage.total for stage in stages]
        assert totals == sorted(totals, reverse=True)
        kept = [StepParts(model, NDR, 1, 8).memory(StepLayout(recompute=how)).activations for how in RECOMPUTE]
        assert kept == sorted(kept, reverse=True) and len({*kept}) == 3


def test_activations_are_those_of_korthikanti():
    """Without scores and dropout a layer of GPT keeps 32 s b h bytes, divided by tp with sequence parallelism."""
    model = SMALL._replace(vocabulary=1)
    kept = [StepParts(model, NDR, tp, 8).memory(StepLayout(tp=tp, microbatch=2)).activations for tp in (1, 4)]
    tokens = 2 * model.sequence
    lse, gathered = 4 * model.heads * tokens * model.layers, 2 * ITEM * tokens * model.hidden
    assert kept[0] == pytest.approx(32 * tokens * model.hidden * model.layers + lse, rel=1e-3)
    assert kept[1] - gathered == pytest.approx(kept[0] / 4, rel=1e-3)


def test_what_is_alive_decides_the_memory_of_a_pipeline():
    """GPipe keeps all micro-batches, 1F1B as many as there are stages, zero bubble without bubble twice as many."""

    def activations(schedule):
        return (
            StepParts(SMALL._replace(vocabulary=1), NDR, 4, 64).memory(StepLayout(pp=4, schedule=schedule)).activations
        )

    one = activations("1f1b") / 4
    assert {name: round(activations(name) / one, 2) for name in ("gpipe", "zb-h2")} == {"gpipe": 64, "zb-h2": 8}


# ------------------------------------------------------------------------------------------------- time, part by part


@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
def test_a_pipeline_takes_as_long_as_in_the_simulator(schedule):
    """The plan of the pipeline with the seconds of the stages, and messages of the same time."""
    chunks = 1 if pipeline.has_chunks(schedule, 1) and schedule != "interleaved" else 2
    layout = StepLayout(pp=4, schedule=schedule, chunks=chunks)
    model = SMALL._replace(vocabulary=1)  # else the last stage takes longer, and W cannot fill what F and I leave
    step = StepParts(model, NVLINK, 4, 8)
    result = step.predicted(layout, step.memory(layout))
    passes = step._stage_of(layout)[0]
    seconds = {"F": passes.forward.seconds, "I": passes.inputs.seconds, "W": passes.weights.seconds}
    message = step.axis(4, 1).message(ITEM * model.sequence * model.hidden)
    written = plan(schedule, ranks=4, microbatches=8, chunks=chunks, activations=(1,), dtype=DTYPE, seconds=seconds)
    machine = Machine("m", message, 1e18, 1.0, 1e18, 0.0, lanes=2)
    trace = fompi.simulate(written, machine)
    update = step._touch(30 * step.memory(layout).optimizer / 12)
    assert result.seconds - update == pytest.approx(trace.seconds, rel=0.03)


def test_the_last_stage_has_fewer_layers_because_of_the_output_layer():
    """As Llama 3 405B on 16 stages: 126 layers, 8 on a stage. The simulator has the seconds of each stage."""
    model = SMALL._replace(layers=30, vocabulary=65536)
    step, layout = StepParts(model, NVLINK, 4, 16), StepLayout(pp=4)
    _, layers, last = step._stage_of(layout)
    assert (layers, last) == (9, 3) and model.layers == 3 * 9 + 3
    layer, output = step.layer(1, 1, 1, 1)[0], step.output(1, 1, 1)
    stages = [*[step.stage(1, 1, 1, 1, 1, 1)[0].plus(layer, -21).plus(output, -1)] * 3, output.plus(layer, 3)]
    seconds = {kind: [stage[i].seconds for stage in stages] for kind, i in (("F", 0), ("I", 1), ("W", 2))}
    written = plan("1f1b", ranks=4, microbatches=16, activations=(1,), dtype=DTYPE, seconds=seconds)
    trace = fompi.simulate(written, Machine("m", 1e-12, 1e18, 1.0, 1e18, 0.0, lanes=2))
    result = step.predicted(layout, step.memory(layout))
    alone = result.compute + result.bubble - step._touch(30 * step.memory(layout).optimizer / 12)
    assert alone == pytest.approx(trace.seconds, rel=0.03)


def test_alive_is_what_the_orders_have():
    for name in pipeline.SCHEDULES:
        for p, m in ((2, 4), (3, 6), (4, 8), (4, 12)):
            v = 1 if pipeline.has_chunks(name, 1) and name != "interleaved" else 2
            if pipeline.has_formula(name, p, m):
                found = [actions.alive(mine) for mine in actions.actions(name, p, m, v)]
                assert found == [pipeline.alive(name, p, m, r, v) for r in range(p)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_exposed_sums_and_gathers_are_the_bounds(zero):
    """E_RS and E_AG of the best of all numbers of buckets, written out: suffixes of sums, prefixes of gathers."""
    model, machine = SMALL._replace(vocabulary=32768), replace(NDR, levels=(Level(8, 6e-6, 2e9),))
    layout = StepLayout(16, zero=zero)
    step = StepParts(model, machine, 16, 64)  # four micro-batches
    layer, output, data = step.layer(1, 1, 1, 1)[0], step.output(1, 1, 1), step.axis(16, 1)
    weights = (sum(step.weights(1, 1, 1, 0)), model.vocabulary * model.hidden)
    forward, backward = [(p.forward.seconds, p.inputs.seconds + p.weights.seconds) for p in (layer, output)], []
    (f, b), (fo, bo) = forward
    sums, gathers = [], []
    for count in (1, 2, 4, 8):
        n = model.layers / count
        used = [0.0, *[n * f] * count, fo]  # embedding, layers, output layer
        back = [0.0, *[n * b] * count, bo]
        size = [weights[1], *[n * weights[0]] * count, weights[1]]
        a = [data.gather(ITEM * each) for each in size]
        g = [data.gather(GRADIENT * each) * (2 if zero == 0 else 1) for each in size]
        if zero == 3:
            g = [x + y for x, y in zip(a, g, strict=True)]
        places = range(count + 2)
        room = sum(back) if zero == 3 else sum(back) + sum(used)
        late = 3 * max(0.0, sum(g) - room) if zero >= 2 else 0.0
        # the backward goes from the last to the first: bucket k leaves when the backward of k and all behind it is done
        sums.append(max(sum(g[: k + 1]) - sum(back[:k]) for k in places) + late)
        late = 3 * max(0.0, sum(a) - sum(used)) if zero == 3 else 0.0
        gathers.append(max(sum(a[: k + 1]) - sum(used[:k]) for k in places) + late)
    assert backward == [] and made(layout, model, machine).exposed["dp"] == pytest.approx(
        min(sums) + (min(gathers) if zero else 0.0)
    )


def test_gathers_take_about_as_long_as_the_best_plans():
    """64 MiB: by the formula, and by the best plan that fompi finds and simulates."""
    for name, size in (("h100-nvlink", 8), ("h100-ndr", 16), ("a800-hdr", 16)):
        machine = Machine.load(name)
        spec = _spec(32 << 20, 1, fompi.Shard(0))
        best = predicted_call("all_gather", (spec,), size, machine)[1]
        assert Axis.of(machine, size, 1, size).gather(64 << 20) == pytest.approx(best, rel=0.35)


def test_products_of_tensor_parallelism_take_as_long_as_fompis_plans():
    machine = replace(NVLINK, wave=0)  # the formulas count no waves
    step, rows, h, f = StepParts(MODELS["llama-7b"], machine, 8, 8), 8192, 4096, 11008
    wide = (_spec(rows, h, fompi.Shard(0)), _spec(h, f, fompi.Shard(1)))
    back = (_spec(rows, f, fompi.Shard(1)), _spec(f, h, fompi.Shard(0)))
    adjoint = (_spec(rows, h, fompi.Shard(0)), _spec(h, f, fompi.Shard(1)), _spec(rows, f, fompi.Shard(1)))
    row = step._row(8, rows, f / 8, h)
    for operation, specs, seconds in (
        ("all_gather_matmul", wide, step._column(8, rows, h, f / 8).forward.seconds),
        ("matmul_reduce_scatter", back, row.forward.seconds),
        ("all_gather_matmul_weight_gradient", adjoint, row.inputs.seconds + row.weights.seconds),
    ):
        assert seconds == pytest.approx(predicted_call(operation, specs, 8, machine)[1], rel=0.1), operation


def test_ring_and_ulysses_expose_what_their_bounds_say():
    """Slow links: T = a + (N - 1) max(a, k), backward 2.5 a and 2 k."""
    slow = replace(NVLINK, bandwidth=20e9)
    step = StepParts(SMALL, slow, 4, 8)
    found = {way: p for p, way in step._attentions(1, 4, 2048.0, step._column(1, 2048.0, 1024, 3072))}
    flops, k = SMALL.attention(2048.0) / 4, slow.latency + 4 * 2048 * 1024 / slow.bandwidth
    a, b = slow.kernel(flops, 2.0 * 2048 * 1024), slow.kernel(2.5 * flops, 4.0 * 2048 * 1024)
    assert k > a and found["ring"].forward.seconds == pytest.approx(a + 3 * k + (a - a))
    assert found["ring"].inputs.seconds == pytest.approx(b + 3 * max(b, 2 * k) + (b - b))
    moved = [step.axis(4, 1).exchange(2.0 * 2048 * n) for n in (3072, 1024)]
    product, whole = step._product(2048, 1024, 3072), slow.kernel(4 * flops, 8.0 * 2048 * 1024)
    exposed = max(0, moved[0] - 0.75 * product) + max(0, moved[1] - 0.75 * whole)
    assert found["ulysses"].forward.cp == pytest.approx(exposed) and exposed > 0


def test_experts_hide_their_messages_down_to_the_floor():
    slow = replace(NVLINK, bandwidth=4e9)
    for machine in (NVLINK, slow):
        step = StepParts(EXPERTS, machine, 4, 8)
        passes = step._experts(1, 4, 512.0)
        messages = 2 * step.axis(4, 1).exchange(2.0 * 512 * 2 * 1024)
        made_by = step._mlp(1, 1024.0, 1024, 2).plus(step._mlp(1, 512.0, 1024))
        assert passes.forward.ep == pytest.approx(max(0.0, messages - made_by.forward.compute))
        assert (passes.forward.ep > 0) == (machine is slow)


def test_where_the_ranks_of_an_axis_are():
    """tp=8 fills a node, its dp has one rank in each node, and groups of six straddle nodes of eight."""
    assert [(hop.groups, hop.inside) for hop in Axis.of(NDR, 8, 1, 64).hops] == [(8, 1)]
    assert [(hop.groups, hop.inside) for hop in Axis.of(NDR, 8, 8, 64).hops] == [(8, 1)]
    assert Axis.of(NDR, 8, 8, 64).hops[0].link.level == NDR.levels[0]
    assert [(hop.groups, hop.inside) for hop in Axis.of(NDR, 16, 2, 64).hops] == [(4, 1), (4, 4)]
    assert [(hop.groups, hop.inside) for hop in Axis.of(NDR, 6, 1, 48).hops] == [(2, 1), (3, 2)]
    assert Axis.of(NDR, 1, 8, 64).hops == () and Axis.of(NDR, 1, 8, 64).message(1e6) == 0


# ------------------------------------------------------------------------------------------------- at scale


@pytest.mark.parametrize("model", MODELS)
def test_there_are_not_too_many_candidates_at_16384_ranks(model):
    """Each takes about 0.1 ms, so 20 s are enough."""
    batch = max(1, (16 << 20) // MODELS[model].sequence)
    count = sum(len(leaner) for leaner in _candidates(MODELS[model], 16384, batch, {}))
    assert 0 < count < 200_000


GPT3 = MODELS["gpt3-175b"]
CHUNKED = {"schedule": "interleaved", "chunks": 3, "microbatch": 1, "tp": 8}
PUBLISHED = [
    # what, model, ranks, machine, what is given, published TFLOP/s per rank
    ("Llama 3 405B, 8,192", "llama-405b", 8192, "h100-ndr", {"batch": 2048, "tp": 8, "pp": 16, "cp": 1}, 430),
    ("Llama 3 405B, 16,384", "llama-405b", 16384, "h100-ndr", {"batch": 2048, "tp": 8, "pp": 16, "cp": 1}, 400),
    (
        "Llama 3 405B, 131,072 tokens",
        MODELS["llama-405b"]._replace(sequence=131072),
        16384,
        "h100-ndr",
        {"batch": 128, "tp": 8, "pp": 16, "cp": 16},
        380,
    ),
    (
        "GPT 22B",
        GPT3._replace(layers=48, hidden=6144, ffn=24576, heads=64, kv_heads=64),
        8,
        "a800-hdr",
        {"batch": 4, "tp": 8, "pp": 1, "microbatch": 4},
        None,
    ),
    ("GPT-3 175B", GPT3, 64, "a800-hdr", {"batch": 64, "pp": 8, **CHUNKED}, None),
    (
        "GPT 530B",
        GPT3._replace(layers=105, hidden=20480, ffn=81920, heads=128, kv_heads=128),
        280,
        "a800-hdr",
        {"batch": 280, "pp": 35, **CHUNKED},
        None,
    ),
    (
        "GPT 1T",
        GPT3._replace(layers=128, hidden=25600, ffn=102400, heads=160, kv_heads=160),
        512,
        "a800-hdr",
        {"batch": 512, "tp": 8, "pp": 64, "microbatch": 1, "schedule": "1f1b"},
        None,
    ),
]
SECONDS = {"GPT 22B": 1.10, "GPT-3 175B": 13.75, "GPT 530B": 37.83, "GPT 1T": 71.49}


@pytest.mark.parametrize(("what", "model", "ranks", "machine", "given", "rate"), PUBLISHED, ids=lambda x: str(x)[:20])
def test_published_steps_are_a_little_slower_than_predicted(what, model, ranks, machine, given, rate):
    """The page of the planner lists both. A formula is optimistic: its kernels always run at the machine's rate."""
    best = layouts(model, ranks, machine, top=1, **given).best[0]
    page = (ROOT / "docs" / "concepts" / "planner.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(what)} \|(.*)\|$", page, re.MULTILINE)
    *_, predicted, published = (cell.strip() for cell in row.split("|"))
    if rate is None:
        assert (predicted, published) == (f"{best.seconds:.2f} s", f"{SECONDS[what]:.2f} s")
        assert 0.6 < best.seconds / SECONDS[what] < 1.05
    else:
        assert (predicted, published) == (f"{best.flops_rate / 1e12:.0f} TFLOP/s", f"{rate} TFLOP/s")
        assert 0.95 < best.flops_rate / 1e12 / rate < 1.2


# ------------------------------------------------------------------------------------------------- wrong arguments

WRONG = [
    ("gpt9", 8, {}, "no model 'gpt9'; choose gpt2-1.5b"),
    ("llama-8b", 0, {}, "ranks=0 must be an integer from 1"),
    ("llama-8b", 2.5, {}, "ranks=2.5"),
    ("llama-8b", 8, {"top": 0}, "top=0"),
    ("llama-8b", 8, {"batch": -1}, "batch=-1 must be a number of sequences"),
    ("llama-8b", 8, {"gp": 2}, "a layout has no 'gp'; it has dp, tp"),
    ("llama-8b", 8, {"tp": "two"}, "tp='two' must be an integer"),
    ("llama-8b", 8, {"zero": 4}, "zero=4 must be 0, 1, 2 or 3"),
    ("llama-8b", 8, {"schedule": "2f2b"}, "schedule='2f2b'; choose gpipe"),
    ("llama-8b", 8, {"recompute": "some"}, "recompute='some'; choose none"),
    ("llama-8b", 64, {"tp": 7}, "tp=7 is possible. The rules: .*tp divides 32 heads"),
    ("mixtral-8x7b", 8, {"ep": 3}, "ep divides dp x cp and the 8 experts"),
    ("llama-405b", 8, {}, r"fits into 72.0 GB.*Nearest is .* which needs 9\d\d.\d GB. Take more ranks"),
    (SMALL._replace(layers=0), 8, {}, "layers=0 of the model must be an integer from 1"),
    (SMALL._replace(heads=3), 8, {}, "hidden=1024, heads=3, kv_heads=16: each must be a multiple"),
    (SMALL._replace(experts=4), 8, {}, "top_k=0 must be from 1 to experts=4"),
    (SMALL._replace(shared=1), 8, {}, "a model without experts has neither"),
]


@pytest.mark.parametrize(("model", "ranks", "more", "text"), WRONG, ids=lambda x: str(x)[:30])
def test_wrong_arguments(model, ranks, more, text):
    with pytest.raises(LayoutError, match=text):
        layouts(model, ranks, "h100-ndr", **more)


def test_a_wire_in_a_layout():
    with pytest.raises(DtypeError, match="known are"):
        layouts("llama-8b", 8, "h100-ndr", wire="int3")
    found = layouts("gpt2-1.5b", 8, "gigabit", wire="int8", top=1)
    assert found.title.endswith("messages in int8")
    assert found.best[0].seconds < layouts("gpt2-1.5b", 8, "gigabit", top=1).best[0].seconds


def test_what_is_given_is_kept():
    given = {"dp": 4, "tp": 2, "pp": 4, "cp": 2, "schedule": "interleaved", "chunks": 4, "recompute": "full"}
    (only,) = layouts("llama-8b", 64, "h100-ndr", **given).best
    assert given.items() <= only.layout._asdict().items() and only.layout.attention in ("ring", "ulysses")


def test_layouts_of_unequal_ranks():
    """Shares by speed take the mean of the speeds, equal ones the slowest: both are candidates."""
    machine = replace(Machine.load("h100-ndr"), speeds=(1.0, 1.0, 1.0, 0.2))
    unequal, equal = (fompi.layouts("llama-8b", 4, m, batch=64).best[0] for m in (machine, replace(machine, speeds=())))
    assert unequal.shares == "shares by speed" and "shares by speed" in unequal.row()[-1] and equal.shares == ""
    assert unequal.compute == pytest.approx(equal.compute / 0.8, rel=0.3) and unequal.compute < 2 * equal.compute
    laptops = fompi.layouts("llama-1b", 4, "laptops", batch=8)
    assert "warning" not in laptops.remark and laptops.best[0].shares == "shares by speed"
