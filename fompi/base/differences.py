"""What the ranks compare before a call, as text with details, and in what the texts of all ranks differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_NAMED, MOST_LETTERS = 8, 1000
"""An error names at most so many differences, and ranks that are alike. It cuts longer texts to where they differ."""

_DETAILS, _DIGEST = re.compile("\1(.*?)\2(.*?)\3", re.DOTALL), "\4"


def detail(name: str, value: object, digest: int | None = None) -> str:
    """A part of a text that the ranks compare. An error shows it only where it differs: the name, and all values.

    Where only the digests differ, the error says on which ranks.
    """
    return f"\1{name}\2{value}{'' if digest is None else f'{_DIGEST}{digest:x}'}\3"


def without_details(text: str) -> str:
    return _DETAILS.sub("", text) if "\1" in text else text


def in_what_they_differ(texts: Sequence[str], refuse: Sequence[bool]) -> str:
    """What the ranks call or refuse, in words, by their texts. If all call the same: which details differ."""
    calls = [rank for rank, refuses in enumerate(refuse) if not refuses]
    heads = _cut([without_details(text) for text in texts])
    details = {rank: dict(_DETAILS.findall(texts[rank])) for rank in calls}
    shared = [name for name in details[calls[0]] if all(name in details[r] for r in calls)] if calls else []
    is_one_call = len({*heads}) == 1 and len(calls) == len(texts)
    found: list[str] = []
    if is_one_call or shared:
        for name in dict.fromkeys(name for rank in calls for name in details[rank]):
            found += _difference(name, {rank: details[rank].get(name, "missing") for rank in calls})
        orders = {rank: [name for name in details[rank] if name in shared] for rank in calls}
        for at in range(len(shared)):
            if changed := _difference(f"number {at} of them", {rank: order[at] for rank, order in orders.items()}):
                found += changed
                break
    if len(found) > MOST_NAMED:
        found[MOST_NAMED:] = [f"and {len(found) - MOST_NAMED} more differ"]
    if found and is_one_call:
        return "; ".join([f"all ranks call {heads[0]}, but with other values", *found])
    by_call = _alike({rank: ("refuse" if refuse[rank] else "call", head) for rank, head in enumerate(heads)})
    whats = [f"{_ranks_in_words(r)} {verb}{'s' * (len(r) == 1)} {head}" for (verb, head), r in by_call.items()]
    return "; ".join([*whats, *found])


def _difference(name: str, values: Mapping[int, str]) -> list[str]:
    """The values of `name` on the ranks, in words. Empty if they are the same."""
    by_value = _alike(values)
    if len(by_value) == 1:
        return []
    by_shown = _alike({rank: value.partition(_DIGEST)[0] for rank, value in values.items()})
    if len(by_shown) == 1:
        ranks = " and ".join([_ranks_in_words(ranks) for ranks in by_value.values()][:MOST_NAMED])
        return [f"{name}: {', '.join([*filter(None, by_shown), f'contents differ between {ranks}'])}"]
    shown = zip(_cut(by_shown), by_shown.values(), strict=True)
    return [f"{name}: " + ", ".join([f"{value} on {_ranks_in_words(ranks)}" for value, ranks in shown][:MOST_NAMED])]


def _alike(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The ranks that have each value."""
    ranks_of: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def _ranks_in_words(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def _cut(texts: Iterable[str]) -> list[str]:
    """Texts that are too long, without most of what they begin with alike, and cut to MOST_LETTERS."""
    texts = [*texts]
    if max(map(len, texts)) <= MOST_LETTERS:
        return texts
    same = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len({*letters}) > 1), 0)
    head, begin = min(same, MOST_LETTERS // 4), max(0, same - MOST_LETTERS // 4)
    if begin > head:
        texts = [f"{text[:head]} ... {text[begin:]}" for text in texts]
    return [text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ..." for text in texts]
