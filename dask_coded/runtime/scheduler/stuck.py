"""What tasks fetch before they begin, and what to compute again if a silent worker has it.

Functions of the scheduler's own record, without messages. Dask waits for a worker that does not
answer, although others have the same data, or could soon compute it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from dask_coded.config import timeouts

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

#: Whether what a task makes can be made again without silent workers.
Replaceable = Callable[["TaskState", Collection[str]], bool]

#: What takes more tasks than this is waited for.
MANY = 1000


def fetching(tasks: Iterable[TaskState]) -> dict[str, list[tuple[TaskState, TaskState]]]:
    """Return from which workers tasks may now fetch what they need before they begin, and what."""
    found: dict[str, list[tuple[TaskState, TaskState]]] = {}
    for ts in tasks:
        there = ts.processing_on
        if there is None or ts in there.long_running:
            continue
        for dts in ts.dependencies:
            holders = dts.who_has or set()
            if there not in holders:
                for ws in holders:
                    found.setdefault(ws.address, []).append((ts, dts))
    return found


def is_cheap(ts: TaskState) -> bool:
    """Whether a task, and what it needs for that, can be computed again, and soon."""
    # To wait for the worker may take as long.
    seconds, soon = 0.0, timeouts().answer
    for count, needed in enumerate(unfinished([ts])):
        duration = needed.prefix.duration_average
        if not is_repeatable(needed) or duration < 0:
            return False
        seconds += duration
        if seconds >= soon or count > MANY:
            return False
    return True


def is_repeatable(ts: TaskState) -> bool:
    """Whether Dask would run a task again; the state of an actor would be lost."""
    return ts.run_spec is not None and not ts.has_lost_dependencies and not ts.actor


def unfinished(tasks: Iterable[TaskState]) -> Iterator[TaskState]:
    """Yield tasks, and all that they need which has no result."""
    unseen = list(tasks)
    seen = set(unseen)
    while unseen:
        ts = unseen.pop()
        yield ts
        needed = {dts for dts in ts.dependencies if not dts.who_has} - seen
        unseen += needed
        seen |= needed


def under_way(tasks: Iterable[TaskState]) -> list[TaskState]:
    """Return what workers compute of tasks without a result, and of what these need.

    Nothing if all of it is many tasks.
    """
    found = []
    for count, ts in enumerate(unfinished(tasks)):
        if count > MANY:
            return []
        if ts.processing_on is not None:
            found.append(ts)
    return found


def blocked(
    tasks: Iterable[TaskState],
    silent: Collection[str],
    replaceable: Replaceable,
    again: Callable[[TaskState], bool],
) -> list[TaskState]:
    """Return tasks, and what they need, as far as only silent workers have or compute it.

    What cannot be computed ``again`` is left out: its worker may answer later.
    """
    found: dict[TaskState, None] = {}
    unseen = list(tasks)
    seen = set(unseen)
    while unseen:
        ts = unseen.pop()
        places = ts.who_has or ([ts.processing_on] if ts.processing_on else [])
        away = places and all(ws.address in silent for ws in places)
        if away and again(ts) and replaceable(ts, silent):
            found[ts] = None
        if not ts.who_has or ts in found:
            unseen += ts.dependencies - seen
            seen |= ts.dependencies
    return _replaced(found, silent)


def can_run_again(ts: TaskState, silent: Collection[str], replaceable: Replaceable) -> bool:
    """Return whether a task can run again.

    What it needs and no worker has must be computed again as well. What it needs and only silent
    workers have must be soon computed again.
    """
    for count, needed in enumerate(unfinished([ts])):
        if count > MANY or not (is_repeatable(needed) and replaceable(needed, silent)):
            return False
        for dts in needed.dependencies:
            if _is_away(dts, silent) and not (is_cheap(dts) and replaceable(dts, silent)):
                return False
    return True


def serves_others(ws: WorkerState, tasks: Iterable[TaskState]) -> bool:
    """Return whether clients that want none of some tasks may be fetching what a worker alone has.

    Those that only hold pieces are no clients of their own, and have told no versions.
    """
    clients = {client for ts in tasks for client in ts.who_wants or ()}
    return any(
        client.versions and client not in clients
        for ts in ws.has_what
        if len(ts.who_has or ()) == 1
        for client in ts.who_wants or ()
    )


def _replaced(found: dict[TaskState, None], silent: Collection[str]) -> list[TaskState]:
    """Return the tasks that can be computed again without any data that stay on silent workers."""
    while waiting := [
        ts
        for ts in found
        if any(_is_away(dts, silent) for dts in ts.dependencies.difference(found))
    ]:
        for ts in waiting:
            del found[ts]
    return list(found)


def _is_away(ts: TaskState, silent: Collection[str]) -> bool:
    """Whether only silent workers have the result of a task."""
    return bool(ts.who_has) and all(ws.address in silent for ws in ts.who_has or ())
