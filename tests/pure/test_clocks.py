"""The clock of another rank, with known offsets and drifts, and with random delays of messages."""

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
    """Samples from time `when` on, of a clock that shows (t - offset) / (1 + drift) at time t of this rank.

    Each message takes at least `delay`, and sometimes much longer.
    """
    samples = []
    for _ in range(count):
        there, back = (delay * (1 + random.expovariate(1.0)) for _ in range(2))
        samples.append(Sample(when, (when + there - offset) / (1 + drift), when + there + back))
        when = samples[-1].received
    return samples


@given(offsets, drifts, delays, st.floats(2.0, 1e4), st.integers(0, 1000))
def test_offset_and_drift_are_found(offset, drift, delay, apart, seed):
    """Between two batches the clock is wrong by at most half of a round trip. `error` is this half."""
    random = Random(seed)
    batches = [batch(when, offset, drift, delay, random) for when in (10.0, 10.0 + apart)]
    clock = fit(batches)
    assert clock.error <= max(min(s.round_trip for s in b) for b in batches) / 2 + 1e-12
    slack = clock.error + 1e-9
    for share in (0.0, 0.3, 1.0):
        local = 10.0 + share * apart
        assert abs(clock((local - offset) / (1 + drift)) - local) <= slack + 1e-3 * delay
    assert clock.drift == pytest.approx(drift, abs=2 * slack / apart + 1e-9)


@given(offsets, delays, st.integers(0, 1000))
def test_one_batch_gives_the_offset(offset, delay, seed):
    """Within a short time no drift is visible."""
    batches = [batch(10.0, offset, 0.0, delay, Random(seed))]
    for samples in (batches, [*batches, batch(10.5, offset, 0.0, delay, Random(seed))]):
        clock = fit(samples)
        assert clock.drift == 0.0 and abs(clock.offset - offset) <= clock.error + 1e-9


def test_the_quickest_exchange_counts():
    """An exchange with a late answer does not count."""
    late, quick = Sample(0.0, 100.0, 1.0), Sample(1.0, 101.001, 1.002)
    clock = fit([[late, quick]])
    assert clock.offset == pytest.approx(-100.0) and clock.error == pytest.approx(0.001)
    assert late.offset == pytest.approx(-99.5)


def test_many_batches():
    """Least squares find the drift, although every batch has a small error."""
    batches = [batch(t, 5.0, 2e-5, 1e-4, Random(t)) for t in range(0, 3600, 60)]
    clock = fit(batches)
    assert clock.drift == pytest.approx(2e-5, abs=1e-7)
    assert clock((1800 - 5.0) / (1 + 2e-5)) == pytest.approx(1800, abs=1e-4)


def test_the_clock_of_this_rank():
    assert SAME(12.5) == 12.5 and Clock(10.0, 1.0, 0.5, 0.0)(12.0) == 14.0


def test_no_sample():
    with pytest.raises(LayoutError, match="no sample"):
        fit([[], []])
