"""Digests of results: those of the parts give that of the whole; and two runs compared call by call."""

from __future__ import annotations

import json

import catalogue
import digest as cli
import numpy as np
import pytest

from fompi.runtime.digest import CHUNK, digest_of, joined, shape_of


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "int8", "uint16", "bool"])
@pytest.mark.parametrize("count", [0, 1, 5, CHUNK, CHUNK + 3, 3 * CHUNK + 1])
def test_the_digest_of_two_runs_follows_from_theirs(dtype, count):
    x = (np.random.default_rng(count).standard_normal(count) * 50).astype(dtype)
    for cut in {0, count // 3, count}:
        assert joined(digest_of(x[:cut]), digest_of(x[cut:]), count - cut) == digest_of(x)


def test_each_bit_and_each_place_matters():
    x = np.arange(20, dtype="f4")
    found = {digest_of(x), digest_of(x[::-1]), digest_of(x.astype("f8")), digest_of(x[:-1]), digest_of(np.append(x, 0))}
    for i in range(20):
        y = x.copy()
        y[i] = np.nextafter(y[i], np.float32(100))
        found.add(digest_of(y))
    assert len(found) == 25 and digest_of(np.array([0.0])) != digest_of(np.array([-0.0]))
    assert digest_of(x.reshape(4, 5)) == digest_of(x)


def test_what_a_rank_has():
    problems = catalogue.problems(2, "float32")
    wanted = {
        "all_reduce": "all", "all_gather": "all", "reduce_scatter": "rows", "matmul_reduce_scatter": "rows",
        "matmul_all_reduce": "all", "all_gather_matmul": "columns", "all_to_all": "rank", "broadcast": "all",
    }  # fmt: skip
    for name, held in wanted.items():
        assert shape_of(problems[name], "y") == held, name
    assert shape_of(problems["all_gather_weight_gradient"], "g") == "columns"


def written(folder, size, values, name="all_reduce", held="all", comm="world"):
    """The files of a run whose calls have these results."""
    folder.mkdir()
    for rank in range(size):
        lines = []
        for call, value in enumerate(values):
            rows = len(value)
            mine = value if held == "all" else value[rank * rows // size : (rank + 1) * rows // size]
            array = np.moveaxis(mine, -1, 0) if held == "columns" else mine
            lines.append(
                {"comm": comm, "members": [*range(size)], "call": call + 1, "words": f"call {call + 1} of {comm}",
                 "result": "y", "held": held, "operation": name, "dtype": "float32", "order": "",
                 "elements": array.size, "digest": f"{digest_of(array):016x}"}
            )  # fmt: skip
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return cli.read(folder)


def test_runs_are_compared_call_by_call(tmp_path):
    values = [np.random.default_rng(i).standard_normal((8, 3)).astype("f4") for i in range(4)]
    one = written(tmp_path / "1", 1, values, held="rows")
    assert cli.compare(one, written(tmp_path / "4", 4, values, held="rows")) == (4, 0, [], None)
    other = [values[0], values[1], values[2] + np.float32(1e-6), values[3]]
    found = cli.compare(one, written(tmp_path / "2", 2, other, held="rows"))
    assert [a.call for a, _ in found.differing] == [3] and found.compared == 4
    assert "call 3 of world, all_reduce of 24 float32: " in cli.text(1, 2, found)
    shorter = cli.compare(one, written(tmp_path / "3", 2, values[:3], held="rows"))
    assert shorter.other_calls == (one[3], None) and "call 4 of world" in cli.text(1, 2, shorter)
    own = cli.compare(written(tmp_path / "5", 2, values, held="rank"), one)
    assert (own.compared, own.not_comparable) == (0, 4)
    split = cli.compare(one, written(tmp_path / "6", 2, [values[0][:4]], held="rows"))
    assert split.other_calls is not None and split.other_calls[1].elements == 12


def test_ranks_that_differ_are_found(tmp_path):
    x = np.ones((4, 2), "f4")
    one = written(tmp_path / "1", 2, [x])
    lines = (tmp_path / "1" / "rank-1.jsonl").read_text().replace(f"{digest_of(x):016x}", "0" * 16)
    (tmp_path / "1" / "rank-1.jsonl").write_text(lines)
    (broken,) = cli.read(tmp_path / "1")
    assert broken.digest == "ranks differ" and cli.compare(one, [broken]).differing
