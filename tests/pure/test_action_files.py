"""Files of torch's pipelines: those that are right, spoiled ones, and a run that knows nothing of the rules."""

from __future__ import annotations

import re
from collections import defaultdict
from random import Random

import pytest

from action_files import judge, lists_actions
from fompi.base.errors import PlanError
from fompi.base.file_checks import decoded
from fompi.parallel.actions import Action, actions, needs, parts

CASES = (("1f1b", 2, 4, 1), ("gpipe", 3, 2, 1), ("interleaved", 2, 4, 2), ("zbv", 3, 4, 2), ("zb-h1", 3, 3, 1),
         ("dualpipev", 2, 4, 2))  # fmt: skip


def with_messages(rows):
    """The cells of each rank, with a SEND behind what makes a value, and a RECV before what needs it.

    A rank takes messages in the order in which they are sent: where several wait, they are taken early.
    """
    owner = {a.stage: rank for rank, row in enumerate(rows) for a in parts(row)}
    made, sends, at = {}, defaultdict(list), [0] * len(rows)
    cells = [[] for _ in rows]
    taken = defaultdict(int)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                step = row[at[rank]]
                wanted = [n for a in parts([step]) for n in needs(a, len(owner))]
                if not all(n in made for n in wanted):
                    break
                for stage, what, i in wanted:
                    pair = owner[stage], rank
                    name = (stage, what, i)
                    while pair[0] != rank and name in sends[pair][taken[pair] :]:
                        s, w, j = sends[pair][taken[pair]]
                        cells[rank].append(f"{s + 1}RECV_F{j}" if w == "y" else f"{s - 1}RECV_B{j}")
                        taken[pair] += 1
                cells[rank].append(str(step))
                for a in parts([step]):
                    made[a.stage, {"F": "y", "W": "w"}.get(a.kind, "d"), a.microbatch] = rank
                    if a.kind == "I":
                        made[a.stage, "i", a.microbatch] = rank
                    to = a.stage + (1 if a.kind == "F" else -1)
                    if a.kind != "W" and owner.get(to, rank) != rank:
                        cells[rank].append(f"{a.stage}SEND_{'F' if a.kind == 'F' else 'B'}{a.microbatch}")
                        sends[rank, owner[to]].append((a.stage, "y" if a.kind == "F" else "d", a.microbatch))
                at[rank] += 1
                moved = True
    return cells


def text_of(cells):
    return "\n".join(",".join(row) for row in cells) + "\n"


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_right_files(name, ranks, microbatches, chunks):
    rows = actions(name, ranks, microbatches, chunks)
    plain, full = (judge(text_of(cells)) for cells in ([[*map(str, row)] for row in rows], with_messages(rows)))
    assert plain.is_right and full.is_right, (plain.reasons, full.reasons)
    assert (full.ranks, full.stages, full.microbatches) == (ranks, ranks * chunks, microbatches)
    assert plain.messages == 0 < full.messages and plain.span == full.span > 0 and 0 <= plain.idle < 1
    assert lists_actions(text_of(with_messages(rows))) and not lists_actions("<algo/>") and not lists_actions("{}")
    assert sum(text_of(with_messages(rows)).count(f"SEND_{k}") for k in "FB") == full.messages


# --------------------------------------------------------------------- a run that knows nothing of the rules


def brute_force(cells):
    """True if the ranks of this file end, and each action has had what it needs. Messages of a pair are a queue."""
    rows = [[c for c in row if c] for row in cells]
    actions = [
        [Action(int(s), k, int(i)) for s, k, i in re.findall(r"(?:^|[(;])(\d+)([FBIW])(\d+)", c)]
        for r in rows
        for c in r
    ]
    flat = [a for each in actions for a in each]
    owner = {a.stage: rank for rank, row in enumerate(rows) for c in row for a in found(c)}
    at, queues, inbox = [0] * len(rows), defaultdict(list), [{} for _ in rows]
    opened = defaultdict(list)  # receives of a pair that have begun, in their order
    made = [set() for _ in rows]
    total = {a: flat.count(a) for a in flat}
    stages, microbatches = 1 + max(a.stage for a in flat), 1 + max(a.microbatch for a in flat)
    for s in range(stages):
        for i in range(microbatches):
            kinds = sorted(a.kind for a in flat if (a.stage, a.microbatch) == (s, i))
            if kinds not in (["B", "F"], ["F", "I", "W"]):
                return False
    if any(n != 1 for n in total.values()) or len({*owner}) != stages or stages % len(rows):
        return False
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                cell = row[at[rank]]
                message = re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", cell)
                if message:
                    s, verb, kind, i = int(message[1]), message[2], message[3], int(message[4])
                    step = 1 if kind == "F" else -1
                    other = s + step if verb == "SEND" else s - step
                    if owner.get(s) != rank or owner.get(other, rank) == rank:
                        return False
                    if verb == "SEND":
                        what = (s, "y" if kind == "F" else "d", i)
                        if what not in made[rank]:
                            return False
                        queues[rank, owner[other]].append(what)
                    else:
                        opened[owner[other], rank].append((other, "y" if kind == "F" else "d", i))
                else:
                    for pair, begun in opened.items():
                        for what, came in zip(begun, queues[pair], strict=False):
                            inbox[pair[1]][what] = came
                    wanted = [n for a in found(cell) for n in needs(a, stages)]
                    local = [n for n in wanted if owner[n[0]] == rank]
                    foreign = [n for n in wanted if owner[n[0]] != rank]
                    if any(n not in made[rank] for n in local) or any(
                        a.stage not in stages_of(rank, owner) for a in found(cell)
                    ):
                        break
                    if any(n not in inbox[rank] for n in foreign):
                        break
                    if any(inbox[rank][n] != n for n in foreign):
                        return False
                    for a in found(cell):
                        names = {"F": ["y"], "B": ["d", "i"], "I": ["d", "i"], "W": []}[a.kind]
                        made[rank] |= {(a.stage, name, a.microbatch) for name in names}
                at[rank] += 1
                moved = True
    ended = all(at[r] == len(row) for r, row in enumerate(rows))
    return ended and all(opened[p] == queues[p] for p in {*opened, *queues})


