"""Speed histories and predictors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, Repetition
from dask_coded.prediction import LagHistory, Records, SpeedHistory
from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.rounds import Layout
from dask_coded.rounds.assignment import deal
from dask_coded.typing import Floats

nan = np.nan
LEARNING = sorted(set(PREDICTORS) - {"uniform"})


def predict(name: str, history: Floats) -> Floats:
    return PREDICTORS[name](Records.of(history), np.arange(len(history)))


@pytest.mark.parametrize("name", LEARNING)
def test_predictors_learn_a_constant(name: str) -> None:
    history = np.tile([[1.0], [0.25], [3.0]], (1, 30))
    np.testing.assert_allclose(predict(name, history), [1.0, 0.25, 3.0], rtol=1e-6)


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("rounds", [0, 1, 2, 5, 40])
def test_the_prediction_for_a_worker_without_history_is_nan(name: str, rounds: int) -> None:
    history = np.ones((3, rounds))
    history[1] = nan
    predicted = predict(name, history)
    assert np.isnan(predicted[1])
    if rounds:
        np.testing.assert_allclose(predicted[[0, 2]], 1.0, atol=0.02)


@pytest.mark.parametrize("name", LEARNING)
def test_predicted_speeds_are_never_negative(name: str) -> None:
    rng = np.random.default_rng(0)
    history = rng.exponential(size=(50, 40)) * (rng.random((50, 40)) < 0.5)
    history[rng.random((50, 40)) < 0.3] = nan
    predicted = predict(name, history)
    assert np.isfinite(predicted).all()
    assert (predicted >= 0).all()


@pytest.mark.parametrize("name", LEARNING)
@given(
    speeds=st.lists(st.none() | st.floats(2, 100), min_size=1, max_size=80),
    idle=st.integers(1, 80),
)
@settings(max_examples=50)
def test_an_idle_worker_is_predicted_within_its_own_range(
    name: str, speeds: list[float | None], idle: int
) -> None:
    """Neither the speeds of the other workers nor the average of 1 pull its estimate away."""
    own = np.array([nan if s is None else s for s in [5.0, *speeds]])
    history = np.full((3, len(own) + idle), 1000.0)
    history[0] = nan
    history[0, : len(own)] = own
    predicted = predict(name, history)[0]
    assert np.nanmin(own) * (1 - 1e-9) <= predicted <= np.nanmax(own) * (1 + 1e-9)


@pytest.mark.parametrize("name", LEARNING)
def test_an_estimate_without_evidence_falls_back_to_the_workers_own_level(name: str) -> None:
    own = np.repeat([0.5, 0.1], [44, 20])
    history = np.ones((3, 64 + 100))
    history[0] = nan
    history[0, :64] = own
    assert predict(name, history[:, :64])[0] < 0.2
    assert predict(name, history)[0] == pytest.approx(own.mean(), rel=0.02)


@pytest.mark.parametrize("name", LEARNING)
def test_a_stopped_worker_does_not_make_the_others_look_slow(name: str) -> None:
    """Two of eight workers stand still in 19 of 20 rounds, and then get no work for a while."""
    history = SpeedHistory()
    workers = [str(i) for i in range(8)]
    for number in range(400):
        measured = dict.fromkeys(workers[2:], 1.0)
        # They are measured in some of the rounds, mostly at almost nothing.
        if number % 7 == 0:
            measured["0"] = 1.0 if number % 20 == 0 else 0.01
        if number % 11 == 0:
            measured["1"] = 1.0 if number % 20 == 0 else 0.01
        history.record(measured)
    for _ in range(50):
        history.record(dict.fromkeys(workers[2:], 1.0))
    predicted = history.predict(workers, name)
    np.testing.assert_allclose(predicted[2:], predicted[2], rtol=1e-6)
    assert (predicted[:2] <= predicted[2] * 1.000001).all()
    assert history.predict(["new"])[0] == pytest.approx(predicted[2], rel=0.4)


def test_adaptive_follows_the_first_jump_of_a_steady_worker() -> None:
    rng = np.random.default_rng(0)
    speeds = 1 + 0.02 * rng.standard_normal((4, 40))
    speeds[0, 30:] /= 5
    first, second = (predict("adaptive", speeds[:, :known])[0] for known in (31, 32))
    assert first < 0.5
    assert second < 0.22


@pytest.mark.parametrize("size", [0.01, 0.1, 0.25])
def test_adaptive_averages_noise(size: float) -> None:
    rng = np.random.default_rng(0)
    speeds = 1 + size * rng.standard_normal((200, 80))
    errors = predict("adaptive", speeds) - 1
    assert np.sqrt(np.mean(errors**2)) < 0.25 * size


def test_adaptive_forgets_an_outlier() -> None:
    rng = np.random.default_rng(0)
    speeds = 1 + 0.02 * rng.standard_normal((1, 70))
    speeds[0, [20, 35, 50, 69]] = 0.2
    assert predict("adaptive", speeds)[0] > 0.9


def test_autoregression_learns_a_rhythm() -> None:
    beat = np.where(np.arange(60) % 2, 1.5, 0.5)
    history = np.stack([beat, np.roll(beat, 1)])
    np.testing.assert_allclose(predict("ar", history), [0.5, 1.5], rtol=0.02)


def test_markov_expects_a_state_to_last_as_long_as_before() -> None:
    lasting = np.repeat([1.0, 0.2, 1.0, 0.2], 10)
    restless = np.where(np.arange(40) % 2, 0.2, 1.0)
    slow, unsure = predict("markov", np.stack([lasting, restless]))
    assert slow < 0.4
    assert unsure > 0.6


def test_rounds_in_different_units_are_put_on_one_scale() -> None:
    history = SpeedHistory()
    history.record({"a": 3e9, "b": 1e9})
    history.record({"b": 2.0, "c": 2.0})
    a, b, c = history.predict(["a", "b", "c"], "last")
    # A worker without a history says nothing about the scale.
    assert a / b == pytest.approx(3)
    assert c == b


def test_the_speeds_of_others_do_not_change_with_one_worker() -> None:
    history = SpeedHistory()
    for speed in [1.0] * 10 + [0.1] * 10 + [1.0] * 10:
        history.record({"a": speed, "b": 1.0, "c": 1.0, "d": 1.0})
        np.testing.assert_allclose(history.predict(["b", "c", "d"], "last"), 1.0, rtol=0.02)


@pytest.mark.parametrize("counts", [[3, 1, 4], [1, 1, 1, 1, 1], [20, 5]])
def test_rows_of_departed_workers_are_used_again(counts: list[int]) -> None:
    history = SpeedHistory()
    for generation, count in enumerate(counts):
        names = [f"{generation}-{i}" for i in range(count)]
        history.record(dict.fromkeys(names, 1.0))
        for name in names[: count // 2]:
            history.forget(name)
    assert history.predict(names).tolist() == [1.0] * counts[-1]
    assert history._records.rows <= 2 * sum(counts)
    before = history._records.rows
    for generation in range(200):
        history.record({f"next-{generation}": 0.5 + generation, names[-1]: 1.0})
        history.forget(f"next-{generation}")
    assert history._records.rows <= max(before, 2 * (sum(counts) + 1))


def test_a_row_used_again_remembers_nothing() -> None:
    history = SpeedHistory()
    for _ in range(10):
        history.record({"a": 1.0, "b": 0.2})
    assert "b" in history and "z" not in history
    history.forget("b")
    assert "b" not in history
    history.record({"a": 1.0, "c": 3.0})
    for name in LEARNING:
        a, c = history.predict(["a", "c"], name)
        assert c / a == pytest.approx(3.0)


def test_a_worker_that_was_slow_when_last_measured_is_not_relied_on() -> None:
    history = SpeedHistory()
    for speed in [1.0] * 60 + [0.3]:
        history.record({"a": 1.0, "b": 1.0, "c": speed})
    for _ in range(60):
        history.record({"a": 1.0, "b": 1.0})
    a, _, c, new = history.assured(["a", "b", "c", "new"])
    assert c < 0.4 * a
    assert new == history.predict(["a", "b", "c"]).mean()


def test_a_worker_without_work_is_tried_now_and_then() -> None:
    history = SpeedHistory()
    workers = ["a", "b", "c"]
    history.record({"a": 1.0, "b": 1.0, "c": 0.001})
    trials = []
    for number in range(100):
        predicted = history.predict(workers)
        planned = history.with_trials(workers, predicted)
        np.testing.assert_array_equal(planned[:2], predicted[:2])
        if planned[2] > predicted[2]:
            trials.append(number)
        history.record({"a": 1.0, "b": 1.0})
    assert trials == [32, 64, 96]


def test_a_plan_that_is_not_used_costs_no_trial() -> None:
    """As after each single product: the plan of a next round is made, and no round follows."""
    history = SpeedHistory()
    history.record({"a": 1.0, "b": 0.001})
    for _ in range(32):
        history.record({"a": 1.0})
    plans = [history.with_trials(["a", "b"], np.array([1.0, 0.001]))[1] for _ in range(3)]
    history.record({"a": 1.0})
    plans.append(history.with_trials(["a", "b"], np.array([1.0, 0.001]))[1])
    assert min(plans[:3]) > plans[3] == 0.001


@pytest.mark.parametrize("name", LEARNING)
def test_rounds_of_another_array_on_other_workers_make_no_speed_older(name: str) -> None:
    alone, shared = SpeedHistory(), SpeedHistory()
    ours, others = ["a", "b", "c", "d"], ["e", "f", "g"]
    for number in range(100):
        slow = 0.1 if number >= 70 else 1.0
        measured = {"a": slow, "b": 1.0, "c": 1.0 + 0.1 * (number % 2)}
        for history in alone, shared:
            history.record(measured, ours)
        for _ in range(number % 7):
            shared.record({"e": 2.0, "f": 1.0}, others)
    for _ in range(200):
        shared.record({"e": 2.0, "f": 1.0}, others)
    np.testing.assert_allclose(shared.predict(ours, name), alone.predict(ours, name), rtol=1e-9)


def test_a_worker_is_tried_by_the_rounds_that_it_could_have_taken_part_in() -> None:
    """Another array has rounds in between, on workers that the first one does not use."""
    history = SpeedHistory()
    workers = ["a", "b", "c"]
    history.record({"a": 1.0, "b": 1.0, "c": 0.001}, workers)
    trials = []
    for number in range(100):
        for _ in range(50):
            history.record({"d": 1.0, "e": 1.0}, ["d", "e"])
        predicted = history.predict(workers)
        if history.with_trials(workers, predicted)[2] > predicted[2]:
            trials.append(number)
        history.record({"a": 1.0, "b": 1.0}, workers)
    assert trials == [32, 64, 96]


def test_a_plan_reaches_known_workers_only() -> None:
    history = SpeedHistory()
    history.record({"a": 1.0}, ["a", "unknown", "a"])
    history.record({"a": 1.0, "b": 2.0}, [])
    assert "unknown" not in history
    assert history.predict(["a", "b"], "last").tolist() == [1.0, 2.0]


@pytest.mark.parametrize("stripes", [1, 2, 4, 8, 40])
@pytest.mark.parametrize("code", [MDS(4, 3), MDS(12, 10), Repetition(6, 2)], ids=repr)
def test_a_trial_is_worth_a_stripe(code: Code, stripes: int) -> None:
    layout = Layout.of(code, code.place.tolist(), np.ones((1, stripes)))
    workers = [str(i) for i in range(code.n)]
    history = SpeedHistory()
    history.record({worker: float(worker != "0") or 1e-3 for worker in workers})
    for _ in range(33):
        speeds = history.with_trials(workers, history.predict(workers), layout.even_share)
        first = deal(layout, speeds)
        if first[0]:
            break
        history.record(dict.fromkeys(workers[1:], 1.0))
    assert first[0]


def test_a_stopped_worker_is_not_tried() -> None:
    history = SpeedHistory()
    for _ in range(100):
        history.record({"a": 1.0, "b": 1.0})
        history.record({"b": 1.0})
    for _ in range(50):
        history.record({"b": 1.0})
    assert history.with_trials(["a", "b"], np.array([0.0, 1.0])).tolist() == [0.0, 1.0]


def test_unknown_and_departed_workers_are_average() -> None:
    history = SpeedHistory()
    history.record({"a": 3.0, "b": 1.0})
    history.forget("b")
    assert history.predict(["b", "new"]).tolist() == [1.0, 1.0]


NOISES = {
    "bursts": lambda rng: np.where(rng.random(7) < 0.2, 10.0, 1.0) * rng.lognormal(0, 0.1, 7),
    "stalls": lambda rng: np.where(rng.random(7) < 0.2, 0.1, 1.0) * rng.lognormal(0, 0.1, 7),
    "wild": lambda rng: rng.lognormal(0, 1, 7),
    "units": lambda rng: 10 ** rng.uniform(-3, 3) * rng.lognormal(0, 0.5, 7),
}


@pytest.mark.parametrize("noise", NOISES)
def test_noise_does_not_change_the_scale(noise: str) -> None:
    """A worker without work keeps its place, and a newcomer counts as one of the others."""
    history, rng = SpeedHistory(), np.random.default_rng(0)
    workers = list("abcdefg")
    for i in range(500):
        speeds = dict(zip(workers, NOISES[noise](rng).tolist(), strict=True))
        history.record(speeds if i < 400 else {w: s for w, s in speeds.items() if w != "g"})
    *others, idle, new = history.predict([*workers, "new"])
    assert 0.4 < idle / np.median(others) < 2.5
    assert min(others) < new < max(others)


def test_speeds_stay_finite_whatever_happens() -> None:
    """Bursts of two of three workers, so that a mean would grow in nearly each round."""
    history = SpeedHistory()
    for i in range(3000):
        history.record({"a": 2.0 ** (i % 200), "b": 2.0 ** (-i % 200), "c": 1.0})
    speeds = history.predict(["a", "b", "c"])
    assert np.isfinite(speeds).all()
    assert (speeds > 0).all()


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


def test_lags_of_workers_that_have_left_are_forgotten() -> None:
    history = LagHistory()
    history.record({"a": 0.1, "left": 0.2})
    history.keep(["a", "new"])
    assert history.known == {"a": 0.1}


def test_a_worker_left_out_for_its_lag_is_tried_again() -> None:
    history = LagHistory()
    history.record({"prompt": 0.001, "slow": 0.1})
    for _ in range(250):
        history.record({"prompt": 0.001})
    assert history.known["slow"] < history.known["prompt"] == 0.001
