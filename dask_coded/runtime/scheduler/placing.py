"""Where coordinators may run: on workers that are not known to be slow.

A coordinator is restricted to these workers whenever Dask is about to choose one. The restrictions
are strict, because work stealing ignores loose ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from dask.typing import Key
from distributed.comm import get_address_host

from dask_coded.rounds.placement import not_slow
from dask_coded.typing import Floats

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

# No worker has this address.
_NOWHERE = "nowhere"


@dataclass
class Limits:
    """Where a task may run, apart from speeds."""

    #: The restrictions that its user gave.
    workers: set[str] | None
    hosts: set[str] | None
    #: Whether it must not run on a slow worker; otherwise not on a silent one.
    coordinates: bool = True
    #: The worker that it was taken from last.
    avoid: str = ""
    #: Whether its user lets it run elsewhere. Work stealing would ignore our restrictions, too.
    loose: bool = False


class Placing:
    """Restricts tasks that coordinate to fast workers.

    Parameters
    ----------
    scheduler : Scheduler
    able : collection of str
        Addresses of workers that have the plugin; it changes as workers come and go.
    predict : callable(addresses) -> ndarray
        Predicted speeds; 0 for a silent worker.
    suspects : collection of str
        Workers that are silent: no task that is placed runs there. It changes, too.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        able: Collection[str],
        predict: Callable[[Sequence[str]], Floats],
        suspects: Collection[str],
    ) -> None:
        self._scheduler = scheduler
        self._able = able
        self._predict = predict
        self._suspects = suspects
        #: By silent worker, which results others wait for, and where: what needs them there waits
        #: as well. There may be thousands.
        self.waiting: defaultdict[str, defaultdict[Key, set[str]]] = defaultdict(
            lambda: defaultdict(set)
        )
        # Thousands of tasks keep the set that was theirs, so it is the same one as long as the same
        # workers are fast.
        self._fast = set[str]()
        self._known = False
        self._running = 0  # workers when that was found
        #: How long a small product takes on each worker, in seconds.
        self._products: dict[str, float] = {}

    def place(self, ts: TaskState, limits: Limits) -> None:
        """Restrict a task to the workers that are chosen for it, among those its user named."""
        chosen = self.choice(ts, limits)
        if not chosen and self.waiting:
            # No worker answers just now. It may be late anywhere, but would wait in some places.
            usable = self._usable(ts, {ws.address for ws in self._valid(ts, limits)})
            chosen = usable - {limits.avoid} or usable
        if not chosen and limits.coordinates and not (limits.workers or limits.hosts):
            # Other workers could not run it. `Supervisor.available` places it again.
            chosen = set(self._able) or {_NOWHERE}
        ts.worker_restrictions = chosen or limits.workers
        # The scheduler would allow the workers on these hosts in addition to those named.
        ts.host_restrictions = None if chosen else limits.hosts
        ts.loose_restrictions = limits.loose and not chosen

    def choice(self, ts: TaskState, limits: Limits) -> set[str]:
        """Return the workers that may run a task, except the worker that it was taken from.

        Tasks share this set, so it must not be changed.
        """
        if not limits.coordinates:
            found = self._allowed(ts, limits)
            if not found and limits.loose:
                found = self._usable(ts, self._answering(self._scheduler.running))
            return found - {limits.avoid}
        fast = self._usable(ts, self._fast_workers())
        if limits.avoid in fast:
            fast = fast - {limits.avoid}
        if limits.avoid:
            # All of a host may be cut off, and only workers of coordinators are watched.
            host = get_address_host(limits.avoid)
            fast = {address for address in fast if get_address_host(address) != host} or fast
        if fast and not (limits.workers or limits.hosts or ts.resource_restrictions):
            return fast
        allowed = self._allowed(ts, limits).intersection(self._able) - {limits.avoid}
        return (allowed & fast) or allowed

    def _allowed(self, ts: TaskState, limits: Limits) -> set[str]:
        """Return the workers that may run a task by its user's limits, and are not silent."""
        return self._usable(ts, self._answering(self._valid(ts, limits)))

    def _valid(self, ts: TaskState, limits: Limits) -> set[WorkerState]:
        before = ts.worker_restrictions, ts.host_restrictions
        ts.worker_restrictions, ts.host_restrictions = limits.workers, limits.hosts
        try:
            valid = self._scheduler.valid_workers(ts)
        finally:  # the task may stay where it is
            ts.worker_restrictions, ts.host_restrictions = before
        return self._scheduler.running if valid is None else valid

    def _usable(self, ts: TaskState, found: set[str]) -> set[str]:
        """Return those of some workers where a task does not wait for a silent one.

        Where it can be chosen, they have what silent workers have, too, which Dask may ask.
        """
        keys = {ts.key, *(dts.key for dts in ts.dependencies)}
        for waiting in self.waiting.values():
            for key in keys & waiting.keys():
                found = found - waiting[key]
        for needed in ts.dependencies:
            holders = {ws.address for ws in needed.who_has or ()}
            if not holders.isdisjoint(self._suspects):
                found = (found & holders) or found
        return found

    def _answering(self, workers: Iterable[WorkerState]) -> set[str]:
        return {ws.address for ws in workers}.difference(self._suspects)

    def _fast_workers(self) -> set[str]:
        # The scheduler moves the tasks of a worker that has left before it tells its plugins.
        if not self._known or len(self._scheduler.running) != self._running:
            self._running = len(self._scheduler.running)
            addresses = list(self._answering(self._scheduler.running).intersection(self._able))
            running = [self._scheduler.workers[address] for address in addresses]
            mask = not_slow(
                self._predict(addresses),
                np.array([ws.metrics.get("event_loop_interval", np.nan) for ws in running]),
                np.array([self._products.get(address, np.nan) for address in addresses]),
            )
            found = {address for address, fast in zip(addresses, mask, strict=True) if fast}
            if found != self._fast:
                self._fast = found
            self._known = True
        return self._fast

    def changed(self) -> None:
        """Forget which workers are fast, because something about a worker has changed."""
        self._known = False

    def measured(self, address: str, seconds: float) -> None:
        """Record how long a small product takes on a worker."""
        self.changed()
        self._products[address] = seconds

    def forget(self, key: Key) -> None:
        """Forget a result, because no task can wait for it any more."""
        for waiting in self.waiting.values():
            waiting.pop(key, None)

    def remove_worker(self, address: str) -> None:
        """Forget a worker that has left."""
        self.changed()
        self.waiting.pop(address, None)
        self._products.pop(address, None)
