"""A store in one process, for tests of processes that meet in one."""

from __future__ import annotations

import threading


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
