"""What an error says about texts with details that differ between ranks."""

import pytest

from fompi.base.differences import MOST_LETTERS, detail, in_what_they_differ, without_details


def said(*texts, refuse=()):
    return in_what_they_differ(texts, [rank in refuse for rank in range(len(texts))])


def call(head="wrap(x)", **details):
    return head + "".join(detail(name, *v) if isinstance(v, tuple) else detail(name, v) for name, v in details.items())


ALL = "all ranks call wrap(x), but these differ; "


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([call(), "other()"], "rank 0 calls wrap(x); rank 1 calls other()"),
        ([call("a"), call("b"), call("a")], "ranks 0, 2 call a; rank 1 calls b"),
        ([call(w="(2, 3)", b="(3,)"), call(w="(2, 4)", b="(3,)")], ALL + "w: (2, 3) on rank 0, (2, 4) on rank 1"),
        ([call(w=2, b=3), call(w=2), call(w=2, b=3)], ALL + "b: 3 on ranks 0, 2, missing on rank 1"),
        ([call(a=1), call(b=1)], ALL + "a: 1 on rank 0, missing on rank 1; b: missing on rank 0, 1 on rank 1"),
        ([call(a=1, c=2, b=2), call(b=2, c=2, a=1)], ALL + "in the order, number 0: a on rank 0, b on rank 1"),
        ([call(w=("2", 77)), call(w=("2", 78)), call(w=("2", 77))],
         ALL + "w: 2, contents differ between ranks 0, 2 and rank 1"),
        ([call(w=("", 77)), call(w=("", 78))], ALL + "w: contents differ between rank 0 and rank 1"),
        ([call(w=("2", 77)), call(w=("3", 78))], ALL + "w: 2 on rank 0, 3 on rank 1"),
        ([call("a", w=1, v=2), call("b", w=1, v=3)], "rank 0 calls a; rank 1 calls b; v: 2 on rank 0, 3 on rank 1"),
        ([call("a", w=1), call("b", v=1)], "rank 0 calls a; rank 1 calls b"),
        ([call("a", w=1), "b"], "rank 0 calls a; rank 1 calls b"),
        ([call("a", w=1), call("a", w=1)], "ranks 0, 1 call a"),
    ],
)  # fmt: skip
def test_what_differs(texts, expected):
    assert said(*texts) == expected and without_details(texts[0]) in ("a", "wrap(x)")


def test_a_rank_that_refuses():
    words = said(call(w=1), "ShapeError: no", call(w=2), refuse={1})
    assert words == "ranks 0, 2 call wrap(x); rank 1 refuses ShapeError: no; w: 1 on rank 0, 2 on rank 2"
    assert said("no", "no", refuse={0, 1}) == "ranks 0, 1 refuse no"


def test_long_texts_are_cut_to_what_differs():
    many = {f"w{i}": i for i in range(1000)}
    assert said(call(**many), call(**many | {"w700": 1})).endswith("w700: 700 on rank 0, 1 on rank 1")
    words = said(call(**many), call(**{name: -1 for name in many}))
    assert words.count("on rank 1") == 8 and words.endswith("and 992 more")
    words = said(f"f({'7, ' * 5000}1{', 7' * 5000})", f"f({'7, ' * 5000}2{', 7' * 5000})")
    assert "7, 1, 7" in words and "7, 2, 7" in words and len(words) < 3 * MOST_LETTERS
    words = said(*(call(w=i % 30) for i in range(300)))
    assert len(words) < 1000 and "0 on ranks 0, 30, 60, 90, 120, 150, 180, 210 and 2 more" in words
