"""The stores by which members find each other: all of them do the same. With etcd, if it is installed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep

import pytest
from stores import Etcd, free_port

import fompi
from fompi.members import Server, open_store, served
from fompi.members.stores import VALUE_NBYTES

TOKEN = "0123456789abcdef0123456789abcdef"
TTL = 1.0


class Served:
    """A store that this test can end and start again, at the same address."""

    def __init__(self, folder):
        self.port = free_port()
        self.address = f"fompi://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self.server = Server("127.0.0.1", self.port)

    def stop(self):
        self.server.close()


class Torch(Served):
    def __init__(self, folder):
        super().__init__(folder)
        self.address = f"tcp://127.0.0.1:{self.port}"

    def start(self):
        from torch.distributed import TCPStore

        seconds = timedelta(seconds=20)
        self.server = TCPStore("127.0.0.1", self.port, None, True, seconds, wait_for_workers=False)

    def stop(self):
        self.server = None


@pytest.fixture(params=["fompi", "torch", "etcd"])
def stores(request, tmp_path, monkeypatch):
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", TOKEN)
    if request.param == "torch":
        pytest.importorskip("torch.distributed")
    if request.param == "etcd" and not shutil.which("etcd"):
        pytest.skip("there is no etcd: apt-get install etcd-server")
    made = {"fompi": Served, "torch": Torch, "etcd": Etcd}[request.param](tmp_path / "data")
    yield made
    made.stop()


def test_the_four_verbs(stores):
    with open_store(stores.address) as store, open_store(stores.address) as other:
        assert store.get("a") is None and store.watch("") == {}
        store.put("a", "1")
        store.put("group/é", b"\0\xff")
        store.put("grouq", b"")
        assert other.get("a") == b"1" and other.watch("group/") == {"group/é": b"\0\xff"}
        assert {*other.watch("")} == {"a", "group/é", "grouq"} and other.get("grouq") == b""
        assert other.compare_set("a", "1", "2") == b"2" and store.get("a") == b"2"
        assert store.compare_set("a", "1", "3") == b"2" and store.compare_set("a", None, "3") == b"2"
        assert store.compare_set("b", "1", "3") is None and store.get("b") is None
        assert store.compare_set("a", b"2", None) is None and other.get("a") is None and "a" not in other.watch("")
        assert other.compare_set("a", None, "4") == b"4" and store.get("a") == b"4"
        large = [bytes([at]) * VALUE_NBYTES for at in (1, 2)]
        store.put("large", large[0])
        assert other.compare_set("large", large[0], large[1]) == large[1] == store.get("large")
        for key, value, ttl in (("", "1", None), ("k" * 513, "1", None), ("k", large[0] + b"1", None), ("k", "1", 0)):
            with pytest.raises(fompi.ArgumentError):
                store.put(key, value, ttl)
        assert store.get("k") is None


def test_a_lease_that_runs_out(stores):
    """It does so by the clock of the store, or of the reader. Who puts it again in time keeps it."""
    with open_store(stores.address) as store, open_store(stores.address) as other:
        store.put("m/kept", "1", TTL)
        store.put("m/gone", "2", TTL)
        store.put("m/stays", "3")
        assert other.watch("m/") == {"m/kept": b"1", "m/gone": b"2", "m/stays": b"3"}
        begun, known = monotonic(), other.watch("m/")
        while "m/gone" in known and monotonic() < begun + 15:
            assert store.compare_set("m/kept", "1", "1", TTL) == b"1"
            known = other.watch("m/", known, TTL / 4)
        assert TTL / 2 < monotonic() - begun < 15
        assert known == {"m/kept": b"1", "m/stays": b"3"} == other.watch("m/") and other.get("m/gone") is None
        assert other.compare_set("m/gone", None, "4") == b"4"


def test_two_proposals_at_once(stores):
    """One of them is taken, and all get that one."""
    opened = [open_store(stores.address) for _ in range(4)]
    for turn in range(5):
        answers = [None] * 8
        taken = opened[0].get("epoch")

        def propose(at, old=taken, turn=turn, answers=answers):
            answers[at] = opened[at % 4].compare_set("epoch", old, f"{turn} of {at}")

        threads = [threading.Thread(target=propose, args=(at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({*answers}) == 1 and answers[0] == opened[1].get("epoch")
        assert answers[0].startswith(f"{turn} of".encode())


def test_a_watch_wakes(stores):
    """A change elsewhere ends the wait. Nothing else does, before the deadline."""
    with open_store(stores.address) as store, open_store(stores.address) as other:
        store.put("w/1", "1")
        found = []
        waiting = threading.Thread(target=lambda: found.append(other.watch("w/", {"w/1": b"1"}, 30)))
        waiting.start()
        sleep(0.3)
        store.put("v", "no")
        store.put("w/1", "1")
        waiting.join(0.3)
        assert waiting.is_alive()
        store.put("w/2", "2")
        waiting.join(10)
        assert found == [{"w/1": b"1", "w/2": b"2"}]
        begun = monotonic()
        assert other.watch("w/", found[0], 0.4) == found[0] and 0.35 < monotonic() - begun < 8


def test_a_store_that_dies_and_comes_back(stores):
    """Who waits goes on, and leases are put again. A store that stays away is named."""
    with open_store(stores.address) as store, open_store(stores.address, seconds=1) as impatient:
        store.put("d/1", "1", 30)
        known, found = impatient.watch("d/"), []
        waiting = threading.Thread(target=lambda: found.append(store.watch("d/", {}, 0.1)))
        stores.stop()
        waiting.start()
        begun = monotonic()
        with pytest.raises(fompi.WaitTimeout, match=rf"the store {stores.address} does not answer for 1 s: "):
            impatient.get("d/1")
        assert monotonic() - begun < 8
        stores.start()
        waiting.join(20)
        assert found in ([{}], [known])  # etcd keeps it
        store.put("d/1", "1", 30)
        assert impatient.get("d/1") == b"1" and impatient.watch("d/") == {"d/1": b"1"}


def test_a_wrong_address_is_named(stores):
    scheme = stores.address.partition("://")[0]
    begun = monotonic()
    with open_store(f"{scheme}://127.0.0.1:1", seconds=0.5) as store:
        with pytest.raises(fompi.WaitTimeout, match=rf"the store {scheme}://127.0.0.1:1 does not answer for 0.5 s"):
            store.get("a")
        assert monotonic() - begun < 5


def test_addresses_that_are_none(monkeypatch):
    for address in ("h1:2379", "http://h1:2379", "etcd://", "fompi://h1:x", "fompi://h1:1,h2:1", "fompi://:1"):
        with pytest.raises(fompi.ArgumentError, match="is no address of a store"):
            open_store(address)
    with pytest.raises(fompi.ArgumentError, match="dict is no address or store: it has no set, check"):
        open_store({})
    monkeypatch.delenv("FOMPI_MEMBERS_TOKEN", raising=False)
    with pytest.raises(fompi.LaunchError, match="FOMPI_MEMBERS_TOKEN is not set: set it for all members to"):
        open_store("fompi://127.0.0.1:1")
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", "short")
    with pytest.raises(fompi.LaunchError, match=r"FOMPI_MEMBERS_TOKEN=\.\.\.: give"):
        open_store("fompi://127.0.0.1:1")


def test_a_stranger_disturbs_nobody(monkeypatch, caplog):
    """Garbage, silence, another token, a question that is said again, and what is no such store: refused, and named."""
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", TOKEN)
    monkeypatch.setattr(served, "STRANGER_SECONDS", 1.0)
    caplog.set_level(logging.WARNING, "fompi")
    with Server("127.0.0.1") as server, open_store(server.address) as store:
        store.put("a", "1")
        place = server.server_address
        silent = [socket.create_connection(place) for _ in range(5)]
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(32) + struct.pack("!I", 99) + os.urandom(500)):
            with socket.create_connection(place) as stranger:
                stranger.sendall(garbage)
                assert b"value" not in heard(stranger)
        monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", TOKEN[::-1])
        with pytest.raises(fompi.LaunchError, match=f"{server.address}: the other end has another FOMPI_MEMBERS_TOKEN"):
            open_store(server.address).get("a")
        monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", TOKEN)

        with socket.create_server(
            ("127.0.0.1", 0)
        ) as between:  # somebody in between hears a question, and says it again
            between_address = f"fompi://127.0.0.1:{between.getsockname()[1]}"
            replay = threading.Thread(target=say_again, args=(between, place))
            replay.start()
            open_store(between_address).put("a", "2")
            open_store(server.address).put("a", "3")
            replay.join(20)
            assert store.get("a") == b"3"
        for wrong in (
            {"what": "write"},
            {"what": "drop", "key": "a"},
            {"what": "read", "key": 5},
            {"key": "a", "x": 1},
        ):
            with pytest.raises(fompi.ArgumentError, match=f"the store {server.address}: "):
                store._ask(**wrong)
        assert [heard(each)[:8] for each in silent] == [served.GREETING] * 5
        for each in silent:
            each.close()
        assert store.get("a") == b"3"
    refused = [record.getMessage() for record in caplog.records]
    assert len(refused) == 9 and all(f"the store {server.address} refuses 127.0.0.1:" in words for words in refused)
    assert sum("is no store of fompi, nor a member" in words for words in refused) == 1
    assert sum("has another FOMPI_MEMBERS_TOKEN" in words for words in refused) == 3
    assert sum("timed out" in words for words in refused) == 5
    with socket.create_server(("127.0.0.1", 0)) as other:
        mail = threading.Thread(target=greet, args=(other, b"220 mail.example.org ESMTP " * 3))
        mail.start()
        with pytest.raises(fompi.LaunchError, match=r"what listens at fompi://127.0.0.1:\d+ is no store of fompi"):
            open_store(f"fompi://127.0.0.1:{other.getsockname()[1]}").get("a")
        mail.join(10)


def greet(listener, words):
    """Say something to the first one that connects."""
    stream, _ = listener.accept()
    with stream:
        stream.sendall(words)


def heard(stream):
    """All that comes, until the other end closes."""
    stream.settimeout(10)
    pieces = []
    with suppress(ConnectionError):
        while piece := stream.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def say_again(listener, place):
    """Pass one question on, and its answer back. Then ask the same again."""
    question = b""
    for turn in range(2):
        with socket.create_connection(place) as store:
            if turn:
                sleep(0.2)  # another value is there now
                store.sendall(question)
                assert b"value" not in heard(store)
                continue
            member, _ = listener.accept()
            member.sendall(store.recv(40))
            while len(question) < 60 or not question.endswith(b"}"):
                question += member.recv(1 << 16)
            store.sendall(question)
            member.sendall(heard(store))
            member.close()


def test_etcd_with_a_password_and_https(tmp_path):
    """Who may not ask is told what to write. A token that etcd has forgotten is asked for again."""
    if not shutil.which("etcd"):
        pytest.skip("there is no etcd: apt-get install etcd-server")
    made = Etcd(tmp_path / "data")
    made.stop()
    try:
        made.start("https", "--auto-tls")
        certificate = tmp_path / "data/fixtures/client/cert.pem"
        begun = monotonic()
        while not certificate.exists() and monotonic() < begun + 20:
            sleep(0.05)
        place = f"127.0.0.1:{made.port}"
        store = open_store(f"etcds://{place}", ca=str(certificate))
        store.put("a", "1")
        for path, body in (
            ("auth/user/add", {"name": "root", "password": "p@ss"}),
            ("auth/role/add", {"name": "root"}),
            ("auth/user/grant", {"user": "root", "role": "root"}),
            ("auth/enable", {}),
        ):
            store._ask(path, body)
        with pytest.raises(fompi.LaunchError, match=r"refuses kv/range: .*user name is empty: write etcd://USER:PASS"):
            store.get("a")
        with pytest.raises(fompi.LaunchError, match=r"refuses auth/authenticate: .*invalid user ID or password"):
            open_store(f"etcds://root:no@{place}", ca=str(certificate)).get("a")
        known = open_store(f"etcds://root:p%40ss@{place}", ca=str(certificate))
        assert known.get("a") == b"1" and "p@ss" not in known.address
        known._token = "forgotten.1"
        assert known.watch("a", {"a": b"1"}, 0.3) == {"a": b"1"}
        with pytest.raises(fompi.WaitTimeout, match="CERTIFICATE_VERIFY_FAILED"):
            open_store(f"etcds://root:p%40ss@{place}", seconds=0.3).get("a")
    finally:
        made.stop()


def test_objects_of_torch(tmp_path):
    """A store of torch that the program has. A reader judges a value by when it has seen it first."""
    distributed = pytest.importorskip("torch.distributed")
    for made in (
        distributed.FileStore(str(tmp_path / "file"), -1),
        distributed.PrefixStore("a", distributed.HashStore()),
    ):
        store, reader = open_store(made), open_store(made)
        store.put("a", "1", TTL / 2)
        assert store.compare_set("b", None, "2") == b"2" and store.watch("") == {"a": b"1", "b": b"2"}
        sleep(TTL)
        assert store.get("a") is None
        assert reader.watch("") == {"a": b"1", "b": b"2"}  # it cannot know how old that is
        assert reader.watch("", {"a": b"1", "b": b"2"}, 20) == {"b": b"2"}
        assert reader.compare_set("b", "2", None) is None and store.watch("") == {}


def test_the_first_member_serves(monkeypatch):
    """Who comes first is the server. When it goes, another one is."""
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", TOKEN)
    address = f"fompi://127.0.0.1:{free_port()}"
    first, second = (open_store(address, serve=True) for _ in range(2))
    first.put("a", "1")
    assert second.get("a") == b"1" and first.server is not None and second.server is None
    first.close()
    assert second.get("a") is None and second.server is not None
    second.close()


def test_the_command(monkeypatch):
    """`fompi members serve` says where it is, and ends by Ctrl-C or SIGTERM. Without a token it is one line."""
    command = [sys.executable, "-m", "fompi", "members", "serve", "--port", str(port := free_port())]
    monkeypatch.delenv("FOMPI_MEMBERS_TOKEN", raising=False)
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2 and done.stderr.startswith("fompi: FOMPI_MEMBERS_TOKEN is not set: "), done.stderr
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", TOKEN)
    # A run in the background ignores Ctrl-C, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            open_store(f"fompi://127.0.0.1:{port}", seconds=40).put("a", "1")
            taken = subprocess.run(command, capture_output=True, text=True, timeout=50)
            assert taken.returncode == 2 and taken.stderr == f"fompi: 127.0.0.1:{port}: Address already in use\n"
            process.send_signal(number)
            out, err = process.communicate(timeout=40)
            assert (process.returncode, err) == (0, "") and out.startswith(f"fompi://127.0.0.1:{port} is there"), err
        finally:
            process.kill()
    signal.signal(signal.SIGINT, before)
