"""Squeezed trainings in virtual time: how close steps come to the fluid bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.aggregation import Ring
from dask_coded.aggregation.timing import Costs
from dask_coded.simulation import (
    Delays,
    Speeds,
    SqueezeSimulation,
    TrainingSimulation,
    changed,
    constant,
)
from dask_coded.squeeze.units import seat

COSTS = Costs(latency=5e-4, bandwidth=1e9, computation=1.0)


def simulated(speeds: Speeds, units: int = 64, **options) -> SqueezeSimulation:
    return SqueezeSimulation(speeds, COSTS, nbytes=100_000, units=units, **options)


@settings(deadline=None, max_examples=20)
@given(
    speeds=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=6),
    units=st.integers(1, 40),
    copies=st.integers(1, 3),
)
def test_all_units_are_in_the_sums_and_no_step_beats_the_bound(
    speeds: list[float], units: int, copies: int
) -> None:
    for step in simulated(constant(speeds), units, copies=copies).run(2):
        assert sum(step.units) == units
        assert step.bound * (1 - 1e-9) <= step.computing <= step.seconds
        assert {span.unit for span in step.spans} == set(range(units))
        assert max(span.end for span in step.spans) == step.computing
        for worker in range(len(speeds)):
            own = [span for span in step.spans if span.worker == worker]
            assert all(one.end <= next_.begin for one, next_ in itertools.pairwise(own))


def test_equal_workers_cost_what_the_messages_cost() -> None:
    costs = Costs(latency=1e-3, bandwidth=1e6, computation=0.4)
    simulation = SqueezeSimulation(constant([1.0] * 4), costs, nbytes=40_000, units=16)
    *_, step = simulation.run(3)
    assert step.units == (4, 4, 4, 4)
    assert (step.moved, step.closings) == (0, 1)
    # The deal, three chunks of 10 KB for each owner and three of its total, each with a latency.
    assert step.seconds == pytest.approx(1e-3 + 0.1 + 2 * (1e-3 + 0.03))


def test_a_slow_worker_costs_its_speed() -> None:
    speeds = [1.0, 1.0, 1.0, 0.25]
    *_, step = simulated(constant(speeds), seats=seat(np.array(speeds))).run(4)
    assert step.seconds < 1.1 * step.bound
    delays = Delays(1 / np.array([speeds]), np.zeros((1, 4)))
    ring = TrainingSimulation(Ring().plan(4), COSTS, 100_000, delays).run(1)
    assert ring.seconds[0] > 3 * step.seconds


def test_units_move_within_a_step_whose_predictions_fail() -> None:
    steady = Speeds(np.ones((8, 6)))
    *_, before, sudden = simulated(changed(steady, [2], 5, 8, 0.2)).run(6)
    assert before.moved == 0 and sudden.moved > 0
    # Without moves it would take five times as long as before.
    assert sudden.seconds < 2 * before.seconds
    alone = simulated(changed(steady, [2], 5, 8, 0.2), copies=1).run(6)[-1]
    assert alone.moved == 0 and alone.seconds > 4 * before.seconds


def test_speeds_that_change_within_a_step() -> None:
    values = np.ones((2, 4))
    values[1, 0] = 0.2
    for step in simulated(Speeds(values, seconds=0.1), units=128).run(5):
        assert step.bound < step.seconds < 1.35 * step.bound


def test_two_slow_neighbours_take_as_long_as_the_ring_says() -> None:
    speeds = np.array([1.0] * 6 + [0.25] * 2)
    block = 1.0 / 8
    *_, side_by_side = simulated(constant(speeds), units=160).run(4)
    *_, apart = simulated(constant(speeds), units=160, seats=seat(speeds)).run(4)
    assert 2.0 * block <= side_by_side.computing < 2.2 * block
    assert 8 / 6.5 * block <= apart.computing < 1.32 * block


def test_the_fixed_cost_of_a_pass_counts_for_each_unit() -> None:
    *_, step = simulated(constant([1.0] * 4), pass_seconds=1 / 64).run(3)
    assert step.computing == pytest.approx(0.5, rel=0.01)
    assert step.bound == pytest.approx(0.25)


def test_stopped_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="above zero"):
        simulated(constant([1.0, 0.0]))
