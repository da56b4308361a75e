"""Stores for tests of processes that meet in one."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Store:
    """What `torch.distributed.Store` does, in one process."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        with self.lock:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def check(self, keys):
        return all(key in self.values for key in keys)


class Etcd:
    """An etcd that a test can kill, and start again with what it had."""

    def __init__(self, folder):
        self.folder, self.port, self.peers = folder, free_port(), free_port()
        self.address = f"etcd://127.0.0.1:{free_port()},127.0.0.1:{self.port}"  # one of them is not there
        self.start()

    def start(self, scheme="http", *options):
        own, peers = f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peers}"
        command = ["etcd", "--data-dir", self.folder, "--listen-client-urls", own, "--advertise-client-urls", own]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, *options]
        command += ["--initial-cluster", f"default={peers}", "--unsafe-no-fsync"]
        with open(f"{self.folder}.log", "a") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self):
        self.server.kill()
        self.server.wait()


class KilledServer:
    """`fompi members serve`, which a test can kill. It starts again with nothing."""

    def __init__(self, folder):
        self.port, self.log = free_port(), f"{folder}.log"
        self.address = f"fompi://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [sys.executable, "-m", "fompi", "members", "serve", "--port", str(self.port)]
        with open(self.log, "a") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self):
        self.server.kill()
        self.server.wait()
