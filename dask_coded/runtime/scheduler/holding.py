"""Keeps the pieces of arrays while rounds need them, also if their owner releases them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from dask.typing import Key

from dask_coded.runtime.scheduler.state import ArrayState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState


class Holding(Collection[Key]):
    """The tasks that run rounds, and the arrays whose pieces are kept until these tasks have ended.

    Dask keeps what a client wants, so a client for each array wants its pieces as long as any task
    needs them. With one for each task, a thousand products over a thousand pieces would take half a
    billion steps: with each product, the scheduler reports each piece to all that want it.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # By task, the arrays that it needs; by array, how many tasks need it.
        self._arrays: dict[Key, tuple[str, ...]] = {}
        self._tasks: Counter[str] = Counter()
        # The pieces and checks of each array that are kept.
        self._kept: dict[str, set[Key]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._arrays

    def __iter__(self) -> Iterator[Key]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def hold(self, key: Key, states: Iterable[ArrayState]) -> None:
        """Keep the pieces of some arrays until a task has ended."""
        alive = {state.spec.id: state.alive for state in states}
        if alive:
            self._arrays[key] = tuple(alive)
        for array, pieces in alive.items():
            self._tasks[array] += 1
            kept = self._kept.setdefault(array, set())
            # More than none after the first task if the array was extended meanwhile.
            more = [piece for piece in pieces - kept if piece in self._scheduler.tasks]
            if more:
                kept.update(more)
                self._scheduler.client_desires_keys(more, client=_name(array))

    def release(self, key: Key) -> None:
        """Keep nothing for a task any more, as it has ended."""
        for array in self._arrays.pop(key, ()):
            self._tasks[array] -= 1
            if not self._tasks[array]:
                # A transition must not start another one.
                self._scheduler.loop.add_callback(self._let_go, array)

    def _let_go(self, array: str) -> None:
        if self._tasks[array]:
            return  # another task needs it by now, or the same one runs again
        self._tasks.pop(array, None)
        self._kept.pop(array, None)
        if client := self._scheduler.clients.get(_name(array)):
            keys = [ts.key for ts in client.wants_what]
            self._scheduler.client_releases_keys(keys=keys, client=client.client_key)
            self._scheduler.clients.pop(client.client_key, None)

    def pieces(self) -> set[TaskState]:
        """Return all pieces and checks that are kept."""
        needed = [_name(array) for array, tasks in self._tasks.items() if tasks]
        clients = (self._scheduler.clients.get(name) for name in needed)
        return {ts for client in clients if client for ts in client.wants_what}

    def clear(self) -> None:
        """Keep nothing, because the scheduler has forgotten all tasks."""
        for array in self._kept:
            self._scheduler.clients.pop(_name(array), None)
        self._arrays.clear()
        self._tasks.clear()
        self._kept.clear()


def _name(array: str) -> str:
    """Return the name of the client that wants the pieces of an array."""
    return f"coded-holds-{array}"