def found(cell):
    if "SEND" in cell or "RECV" in cell:
        return []
    return [Action(int(s), k, int(i)) for s, k, i in re.findall(r"(\d+)([FBIW])(\d+)", cell)]


def stages_of(rank, owner):
    return {stage for stage, of in owner.items() if of == rank}


def spoiled(random, cells):
    """A copy with one change: a cell moved, left out, doubled, or given to another rank; two cells change places."""
    rows = [[*row] for row in cells]
    rank = random.randrange(len(rows))
    at, how = random.randrange(len(rows[rank])), random.choice(("move", "drop", "double", "give", "swap", "rename"))
    cell = rows[rank][at]
    if how == "swap":
        other = random.randrange(len(rows[rank]))
        rows[rank][at], rows[rank][other] = rows[rank][other], cell
    elif how == "rename":
        rows[rank][at] = re.sub(r"\d+$", lambda m: str((int(m[0]) + 1) % 3), cell)
    elif how != "double":
        del rows[rank][at]
    if how in ("move", "double"):
        rows[rank].insert(random.randrange(len(rows[rank]) + 1), cell)
    if how == "give":
        to = random.randrange(len(rows))
        rows[to].insert(random.randrange(len(rows[to]) + 1), cell)
    return rows


def test_the_verdict_on_spoiled_files_is_that_of_a_run():
    random, verdicts = Random(1), defaultdict(int)
    files = [with_messages(actions(*case)) for case in CASES if case[0] != "dualpipev"]
    for _ in range(1500):
        rows = spoiled(random, random.choice(files))
        verdict = judge(text_of(rows))
        assert verdict.is_right == brute_force(rows), (text_of(rows), verdict.reasons)
        verdicts[verdict.is_right] += 1
    assert verdicts[False] > 900 and verdicts[True] > 50  # some changes do no harm


@pytest.mark.parametrize(("text", "words"), [
    ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", "rank 1: 1RECV_F0 is missing"),
    ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "0SEND_F0 comes before 0F0"),
    ("0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "0RECV_B0 comes after 0B0"),
    ("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "0SEND_F0 is there more than once"),
    ("0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n"
     "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n", "messages have no tags"),
    ("0F0,0B0\n1F0\n", "1B0 is missing"),
    ("0UNSHARD,0F0,0RESHARD,0B0\n", "0B0 comes while the parameters of stage 0 are not there"),
    ("0F0,0B0\n1F0,1B0\n2F0,2B0,3F0,3B0\n", "cannot be divided"),
    ("0F0,0SEND_F0,0SEND_B0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "nobody needs 0SEND_B0"),
])  # fmt: skip
def test_reasons(text, words):
    verdict = judge(text)
    assert not verdict.is_right and words in " ".join(verdict.reasons), verdict.reasons


def test_what_is_not_known_is_said_by_name():
    with pytest.raises(PlanError, match=r"line 2, cell 3: '1Q0' is not known"):
        judge("0F0,0B0\n1F0,1B0,1Q0\n")
    assert judge("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n").is_right
    assert judge('"0F0",,0B0\n').is_right  # an empty cell is a step without an action


def test_numbers_that_no_memory_holds():
    """Judged or refused at once: the first stage or micro-batch that is missing ends it."""
    for text, words in (("0F0,0B0,999999999F0", "1F0 is missing"), ("0F0,0B0,0F999999999", "0F1 is missing")):
        assert words in judge(text).reasons[0]
    for text in (
        "1000000000F0",
        f"0F{'9' * 5000}",
        f"0SEND_F{'9' * 5000}",
        "(0F0;)OVERLAP_F_B",
        f"0F0,({';' * 100_000}",
    ):
        with pytest.raises(PlanError, match=r"is not known$"):
            judge(text)
    with pytest.raises(PlanError, match="too many to be proven"):
        judge("0F0\n" * 5000)


def test_files_of_any_encoding():
    text = "0F0,0B0\n1F0,1B0\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert lists_actions(decoded(text.encode(encoding))) and judge(decoded(text.encode(encoding))).is_right
