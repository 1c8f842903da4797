"""Tasks that follow workers: they are told which of these are silent, and which available."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from dask.typing import Key

#: Tells the worker of a task whether another worker is silent.
Tell = Callable[[str, Key, str, bool], None]


@dataclass
class _Followed:
    workers: frozenset[str]
    tell: Tell
    #: Those that were said to be silent.
    silent: set[str] = field(default_factory=set)


class Followers:
    """The workers that plugins follow for tasks.

    Parameters
    ----------
    suspects : collection of str
        Workers that are silent; it changes.
    owes : callable(address, seconds) -> bool
        Whether a worker has owed an answer for so long.
    """

    def __init__(self, suspects: Collection[str], owes: Callable[[str, float], bool]) -> None:
        self._suspects = suspects
        self._owes = owes
        self._tasks: dict[Key, _Followed] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    def follow(self, key: Key, workers: Iterable[str], tell: Tell) -> None:
        """Follow workers for a task, instead of those before."""
        self._tasks[key] = _Followed(frozenset(workers), tell)

    def forget(self, key: Key) -> None:
        """Forget a task."""
        self._tasks.pop(key, None)

    def clear(self) -> None:
        """Forget all tasks."""
        self._tasks.clear()

    def workers(self, keys: Collection[Key]) -> set[str]:
        """Return the workers that are followed for some tasks."""
        return {a for key in self._tasks.keys() & keys for a in self._tasks[key].workers}

    def say_silent(self, key: Key, worker: str, patience: float) -> bool:
        """Tell a task's worker which others are silent for too long; return whether any is new."""
        found = self._tasks[key]
        late = [
            address
            for address in found.workers.difference(found.silent, [worker])
            if address in self._suspects and self._owes(address, patience)
        ]
        for address in late:
            found.tell(worker, key, address, True)
        found.silent.update(late)
        return bool(late)

    def say_available(self, key: Key, worker: str, address: str) -> None:
        """Tell a task's worker that another one has joined, answers, or runs again."""
        found = self._tasks[key]
        found.silent.discard(address)
        found.tell(worker, key, address, False)
