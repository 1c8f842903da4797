"""How often workers report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_coded.rounds import Pace, Reporting

# Seconds from the start of a worker to its last report.
ELAPSED = st.just(0.0) | st.floats(0.001, 10)
GROWTHS = st.floats(0, 0.99) | st.just(1.0)


@given(st.floats(0.001, 10), GROWTHS, ELAPSED, st.floats(0, 10))
def test_a_report_is_due_as_soon_as_its_conditions_hold(interval, growth, elapsed, left):
    def due(silent):
        long = silent >= growth * (elapsed + silent) or silent >= left - silent
        return silent >= left or (silent >= interval and long)

    gap = Reporting(interval, growth).gap(elapsed, left)
    assert due(gap * (1 + 1e-9) + 1e-9)
    assert not due(gap * (1 - 1e-9) - 1e-9)


def test_workers_report_at_most_seven_times_a_round():
    pace = Pace(0.004, Reporting(0.02, growth=0.5))
    assert (pace.lead, pace.reporting) == (0.004, Reporting(0.02, growth=0.5))
    pace.record(seconds=0.01, lag=0.001)
    assert (pace.lead, pace.reporting) == (0.004, Reporting(0.02, growth=0.5))
    for _ in range(3):
        pace.record(seconds=7.0, lag=0.05)
    assert (pace.lead, pace.reporting) == (0.05, Reporting(1.0, growth=0.5))
    pace.record(seconds=70.0, lag=0.05)  # once
    assert pace.reporting == Reporting(1.0, growth=0.5)
