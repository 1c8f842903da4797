"""Trainings in virtual time: the formulas where they are exact, and stragglers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.aggregation import (
    CodedReduce,
    DynamicClusters,
    GradientCoding,
    Ring,
    Squeeze,
    Star,
    StaticClusters,
    Tree,
)
from dask_coded.aggregation.timing import Costs, Shape, communication, predict
from dask_coded.simulation import (
    Delays,
    TrainingSimulation,
    additive,
    markov,
    proportional,
    replayed,
    undelayed,
)

COSTS = Costs(latency=1e-3, bandwidth=1e7, summation=0.0, computation=0.6)
KINDS = [
    Star(),
    Ring(),
    Ring(segments=3),
    Tree(3, 2),
    GradientCoding(1),
    GradientCoding(2, code="cyclic"),
    StaticClusters(4, 2, code="cyclic"),
    DynamicClusters(4, 2, code="cyclic"),
    CodedReduce(),
    CodedReduce(3, 2, code="cyclic"),
]


def seconds(aggregation, workers, nbytes, delays=None, *, steps=4, costs=COSTS, **keywords):
    plan = aggregation.plan(workers)
    return TrainingSimulation(plan, costs, nbytes, delays, **keywords).run(steps).seconds


@given(st.integers(2, 12), st.integers(1, 10**7), st.sampled_from([0.0, 3e-9]))
@settings(deadline=None, max_examples=20)
def test_a_ring_takes_what_the_formula_says(workers, nbytes, summation):
    costs = Costs(1e-3, 1e7, summation, 0.6)
    # Every message with a partial chunk is added up; messages with totals are not.
    found = seconds(Ring(), workers, nbytes, costs=costs)
    expected = predict(Shape("Ring"), costs, workers, nbytes).seconds
    np.testing.assert_allclose(found, expected)


@given(st.integers(1, 12), st.integers(1, 10**7))
@settings(deadline=None, max_examples=20)
def test_a_star_takes_what_the_formula_says(workers, nbytes):
    found = seconds(Star(), workers, nbytes)
    # The root's links carry the same load in each step; the last worker to get the sum differs.
    assert found[0] == pytest.approx(0.6 / workers + 1e-3 + workers * nbytes / 1e7)
    assert found[1:].max() <= predict(Shape("Star"), COSTS, workers, nbytes).seconds * 1.000001


def test_a_tree_stays_below_the_formula_because_layers_overlap():
    found = seconds(Tree(3, 2), 12, 10**6)
    bound = predict(Shape("Tree", 3, 2), COSTS, 12, 10**6).seconds
    assert 0.6 * bound < found[1:].mean() <= bound


@pytest.mark.parametrize("aggregation", KINDS, ids=repr)
def test_every_aggregation_finishes_with_delays_of_every_kind(aggregation):
    workers, steps = 12, 8
    record = 1 + np.random.default_rng(3).random((5, workers))
    for delays in (
        undelayed(workers),
        additive(workers, steps, share=0.3, mean=1.0),
        proportional(workers, steps),
        markov(workers, steps),
        replayed(record),
    ):
        plan = aggregation.plan(workers)
        result = TrainingSimulation(plan, COSTS, 10_000, delays).run(steps)
        assert (result.seconds > 0).all()
        again = TrainingSimulation(aggregation.plan(workers), COSTS, 10_000, delays).run(steps)
        assert np.array_equal(result.ended, again.ended)
        assert result.messages == again.messages


@pytest.mark.parametrize("width", [2, 3])
def test_overlapping_steps_take_the_longer_half(width):
    found = seconds(Ring(), 4, 10**6, steps=30, width=width)
    travel = communication(Shape("Ring"), COSTS, 4, 10**6)
    # If a step waits for its link, the previous step hides its latencies.
    assert 0.6 / 4 <= found[10:].mean() <= max(0.6 / 4, travel)


def test_a_straggler_skips_to_the_newest_step_and_no_worker_waits():
    extra = np.zeros((40, 4))
    extra[5, 0] = 1.0  # once, for about six steps
    delays = Delays(np.ones_like(extra), extra)
    plan = GradientCoding(1).plan(4)
    result = TrainingSimulation(plan, COSTS, 1000, delays).run(40)
    assert result.seconds.max() < 0.5
    late = np.flatnonzero(result.late[:, 0])
    # Late from when it is held up until it is back; before and after, either of the pair may win.
    assert 5 in late
    assert result.late[5:8, 0].all() and not result.late[:, 2].all()
    uncoded = TrainingSimulation(Star().plan(4), COSTS, 1000, delays).run(40)
    assert uncoded.seconds.max() > 1.0


def test_late_messages_still_occupy_the_link():
    plan = GradientCoding(3).plan(4)  # four copies of the same data
    costs = Costs(0.0, 1e6, 0.0, 0.01)
    result = TrainingSimulation(plan, costs, 10**6).run(5)
    assert result.seconds[0] == pytest.approx(1.01)
    assert result.seconds[1:].mean() > 3
    assert result.received[-1] == pytest.approx(5 * 4 * 10**6, rel=0.5)


def test_the_root_may_have_a_slower_link():
    thin = seconds(Star(), 4, 10**6, root_bandwidth=1e6)
    assert thin[0] == pytest.approx(0.15 + 1e-3 + 4.0)


def test_a_cluster_of_the_paper():
    delays = additive(156, 20)
    coded = seconds(CodedReduce(12, 2), 156, 40_000, delays, steps=20)
    star = seconds(GradientCoding(13), 156, 40_000, delays, steps=20)
    assert coded.mean() < star.mean() / 2


def test_dynamic_clusters_gain_where_straggling_has_a_memory_and_lose_nothing_elsewhere():
    costs = Costs(0.0, 1e15, computation=20.0)
    ratio = {}
    for memory in (0.9, 0.0):
        delays = markov(20, 250, share=0.25, memory=memory, slowdown=10.0, seed=1)
        static, dynamic = (
            seconds(aggregation, 20, 8, delays, steps=250, costs=costs).sum()
            for aggregation in (
                StaticClusters(4, 3, code="cyclic"),
                DynamicClusters(4, 3, 3, code="cyclic"),
            )
        )
        ratio[memory] = dynamic / static
    assert ratio[0.9] < 0.93
    assert 0.95 < ratio[0.0] < 1.05


def test_a_markov_chain_has_the_share_and_the_memory_that_are_asked_for():
    delays = markov(200, 2000, share=0.2, memory=0.9, slowdown=1e6, shift=0.0)
    slow = delays.factor > 100
    assert slow.mean() == pytest.approx(0.2, abs=0.02)
    memory = np.corrcoef(slow[:-1].ravel(), slow[1:].ravel())[0, 1]
    assert memory == pytest.approx(0.9, abs=0.02)


def test_arguments_are_checked():
    plan = Star().plan(3)
    for name, call in (
        ("width", lambda: TrainingSimulation(plan, COSTS, 8, width=0)),
        ("width", lambda: TrainingSimulation(plan, COSTS, 8, width=1.5)),
        ("nbytes", lambda: TrainingSimulation(plan, COSTS, np.nan)),
        ("root_bandwidth", lambda: TrainingSimulation(plan, COSTS, 8, root_bandwidth=0)),
        ("steps", lambda: TrainingSimulation(plan, COSTS, 8).run(-1)),
        ("workers", lambda: undelayed(-1)),
        ("steps", lambda: additive(3, 0)),
        ("share", lambda: additive(3, 3, share=np.nan)),
        ("straggling", lambda: proportional(3, 3, straggling=-1)),
        ("memory", lambda: markov(3, 3, memory=2)),
    ):
        with pytest.raises(ValueError, match=f"^Argument '{name}' must be "):
            call()
    with pytest.raises(ValueError, match="The plan has 3 workers, the delays have 4"):
        TrainingSimulation(plan, COSTS, 8, undelayed(4))
    with pytest.raises(ValueError, match="one row per step"):
        Delays(np.ones((1, 3)), np.ones((2, 3)))
    with pytest.raises(ValueError, match="finite and non-negative"):
        Delays(np.full((1, 3), -1.0), np.ones((1, 3)))


def test_a_plan_that_deals_out_its_steps_has_a_simulation_of_its_own() -> None:
    with pytest.raises(ValueError, match="are simulated by SqueezeSimulation"):
        TrainingSimulation(Squeeze(units=8).plan(4), COSTS, 40_000)
