"""Clocks that tests turn by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from dask_coded.membership import Timeouts

DAY = 24 * 3600.0


class Clock:
    """A clock that a test turns."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def clock_of(scheduler: Any) -> Clock:
    """Have the scheduler plugin read its time from a clock that the test turns."""
    standings = scheduler.extensions["dask-coded"].standings
    if not isinstance(standings.clock, Clock):
        standings.clock = Clock(standings.clock())
    return standings.clock


def look(scheduler: Any, ticks: int = 1) -> None:
    """Let some ticks pass, after each of which the supervisor looks who is silent."""
    plugin, clock = scheduler.extensions["dask-coded"], clock_of(scheduler)
    for _ in range(ticks):
        clock.now += plugin.standings.membership.timeouts.tick
        plugin.supervisor.look()


def set_timeouts(patch: pytest.MonkeyPatch, silence: float, *modules: ModuleType) -> None:
    """Have modules read other timeouts than those of the configuration."""
    for module in modules:
        patch.setattr(module, "timeouts", lambda: Timeouts(silence))
