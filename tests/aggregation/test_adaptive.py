"""Dynamic clusters react to stragglers."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from dask_coded.aggregation import DynamicClusters

from .driver import Group, agree
from .test_exact import gradients, nodes


@pytest.mark.parametrize("placement", ["exact", "greedy"])
@pytest.mark.parametrize("code", ["fractional", "cyclic"])
@pytest.mark.parametrize("workers", [8, 13])
def test_moved_workers_still_make_the_sum(placement: Any, code: Any, workers: int) -> None:
    plan = DynamicClusters(size=4, load=2, placement=placement, code=code, memory=-math.inf).plan(
        workers
    )
    rng = np.random.default_rng(0)
    moved = 0
    for step in range(20):
        late = rng.random(workers) < 0.3
        choice = plan.choose(late)
        assert sorted(choice) == list(range(workers))
        moved += choice != tuple(range(workers))
        group = Group(plan, gradients(plan.parts), choice=choice)
        group.run(random.Random(step).randrange)
        agree(group, nodes(plan))
    assert moved


def test_late_workers_are_spread() -> None:
    plan = DynamicClusters(size=3, load=2, code="cyclic", memory=-math.inf).plan(9)
    # Two of the first cluster are late: without moving one of them, the step would wait.
    late = np.isin(np.arange(9), [0, 1])
    stuck = Group(plan, gradients(9), stopped=[0, 1])
    stuck.run(lambda count: 0)
    assert not list(stuck.complete())
    group = Group(plan, gradients(9), choice=plan.choose(late), stopped=[0, 1])
    group.run(lambda count: 0)
    agree(group, nodes(plan))


def test_workers_move_only_while_straggling_has_a_memory() -> None:
    always = np.isin(np.arange(12), [0, 1, 5])
    plan = DynamicClusters().plan(12)
    assert plan.choose() == ()
    choices = [plan.choose(always) for _ in range(5)]
    assert choices[0] == () and choices[-1] != ()
    rng = np.random.default_rng(0)
    chance = DynamicClusters().plan(12)
    assert not any(chance.choose(rng.random(12) < 0.25) for _ in range(100))


def test_a_single_cluster_stays() -> None:
    plan = DynamicClusters(size=4, load=2, memory=-math.inf).plan(3)
    assert plan.parts == 1
    assert sorted(plan.choose(np.array([True, False, False]))) == [0, 1, 2]
