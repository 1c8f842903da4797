"""Where coordinators may run, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dask_coded.runtime.scheduler.placing import Limits, Placing

HOSTS = [f"tcp://10.0.0.{i}:80" for i in range(4)]


class _Scheduler:
    """As much of a scheduler as choosing takes."""

    def __init__(self) -> None:
        self.workers = {a: SimpleNamespace(address=a, metrics={}) for a in HOSTS}
        self.running = list(self.workers.values())

    def valid_workers(self, ts: Any) -> list[Any] | None:
        named = ts.worker_restrictions
        return None if named is None else [self.workers[a] for a in named if a in self.workers]


def placing() -> Placing:
    scheduler: Any = _Scheduler()
    return Placing(scheduler, HOSTS, lambda addresses: np.ones(len(addresses)), set())


def task(workers: set[str] | None = None) -> Any:
    return SimpleNamespace(
        key="task",
        dependencies=set(),
        worker_restrictions=workers,
        host_restrictions=None,
        resource_restrictions={},
        loose_restrictions=False,
    )


@pytest.mark.parametrize("coordinates", [True, False])
def test_a_choice_leaves_a_task_as_it_is(coordinates: bool) -> None:
    """If there is no other worker, the task stays, and must not be stolen by a slow one."""
    ts = task({HOSTS[0]})
    found = placing().choice(ts, Limits({HOSTS[1]}, {"10.0.0.1"}, coordinates, avoid=HOSTS[1]))
    assert not found
    assert ts.worker_restrictions == {HOSTS[0]}
    assert ts.host_restrictions is None


def test_tasks_share_the_set_of_fast_workers() -> None:
    """A thousand addresses take 33 KB, and a task keeps its own until it is forgotten."""
    found, tasks = placing(), [task() for _ in range(3)]
    for ts in tasks:
        found.place(ts, Limits(None, None))
        found.measured(HOSTS[0], 0.001)  # as with each heartbeat
    assert tasks[0].worker_restrictions == set(HOSTS)
    assert tasks[1].worker_restrictions is tasks[0].worker_restrictions
    assert tasks[2].worker_restrictions is tasks[0].worker_restrictions
    found.place(moved := task(), Limits(None, None, avoid=HOSTS[0]))
    assert moved.worker_restrictions == set(HOSTS[1:])
    assert tasks[0].worker_restrictions == set(HOSTS)
