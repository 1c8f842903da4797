"""Aggregations that react to stragglers: dynamic clusters and speculative execution."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from dask_coded.aggregation import ROOT, Compute, DynamicClusters, Speculation, Tag
from dask_coded.compression import EXACT, Partial

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


def test_parts_of_stopped_workers_are_computed_again() -> None:
    for segments in (1, 2):
        plan = Speculation(share=0.5, segments=segments).plan(6)
        group = Group(plan, gradients(6), stopped=[1, 4])
        group.run(random.Random(0).randrange)
        agree(group, nodes(plan))
        asked = [send for sender, send in group.sent if sender == ROOT and send.tag.kind == "redo"]
        assert {(0, (1,)), (3, (4,))} <= {(send.to, send.payload) for send in asked}
        group.wake()
        group.run(random.Random(0).randrange)
        agree(group, nodes(plan))


def test_no_worker_is_asked_before_most_have_delivered() -> None:
    plan = Speculation(share=0.75).plan(4)
    root = plan.machine(ROOT)
    part = EXACT.pack(Partial(np.ones(2)))
    assert root.received(0, Tag("part"), part) == []
    assert root.received(1, Tag("part"), part) == []
    # Worker 2 has delivered, so it can help worker 3.
    (ask,) = root.received(2, Tag("part"), part)
    assert (ask.to, ask.tag.kind, ask.payload) == (2, "redo", (3,))  # type: ignore[union-attr]
    assert root.received(2, Tag("part"), part) == []


def test_a_helper_computes_once_and_only_while_the_sum_is_missing() -> None:
    worker = Speculation().plan(4).machine(1)
    assert worker.begin() == [Compute((1,), (1.0,))]
    assert worker.received(ROOT, Tag("redo"), (2,)) == [Compute((2,), (1.0,))]
    assert worker.received(ROOT, Tag("redo"), (2,)) == []
    late = Speculation().plan(4).machine(1)
    late.received(ROOT, Tag("sum"), EXACT.pack(Partial(np.ones(2))))
    assert late.received(ROOT, Tag("redo"), (2,)) == []
