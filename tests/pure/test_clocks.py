"""The clock of another rank, against clocks with an offset, a drift and a line whose delays differ."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fompi.base.errors import LayoutError
from fompi.traces.clocks import SAME, Clock, Sample, fit

offsets = st.floats(-1e5, 1e5)
drifts = st.floats(-1e-3, 1e-3)
delays = st.floats(1e-6, 1e-3)


def batch(when, offset, drift, delay, random, count=20):
    """Exchanges from `when` on, with a clock that shows (t - offset) / (1 + drift) at our time t.

    Each way takes `delay` or, by chance, much more.
    """
    samples = []
    for _ in range(count):
        there, back = (delay * (1 + random.expovariate(1.0)) for _ in range(2))
        samples.append(Sample(when, (when + there - offset) / (1 + drift), when + there + back))
        when = samples[-1].received
    return samples


@given(offsets, drifts, delays, st.floats(2.0, 1e4), st.integers(0, 1000))
def test_offset_and_drift_are_found(offset, drift, delay, apart, seed):
    """Between two batches the clock is off by half a round trip at most, and the error is that half."""
    random = Random(seed)
    batches = [batch(when, offset, drift, delay, random) for when in (10.0, 10.0 + apart)]
    clock = fit(batches)
    assert clock.error <= max(min(s.round_trip for s in b) for b in batches) / 2 + 1e-12
    slack = clock.error + 1e-9
    for share in (0.0, 0.3, 1.0):
        ours = 10.0 + share * apart
        assert abs(clock((ours - offset) / (1 + drift)) - ours) <= slack + 1e-3 * delay
    assert clock.drift == pytest.approx(drift, abs=2 * slack / apart + 1e-9)


@given(offsets, delays, st.integers(0, 1000))
def test_one_batch_gives_the_offset(offset, delay, seed):
    """A drift cannot be seen within a moment."""
    batches = [batch(10.0, offset, 0.0, delay, Random(seed))]
    for taken in (batches, [*batches, batch(10.5, offset, 0.0, delay, Random(seed))]):
        clock = fit(taken)
        assert clock.drift == 0.0 and abs(clock.offset - offset) <= clock.error + 1e-9


def test_the_quickest_exchange_counts():
    """One that was delayed on its way back says little."""
    late, quick = Sample(0.0, 100.0, 1.0), Sample(1.0, 101.001, 1.002)
    clock = fit([[late, quick]])
    assert clock.offset == pytest.approx(-100.0) and clock.error == pytest.approx(0.001)
    assert late.offset == pytest.approx(-99.5)


def test_many_batches():
    """Least squares: the drift of a day, though every batch is off by a little."""
    batches = [batch(t, 5.0, 2e-5, 1e-4, Random(t)) for t in range(0, 3600, 60)]
    clock = fit(batches)
    assert clock.drift == pytest.approx(2e-5, abs=1e-7)
    assert clock((1800 - 5.0) / (1 + 2e-5)) == pytest.approx(1800, abs=1e-4)


def test_our_own_clock():
    assert SAME(12.5) == 12.5 and Clock(10.0, 1.0, 0.5, 0.0)(12.0) == 14.0


def test_no_sample():
    with pytest.raises(LayoutError, match="no sample"):
        fit([[], []])
