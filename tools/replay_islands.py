"""A run of islands again, in one process, from the log of its epochs: the same bits, or the first difference.

python -m fompi islands replay a.log b.log examples/islands.py:island     # in a checkout
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise, starmap
from typing import Any

import numpy as np

from fompi.backends.wires import Feedback, carry
from fompi.base.errors import FompiError, LayoutError, MismatchError
from fompi.base.layout import offsets, split
from fompi.members.epoch_log import lines_of
from fompi.parallel.outer import HERE, NEW, OF_RULE, SLOW, OuterCopies, OuterExchange
from fompi.plans.tree import folded

Array = np.ndarray[Any, Any]
Line = dict[str, Any]


@dataclass(frozen=True)
class Replayed:
    """What a replay has done: how many epochs and exchanges, of which islands. `sha256`: of the last exchange."""

    epochs: int
    exchanges: int
    islands: tuple[str, ...]
    sha256: str


class HeldArrays:
    """The parameters of an island that are arrays: params = inner(params)."""

    def __init__(self, params: Mapping[str, Any], inner: Callable[[Mapping[str, Any]], Mapping[str, Any]]):
        self.params, self._inner = dict(params), inner

    def get(self, name: str) -> Any:
        return self.params[name]

    def take(self, values: Mapping[str, Any]) -> None:
        self.params.update(values)

    def step(self) -> None:
        self.params = dict(self._inner(self.params))


def _module(model: Any, optimizer: Any, step: Callable[[], object]) -> Any:
    """The same of a module of torch: step()."""
    made = import_module("fompi.torch.outer").TrainedModule(model, optimizer)
    made.step = step
    return made


class Life:
    """An island from its start, or from its start again, on. `steps`: how many of its inner steps were made."""

    def __init__(self, name: str, made: Sequence[Any], outer: Line):
        self.name, self._outer = name, outer
        self.held: Any = HeldArrays(*made) if len(made) == 2 else _module(*made)
        forms = outer["parameters"]
        try:
            params = {name: self.held.get(name) for name in forms}
        except (KeyError, AttributeError) as error:
            raise LayoutError(f"the replayed island {name!r} has no parameter {error}, which the log has") from None
        fragments = [[name for name in forms if forms[name][2] == p] for p in range(outer["fragments"])]
        self.copies = OuterCopies(
            params,
            fragments,
            {name: form[3] for name, form in forms.items() if form[3]},
            **{key: outer[key] for key in ("sync_every", "delay", *OF_RULE)},
        )
        for key, form in self.copies.forms.items():
            if form != forms[key]:
                raise LayoutError(f"{key!r} of the replayed island {name!r} is {form}, and {forms[key]} in the log")
        wire = outer["how"].get("wire", "")
        for row in self.copies.all_rows:
            row.wire = wire if row.outer is not None and row.dtype == "float32" else ""
        self.flight: OuterExchange | None = None  # of the last step in which one began
        self.pending: tuple[OuterExchange, list[Array], Line] | None = None

    def run(self, until: int) -> None:
        """Make inner steps, and the outer step that is due."""
        copies, delay = self.copies, self._outer["delay"]
        while copies.steps < until:
            copies.steps += 1
            self.held.step()
            if copies.schedule.begins(copies.steps) is not None:
                self.flight = copies.left(self.held.get)
            self.apply(copies.steps - delay)

    def apply(self, begun: int) -> None:
        """Apply the exchange of the step `begun`, if it is here. Raises MismatchError for other bits."""
        if self.pending is None or self.pending[0].step != begun:
            return
        (flight, means, line), self.pending = self.pending, None
        self.held.take(self.copies.outer_step(flight, means, self.held.get))
        if (found := self.copies.sha256(flight.fragment)) != line["sha256"]:
            raise MismatchError(
                f"exchange {line['exchange']} (fragment {line['fragment']} after step {line['step']}, epoch "
                f"{line['epoch']}): the outer copies have the sha256 {line['sha256'][:16]}... in the log, and "
                f"{found[:16]}... in the replay of {self.name!r}"
            )

    def adds(self, line: Line, weight: int) -> OuterExchange:
        """What it adds to an exchange."""
        step = line["step"]
        if weight == 0:
            return self.copies.idle(step)
        self.run(step)
        if self.flight is None or self.flight.step != step or self.flight.fragment != line["fragment"]:
            raise LayoutError(f"exchange {line['exchange']}: {self.name!r} was at step {self.copies.steps} by then")
        return self.flight

    def take_over(self, other: Life, applied: int, steps: int, keeps: bool) -> None:
        """Come as far as it was, and have what the other one has."""
        if self.pending is not None and self.pending[2]["exchange"] > applied:  # others have applied it
            self.pending = None
        self.run(steps)
        self.copies.take_over([array.copy() for array in other.copies.shared()], other.copies._applied, keeps)
        self.held.take(self.copies.received(self.held.get))


def replay(logs: Sequence[str], make: Callable[[str], Sequence[Any]]) -> Replayed:
    """Repeat a run of islands in this process, and compare the outer copies after each exchange. Returns what it did.

        replay(["a.log", "b.log"], island)

    `logs`: the files of `fompi.islands.join(log=...)`. That of one island is enough if it was in all exchanges.
    `make(name)`: one island as it starts: `(model, optimizer, inner)` of torch, where `inner()` makes an inner step; or
    `(params, inner)`, where `params = inner(params)`, for names and arrays. It is called again for an island that was
    started again. Its steps must not depend on what else runs: take random numbers from a generator of the island.

    Islands that were lost, came late, were slow or were started again do what they have done. Raises MismatchError for
    the first exchange with other bits, and LayoutError for a log that was changed or lacks something, by its line.
    """
    outer, events = _merged(logs)
    lives: dict[str, Life] = {}
    epoch: Line = {"epoch": 0, "islands": []}
    done, last = 0, ""
    for i, line in enumerate(events):
        if line["kind"] == "epoch":
            epoch = line
            _meet(epoch, events[i + 1 : i + 2], lives, lambda name: Life(name, make(name), outer))
            continue
        if line["epoch"] != epoch["epoch"] or line["exchange"] != done + 1:
            lacks = f"exchange {done + 1}" if line["exchange"] != done + 1 else f"epoch {line['epoch']}"
            raise LayoutError(f"the logs lack {lacks}, before exchange {line['exchange']}: give those of other islands")
        done, last = line["exchange"], line["sha256"]
        _exchange(line, [lives[name] for name in epoch["islands"]], outer)
    for name in epoch["islands"]:
        if (pending := lives[name].pending) is not None:
            lives[name].run(pending[0].step + outer["delay"])
    return Replayed(sum(line["kind"] == "epoch" for line in events), done, tuple(sorted(lives)), last)


def _merged(logs: Sequence[str]) -> tuple[Line, list[Line]]:
    """How the run exchanges, and its epochs and exchanges in their order."""
    outer, events = None, dict[tuple[int, int], tuple[str, Line]]()
    for where, line in (each for path in logs for each in lines_of(path)):
        line = {key: value for key, value in line.items() if key not in ("island", "here")}
        if line["kind"] == "loaded":
            raise LayoutError(f"{where}: an island has loaded a state there, which the log does not have")
        if line["kind"] == "outer":
            line.pop("epoch")
            if outer is not None and outer[1] != line:
                raise LayoutError(f"{where}: its outer steps are others than those of {outer[0]}")
            outer = outer or (where, line)
            continue
        before, known = events.setdefault((line["epoch"], line.get("exchange", 0)), (where, line))
        if known != line:
            raise LayoutError(f"{where}: it does not say what {before} says")
    if outer is None:
        raise LayoutError(f"there is no log of outer steps in {', '.join(map(str, logs)) or 'no file'}")
    return outer[1], [line for _, (_, line) in sorted(events.items())]


def _meet(epoch: Line, after: Sequence[Line], lives: dict[str, Life], make: Callable[[str], Life]) -> None:
    """The islands of an epoch meet. `after`: what the log has next, by which it says who has come that far."""
    of_all = [*zip(*(epoch[key] for key in ("islands", "roles", "applied", "steps", "lacks")), strict=True)]
    farthest = epoch["islands"][epoch["root"]]
    for name, role, _, steps, _ in of_all:
        if role == HERE and (name not in lives or lives[name].copies.steps > steps == 0):
            if steps > 0:
                raise LayoutError(f"the logs lack what {name!r} did before epoch {epoch['epoch']}: give its own")
            lives[name] = make(name)
    for name, role, applied, steps, lacks in of_all:
        if role == HERE or not _has_come(name, epoch, after):
            continue
        root = lives[farthest]
        root.run(epoch["steps"][epoch["root"]])
        if role == NEW:
            lives[name] = make(name)
        lives[name].take_over(root, applied, steps, keeps=role == SLOW)
        if lacks:
            state = iter(root.held.inner_state({}))
            lives[name].held.take_inner(lambda _, state=state: next(state))
        if role in (NEW, SLOW):
            lives[name].copies.steps = epoch["start"]


def _has_come(name: str, epoch: Line, after: Sequence[Line]) -> bool:
    """False if it was lost in the meeting, so that it was as before in the next one."""
    for line in after:
        if line["kind"] == "epoch" and name in line["islands"]:
            return bool(line["applied"][line["islands"].index(name)] >= max(epoch["applied"]))
    return True


def _exchange(line: Line, lives: Sequence[Life], outer: Line) -> None:
    """All islands of the epoch have the means of an exchange, to apply them when they come there."""
    weights = line["weights"]
    flights = [life.adds(line, weight) for life, weight in zip(lives, weights, strict=True)]
    means: list[Array] = []
    for i, row in enumerate(flights[0].rows):
        terms = []
        for rank, (flight, weight) in enumerate(zip(flights, weights, strict=True)):
            own, term = flight.rows[i], flight.terms[i]
            term = term * term.dtype.type(weight)
            if row.wire and outer["how"].get("feedback"):
                lost = np.zeros(row.size, np.float32) if own.feedback is None else own.feedback.lost
                own.feedback = Feedback(row.wire, len(lives), rank, lost)
            terms.append(own.sent(term))
            if own.feedback is not None:
                own.feedback.keep()
        total = _sum(row.wire, terms)
        means.append(total / total.dtype.type(max(1, sum(weights))))
    for life, flight in zip(lives, flights, strict=True):
        life.pending = flight, means, line
        life.apply(life.copies.steps - outer["delay"])


def _sum(wire: str, terms: Sequence[Array]) -> Array:
    """The sum of the islands, in the order and by the roundings of `OuterRow.sums`."""
    if not wire or len(terms) == 1:
        return folded(terms, lambda a, b: a + b)
    parts: Iterator[slice] = starmap(slice, pairwise(offsets(split(terms[0].size, len(terms)))))
    total = np.empty_like(terms[0])
    for owner, part in enumerate(parts):
        sums = None
        for d in range(1, len(terms)):
            carried = terms[(owner + d) % len(terms)][part].copy()
            carry(wire, carried, "float32", [0, carried.size])
            sums = carried if sums is None else sums + carried
        whole = sums + terms[owner][part]
        carry(wire, whole, "float32", [0, whole.size])
        total[part] = whole
    return total


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="a run of islands again, in this process: the same bits")
    parser.add_argument("logs", nargs="+", metavar="LOG", help="what fompi.islands.join(log=...) has written")
    parser.add_argument("program", metavar="FILE.py:FUNCTION", help="it makes one island, from its name")
    words = sys.argv[1:]
    options = parser.parse_args(words[words[:1] == ["replay"] :])
    path, _, name = options.program.rpartition(":")
    try:
        done = replay(options.logs, runpy.run_path(path, run_name="replayed")[name])
    except (FompiError, OSError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    what = f"{done.exchanges} exchanges in {done.epochs} epochs of {', '.join(done.islands)}"
    print(f"{what}: the same bits, sha256 {done.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
