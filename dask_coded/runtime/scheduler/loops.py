"""Which workers keep the states of the loops that run in the cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from dask.typing import Key
from distributed.metrics import time

from dask_coded.compat import drop_topics
from dask_coded.loop import TOPIC

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

    def keepers(
        self,
        key: Key,
        run: int,
        worker: str,
        copies: int,
        avoid: Collection[str] = (),
    ) -> tuple[list[str], list[str]]:
        """Handler: choose the workers that keep the state of a loop that runs on ``worker``.

        Workers in ``avoid`` do not answer the loop's worker. The second list that is returned names
        earlier keepers, which may have the latest state as long as no other has one.
        """
        ts = self._scheduler.tasks.get(key)
        if ts is None or ts.run_id != run:
            # It was cancelled, and no keeper would hear of its end; or another worker runs it,
            # whose keepers must stay.
            return [], []
        told = self._keepers.get(key, [])
        present = [
            address
            for address in self._able
            if address in self._scheduler.workers and address not in avoid
        ]
        known = [address for address in told if address in present]
        chosen = choose_keepers(known, self._best(present), worker, copies)
        # The present keepers first, because they have the latest state. Earlier ones may still
        # hold an old one, so they hear of the end, too.
        earlier = [a for a in told if a not in chosen and a in self._scheduler.workers]
        self._keepers[key] = chosen + earlier
        return chosen, earlier

    def keeps(self, key: Key) -> bool:
        """Whether workers have been named to keep the state of a loop."""
        return bool(self._keepers.get(key))

    def keeping(self) -> set[str]:
        """Return the workers that keep the state of any loop, or may hold an old one."""
        return {address for keepers in self._keepers.values() for address in keepers}

    def forget(self, key: Key) -> None:
        """Have the keepers drop the state of a loop that has ended."""
        for address in self._keepers.pop(key, ()):
            if address in self._scheduler.stream_comms:
                run = self._scheduler.tasks[key].run_id
                self._scheduler.worker_send(address, {"op": "coded-forget", "key": key, "run": run})

    def left(self, topic: str, client: str) -> None:
        """Handler: a client listens no more to the reports of a loop; it hears when none comes."""
        self._scheduler.unsubscribe_topic(topic=topic, client=client)
        # Also those of clients that are gone, and of loops that have gone on for a while.
        drop_topics(self._scheduler, TOPIC)
        event = {"op": "event", "topic": topic, "event": (time(), None)}
        self._scheduler.client_send(client, event)

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
