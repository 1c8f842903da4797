"""Speed histories and predictors."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.prediction import LagHistory, SpeedHistory
from dask_coded.prediction.predictors import PREDICTORS

nan = np.nan


@pytest.mark.parametrize("name", sorted(set(PREDICTORS) - {"uniform"}))
def test_predictors_learn_a_constant(name: str) -> None:
    history = np.tile([[1.0], [0.25], [3.0]], (1, 30))
    np.testing.assert_allclose(PREDICTORS[name](history), [1.0, 0.25, 3.0], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(set(PREDICTORS) - {"uniform"}))
@pytest.mark.parametrize("rounds", [0, 1, 2, 5, 40])
def test_the_prediction_for_a_worker_without_history_is_nan(name: str, rounds: int) -> None:
    history = np.ones((3, rounds))
    history[1] = nan
    predicted = PREDICTORS[name](history)
    assert np.isnan(predicted[1])
    if rounds:
        np.testing.assert_allclose(predicted[[0, 2]], 1.0, atol=0.02)


@pytest.mark.parametrize("name", sorted(set(PREDICTORS) - {"uniform"}))
def test_predicted_speeds_are_never_negative(name: str) -> None:
    rng = np.random.default_rng(0)
    history = rng.exponential(size=(50, 40)) * (rng.random((50, 40)) < 0.5)
    history[rng.random((50, 40)) < 0.3] = nan
    predicted = PREDICTORS[name](history)
    assert np.isfinite(predicted).all()
    assert (predicted >= 0).all()


@pytest.mark.parametrize("name", sorted(set(PREDICTORS) - {"uniform"}))
def test_the_prediction_for_a_slow_worker_recovers_while_it_gets_no_work(name: str) -> None:
    history = np.full((2, 60), nan)
    history[:, 0] = 0.01, 1.0
    history[1] = 1.0
    predict = PREDICTORS[name]
    assert predict(history[:, :1])[0] == pytest.approx(0.01, rel=0.1)
    assert predict(history)[0] > 0.6


def test_autoregression_learns_a_rhythm() -> None:
    beat = np.where(np.arange(60) % 2, 1.5, 0.5)
    history = np.stack([beat, np.roll(beat, 1)])
    np.testing.assert_allclose(PREDICTORS["ar"](history), [0.5, 1.5], rtol=0.02)


def test_markov_expects_a_state_to_last_as_long_as_before() -> None:
    lasting = np.repeat([1.0, 0.2, 1.0, 0.2], 10)
    restless = np.where(np.arange(40) % 2, 0.2, 1.0)
    slow, unsure = PREDICTORS["markov"](np.stack([lasting, restless]))
    assert slow < 0.4
    assert unsure > 0.6


def test_rounds_in_different_units_are_put_on_one_scale() -> None:
    history = SpeedHistory()
    history.record({"a": 3e9, "b": 1e9})
    history.record({"b": 2.0, "c": 2.0})
    a, b, c = history.predict(["a", "b", "c"], "last")
    assert a / b == pytest.approx(1.5 / 0.75, rel=0.05)
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


def test_uniform_ignores_measurements() -> None:
    history = SpeedHistory()
    history.record({"a": 3.0, "b": 1.0})
    assert history.predict(["a", "b"], "uniform").tolist() == [1.0, 1.0]


def test_a_worker_left_out_for_its_lag_is_tried_again() -> None:
    history = LagHistory()
    history.record({"prompt": 0.001, "slow": 0.1})
    for _ in range(100):
        history.record({"prompt": 0.001})
    assert history.known["slow"] < history.known["prompt"] == 0.001
