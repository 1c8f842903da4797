"""The baselines that S2C2 is compared with, and when the continuous policy computes twice."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.codes import MDS, Code, RandomLinear, Repetition
from dask_coded.rounds import Assign, Layout, Reporting, Round, StripeRange, Withdraw
from dask_coded.rounds.policies import Continuous, Replication
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


def test_a_task_is_dropped_once_its_copy_has_come_though_both_had_begun() -> None:
    code = Repetition(4, 4)
    layout = Layout.of(code, code.place.tolist(), np.ones((1, 4)))
    round_ = Round(layout, Replication(), np.ones(4), 0.0)
    round_.start()
    # Workers 0 and 1 have computed their blocks, the others one stripe of four.
    for piece, stripes in ((0, 4), (4, 4), (8, 1), (12, 1)):
        round_.record(piece // 4, [StripeRange(piece, 0, stripes)], 1.0, 1.0)
    helped = [Assign(0, (StripeRange(2, 0, 4),)), Assign(1, (StripeRange(6, 0, 4),))]
    assert round_.react(1.0) == helped
    _, commands = round_.share(0, [StripeRange(2, 0, 4)], 1.0, 2.0)
    assert Withdraw(2, (StripeRange(8, 1, 4),)) in commands
    # No other worker is given that block once more.
    again = [command for command in commands if isinstance(command, Assign)]
    assert {layout.group[part.piece] for command in again for part in command.ranges} <= {3}


@pytest.mark.parametrize("code", [MDS(3, 2), RandomLinear(3, 2, density=1.0)])
def test_a_worker_that_goes_on_as_before_is_not_helped_until_it_is_overdue(code: Code) -> None:
    layout = Layout.of(code, code.place.tolist(), np.ones((1, 42)))
    speeds, lags = np.full(3, 100.0), np.full(3, 0.01)
    round_ = Round(layout, Continuous(), speeds, 0.0, Reporting(0.2), lags)
    first = [StripeRange(0, 0, 28)], [StripeRange(1, 28, 42), StripeRange(1, 0, 14)]
    round_.start([*first, [StripeRange(2, 14, 42)]])
    # All three compute 28 stripes in 0.28 seconds, and worker 2 says so after 21.
    round_.share(2, [StripeRange(2, 14, 35)], 0.21, 0.22)
    for worker in (0, 1):
        round_.record(worker, first[worker], 0.28, 0.29)
    assert not round_.react(0.29) + round_.react(0.30)
    assert round_.wake is not None
    # Only worker 0 can replace the last seven stripes: worker 1 has computed them already.
    helped = [command for command in round_.react(0.32) if isinstance(command, Assign)]
    assert [command.worker for command in helped] == [0]
