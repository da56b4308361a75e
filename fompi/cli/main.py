"""`fompi` and `python -m fompi`: find the subcommand, run it, turn errors into one line and exit status 2."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple, NoReturn

from fompi.base.errors import FompiError, meant
from fompi.base.version import __version__
from fompi.cli import tools
from fompi.cli.output import UsageError, first_rank_only, is_first_rank
from fompi.mpi import environment

MEETING_SECONDS = 1.0
"""How long a rank with an error waits for the others. Ranks that all have the error arrive within this time.

A launcher may end the job when the first rank ends with an error. So rank 0 has this time to say what is wrong.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        invalid = re.fullmatch(r"(.*invalid choice: '?(.*?)'?) \(choose from (.*)\)", message)
        if invalid is not None:
            known = [name.strip("' ") for name in invalid[3].split(",")]
            near = meant(invalid[2], known, ": did you mean {}?")
            message = invalid[1] + (near or f": choose one of {', '.join(known)}")
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")


class Command(NamedTuple):
    """A subcommand. With `on_ranks` it runs on all ranks of an MPI job, and the ranks must agree on an error.

    With `starts_mpi` it looks at the job by itself, whatever is wrong with it. With `runs_program` the words after `--`
    are a program, in `options.program`.
    """

    module: str
    summary: str
    on_ranks: bool = False
    starts_mpi: bool = False
    runs_program: bool = False


COMMANDS = {
    "info": Command("fompi.cli.info", "versions, MPI, launcher, ranks and hosts", starts_mpi=True),
    "doctor": Command("fompi.cli.doctor", "measure the job, and list what is wrong, with remedies", starts_mpi=True),
    "plan": Command("fompi.cli.plan", "the grid of ranks of a plan"),
    "simulate": Command("fompi.cli.simulate", "the predicted trace of a plan"),
    "explain": Command("fompi.cli.explain", "which schedule is the best, and why"),
    "digest": Command("tools.digest", "at which call do the bits of two numbers of ranks first differ?"),
    "layout": Command("fompi.cli.layout", "the best sizes dp x tp x pp x ep x cp for a model on a machine, on paper"),
    "balance": Command("fompi.cli.balance", "shares of a model for ranks that are not equally fast, on paper, and why"),
    "trace": Command(
        "fompi.cli.trace", "the report and the trace of a job: of the file that FOMPI_REPORT=run.json wrote"
    ),
    "replay": Command("fompi.cli.replay", "a run that FOMPI_RECORD=FOLDER recorded, walked again: on other links, too"),
    "advise": Command("fompi.cli.replay", "what would help a recorded run, and by how much"),
    "checkpoint": Command("fompi.cli.checkpoint", "what is in a checkpoint, and is every byte as it was written?"),
    "reshard": Command("fompi.cli.reshard", "write a checkpoint anew: other files, or those of the Hugging Face hub"),
    "calibrate": Command("fompi.cli.calibrate", "measure the machine, for mpirun: writes JSON", on_ranks=True),
    "try": Command("fompi.bench.trial", "what overlap gains here for a shape of your own", on_ranks=True),
    "up": Command("fompi.cli.up", "look at machines over ssh, choose their network, start a job", runs_program=True),
    "members": Command("fompi.cli.members", "serve the store by which groups that come and go find each other"),
    "slurm": Command("fompi.cli.slurm", "print a job script for Slurm"),
    "bench": Command("tools.bench.command", "benchmarks, for mpirun (in a checkout)", on_ranks=True),
}
"""The modules of the subcommands, by name. A module is imported only when its subcommand is used."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    status: object = 1
    try:
        return (status := _run(sys.argv[1:] if argv is None else argv))
    except SystemExit as end:  # of argparse
        status = end.code
        raise
    finally:
        if status and not is_first_rank():
            sleep(MEETING_SECONDS)


def _run(arguments: list[str]) -> int:
    command = COMMANDS.get(arguments[0]) if arguments else COMMANDS["info"]
    try:
        if not arguments and "_ARGCOMPLETE" not in os.environ:
            status = import_module(COMMANDS["info"].module).brief(program())
        else:
            tools.run_script(arguments)
            parser, parsers = _parsers()
            if "_ARGCOMPLETE" in os.environ:
                _complete(parser, parsers)
            with first_rank_only():
                module, options = _parse(arguments, command, parser, parsers)
            if _starts_mpi(command):
                status = module.run(options)
            else:
                with first_rank_only():
                    _check_environment()
                    status = module.run(options)
        sys.stdout.flush()
        return status
    except UsageError as error:
        with first_rank_only():
            parsers[arguments[0]].error(str(error))
    except BrokenPipeError:  # the reader has stopped reading, like `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FompiError, OSError, MemoryError) as error:
        return _fail(error, command)


def _parse(
    arguments: list[str],
    command: Command | None,
    parser: argparse.ArgumentParser,
    parsers: Mapping[str, argparse.ArgumentParser],
) -> tuple[Any, argparse.Namespace]:
    """The module of the subcommand, and its options. Arguments without a subcommand end the process here."""
    module = None
    if command is not None:
        module = tools.load(command.module)
        module.add_arguments(parsers[arguments[0]])
        parsers[arguments[0]].epilog = f"for example: {module.EXAMPLE.format(program(), command=arguments[0])}"
    words: list[str] = []
    if command is not None and command.runs_program and "--" in arguments:
        cut = arguments.index("--")
        arguments, words = arguments[:cut], arguments[cut + 1 :]
    options, unknown = parser.parse_known_args(arguments, argparse.Namespace(program=words))
    if unknown or module is None:
        used = parsers.get(arguments[0], parser)
        known = [name[2:] for name in used._option_string_actions if name.startswith("--")]  # dashes make all alike
        near = meant(unknown[0].partition("=")[0].lstrip("-"), known, ": did you mean --{}?") if unknown else ""
        used.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    return module, options


def _complete(parser: argparse.ArgumentParser, parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Answer a shell that asks how a word of the command line may end (argcomplete). Does not return."""
    named = set(os.environ.get("COMP_LINE", "").split())
    for name in named & set(COMMANDS):
        tools.load(COMMANDS[name].module).add_arguments(parsers[name])
    import_module("argcomplete").autocomplete(parser)


