"""Which workers know of a loop that runs in the cluster: they are told when it is over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from dask_coded.runtime.checkpoints import keepers

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


class LoopDirectory:
    """Who keeps the state of a loop, and who takes part in a training.

    Parameters
    ----------
    scheduler : Scheduler
    able : collection of str
        Addresses of workers that have the plugin, as they come and go.
    best : callable(addresses) -> addresses
        Puts the fastest first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        able: Collection[str],
        best: Callable[[Sequence[str]], list[str]],
    ) -> None:
        self._scheduler = scheduler
        self._able = able
        self._best = best
        #: By the key of the loop's task.
        self._told: dict[Key, list[str]] = {}

    def keepers(self, key: Key, worker: str, copies: int) -> list[str]:
        """Handler: which workers keep, or are to keep, the state of a loop that runs on one."""
        there = [address for address in self._able if address in self._scheduler.workers]
        known = [address for address in self._told.get(key, ()) if address in there]
        chosen = keepers(known, self._best(there), worker, copies)
        self._told[key] = [*known, *(address for address in chosen if address not in known)]
        return chosen

    def candidates(
        self, key: Key, worker: str, allowed: Sequence[str] | None
    ) -> dict[str, list[str]]:
        """Handler: who can take part in the training that a task on a worker leads."""
        there = [
            ws.address
            for ws in self._scheduler.running
            if ws.address in self._able and (allowed is None or ws.address in allowed)
        ]
        if key in self._scheduler.tasks:  # else it was cancelled just now
            told = self._told.setdefault(key, [])
            told += [address for address in (*there, worker) if address not in told]
        return {"workers": self._best(there)}

    def enough(self, training: str) -> None:
        """Handler: a client has seen enough of a training; whoever takes part tells its leader."""
        self._tell(self._able, {"op": "coded-enough", "training": training})

    def forget(self, key: Key) -> None:
        """A loop is over: what is kept of it is of no use any more."""
        self._tell(self._told.pop(key, ()), {"op": "coded-forget", "key": key})

    def clear(self) -> None:
        """All loops are gone."""
        self._told.clear()

    def _tell(self, workers: Collection[str], message: dict[str, Any]) -> None:
        for address in workers:
            if address in self._scheduler.stream_comms:
                self._scheduler.worker_send(address, message)
