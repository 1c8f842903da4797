"""Tasks that a client waits for before it goes on, and what is done if their worker is silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from dask.typing import Key

from dask_coded.membership import Membership
from dask_coded.runtime.scheduler import stuck
from dask_coded.runtime.spec import as_key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

# A worker may be silent for this many times as long as a task of its usually takes, because the
# task may hold up the event loop.
_DURATIONS = 2


class Awaited:
    """Tasks that clients wait for.

    Parameters
    ----------
    scheduler : Scheduler
    membership : Membership
        Of the workers. That of a task may be silent for its timeout, at least. After each time that
        something was done about a task, twice as long.
    """

    def __init__(self, scheduler: Scheduler, membership: Membership) -> None:
        self._scheduler = scheduler
        self._membership = membership
        self._keys: set[Key] = set()
        self._times: Counter[Key] = Counter()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, keys: Collection[Key]) -> None:
        """Add tasks that a client waits for from now on. Very many are ignored."""
        if len(keys) <= stuck.MANY:
            self._keys.update(map(as_key, keys))

    def clear(self) -> None:
        """Forget all tasks."""
        self._keys.clear()
        self._times.clear()

    def under_way(self) -> list[TaskState]:
        """Return the tasks that workers compute now because clients wait for them."""
        tasks = (self._scheduler.tasks.get(key) for key in self._keys)
        lacking = [
            ts for ts in tasks if ts and ts.who_wants and ts.state not in ("memory", "erred")
        ]
        if not lacking:
            # Not one by one: while others are computed, a result may be lost again.
            self.clear()
        return stuck.under_way(lacking)

    def give_up(self, ts: TaskState, address: str) -> bool:
        """Whether to wait no more for a silent worker; counts if so."""
        usual = _DURATIONS * max(ts.prefix.duration_average, 0.0)
        patience = max(self._membership.timeouts.silence, usual) * 2 ** self._times[ts.key]
        late = self._membership.owes(address, patience)
        self._times[ts.key] += late
        return late

    def give_up_here(self, ts: TaskState, address: str, silent: Collection[str]) -> bool:
        """As :meth:`give_up`, for a task on the silent worker itself: if it can run elsewhere."""
        running, valid = self._scheduler.running, self._scheduler.valid_workers(ts)
        able = running if valid is None or ts.loose_restrictions else valid & running
        others = (ws for ws in able if ws is not ts.processing_on)
        return any(ws.address not in silent for ws in others) and self.give_up(ts, address)
