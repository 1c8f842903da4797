"""The baselines that S2C2 is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.codes import Repetition
from dask_coded.rounds import Layout
from dask_coded.rounds.policies import Replication
from dask_coded.simulation import Simulation, constant


def test_replication_takes_over_from_the_slowest() -> None:
    speeds = constant([1.0, 1.0, 0.1, 1.0])
    simulation = Simulation(Repetition(4, 2), speeds, policy="replication")
    round_ = simulation.step()
    # The copy starts when its worker has finished its own block, and at the first stripe.
    assert 1.9 < round_.seconds < 2.3
    alone = Simulation(Repetition(4, 1), speeds, policy="replication").step()
    assert alone.seconds == pytest.approx(10.0, rel=0.01)


def test_replication_speculates_on_a_bounded_number_at_once() -> None:
    layout = Layout.of(Repetition(8, 2), Repetition(8, 2).place.tolist(), np.ones((1, 4)))
    first = Replication().first(layout, np.ones(8), np.zeros(8))
    assert [run.piece for ranges in first for run in ranges] == list(range(0, 16, 2))
    slow = constant([1.0] * 4 + [0.01] * 4)
    capped = Simulation(Repetition(8, 5), slow, policy=lambda: Replication(cap=1)).step()
    free = Simulation(Repetition(8, 5), slow, policy=lambda: Replication(cap=4)).step()
    assert free.seconds < capped.seconds
