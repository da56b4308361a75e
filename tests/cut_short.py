"""A call in C that Python takes over after some rounds, as if it could not end well."""

from __future__ import annotations

GOES_ON, STALLED = 1, 2


class CutShort:
    """`call`, of which C does `rounds()` rounds in each run. 0 seconds are one round."""

    def __init__(self, call, rounds):
        self.call, self.rounds = call, rounds

    def run(self, tag, *_):
        state = self.call.run(tag, 0.0, 1.0)
        for _ in range(self.rounds()):
            if state == GOES_ON:
                state = self.call.drive(0.0, 1.0)
        return state

    @property
    def state(self):
        return STALLED if self.call.state == GOES_ON else self.call.state

    def __getattr__(self, name):
        return getattr(self.call, name)
