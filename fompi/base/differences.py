"""What the ranks compare before a call: a text with details. An error says in what the texts of all ranks differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_NAMED, MOST_LETTERS = 8, 1000
"""An error names at most this many differences, values, ranks. Texts longer than this are cut to where they differ."""

_DETAILS, _DIGEST = re.compile("\1(.*?)\2(.*?)\3", re.DOTALL), "\4"


def detail(name: str, value: object, digest: int | None = None) -> str:
    """A part of a text that an error shows only where it differs: the name, and the value of each rank.

    Where only the digests differ, the error says on which ranks.
    """
    return f"\1{name}\2{value}{'' if digest is None else f'{_DIGEST}{digest:x}'}\3"


def without_details(text: str) -> str:
    return _DETAILS.sub("", text) if "\1" in text else text


def in_what_they_differ(texts: Sequence[str], refuse: Sequence[bool]) -> str:
    """What the ranks call or refuse, by their texts, and which details of the calls differ."""
    verbs = ["refuse" if refuses else "call" for refuses in refuse]
    heads = [*zip(verbs, _cut(map(without_details, texts), MOST_LETTERS), strict=True)]
    details = {rank: dict(_DETAILS.findall(texts[rank])) for rank, refuses in enumerate(refuse) if not refuses}
    names = dict.fromkeys(name for known in details.values() for name in known)
    shared = dict.fromkeys(name for name in names if all(name in known for known in details.values()))
    found: list[str] = []
    if shared or len({*heads}) == 1:  # else they are no details of one call
        for name in names:
            found += _difference(name, {rank: known.get(name, "missing") for rank, known in details.items()})
        orders = {rank: [name for name in known if name in shared] for rank, known in details.items()}
        places = (
            _difference(f"in the order, number {i}", {r: names[i] for r, names in orders.items()})
            for i in range(len(shared))
        )
        found += next(filter(None, places), [])
    if len(found) > MOST_NAMED:
        found[MOST_NAMED:] = [f"and {len(found) - MOST_NAMED} more"]
    if found and len({*heads}) == 1:
        return "; ".join([f"all ranks call {heads[0][1]}, but these differ", *found])
    calls = _alike(dict(enumerate(heads))).items()
    return "; ".join([*(f"{_names(r)} {verb}{'s' * (len(r) == 1)} {head}" for (verb, head), r in calls), *found])


def _difference(name: str, values: Mapping[int, str]) -> list[str]:
    """The values of `name` on the ranks, in words. Empty if they are the same."""
    ranks_of = _alike(values)
    if len(ranks_of) == 1:
        return []
    shown = _alike({rank: value.partition(_DIGEST)[0] for rank, value in values.items()})
    if len(shown) == 1:
        found = f"contents differ between {' and '.join([*map(_names, ranks_of.values())][:MOST_NAMED])}"
        return [f"{name}: {', '.join([*filter(None, shown), found])}"]
    words = [f"{value} on {_names(ranks)}" for value, ranks in zip(_cut(shown), shown.values(), strict=True)]
    return [f"{name}: {', '.join(words[:MOST_NAMED])}"]


def _alike(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The ranks that have each value."""
    ranks_of: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def _names(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def _cut(given: Iterable[str], letters: int = MOST_LETTERS // 4) -> list[str]:
    """Texts without most of what they begin with alike, if they are too long, and cut."""
    texts, most = [*given], letters // 4
    if max(map(len, texts)) <= letters:
        return texts
    same = next((i for i, each in enumerate(zip(*texts, strict=False)) if len({*each}) > 1), 0)
    if same > 2 * most:
        texts = [f"{text[:most]} ... {text[same - most :]}" for text in texts]
    return [text if len(text) <= letters else f"{text[:letters]} ..." for text in texts]
