"""Estimates of the workers during a round."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.codes import MDS
from dask_coded.rounds import Layout, Reporting, RoundState, StripeRange


def started(unit: float) -> RoundState:
    """Return a round of two workers with one piece each, at predicted speeds of ``unit``."""
    layout = Layout.of(MDS(2, 1), [0, 1], np.full((1, 8), 100.0))
    state = RoundState(layout, np.ones(2) * unit, 0.0, Reporting(interval=0.02))
    for worker in range(2):
        state.assign(worker, [StripeRange(worker, 0, 8)])
    return state


@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_workers_are_late_if_none_answers_in_any_unit_of_speed(unit: float) -> None:
    state = started(unit)
    before = state.estimate()
    state.now = 1.0
    after = state.estimate()
    assert (after.speed < before.speed).all()
    assert (after.eta > before.eta).all()


def test_a_worker_is_not_late_before_half_of_its_list_could_be_done() -> None:
    state = started(unit=1.0)
    state.now = 0.1
    for worker in range(2):
        state.record(worker, [StripeRange(worker, 0, 1)], seconds=0.1)
    state.now = 0.4  # 3 of 7 stripes later
    assert state.estimate().speed == pytest.approx(1000.0)
    state.now = 10.0
    assert (state.estimate().speed < 500.0).all()


def test_the_batch_in_hand_is_not_moved() -> None:
    layout = Layout.of(MDS(2, 1), [0, 1], np.full((1, 8), 100.0))
    state = RoundState(layout, np.ones(2), 0.0, least_batch=3)
    state.assign(0, [StripeRange(0, 6, 8), StripeRange(0, 0, 4)])
    assert state.movable.array()[0].nonzero()[0].tolist() == [1, 2, 3]
    state.record(0, [StripeRange(0, 6, 8), StripeRange(0, 0, 2)], seconds=1.0)
    assert not state.movable.array().any()


def test_a_worker_that_was_away_is_not_late_when_it_is_back() -> None:
    layout = Layout.of(MDS(2, 1), [0, 1], np.ones((1, 8)))
    lags = np.full(2, 0.01)
    state = RoundState(layout, np.full(2, 4.0), 0.0, Reporting(interval=0.02), lags)
    state.assign(0, [StripeRange(0, 0, 8)])
    state.lose([0])
    state.regain([0])
    state.now = 100.0
    state.assign(0, [StripeRange(0, 0, 8)])
    state.now = 100.1
    assert state.estimate().speed[0] == pytest.approx(4.0)
    assert not state.estimate().overdue[0]
    state.now = 101.0
    state.record(0, [StripeRange(0, 0, 4)], seconds=0.9)
    assert state.workers.measured_lag[0] == pytest.approx(0.1)
    assert state.workers.began[0] == 100.0


def test_a_worker_that_has_lost_one_of_its_pieces_still_owes_a_report() -> None:
    layout = Layout.of(MDS(4, 2), [0, 0, 1, 1], np.ones((1, 8)))
    state = RoundState(layout, np.full(2, 4.0), 0.0, Reporting(interval=0.02), np.full(2, 0.01))
    state.assign(0, [StripeRange(0, 0, 8), StripeRange(1, 0, 8)])
    state.lose([0])
    state.now = 100.0
    assert state.estimate().speed[0] < 1.0


def test_a_round_that_took_no_time_measures_no_speeds() -> None:
    state = started(unit=1.0)
    assert state.measured_speeds(0.0) == {}
    assert state.misprediction(0.0) == 1.0


def test_a_worker_that_was_called_in_late_and_has_sent_nothing_is_not_measured() -> None:
    """It may be the slowest one, or the fastest."""
    layout = Layout.of(MDS(3, 1), [0, 1, 2], np.ones((1, 8)))
    state = RoundState(layout, np.full(3, 4.0), 5.0)
    for worker, at in enumerate((5.0, 5.5, 6.0)):
        state.now = at
        state.assign(worker, [StripeRange(worker, 0, 8)])
    assert state.measured_lags(elapsed=1.25) == {0: 1.25, 1: 0.75}
    assert state.measured_speeds(elapsed=1.25) == pytest.approx({0: 0.8, 1: 4 / 3})
    state.record(2, [StripeRange(2, 0, 1)], seconds=0.2)
    assert set(state.measured_speeds(elapsed=1.25)) == {0, 1, 2}
