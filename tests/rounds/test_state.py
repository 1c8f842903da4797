"""What is thought of workers while a round goes on."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.codes import MDS
from dask_coded.rounds import Layout, Reporting, RoundState, StripeRange


def begun(unit: float) -> RoundState:
    """Two workers have been dealt a piece each, at predicted speeds in some unit."""
    layout = Layout.of(MDS(2, 1), [0, 1], np.full((1, 8), 100.0))
    state = RoundState(layout, np.ones(2) * unit, 0.0, Reporting(interval=0.02))
    for worker in range(2):
        state.assign(worker, [StripeRange(worker, 0, 8)])
    return state


@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_workers_of_which_none_answers_are_late_whatever_the_unit_of_speeds(unit: float) -> None:
    state = begun(unit)
    before = state.estimate()
    state.now = 1.0
    after = state.estimate()
    assert (after.speed < before.speed).all()
    assert (after.eta > before.eta).all()


def test_a_worker_is_not_late_before_half_of_its_list_can_be_done() -> None:
    state = begun(unit=1.0)
    state.now = 0.1
    for worker in range(2):
        state.record(worker, [StripeRange(worker, 0, 1)], seconds=0.1)
    state.now = 0.4  # 3 of 7 stripes later
    assert state.estimate().speed == pytest.approx(1000.0)
    state.now = 10.0
    assert (state.estimate().speed < 500.0).all()
