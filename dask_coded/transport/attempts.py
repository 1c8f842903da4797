"""Attempts: what a run of a task sends counts for nothing once there is a later run.

A stopped worker may wake up after its task was taken over by another one, and would go on as if
nothing had happened. The scheduler numbers all runs of tasks, and the numbers only grow. The
messages by which a run begins something carry its number. Each worker keeps the highest number of
each task, and refuses earlier ones; the scheduler gives no plans to earlier ones.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from operator import index

from dask.typing import Key

from dask_coded.transport.messages import Attempt

# How many tasks a worker remembers; a run that is over ends within seconds or with its worker.
_TASKS = 1000


class RunOverError(CancelledError):
    """The run of a task is over: it was cancelled, or another worker has taken it over."""

    def __init__(self, task: Key | None) -> None:
        super().__init__(f"This run of {task!r} is over.")


class Attempts:
    """The latest run of each task.

    Examples
    --------
    >>> attempts = Attempts()
    >>> attempts.admits(("task", 7)), attempts.admits(("task", 8)), attempts.admits(("task", 7))
    (True, True, False)
    >>> attempts.end(("task", 8))
    >>> attempts.admits(("task", 8)), attempts.admits(("task", 9)), attempts.admits(("other", 1))
    (False, True, True)
    """

    def __init__(self) -> None:
        # By task, the least run that counts; the task of the latest message comes last.
        self._least: dict[Key, int] = {}

    def admits(self, attempt: Attempt | None) -> bool:
        """Whether a message counts that such a run sends; None stands for no task."""
        if attempt is None:
            return True
        task, run = attempt
        return self._raise(task, run) == run

    def end(self, attempt: Attempt) -> None:
        """Refuse a run of a task from now on, as it refuses all earlier ones."""
        self._raise(attempt[0], index(attempt[1]) + 1)

    def _raise(self, task: Key, run: int) -> int:
        least = self._least[task] = max(run, self._least.pop(task, run))
        if len(self._least) > _TASKS:
            del self._least[next(iter(self._least))]
        return least
