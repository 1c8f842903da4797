"""Whether the next product is a round or is computed alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.rounds.quicker import Quicker


def after_rounds(*seconds, alone):
    quicker = Quicker()
    for taken in seconds:
        quicker.took_round(taken, alone)
    return quicker


def run(quicker, products, round, alone, expected=None):
    """Return how many of some products were computed alone, and how long all took."""
    count, total = 0, 0.0
    for _ in range(products):
        if quicker.is_alone:
            quicker.took_alone(alone)
            count, total = count + 1, total + alone
        else:
            quicker.took_round(round, alone if expected is None else expected)
            total += round
    return count, total


def test_the_first_rounds_show_how_long_a_round_takes():
    assert not after_rounds(0.3, 0.005, alone=0.001).is_alone
    assert after_rounds(0.3, 0.005, 0.005, alone=0.001).is_alone


def test_a_slow_first_round_does_not_count():
    assert not after_rounds(0.3, 0.005, 0.005, alone=0.006).is_alone


def test_a_coordinator_that_has_computed_nothing_does_not_compute_alone():
    assert not after_rounds(*[0.005] * 9, alone=math.inf).is_alone


def test_a_coordinator_that_becomes_slow_runs_rounds_and_returns_later():
    quicker = after_rounds(*[0.005] * 3, alone=0.001)
    assert run(quicker, 100, 0.005, 0.001)[0] == 100
    assert run(quicker, 1000, 0.005, 0.02)[0] < 20
    assert run(quicker, 2000, 0.005, 0.001)[0] > 900


def test_rounds_that_become_quick_are_found():
    quicker = after_rounds(*[0.005] * 3, alone=0.004)
    run(quicker, 100, 0.005, 0.004)
    count, _ = run(quicker, 1000, 0.001, 0.004)
    assert count < 150


@given(st.floats(1e-4, 1), st.floats(1e-4, 1), st.floats(0.3, 3))
def test_the_time_is_near_that_of_the_quicker_way(round, alone, error):
    quicker = Quicker()
    products = 2000
    _, total = run(quicker, products, round, alone, expected=alone * error)
    # Either way is tried at most 2 % of the time, and one is not left for a tenth of its time. What
    # the coordinator expects wrongly keeps it in rounds.
    best = min(round, alone) if alone * error < 0.9 * round else round
    assert total <= 1.17 * products * best + 6 * max(round, min(alone, 4 * round))


@pytest.mark.parametrize("expected", [0.001, 0.1])
def test_what_a_product_is_expected_to_gain(expected):
    quicker = after_rounds(0.005, alone=expected)
    assert quicker.gain == pytest.approx(max(0.005 - expected, 0))
    assert Quicker().gain == 0
