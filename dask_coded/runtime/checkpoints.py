"""Loops that outlive their worker: after a round the state goes to a few other workers.

They keep it in memory until the task is done with. A round sends its operand to every worker
anyway, so that a state of a few vectors costs little more. Which workers keep it, the scheduler
knows: it is asked when a loop begins, and names those that kept the state before, if any did.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from time import monotonic
from typing import Any

from dask.typing import Key
from distributed import get_worker
from distributed.utils import sync

from dask_coded.loop import Loop, Progress, State
from dask_coded.runtime.worker import CodedWorkerPlugin

# A state is kept if pickling it and handing it over took at most this share of the loop's time.
_SHARE = 0.05

# Seconds in which a keeper that runs is heard of.
_ANSWER = 2.0


class KeptLoop(Loop):
    """The loop of a task in the cluster.

    Parameters
    ----------
    plugin : CodedWorkerPlugin
        Of the worker that the task runs on.
    key : Key
        Of the task.
    copies : int
        On how many other workers to keep the state.
    topic : str or None
        Event topic under which the client hears of rounds.
    interval : float
        Seconds between two reports to it, at least.
    """

    def __init__(
        self,
        plugin: CodedWorkerPlugin,
        key: Key,
        copies: int,
        topic: str | None = None,
        interval: float = 0.1,
    ) -> None:
        self._plugin = plugin
        self._key = key
        self._copies = copies
        self._topic = topic
        self._interval = interval
        self._keepers: list[str] = []
        self._told = self._kept = float("-inf")
        self._cost = 0.0

    def resume(self, state: State) -> State:
        found = sync(self._plugin.worker.loop, self._resume)
        return state if found is None else pickle.loads(found)

    async def _resume(self) -> bytes | None:
        await self._find_keepers()
        worker = self._plugin.worker
        own = self._plugin.kept.get(self._key)
        asked = [
            asyncio.create_task(worker.rpc(address).coded_kept(key=self._key))
            for address in self._keepers
        ]
        # A keeper may have died or been stopped just now: then the others have to do.
        done, silent = await asyncio.wait(asked, timeout=_ANSWER) if asked else (set(), set())
        for task in silent:
            task.cancel()
        found = [own, *(task.result() for task in done if task.exception() is None)]
        states = [entry for entry in found if entry is not None]
        return max(states, key=lambda entry: entry[0])[1] if states else None

    async def _find_keepers(self) -> None:
        self._keepers = await self._plugin.worker.scheduler.coded_keepers(
            key=self._key, worker=self._plugin.worker.address, copies=self._copies
        )

    def report(self, progress: Progress, state: Any = None, last: bool = False) -> None:
        now = monotonic()
        if self._topic and (last or now >= self._told + self._interval):
            self._told = now
            get_worker().log_event(self._topic, vars(progress))
        if state is not None and not last and now >= self._kept + self._cost / _SHARE:
            kept = pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
            sync(self._plugin.worker.loop, self._keep, progress.round, kept)
            self._kept = monotonic()
            self._cost = self._kept - now

    async def _keep(self, round: int, state: bytes) -> None:
        channels = [self._plugin.channel(address) for address in self._keepers]
        if any(channel.closed for channel in channels) or not channels:
            await self._find_keepers()
            channels = [self._plugin.channel(address) for address in self._keepers]
        for channel in channels:
            channel.send({"op": "keep", "run": self._key, "round": round, "state": state})


def keepers(known: Sequence[str], candidates: Sequence[str], worker: str, copies: int) -> list[str]:
    """Who keeps the state of a loop: those that do already, then the best of the others.

    Parameters
    ----------
    known, candidates : sequence of str
        Addresses: who kept it so far and is alive, and all others, the best first.
    worker : str
        Where the loop runs: it would be lost together with what it keeps.
    copies : int

    Examples
    --------
    >>> keepers(["b"], ["a", "b", "c", "d"], worker="a", copies=2)
    ['b', 'c']
    """
    chosen = [address for address in known if address != worker]
    chosen += [a for a in candidates if a != worker and a not in chosen]
    return chosen[:copies]
