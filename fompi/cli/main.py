"""python -m fompi info | plan | simulate | explain | calibrate | bench: what the functions return, in a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from time import perf_counter

import fompi
from fompi.base.errors import FompiError, LaunchError
from fompi.base.layout import Spec
from fompi.bench import suites
from fompi.cli import info, picture
from fompi.engine import faults
from fompi.engine.communicator import machine_of_environment
from fompi.engine.handshake import agree
from fompi.model.machine import PRESETS
from fompi.mpi import launcher, transport
from fompi.planner.layers import MODELS, PARALLEL, step
from fompi.plans import problems
from fompi.plans.problems import MEANING
from fompi.schedules.registry import SCHEDULES

MEET_SECONDS = 1.0
"""So soon all ranks have an error that is everybody's."""

EXAMPLE = "for example: python -m fompi {} all_gather_matmul 4096x4096 4096x14336 --ranks 8 --dtype bfloat16"


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m fompi", description="A runtime on MPI that overlaps.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", add_help=False, help="versions, MPI, launcher, ranks and hosts")
    for name, what in (
        ("plan", "the grid of ranks of a plan"),
        ("simulate", "the predicted trace of a plan; `simulate step`: a whole model, with overlap and without"),
    ):
        _plan_arguments(commands.add_parser(name, help=what, epilog=EXAMPLE.format(name)), name)
    why = commands.add_parser("explain", help="which schedule is the best, and why", epilog=EXAMPLE.format("explain"))
    _explain_arguments(why)
    calibrated = commands.add_parser("calibrate", help="measure the machine, for mpirun: writes JSON")
    calibrated.add_argument("file", nargs="?", default="machine.json", help="(machine.json)")
    bench = commands.add_parser("bench", help="benchmarks, for mpirun")
    _bench_arguments(bench)
    options = None
    try:
        if arguments[:1] == ["info"]:
            return info.main(arguments[1:])
        options = parser.parse_args(arguments)
        if options.command == "bench":
            if options.rounds < 1 or options.ranks < 1:
                parser.error("bench: --rounds and --ranks are 1 or more")
            measure = suites.Options(options.rounds, options.quick)
            if options.like is not None:
                return suites.like(_numbers(options.like), options.ranks, measure)
            if options.suite is None:
                parser.error(f"bench: name a suite ({', '.join(suites.SUITES)}), or a shape with --like M,K,N")
            return suites.run(options.suite, measure, options.json, options.markdown, options.plot)
        if options.command == "calibrate":
            return _calibrate(options.file)
        if options.operation == "step":
            how = options.schedule, options.slices, options.window, options.dtype
            if options.shapes or how != ("auto", None, None, "float32") or options.verify or options.save:
                parser.error("simulate step takes --model, --parallel, --ranks, --machine and --tokens only")
            machine = _machine(options)
            print(step(options.model, options.parallel, options.ranks, machine, options.tokens))
            return 0
        status = _explain(options) if options.command == "explain" else _plan(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FompiError, OSError, MemoryError) as error:
        if options is not None and options.command in ("bench", "calibrate") and launcher.detect().launcher != "none":
            return _fail(error)
        print(f"fompi: {_words(error)}", file=sys.stderr)
        return 2


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _fail(error: BaseException) -> int:
    """An error of a rank among others: said once if all of them have it, else it ends the job."""
    rank, size = transport.world()
    if size > 1 and not transport.all_come(MEET_SECONDS):
        faults.end_job(f"rank {rank}: {_words(error)}", 2)
    if rank == 0:
        print(f"fompi: {_words(error)}", file=sys.stderr)
    return 2


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", nargs="?", choices=suites.SUITES)
    parser.add_argument("--like", metavar="M,K,N", help="what overlap would gain here for x[M, K] @ w[K, N]")
    parser.add_argument("--ranks", type=int, default=2, help="with --like, outside of mpirun: how many to start (2)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of every contestant (15)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rows")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="all samples as JSON (no FILE: print it)")
    parser.add_argument("--markdown", metavar="FILE", help="the table as Markdown")
    parser.add_argument("--plot", metavar="FILE", help="a picture, PNG or SVG (needs matplotlib)")


def _problem_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    names = [*sorted(MEANING), *more]
    parser.add_argument("operation", choices=names, metavar="OPERATION", help=", ".join(names))
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="global shapes, x first: 4096x4096")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--dtype", default="float32")


DEFAULT = "what FOMPI_MACHINE says, or gigabit"


def _machine(options: argparse.Namespace) -> fompi.Machine:
    return _named(options) or fompi.Machine.load("gigabit")


