"""The baselines that S2C2 is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.codes import Repetition
from dask_coded.planning import Layout
from dask_coded.planning.policies import OverDecomposition, Replication, Stores, over_decomposed
from dask_coded.simulation import Network, Simulation, constant


def test_stores_hold_as_many_copies_as_they_are_meant_to() -> None:
    stores = Stores(10)
    assert stores.stored.sum() == 57  # 40 partitions, 10/7 copies
    assert stores.stored.any(axis=0).all()
    rng = np.random.default_rng(0)
    for _ in range(50):
        given, delays = stores.deal(rng.uniform(0.1, 1, 10))
        assert stores.stored[given, np.arange(40)].all()
        assert (delays == 0).all()
        assert stores.stored.sum() <= 57
        assert stores.stored.any(axis=0).all()


def test_partitions_follow_the_speeds_and_moves_are_charged() -> None:
    stores = Stores(4, factor=4, copies=1.0, move_seconds=0.5)
    given, delays = stores.deal(np.array([2.0, 1.0, 1.0, 0.0]))
    assert np.bincount(given, minlength=4).tolist() == [8, 4, 4, 0]
    assert delays.tolist() == [2.0, 0.0, 0.0, 0.0]
    assert stores.moved == 4


def test_what_was_moved_stays_while_there_is_room() -> None:
    stores = Stores(4, copies=1.5, move_seconds=1.0)
    speeds = np.array([4.0, 2.0, 1.0, 1.0])
    stores.deal(speeds)
    before = stores.moved
    stores.deal(speeds)
    assert stores.moved == before


def test_over_decomposition_with_right_predictions_only_rounds_to_partitions() -> None:
    def simulate(move_seconds: float) -> float:
        stores = Stores(4, copies=1.0, move_seconds=move_seconds)
        simulation = Simulation(
            over_decomposed(4),
            constant([1.0, 1.0, 1.0, 0.5]),
            policy=lambda: OverDecomposition(stores),
            foresight=lambda u: u,
            network=Network(latency=0.0),
        )
        return simulation.step().seconds

    # 16 partitions over speeds 1, 1, 1, 0.5: the fast get 5, 5, 4 or so.
    assert simulate(0.0) == pytest.approx(5.0)
    assert simulate(0.25) > 5.2


def test_replication_takes_over_from_the_slowest() -> None:
    speeds = constant([1.0, 1.0, 0.1, 1.0])
    simulation = Simulation(Repetition(4, 2), speeds, policy="replication")
    round_ = simulation.step()
    # The copy begins when its worker is done with its own block, and starts afresh.
    assert 1.9 < round_.seconds < 2.3
    alone = Simulation(Repetition(4, 1), speeds, policy="replication").step()
    assert alone.seconds == pytest.approx(10.0, rel=0.01)


def test_replication_speculates_on_a_bounded_number_at_once() -> None:
    layout = Layout.of(Repetition(8, 2), Repetition(8, 2).place.tolist(), np.ones((1, 4)))
    first = Replication().first(layout, np.ones(8), np.zeros(8))
    assert [run.piece for runs in first for run in runs] == list(range(0, 16, 2))
    slow = constant([1.0] * 4 + [0.01] * 4)
    capped = Simulation(Repetition(8, 5), slow, policy=lambda: Replication(cap=1)).step()
    free = Simulation(Repetition(8, 5), slow, policy=lambda: Replication(cap=4)).step()
    assert free.seconds < capped.seconds
