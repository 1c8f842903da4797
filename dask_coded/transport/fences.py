"""Fences: what a run of a task sends counts for nothing once the scheduler has given up that run.

A stopped worker may wake up after its task was taken over by another one, and would go on as if
nothing had happened. The scheduler numbers all runs of tasks, and the numbers only grow. The
messages by which a run begins something carry its number. When the scheduler gives up a run, it
raises a fence at all workers, which then drop the messages of that run and of earlier ones.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from operator import index

from dask.typing import Key

from dask_coded.transport.messages import Attempt

# How many tasks a worker remembers; a run that is given up ends within seconds or with its worker.
_TASKS = 1000


class RunOverError(CancelledError):
    """The run of a task is over: it was cancelled, or another worker has taken it over."""


class Fences:
    """The runs of tasks that are over.

    Examples
    --------
    >>> fences = Fences()
    >>> fences.put(("task", 7))
    >>> fences.admits(("task", 7)), fences.admits(("task", 8)), fences.admits(("other", 1))
    (False, True, True)
    """

    def __init__(self) -> None:
        self._over: dict[Key, int] = {}

    def put(self, attempt: Attempt) -> None:
        """Refuse a run of a task and all earlier ones from now on."""
        task, run = attempt[0], index(attempt[1])
        self._over[task] = max(run, self._over.pop(task, run))
        if len(self._over) > _TASKS:
            del self._over[next(iter(self._over))]

    def admits(self, attempt: Attempt | None) -> bool:
        """Whether a message counts that such a run sends; None stands for no task."""
        if attempt is None:
            return True
        task, run = attempt
        return task not in self._over or run > self._over[task]
