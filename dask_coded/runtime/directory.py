"""Which workers keep the states of the loops that run in the cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


class LoopDirectory:
    """Names the keepers of each loop, and tells them when the loop has ended.

    Parameters
    ----------
    scheduler : Scheduler
    able : collection of str
        Addresses of workers that have the plugin; it changes as workers come and go.
    best : callable(addresses) -> addresses
        Sorts the fastest first.
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
        self._keepers: dict[Key, list[str]] = {}

    def keepers(self, key: Key, worker: str, copies: int) -> list[str]:
        """Handler: name the workers that are to keep the state of a loop on ``worker``."""
        present = [address for address in self._able if address in self._scheduler.workers]
        known = [address for address in self._keepers.get(key, ()) if address in present]
        chosen = choose_keepers(known, self._best(present), worker, copies)
        self._keepers[key] = [*known, *(address for address in chosen if address not in known)]
        return chosen

    def forget(self, key: Key) -> None:
        """Have the keepers drop the state of a loop that has ended."""
        for address in self._keepers.pop(key, ()):
            if address in self._scheduler.stream_comms:
                self._scheduler.worker_send(address, {"op": "coded-forget", "key": key})

    def clear(self) -> None:
        """Forget all loops."""
        self._keepers.clear()


def choose_keepers(
    known: Sequence[str], candidates: Sequence[str], worker: str, copies: int
) -> list[str]:
    """Choose the keepers of a loop: those that keep its state already, then the best others.

    Parameters
    ----------
    known, candidates : sequence of str
        Addresses of the keepers so far that are alive, and of all workers, the best first.
    worker : str
        Where the loop runs; not chosen, because its copy would be lost together with the loop.
    copies : int

    Examples
    --------
    >>> choose_keepers(["b"], ["a", "b", "c", "d"], worker="a", copies=2)
    ['b', 'c']
    """
    chosen = [address for address in known if address != worker]
    chosen += [a for a in candidates if a != worker and a not in chosen]
    return chosen[:copies]
