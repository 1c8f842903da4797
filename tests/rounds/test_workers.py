"""Estimates that are kept up to date are those computed from all accounts at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.rounds import Reporting
from dask_coded.rounds.batches import BATCH_SHARE
from dask_coded.rounds.workers import Estimate, Median, Workers


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.data())
def test_the_median_of_numbers_that_come_and_go(numbers: list[float], data: st.DataObject) -> None:
    median = Median()
    for number in numbers:
        median.add(number)
    gone = data.draw(st.permutations(numbers))[: data.draw(st.integers(0, len(numbers) - 1))]
    for number in gone:
        median.discard(number)
        numbers.remove(number)
    assert len(median) == len(numbers)
    assert median.value() == np.median(numbers)


def from_scratch(
    workers: Workers,
    asked: np.ndarray,
    expected_lags: np.ndarray,
    interval: float,
    batch: int,
    now: float,
) -> Estimate:
    """Estimate all workers by array operations over all accounts; reports have growth 1."""
    with np.errstate(all="ignore"):
        known = (workers.done > 0) & (workers.busy > 0)
        # A predicted speed counts for two lags.
        trust = np.where(workers.prior > 0, 2 * np.median(expected_lags), 0.0)
        mean = (workers.done + trust * workers.prior) / (workers.busy + trust)
        ratios = (mean / workers.prior)[known & (workers.prior > 0)]
        scale = np.median(ratios) if len(ratios) else 1.0
        speed = np.where(known, mean, workers.prior * scale)
        lags = np.where(expected_lags > 0, expected_lags, workers.lag)
        lags = np.where(np.isnan(workers.measured_lag), lags, workers.measured_lag)
        left = workers.todo / speed
        elapsed = workers.heard - workers.began
        wait = np.where(elapsed > 0, left / 2, 0.0)
        gap = np.minimum(np.maximum(interval, wait), left)
        # The first batch is as small as batches may be.
        least = np.clip(workers.todo, 1.0, batch)
        in_hand = np.maximum(np.where(known, (left - gap) * BATCH_SHARE, 0.0), least / speed)
        normal = 2 * (gap + in_hand)
        if not len(ratios):
            normal = np.full(len(speed), 20 * interval)
        quiet = np.nan_to_num(now - asked)
        overdue = quiet > np.where(workers.todo > 0, left, 0.0) + 2 * lags
        late = quiet - normal
        computed = speed * (quiet - np.where(known, 0.0, lags)) if len(ratios) else 0.0
        backlog = np.clip(workers.todo - computed, 0.0, workers.todo)
        backlog = np.where(late > 0, workers.todo, backlog)
        slowed = np.where(
            workers.todo > 0,
            workers.todo / (workers.todo / speed + late),
            speed * normal / (normal + late),
        )
        speed = np.where(late > 0, slowed, speed)
        latest = np.where(workers.todo > 0, workers.todo / speed, 0.0)
        eta = np.where(backlog > 0, backlog / speed, 0.0)
        return Estimate(speed, backlog, latest, eta, overdue)


# What happens to which worker: it is assigned or reports so many stripes, some are withdrawn, or it
# leaves and comes back.
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["assign", "report", "withdraw", "leave"]),
        st.integers(0, 4),
        st.integers(1, 9),
    ),
    max_size=40,
)


@given(EVENTS, st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=5, max_size=5), st.data())
def test_estimates_are_those_from_all_accounts(
    events: Sequence[tuple[str, int, int]], prior: list[float], data: st.DataObject
) -> None:
    interval = 0.1
    lags = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.02]), min_size=5, max_size=5)))
    speeds = np.maximum(prior, [1.0, 0.0, 0.0, 0.0, 0.0])
    batch = data.draw(st.integers(1, 5))
    workers = Workers(speeds, lags, Reporting(interval, growth=1.0), stripe=1.0, least_batch=batch)
    asked = np.full(5, np.nan)
    now = 0.0
    for number, (what, worker, stripes) in enumerate(events):
        now += 0.01 * (number % 7)
        todo = float(workers.todo[worker])
        if what == "assign":
            asked[worker] = now if np.isnan(asked[worker]) else asked[worker]
            workers.assign(worker, todo + stripes, now)
        elif what == "withdraw":
            workers.owe(worker, max(todo - stripes, 0.0))
        elif what == "leave":
            asked[worker] = np.nan
            workers.owe(worker, 0.0)
            workers.leave(worker)
        elif todo and speeds[worker]:
            part = min(float(stripes), todo)
            asked[worker] = now if todo > part else np.nan
            seconds = part / (1 + (worker + number) % 5)
            workers.report(worker, workers.done[worker] + part, seconds, todo - part, now)
        later = now + 0.05 * stripes
        found = workers.estimate(later)
        expected = from_scratch(workers, asked, lags, interval, batch, later)
        for name, one, other in zip(Estimate._fields, found, expected, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def test_a_new_prediction_counts_at_once() -> None:
    workers = Workers(np.array([1.0, 0.0]), np.zeros(2), Reporting(), stripe=1.0)
    assert workers.estimate(0.0).speed == pytest.approx([1.0, 0.0])
    workers.expect(1, 3.0)
    assert workers.estimate(0.0).speed == pytest.approx([1.0, 3.0])
    workers.assign(0, 8.0, 0.0)
    workers.report(0, 4.0, seconds=2.0, todo=4.0, now=2.0)
    assert workers.estimate(2.0).speed == pytest.approx([2.0, 6.0])


def test_a_burst_at_the_beginning_changes_the_expected_speed_only_a_little() -> None:
    workers = Workers(np.full(2, 100.0), np.full(2, 0.02), Reporting(), stripe=1.0)
    workers.assign(0, 50.0, 0.0)
    workers.report(0, 1.0, seconds=0.001, todo=49.0, now=0.021)
    assert 100 < workers.estimate(0.021).speed[0] < 125
    workers.report(0, 11.0, seconds=0.399, todo=39.0, now=0.42)
    assert 25 < workers.estimate(0.42).speed[0] < 35


def test_predictions_in_an_unknown_unit_do_not_count_once_a_worker_has_reported() -> None:
    workers = Workers(np.full(2, 100.0), np.zeros(2), Reporting(), stripe=1.0)
    workers.assign(0, 50.0, 0.0)
    workers.report(0, 1.0, seconds=0.5, todo=49.0, now=0.6)
    assert workers.estimate(0.6).speed == pytest.approx([2.0, 2.0])
