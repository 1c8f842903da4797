"""Speed histories and predictors."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.planning import PREDICTORS, SpeedHistory

nan = np.nan


@pytest.mark.parametrize("name", sorted(set(PREDICTORS) - {"uniform"}))
def test_predictors_learn_a_constant(name: str) -> None:
    history = np.tile([[1.0], [0.25], [3.0]], (1, 30))
    np.testing.assert_allclose(PREDICTORS[name](history), [1.0, 0.25, 3.0], rtol=1e-6)


def test_last_value_skips_rounds_without_a_measurement() -> None:
    history = np.array([[1.0, 2.0, nan], [nan, nan, nan], [5.0, nan, nan]])
    np.testing.assert_equal(PREDICTORS["last"](history), [2.0, nan, 5.0])


def test_a_worker_that_is_given_nothing_is_forgiven() -> None:
    history = np.full((1, 60), nan)
    history[0, 0] = 0.01
    predict = PREDICTORS["exponential"]
    assert predict(history[:, :1])[0] == pytest.approx(0.01)
    assert predict(history)[0] > 0.9


def test_rounds_in_different_units_are_put_on_one_scale() -> None:
    history = SpeedHistory()
    history.record({"a": 3e9, "b": 1e9})
    history.record({"b": 2.0, "c": 2.0})
    a, b, c = history.predict(["a", "b", "c"], "last")
    assert a / b == pytest.approx(1.5 / 0.75)
    assert c == b


def test_unknown_and_departed_workers_are_average() -> None:
    history = SpeedHistory()
    history.record({"a": 3.0, "b": 1.0})
    history.forget("b")
    assert history.predict(["b", "new"]).tolist() == [1.0, 1.0]


def test_useless_measurements_are_ignored() -> None:
    history = SpeedHistory()
    history.record({})
    history.record({"a": 0.0})
    history.record({"a": nan, "b": -1.0})
    assert history.predict(["a", "b"]).tolist() == [1.0, 1.0]


def test_uniform_knows_nothing() -> None:
    history = SpeedHistory()
    history.record({"a": 3.0, "b": 1.0})
    assert history.predict(["a", "b"], "uniform").tolist() == [1.0, 1.0]
