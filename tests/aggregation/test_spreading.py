"""Placement of late workers: they are spread evenly, and memory is distinguished from chance."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.aggregation import spreading


@st.composite
def situations(draw: st.DrawFn, most: int = 24) -> tuple[np.ndarray, list[int], np.ndarray]:
    room = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    workers = sum(room)
    late = np.array(draw(st.lists(st.booleans(), min_size=workers, max_size=workers)))
    count = draw(st.integers(1, len(room)))
    allowed = np.zeros((workers, len(room)), dtype=bool)
    for worker, found in enumerate(spreading.candidates(room, count)):
        assert len(set(found)) == count
        allowed[worker, list(found)] = True
    return late, room, allowed


def cost(group: np.ndarray, late: np.ndarray, room: list[int]) -> int:
    return int((np.bincount(group[late], minlength=len(room)) ** 2).sum())


@given(situations())
def test_groups_are_full_and_allowed(situation: tuple) -> None:
    late, room, allowed = situation
    best = spreading.spread(late, room, allowed)
    good = spreading.spread_greedily(late, room, allowed)
    for group in (best, good):
        assert np.bincount(group, minlength=len(room)).tolist() == room
        assert allowed[np.arange(len(group)), group].all()
    home = np.repeat(np.arange(len(room)), room)
    assert cost(best, late, room) <= min(cost(good, late, room), cost(home, late, room))


@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_the_exact_placement_has_the_least_cost(flags: list[bool]) -> None:
    late, room = np.array(flags), [2, 2, 2]
    allowed = np.zeros((6, 3), dtype=bool)
    for worker, found in enumerate(spreading.candidates(room, 2)):
        allowed[worker, list(found)] = True
    least = min(
        cost(np.array(group), late, room)
        for group in itertools.product(range(3), repeat=6)
        if np.bincount(group, minlength=3).tolist() == room
        and allowed[np.arange(6), list(group)].all()
    )
    assert cost(spreading.spread(late, room, allowed), late, room) == least


def chains(memory: float, share: float, steps: int, workers: int, seed: int) -> np.ndarray:
    """Return two-state Markov chains whose correlation from step to step is ``memory``."""
    rng = np.random.default_rng(seed)
    late = rng.random(workers) < share
    out = [late]
    for _ in range(steps - 1):
        late = np.where(rng.random(workers) < memory, late, rng.random(workers) < share)
        out.append(late)
    return np.array(out)


def mean_time(late: np.ndarray, spread: bool) -> float:
    """Return the mean time of a step of five clusters of four, each waiting for three workers.

    A late worker takes ten times as long as the others.
    """
    room = [4] * 5
    allowed = np.zeros((20, 5), dtype=bool)
    for worker, found in enumerate(spreading.candidates(room, 2)):
        allowed[worker, list(found)] = True
    group = np.repeat(np.arange(5), room)
    seconds = []
    for before, now in itertools.pairwise(late):
        if spread:
            group = spreading.spread(before, room, allowed)
        seconds.append(10.0 if (np.bincount(group[now], minlength=5) > 1).any() else 1.0)
    return float(np.mean(seconds))


def test_spreading_late_workers_gains_only_with_a_memory() -> None:
    remembered, forgotten = (chains(memory, 0.15, 600, 20, seed=1) for memory in (0.95, 0.0))
    assert mean_time(remembered, spread=True) < 0.6 * mean_time(remembered, spread=False)
    assert mean_time(forgotten, spread=True) > 0.95 * mean_time(forgotten, spread=False)


def test_memory_is_measured() -> None:
    for memory in (0.0, 0.3, 0.6, 0.9):
        history = chains(memory, 0.25, 2000, 20, seed=3)
        assert abs(spreading.memory(history) - memory) < 0.03


def test_chance_is_no_memory() -> None:
    found = [spreading.has_memory(chains(0.0, 0.2, 50, 20, seed)) for seed in range(200)]
    assert not any(found)
    assert all(spreading.has_memory(chains(0.8, 0.2, 50, 20, seed)) for seed in range(50))


def test_a_few_steps_show_no_memory() -> None:
    assert spreading.memory(np.zeros((1, 4))) == 0
    assert not spreading.has_memory(np.eye(1, 4, dtype=bool))
    assert not spreading.has_memory(np.zeros((0, 4)))
