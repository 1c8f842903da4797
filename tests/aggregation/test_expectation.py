"""The expected time of a step, compared with random draws and with the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.aggregation import (
    CodedReduce,
    GradientCoding,
    Ring,
    Star,
    StaticClusters,
    Tree,
)
from dask_coded.aggregation.expectation import expected_step
from dask_coded.aggregation.timing import Costs
from dask_coded.simulation import TrainingSimulation, proportional

FREE = Costs(latency=0.0, bandwidth=float("inf"), computation=1.0)
COSTS = Costs(latency=1e-3, bandwidth=1e7, summation=1e-9, computation=1.0)


def within(found, low, high):
    """Return whether the mean of random numbers lies within bounds, up to 4 standard errors."""
    error = 4 * np.std(found) / np.sqrt(len(found)) + 1e-9
    return low - error <= np.mean(found) <= high + error


def draws(load, n, inner, code, s, count=20_000):
    """Return times of trees of two layers, or of one without ``inner``, drawn without the plan."""
    rng = np.random.default_rng(0)

    def worker(*shape):
        return load * (1 + 0.7 * rng.exponential(size=(count, *shape)))

    def decoded(times):
        if code == "fractional":
            groups = times.reshape(*times.shape[:-1], times.shape[-1] // (s + 1), s + 1)
            return groups.min(axis=-1).max(axis=-1)
        return np.sort(times, axis=-1)[..., times.shape[-1] - s - 1]

    if not inner:
        return decoded(worker(n))
    return decoded(np.maximum(worker(n), decoded(worker(n, n))))


@pytest.mark.parametrize(
    ("aggregation", "workers", "about"),
    [
        (CodedReduce(4, 2, 1), 20, (1 / 6, 4, True, "fractional", 1)),
        (CodedReduce(6, 2, 2), 42, (1 / 6, 6, True, "fractional", 2)),
        (CodedReduce(3, 2, 1, code="cyclic"), 12, (4 / 15, 3, True, "cyclic", 1)),
        (Tree(3, 2), 12, (1 / 12, 3, True, "fractional", 0)),
        (GradientCoding(1), 6, (1 / 3, 6, False, "fractional", 1)),
        (GradientCoding(2, "cyclic"), 7, (3 / 7, 7, False, "cyclic", 2)),
        (Star(), 5, (1 / 5, 5, False, "fractional", 0)),
        (Ring(), 5, (1 / 5, 5, False, "fractional", 0)),
    ],
    ids=repr,
)
def test_without_messages_it_is_the_mean_of_random_draws(aggregation, workers, about):
    found = expected_step(aggregation, workers, FREE, 1e6, straggling=0.7)
    assert found.least == pytest.approx(found.computation) == found.most
    assert within(draws(*about), found.computation, found.computation)


@pytest.mark.parametrize("straggling", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("nbytes", [1_000, 200_000])
@pytest.mark.parametrize(
    "aggregation",
    [CodedReduce(4, 2, 1), CodedReduce(3, 2, 1, code="cyclic"), GradientCoding(3), Tree(4, 2)],
    ids=repr,
)
def test_the_mean_of_simulated_steps_lies_within_the_bounds(aggregation, nbytes, straggling):
    workers = 11  # no tree is full
    found = expected_step(aggregation, workers, COSTS, nbytes, straggling=straggling)
    times = [
        TrainingSimulation(
            aggregation.plan(workers),
            COSTS,
            nbytes,
            proportional(workers, 1, straggling=straggling, seed=seed),
        )
        .run(1)
        .ended[0]
        for seed in range(60)
    ]
    assert within(times, found.least, found.most)
    assert found.computation < found.least <= found.most


def test_the_mean_of_simulated_rings_is_the_expected_one():
    found = expected_step(Ring(), 6, COSTS, 50_000, straggling=2.0)
    times = [
        TrainingSimulation(
            Ring().plan(6), COSTS, 50_000, proportional(6, 1, straggling=2.0, seed=seed)
        )
        .run(1)
        .ended[0]
        for seed in range(150)
    ]
    assert within(times, found.least, found.most)


def test_without_straggling_computing_takes_the_load():
    found = expected_step(CodedReduce(4, 2, 1), 20, COSTS, 0, straggling=0.0)
    assert found.computation == pytest.approx(1 / 6)
    assert found.most == pytest.approx(1 / 6 + 2e-3)


def test_the_time_of_messages_grows_with_the_fan_in_and_that_of_a_star_with_the_workers():
    costs = Costs(latency=0.0, bandwidth=1e6)

    def seconds(aggregation, n):
        return expected_step(aggregation, n + n * n, costs, 1e4, straggling=1.0).most

    for n in (8, 16, 32):
        tree, star = CodedReduce(n, 2, n // 4 - 1), GradientCoding((n + n * n) // 4 - 1)
        assert seconds(tree, n) == pytest.approx(2 * (0.75 * n + 1) * 0.01)
        assert seconds(star, n) == pytest.approx((0.75 * (n + n * n) + 1) * 0.01, rel=0.01)


@pytest.mark.parametrize("aggregation", [StaticClusters()])
def test_it_is_not_known_for_others(aggregation):
    with pytest.raises(ValueError, match=f"of {type(aggregation).__name__} is not known"):
        expected_step(aggregation, 8, COSTS, 1, straggling=1.0)


def test_it_is_not_known_for_segments():
    with pytest.raises(ValueError, match="in one segment only"):
        expected_step(Tree(2, 2, segments=2), 6, COSTS, 1, straggling=1.0)
