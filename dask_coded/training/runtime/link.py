"""A leader's link to the workers of its training: what it sends them, and what they answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple

from distributed.protocol.pickle import dumps
from distributed.utils import sync

from dask_coded.compat import WORKER_ANY_RUNNING
from dask_coded.config import timeouts
from dask_coded.training.runtime.memberships import (
    Available,
    Cancelled,
    Silent,
    StopRequested,
    TrainingWorkerPlugin,
)
from dask_coded.training.runtime.messages import Enlist, Enlisted, Join
from dask_coded.training.runtime.spec import Group, Training
from dask_coded.transport import Channel
from dask_coded.transport.attempts import RunOverError
from dask_coded.transport.messages import Attempt, EndRun, Message


class Event(NamedTuple):
    """A message that the leader has received, and the address of its sender."""

    sender: str
    message: Message


class Link:
    """Carries messages between the thread of a leader and the workers, by run.

    Parameters
    ----------
    plugin : TrainingWorkerPlugin
        Of the leader's worker.
    training : Training
    attempt : Attempt
        The run of the leader's task.

    Attributes
    ----------
    run_id : str
        Of the present group.
    enough : bool
        Whether the client wants the training to end soon.
    available : set of str
        Workers that have become available, or have answered, since the present group was begun.
    """

    def __init__(self, plugin: TrainingWorkerPlugin, training: Training, attempt: Attempt) -> None:
        self.run_id = ""
        self.enough = False
        self.available: set[str] = set()
        self._plugin = plugin
        self._loop = plugin.worker.loop
        self._training = training
        self._attempt = attempt
        self._task = attempt[0]
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._channels: dict[str, Channel] = {}
        # Workers lost just now, which the scheduler may still list.
        self._lost: set[str] = set()

    @property
    def address(self) -> str:
        """Of the leader's worker."""
        return self._plugin.exchange.address

    def __enter__(self) -> Link:
        self._plugin.leaders[self._attempt] = partial(self._hear, self.address)
        return self

    def __exit__(self, *exc_info: object) -> None:
        del self._plugin.leaders[self._attempt]
        sync(self._loop, self._leave)

    # -- events --------------------------------------------------------------------------------

    def next_event(self, timeout: float | None = None) -> Event | None:
        """Return the next message of the present group, or None after ``timeout`` seconds.

        Messages about the workers of the cluster are of all groups.

        Raises
        ------
        RunOverError
            If the training is cancelled, or another worker has taken over its leader.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            left = None if deadline is None else max(deadline - monotonic(), 0.0)
            try:
                event = self._events.get(timeout=left)
            except Empty:
                return None
            match event.message:
                case Cancelled() | EndRun():
                    raise RunOverError(self._task)
                case StopRequested(_, training):
                    if training != self._training.id:
                        continue
                    self.enough = True
                case Available(_, address):
                    self.available.add(address)
                case Enlisted(run_id) if run_id == self.run_id:
                    self.available.add(event.sender)
                case Silent(_, address):
                    self.available.discard(address)
            if event.message.run_id in (self.run_id, self._task):
                return event

    def _hear(self, address: str, message: Message) -> None:
        self._events.put(Event(address, message))

    # -- messages ------------------------------------------------------------------------------

    def send(self, messages: Iterable[tuple[str, Message]]) -> None:
        """Send messages to workers of the group, without expecting answers."""
        self._loop.add_callback(self._post, list(messages))

    def _post(self, messages: list[tuple[str, Message]]) -> None:
        for address, message in messages:
            if channel := self._channels.get(address):
                channel.post(message)

    def give_up(self, address: str) -> None:
        """Break the channel to a worker that has been stopped for too long."""
        if channel := self._channels.get(address):
            self._loop.add_callback(channel.abort)

    def lose(self, address: str) -> None:
        """Record that a worker is gone, so that the next group is formed without it."""
        self._lost.add(address)

    def confirm(self) -> None:
        """Ask the scheduler whether this run of the leader is still the present one.

        What a leader does outside of the cluster no worker can refuse, so it asks before.

        Raises
        ------
        RunOverError
            If the training is cancelled, or another worker has taken over its leader.
        TimeoutError
            If the leader's worker has closed.
        """

        async def ask() -> bool:
            key, run = self._attempt
            async with asyncio.timeout(2 * timeouts().answer):
                leads: bool = await self._plugin.worker.scheduler.coded_leads(key=key, run=run)
            return leads

        while True:
            try:
                # The event loop ends with the worker, which must not keep this thread.
                leads = sync(self._loop, ask, callback_timeout=3 * timeouts().answer)
            except TimeoutError:
                if self._plugin.worker.status in WORKER_ANY_RUNNING:
                    continue  # the scheduler is busy: ask again, because only it knows
                raise
            if not leads:
                raise RunOverError(self._task)
            return

    # -- groups --------------------------------------------------------------------------------

    def invite(self, step: int) -> list[str]:
        """Start a new run and ask all workers how far along they are.

        Parameters
        ----------
        step : int
            How many steps have ended, as far as is known.

        Returns
        -------
        list of str
            Their addresses: the leader's own first, then the fastest.
        """
        # Before the scheduler is asked: whoever becomes available later is not among its answer.
        self.available.clear()
        workers: list[str] = sync(self._loop, self._invite, step)
        return workers

    async def _invite(self, step: int) -> list[str]:
        plugin, own = self._plugin, self.address
        candidates: Sequence[str] = await plugin.worker.scheduler.coded_candidates(
            key=self._task, worker=own, allowed=self._training.workers, round=step
        )
        # If a task is cancelled before the scheduler names its workers, they never learn of that.
        plugin.exchange.check(self._attempt)
        workers = [address for address in candidates if address not in self._lost]
        workers.sort(key=lambda address: address != own)
        await self._leave()
        self.run_id = uuid.uuid4().hex
        self._enlist(workers)
        return workers

    def _enlist(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            channel = self._channels[address] = self._plugin.exchange.channel(address)
            channel.listen(self.run_id, partial(self._hear, address))
            channel.send(Enlist(self.run_id, self._training.id, self._attempt))

    def call(self, group: Group) -> None:
        """Tell the workers of a group that they are in it.

        Raises
        ------
        RunOverError
            If the training is cancelled, or another worker has taken over its leader.
        """
        # Once for all workers, and in this thread: a large model would hold up the event loop.
        sync(self._loop, self._call, group, dumps(group))

    def ask_lost(self) -> None:
        """Ask the workers that were lost once more.

        Perhaps only a connection has broken. Then the worker answers, and can be in the next group.
        """
        lost, self._lost = self._lost, set()
        self._loop.add_callback(self._enlist, lost)

    async def _call(self, group: Group, packed: bytes) -> None:
        self._plugin.exchange.check(self._attempt)
        for node, address in enumerate(group.addresses):
            join = Join(group.run_id, self._task, node, group.training.id, packed, self._attempt)
            self._channels[address].send(join)

    async def _leave(self) -> None:
        """Stop listening to the previous group."""
        for channel in self._channels.values():
            channel.unlisten(self.run_id)
        self._channels = {}
