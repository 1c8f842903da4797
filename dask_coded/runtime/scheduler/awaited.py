"""What clients wait for before they go on: no silent worker is to hold it up."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from dask.typing import Key

from dask_coded.runtime.scheduler import stuck
from dask_coded.runtime.spec import PieceTask, as_key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState


class Awaited:
    """The tasks that each client waits for.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # Each key with whether its task has been there: the graph of a client may come later.
        self._keys: dict[str, dict[Key, bool]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def add(self, keys: Collection[Key], client: str) -> None:
        """Learn that a client waits for tasks, unless they are many."""
        if len(keys) <= stuck.MANY:
            self._keys.setdefault(client, {}).update(dict.fromkeys(map(as_key, keys), False))

    def clear(self) -> None:
        """Forget all clients."""
        self._keys.clear()

    def under_way(self) -> list[TaskState]:
        """Return the tasks that workers compute now because clients wait for them.

        Many tasks of one client hide none of another one.
        """
        found: dict[TaskState, None] = {}
        for client in list(self._keys):
            if lacking := self._lacking(client):
                found |= dict.fromkeys(stuck.under_way(lacking))
            else:
                del self._keys[client]
        # Pieces have homes.
        return [ts for ts in found if not isinstance(ts.run_spec, PieceTask)]

    def _lacking(self, client: str) -> list[TaskState]:
        """Return what a client waits for that has no result, and drop what it wants no more.

        Not what has one: while others are computed, it may be lost again.
        """
        keys, lacking = self._keys[client], []
        for key, seen in list(keys.items()):
            ts = self._scheduler.tasks.get(key)
            if ts is None:
                if seen:
                    del keys[key]
            elif ts.state == "erred" or not _wants(client, ts):
                del keys[key]
            else:
                keys[key] = True
                if ts.state != "memory":
                    lacking.append(ts)
        return lacking


def _wants(client: str, ts: TaskState) -> bool:
    return any(wanting.client_key == client for wanting in ts.who_wants or ())