def _named(options: argparse.Namespace) -> fompi.Machine | None:
    """That of --machine, or of FOMPI_MACHINE, if there is one."""
    return machine_of_environment() if options.machine is None else fompi.Machine.load(options.machine)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    _problem_arguments(parser)
    parser.add_argument("--machine", help=f"a JSON file, or one of {', '.join(PRESETS)}; {DEFAULT}")
    parser.add_argument("--top", type=int, metavar="N", help="only the best N candidates")
    parser.add_argument("--timeline", action="store_true", help="that of the best one, as text")
    parser.add_argument(
        "--plot", metavar="FILE", help="timelines of the best one and of the best without overlap, SVG or PNG"
    )


def _plan_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    _problem_arguments(parser, *["step"] * (command == "simulate"))
    parser.add_argument("--schedule", default="auto", help=f"auto, {', '.join(SCHEDULES)}, hierarchical(RANKS)")
    parser.add_argument("--slices", metavar="N | A,B,...", help="equal ones, or their sizes in proportion: 1,2,4")
    parser.add_argument("--window", type=int, help="sends in flight of a rank (as the schedule has it)")
    parser.add_argument("--verify", action="store_true", help="prove the plan first")
    if command == "plan":
        parser.add_argument("--json", action="store_true", help="the plan as JSON")
        parser.add_argument("--machine", help="auto is what is best there: a preset, or a JSON file")
    else:
        parser.add_argument("--machine", help=f"a preset, or a JSON file; {DEFAULT}")
        parser.add_argument("--save", metavar="FILE", help="the trace as Chrome JSON, for Perfetto")
        parser.add_argument("--model", default="llama-7b", help=f"of a step: {', '.join(MODELS)}")
        parser.add_argument("--parallel", default="tp", help=f"of a step: {', '.join(PARALLEL)}")
        parser.add_argument("--tokens", type=int, default=2048, help="of a step, on each rank (2048)")


def _specs(options: argparse.Namespace) -> list[Spec]:
    shapes = [_shape(text) for text in options.shapes]
    layouts = problems.layouts(options.operation, len(shapes))
    return [Spec(shape, options.dtype, layout) for shape, layout in zip(shapes, layouts, strict=True)]


def _explain(options: argparse.Namespace) -> int:
    if options.plot:
        picture.check(options.plot)  # before the walks
    if options.top is not None and options.top < 1:
        raise fompi.PlanError(f"--top {options.top}: show one candidate at least")
    found = fompi.explain(options.operation, *_specs(options), ranks=options.ranks, machine=_machine(options))
    print(found.text(options.top))
    if options.timeline:
        print(found.timeline())
    if options.plot:
        picture.save(found.plot(), options.plot)
    return 0


def _calibrate(file: str) -> int:
    from fompi.tuning.calibrate import calibrate

    with fompi.Communicator() as comm:
        begun, refusal = perf_counter(), None
        try:
            if comm.size == 1:
                raise LaunchError("one rank has no links to measure: mpirun -n 4 python -m fompi calibrate")
            if comm.rank == 0:
                suites.check_writable(file)  # before a minute is spent
        except (OSError, LaunchError) as error:
            refusal = error
        agree(comm, f"calibrate {file}", refusal)
        machine = calibrate(comm, print if comm.rank == 0 else lambda text: None)
        if comm.rank == 0:
            machine.save(file)
            print(f"{machine}\nwritten to {file} in {perf_counter() - begun:.0f} s", flush=True)
    return 0


def _plan(options: argparse.Namespace) -> int:
    simulated = _machine(options) if options.command == "simulate" else None
    plan = fompi.plan(
        options.operation,
        *_specs(options),
        ranks=options.ranks,
        schedule=options.schedule,
        slices=None if options.slices is None else _slices(options.slices),
        window=options.window,
        machine=simulated or _named(options),
    )
    if options.verify:
        fompi.verify(plan)
        print(f"verified: {plan.size} ranks, {sum(len(p.ops) for p in plan.programs)} ops", file=sys.stderr)
    if simulated is None:
        print(plan.to_json() if options.json else plan)
        return 0
    trace = fompi.simulate(plan, simulated)
    print(trace)
    if options.save:
        trace.save(options.save)
    return 0


def _slices(text: str) -> int | tuple[int, ...]:
    try:
        shares = tuple(int(part) for part in text.replace(":", ",").split(","))
    except ValueError:
        raise fompi.PlanError(
            f"--slices takes a number, or sizes in proportion, for example 1,2,4, not {text!r}"
        ) from None
    return shares if len(shares) > 1 else shares[0]


def _numbers(text: str) -> tuple[int, int, int]:
    try:
        m, k, n = (int(part) for part in text.split(","))
    except ValueError:
        raise fompi.ShapeError(f"--like takes M,K,N, for example 4096,4096,4096, not {text!r}") from None
    return m, k, n


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.split("x"))
    except ValueError:
        raise fompi.ShapeError(f"{text!r} is not a shape like 4096x1024") from None


if __name__ == "__main__":
    sys.exit(main())
