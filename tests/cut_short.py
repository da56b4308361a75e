"""A call in C that Python takes over after some steps, as if it could not end well."""

from __future__ import annotations

from fompi.engine.in_flight import FAILED, FINISHED, GOES_ON


class CutShort:
    """`call`, of which C does `rounds()` rounds, and Python as many kernels at most, in each run."""

    def __init__(self, call, rounds):
        self.call, self.rounds, self.left = call, rounds, 0

    def run(self, tag, seconds, stall, *held):
        self.left = self.rounds()
        return self._driven(self.call.run(tag, 0.0, 1.0, *held))

    def run_on(self, tag, seconds, stall, *memory):
        self.left = self.rounds()
        return self._driven(self.call.run_on(tag, 0.0, 1.0, *memory))

    def sized(self, starts, is_small, is_long, addresses, *times):
        return self._driven(self.call.sized(starts, is_small, is_long, addresses, 0.0, 1.0))

    def drive(self, seconds, stall):
        return self._driven(self.call.drive(0.0, 1.0))

    def ran(self, op, begun):
        self.left -= 1
        return self._said(self.call.ran(op, begun))

    def launched(self, op, begun, due):
        self.left -= 1
        return self._said(self.call.launched(op, begun, due))

    @property
    def state(self):
        return self._said(self.call.state)

    def _driven(self, state):
        while state == GOES_ON and self.left > 0:
            state = self.call.drive(0.0, 1.0)
            self.left -= 1
        return self._said(state)

    def _said(self, state):
        return FAILED if self.left <= 0 and state != FINISHED else state

    def __getattr__(self, name):
        return getattr(self.call, name)
