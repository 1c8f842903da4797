"""How often workers report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_coded.rounds import Pace, Reporting

# Seconds since a worker started: zero, or at least one stripe's.
ELAPSED = st.just(0.0) | st.floats(0.001, 10)
GROWTHS = st.floats(0, 0.99) | st.just(1.0)


@given(st.floats(0.001, 10), GROWTHS, ELAPSED, st.floats(0, 10))
def test_a_worker_reports_when_it_is_expected_to(interval, growth, elapsed, left):
    reporting = Reporting(interval, growth)
    stripe = 0.01
    silent = 0.0
    # A job checks after every stripe, and reports with the last.
    while silent < left and not reporting.due(silent, elapsed + silent, left - silent):
        silent += stripe
    expected = reporting.gap(elapsed, left)
    assert expected - 1e-9 <= silent <= expected + 2 * stripe


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
