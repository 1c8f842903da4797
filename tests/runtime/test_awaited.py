"""What clients wait for, as the scheduler keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from dask_coded.runtime.scheduler.awaited import Awaited
from dask_coded.runtime.scheduler.stuck import MANY


@dataclass(frozen=True)
class _Client:
    client_key: str


class _Task:
    """As much of a task on the scheduler as is looked at."""

    def __init__(self, key: str, *clients: str) -> None:
        self.key = key
        self.state = "processing"
        self.who_wants = set(map(_Client, clients))
        self.dependencies: set[_Task] = set()
        self.who_has: set[str] = set()
        self.processing_on: str | None = "worker"
        self.run_spec = None

    def end(self) -> None:
        self.state, self.processing_on, self.who_has = "memory", None, {"worker"}

    def begin(self) -> None:
        self.state, self.processing_on, self.who_has = "processing", "worker", set()


def awaiting(tasks: dict[str, _Task]) -> Awaited:
    scheduler: Any = SimpleNamespace(tasks=tasks)
    return Awaited(scheduler)


def keys(tasks: Any) -> list[str]:
    return sorted(ts.key for ts in tasks)


def test_nothing_is_kept_of_a_client_that_waits_no_more() -> None:
    first, busy = _Task("first", "a"), _Task("busy", "b")
    awaited = awaiting({"first": first, "busy": busy})
    awaited.add(["first"], "a")
    awaited.add(["busy"], "b")
    assert keys(awaited.under_way()) == ["busy", "first"]
    first.end()
    assert keys(awaited.under_way()) == ["busy"]
    assert len(awaited) == 1


def test_a_result_that_is_lost_while_others_are_computed_is_waited_for_again() -> None:
    first, second = _Task("first", "a"), _Task("second", "a")
    awaited = awaiting({"first": first, "second": second})
    awaited.add(["first", "second"], "a")
    first.end()
    assert keys(awaited.under_way()) == ["second"]
    first.begin()
    assert keys(awaited.under_way()) == ["first", "second"]


@pytest.mark.parametrize("how", ["erred", "unwanted", "wanted by another", "forgotten"])
def test_what_a_client_does_not_want_any_more_is_dropped(how: str) -> None:
    gone = _Task("gone", "a")
    tasks = {"gone": gone, "other": _Task("other", "a")}
    awaited = awaiting(tasks)
    awaited.add(["gone", "other"], "a")
    awaited.under_way()
    match how:
        case "erred":
            gone.state, gone.processing_on = "erred", None
        case "unwanted":
            gone.who_wants = set()
        case "wanted by another":
            gone.who_wants = _Task("", "b").who_wants
        case "forgotten":
            del tasks["gone"]
    assert keys(awaited.under_way()) == ["other"]
    assert len(awaited) == 1


def test_a_task_that_the_scheduler_has_yet_to_see_is_waited_for() -> None:
    tasks = {"other": _Task("other", "a")}
    awaited = awaiting(tasks)
    awaited.add(["late", "other"], "a")
    assert keys(awaited.under_way()) == ["other"]
    tasks["late"] = _Task("late", "a")
    assert keys(awaited.under_way()) == ["late", "other"]


def test_the_load_of_one_client_hides_nothing_of_another() -> None:
    large = _Task("large", "a")
    large.dependencies = {_Task(str(i)) for i in range(MANY + 1)}
    awaited = awaiting({"large": large, "small": _Task("small", "b")})
    awaited.add(["large"], "a")
    awaited.add(["small"], "b")
    awaited.add([str(i) for i in range(MANY + 1)], "c")  # these are waited for
    assert keys(awaited.under_way()) == ["small"]
    assert len(awaited) == 2
