"""What tasks fetch before they begin, and what to compute again if a silent worker has it.

Functions of the scheduler's own record, without messages. Dask waits for a worker that does not
answer, although others have the same data, or could soon compute it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from dask_coded.config import timeouts

if TYPE_CHECKING:
    from dask.typing import Key
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


def helped(fetched: Iterable[tuple[TaskState, TaskState]]) -> list[TaskState]:
    """Return the tasks for which something can be done if they fetch from a silent worker.

    What they need is somewhere else, or soon computed again. Ask only about silent workers, because
    this may look at a thousand tasks for each.
    """
    return [ts for ts, dts in fetched if len(dts.who_has or ()) > 1 or _is_cheap(dts)]


def under_way(tasks: Iterable[TaskState]) -> list[TaskState]:
    """Return what workers compute of tasks without a result, and of what these need.

    Nothing if all of it is many tasks.
    """
    found = []
    for count, ts in enumerate(_unfinished(tasks)):
        if count > MANY:
            return []
        if ts.processing_on is not None:
            found.append(ts)
    return found


def computing(tasks: Iterable[TaskState]) -> dict[str, list[TaskState]]:
    """Return which workers compute tasks that could soon be computed again.

    Tasks that have left the thread pool of their worker are left out: nothing is known about how
    long they take.
    """
    found: dict[str, list[TaskState]] = {}
    for ts in tasks:
        there = ts.processing_on
        if there is not None and ts not in there.long_running and _is_cheap(ts):
            found.setdefault(there.address, []).append(ts)
    return found


def stranded(
    tasks: Iterable[TaskState], silent: Collection[str], replaceable: Replaceable
) -> list[TaskState]:
    """Return what tasks need and only silent workers have, if it is soon computed again."""
    found: dict[TaskState, None] = {}
    unseen = [dts for ts in tasks for dts in ts.dependencies]
    while unseen:
        ts = unseen.pop()
        there = _is_away(ts, silent)
        if there and ts not in found and _is_cheap(ts) and replaceable(ts, silent):
            found[ts] = None
            unseen += ts.dependencies
    return _replaced(found, silent)


def blocked(ts: TaskState, silent: Collection[str], replaceable: Replaceable) -> list[TaskState]:
    """Return a task, and what it needs, as far as only silent workers have or compute it.

    What cannot be computed again is left out: its worker may answer later.
    """
    found: dict[TaskState, None] = {}
    unseen, seen = [ts], {ts}
    while unseen:
        ts = unseen.pop()
        places = ts.who_has or ([ts.processing_on] if ts.processing_on else [])
        away = places and all(ws.address in silent for ws in places)
        if away and _is_repeatable(ts) and replaceable(ts, silent):
            found[ts] = None
        if not ts.who_has or ts in found:
            unseen += ts.dependencies - seen
            seen |= ts.dependencies
    return _replaced(found, silent)


def repeatable(ts: TaskState, silent: Collection[str], replaceable: Replaceable) -> bool:
    """Return whether a task can run again.

    What it needs and no worker has must be computed again as well. What it needs and only silent
    workers have must be soon computed again.
    """
    for count, needed in enumerate(_unfinished([ts])):
        if count > MANY or not (_is_repeatable(needed) and replaceable(needed, silent)):
            return False
        for dts in needed.dependencies:
            if _is_away(dts, silent) and not (_is_cheap(dts) and replaceable(dts, silent)):
                return False
    return True


def needed_from(ws: WorkerState, tasks: Iterable[TaskState]) -> list[Key]:
    """Return the keys of tasks, and of what they need, that others may be fetching from a worker.

    Some may have been released there meanwhile, to be computed again.
    """
    return list(
        {
            needed.key
            for ts in tasks
            for needed in (ts, *ts.dependencies)
            if not needed.who_has or ws in needed.who_has
        }
    )


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


def _is_cheap(ts: TaskState) -> bool:
    """Whether a task, and what it needs for that, can be computed again, and soon."""
    # To wait for the worker may take as long.
    seconds, soon = 0.0, timeouts().answer
    for count, needed in enumerate(_unfinished([ts])):
        duration = needed.prefix.duration_average
        if not _is_repeatable(needed) or duration < 0:
            return False
        seconds += duration
        if seconds >= soon or count > MANY:
            return False
    return True


def _is_repeatable(ts: TaskState) -> bool:
    """Whether Dask would run a task again; the state of an actor would be lost."""
    return ts.run_spec is not None and not ts.has_lost_dependencies and not ts.actor


def _unfinished(tasks: Iterable[TaskState]) -> Iterator[TaskState]:
    """Yield tasks, and all that they need which has no result."""
    unseen = list(tasks)
    seen = set(unseen)
    while unseen:
        ts = unseen.pop()
        yield ts
        needed = {dts for dts in ts.dependencies if not dts.who_has} - seen
        unseen += needed
        seen |= needed
