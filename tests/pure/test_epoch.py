"""Handles, and what members of an epoch say to each other, as values."""

from __future__ import annotations

import base64
import struct

import pytest

from fompi.base.errors import LaunchError
from fompi.mpi.epoch import HERE, PREFIX, Handle, Word

ADDRESS = struct.pack("<BHH", 2, 3, 250) + bytes(253)
HANDLE = Handle(bytes(range(16)), 1234, "h\u00f6st", ADDRESS)


def test_a_handle_is_a_string_of_one_word():
    text = str(HANDLE)
    assert Handle.of(text) == HANDLE
    assert text.isascii() and not {*text} & {*" \n\t/:,"}


@pytest.mark.parametrize("n", [1, 7, 40, 100])
def test_a_part_of_a_handle_is_refused(n):
    with pytest.raises(LaunchError, match="is not whole: it has"):
        Handle.of(str(HANDLE)[:-n])


def test_a_changed_handle_is_refused():
    text = str(HANDLE)
    for at in range(len(PREFIX), len(text) - 4, 7):  # the last bits of the base64 may mean nothing
        with pytest.raises(LaunchError, match="is not whole"):
            Handle.of(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fompi-2-AAAA", "another version"),
        ("tcp://h0:123", "no handle"),
        ("", "no handle"),
        (b"fompi-1-", "no handle"),
        (None, "no handle"),
    ],
)
def test_what_is_no_handle_is_refused(text, why):
    with pytest.raises(LaunchError, match=f"{why}.*pass on what fompi.members.handle"):
        Handle.of(text)


def test_a_handle_that_says_nothing():
    with pytest.raises(LaunchError, match="is not whole"):
        Handle.of(PREFIX + base64.urlsafe_b64encode(b"\0\0\0\0").decode())


@pytest.mark.parametrize("address", [b"", b"\0", b"\1\0\0", ADDRESS[:-1], ADDRESS + b"x", bytes(range(200))])
def test_a_handle_with_another_address_is_refused(address):
    with pytest.raises(LaunchError, match="is not whole"):
        Handle.of(str(HANDLE._replace(address=address)))


def test_words():
    word = Word(HERE, b"n" * 16, b"m" * 16, b"s" * 16, b"r" * 16, 3, 1 << 40, "why \u2026")
    assert Word.decoded(word.encoded()) == word
    long = word._replace(text="x" * 10000)
    assert len(long.encoded()) < 4096 and Word.decoded(long.encoded()).text == "x" * 2048
    for data in (b"", b"GET / HTTP/1.1", word.encoded()[:60], b"fompi-e2" + word.encoded()[8:]):
        assert Word.decoded(data) is None