def _starts_mpi(command: Command | None) -> bool:
    """True if the subcommand runs on the ranks. All others do the same on every rank, and rank 0 says it."""
    return command is not None and (command.on_ranks or command.starts_mpi)


def _check_environment() -> None:
    """For a command without ranks. `info` shows what is wrong, and a Communicator does the same for its ranks."""
    for sentence in environment.unknown():
        print(f"fompi: warning: {sentence}", file=sys.stderr)
    if (error := environment.refusal()) is not None:
        raise error


def program() -> str:
    """How this program was called: `fompi` or `python -m fompi`."""
    return "fompi" if Path(sys.argv[0]).name == "fompi" else "python -m fompi"


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and one for each subcommand, still without arguments."""
    layout: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}  # an example stays on one line
    parser = Parser(
        prog=program(),
        description="Collectives that overlap with computation, on MPI. Without a command: what is here, in short.",
        epilog=f"for example: {program()} try 1024,1024,1024 --ranks 4",
        **layout,
    )
    parser.add_argument("--version", action="version", version=f"fompi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=command.summary, description=command.summary, **layout)
        for name, command in COMMANDS.items()
    }
    return parser, parsers


def _fail(error: BaseException, command: Command | None) -> int:
    """Print one line. An error of a single rank among others ends the job."""
    line = str(error) or type(error).__name__
    if command is not None and command.on_ranks:
        from fompi.engine import faults
        from fompi.mpi import launcher, transport

        if launcher.detect().launcher != "none":
            rank, size = transport.world()
            if size > 1 and not transport.all_ranks_arrive(MEETING_SECONDS):
                faults.end_job(f"rank {rank}: {line}", 2)
            if rank:
                return 2
    if _starts_mpi(command) or is_first_rank():
        print(f"fompi: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
