"""Over-decomposition, a baseline of the S2C2 paper."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evidence.s2c2.overdecomposition import Stores, over_decomposed
from dask_coded.simulation import Network, Simulation, constant


def test_stores_keep_the_given_number_of_copies() -> None:
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


def test_moved_partitions_stay_while_there_is_room() -> None:
    stores = Stores(4, copies=1.5, move_seconds=1.0)
    speeds = np.array([4.0, 2.0, 1.0, 1.0])
    stores.deal(speeds)
    before = stores.moved
    stores.deal(speeds)
    assert stores.moved == before


def test_correct_predictions_are_only_rounded_to_partitions() -> None:
    def simulate(move_seconds: float) -> float:
        stores = Stores(4, copies=1.0, move_seconds=move_seconds)
        simulation = Simulation(
            over_decomposed(4),
            constant([1.0, 1.0, 1.0, 0.5]),
            policy="static",
            assigner=stores.assign,
            foresight=lambda u: u,
            network=Network(latency=0.0),
        )
        return simulation.step().seconds

    # 16 partitions over speeds 1, 1, 1, 0.5: the fast workers get 5, 5, 4 or so.
    assert simulate(0.0) == pytest.approx(5.0)
    assert simulate(0.25) > 5.2
