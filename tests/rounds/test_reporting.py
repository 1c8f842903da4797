"""How often workers report."""

from __future__ import annotations

import numpy as np
import pytest
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
    pace.record(seconds=0.01, lag=0.001, error=1.0)
    assert (pace.lead, pace.reporting) == (0.004, Reporting(0.02, growth=0.5))
    for _ in range(3):
        pace.record(seconds=7.0, lag=0.05, error=1.0)
    assert (pace.lead, pace.reporting) == (0.05, Reporting(1.0, growth=0.5))
    pace.record(seconds=70.0, lag=0.05, error=1.0)  # once
    assert pace.reporting == Reporting(1.0, growth=0.5)


def test_workers_report_less_where_predictions_have_held_for_three_rounds():
    pace = Pace(0.004, Reporting(0.02))
    intervals = []
    for error in (1.0, 0.0, 0.05, 0.0, 0.0, 0.0, 1.0):
        pace.record(seconds=1.024, lag=0.001, error=error)
        intervals.append(pace.reporting.interval)
    expected = [7, 7, 7, 5, 5, 3, 7]
    assert 1.024 / np.array(intervals) == pytest.approx(expected)


@pytest.mark.parametrize("lag", [0.0, 0.001, 0.025])
def test_workers_report_less_in_rounds_of_few_lags(lag):
    reports = []
    for lags in (100_000, 1_024, 256, 50):
        seconds = lags * max(lag, 0.001)
        pace = Pace(0.004, Reporting(0.001))
        pace.record(seconds, lag=lag, error=0.0)
        reports.append(seconds / pace.reporting.interval)
    assert reports == pytest.approx([7, 3, 1.5, 4 / 3])


def test_workers_report_less_if_the_coordinator_has_many_of_them():
    reports = []
    for workers in (1, 40, 160, 1000):
        pace = Pace(0.004, Reporting(0.02))
        pace.record(seconds=1.024, lag=0.001, error=0.0, workers=workers)
        reports.append(1.024 / pace.reporting.interval)
    assert reports == pytest.approx([3, 3, 1.5, 4 / 3])


def test_a_round_is_unusually_long_in_comparison_with_the_last_three():
    pace = Pace(0.004, Reporting(0.02))
    slowed = []
    for seconds in (1.0, 1.9, 2.1, 2.5, 2.5, 4.1):
        pace.record(seconds, lag=0.001, error=0.0)
        slowed.append(pace.slowed)
    assert slowed == [False, False, True, True, False, False]
