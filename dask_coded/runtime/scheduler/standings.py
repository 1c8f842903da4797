"""Which workers are there, as the scheduler sees it: the clock and the questions of one machine.

The scheduler knows of a worker's silence from three sources: the worker owes an answer, it has sent
no heartbeat for some intervals, or another worker reports it. A heartbeat or an answer ends that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING

from dask_coded.compat import heartbeat_interval
from dask_coded.config import timeouts
from dask_coded.membership import Ask, Changed, Membership

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


class Standings:
    """Drives the :class:`~dask_coded.membership.Membership` of the workers that have the plugin.

    Parameters
    ----------
    scheduler : Scheduler
    changed : callable(Changed)
        Called with each change of a worker's standing.

    Attributes
    ----------
    membership : Membership
    suspects : set of str
        The workers that are suspect now; the same object for ever.
    clock : callable() -> float
        Seconds that never go back. Tests turn it by hand.
    """

    def __init__(self, scheduler: Scheduler, changed: Callable[[Changed], None]) -> None:
        self.membership = Membership(timeouts())
        self.suspects = self.membership.suspects
        self.clock: Callable[[], float] = monotonic
        self._scheduler = scheduler
        self._changed = changed

    def joined(self, worker: str) -> None:
        """Record that a worker has the plugin."""
        self._changed(self.membership.opened(worker, self.clock()))

    def left(self, worker: str) -> None:
        """Forget a worker that has left."""
        self.membership.forget(worker)

    def heard(self, worker: str, answers: bool = False) -> None:
        """Record a heartbeat of a worker, or that it ``answers``."""
        self._report(self.membership.heard(worker, self.clock(), answers))

    def suspect(self, workers: Iterable[str]) -> None:
        """Take workers that have left another one waiting for suspect, until they are heard."""
        for worker in workers:
            self._report(self.membership.suspect(worker))

    def expect_heartbeats(self) -> None:
        """Take workers whose heartbeats have ceased for suspect."""
        seconds = self.membership.timeouts.beats(heartbeat_interval(len(self._scheduler.workers)))
        self._report(self.membership.unheard(seconds, self.clock()))

    def look(self, watched: Mapping[str, float]) -> None:
        """Ask workers whether they run, if they have said nothing for so many seconds."""
        commands = self.membership.react(self.clock(), watched)
        for command in commands:
            if isinstance(command, Ask) and command.peer in self._scheduler.stream_comms:
                self._scheduler.worker_send(command.peer, {"op": "coded-ping"})
        self._report(c for c in commands if isinstance(c, Changed))

    def _report(self, changes: Iterable[Changed]) -> None:
        for change in changes:
            self._changed(change)
