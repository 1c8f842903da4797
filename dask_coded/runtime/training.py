"""The leader of a training: forms the group, holds the root's machine, sees to it that it ends.

It runs in a task. Parameters it has none: every worker of the group is a replica. What it keeps of
its own, through a :class:`~dask_coded.loop.Loop`, is the recent history; when it is lost with its
worker, another leader asks all workers how far they are, and goes on with the most advanced.

A worker whose channel closes is lost. If the code can do without, the steps in flight are ended by
the others first; then there is a new group, without the lost and with whoever has come meanwhile. A
worker that is only slow, or stopped, is left alone: it finds the sums when it looks.
"""

from __future__ import annotations

import math
import pickle
import uuid
from collections import deque
from concurrent.futures import CancelledError
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from dask.typing import Key
from distributed import get_worker
from distributed.utils import sync
from distributed.worker import thread_state

from dask_coded.loop import Loop, Progress
from dask_coded.runtime.channels import Channel, Message
from dask_coded.runtime.formation import check_memory, form
from dask_coded.runtime.play import ANSWER, Lost, Play, check_folder
from dask_coded.runtime.training_spec import Group, Outcome, Step, Training
from dask_coded.runtime.worker import CodedWorkerPlugin, worker_plugin

# Of so many steps all is known if the leader is lost; of those before, the loss.
_RECENT = 1000


def lead(training: Training, loop: Loop) -> Outcome:
    """Task: lead a training to its end."""
    return Leader(worker_plugin(get_worker()), training, thread_state.key, loop).run()


class Leader:
    """Leads one training, from the thread of its task."""

    def __init__(
        self, plugin: CodedWorkerPlugin, training: Training, task: Key, loop: Loop
    ) -> None:
        self._plugin = plugin
        self._training = training
        self._task = task
        self._loop = loop
        self._events: SimpleQueue[Message] = SimpleQueue()
        self._history: dict[int, Step] = {}
        #: What of it other workers keep: a long one would take longer and longer to hand over.
        self._recent: deque[Step] = deque(maxlen=_RECENT)
        self._channels: dict[str, Channel] = {}
        self._run = ""
        #: Lost just now: the scheduler may not know it yet.
        self._lost: set[str] = set()
        #: Whether the client has seen enough.
        self.enough = False

    def run(self) -> Outcome:
        if self._training.checkpoint is not None:
            check_folder(self._training.checkpoint[0], self._plugin.worker.address)
        self._plugin.memberships.leaders[self._task] = self._events.put
        for step in self._loop.resume(list(self._recent)):
            self._remember(step)
        try:
            while True:
                group = self._form()
                try:
                    return Play(self, group).run()
                except Lost:
                    continue
        finally:
            del self._plugin.memberships.leaders[self._task]
            sync(self._plugin.worker.loop, self._leave)

    # -- what a group uses ---------------------------------------------------------------------

    def next_event(self, timeout: float | None = None) -> Message | None:
        """The next message of a group, or None after ``timeout`` seconds.

        Raises
        ------
        CancelledError
            If the training is cancelled.
        """
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            return None
        if event["op"] == "cancelled":
            raise CancelledError(f"{self._task!r} was cancelled")
        self.enough |= event["op"] == "enough"
        return event

    def send(self, messages: list[tuple[str, Message]]) -> None:
        """Send messages to workers of the group, without expecting answers."""
        self._plugin.worker.loop.add_callback(self._post, messages)

    def _post(self, messages: list[tuple[str, Message]]) -> None:
        for address, message in messages:
            if channel := self._channels.get(address):
                channel.post(message)

    def give_up(self, address: str) -> None:
        """Break with a worker that has been stopped for too long."""
        if channel := self._channels.get(address):
            self._plugin.worker.loop.add_callback(channel.abort)

    def ended(self, step: Step, norm: float) -> None:
        """A step has ended."""
        self._remember(step)
        workers = len(step.computing) or None
        loss = None if math.isnan(step.loss) else step.loss
        progress = Progress(step.step + 1, norm, loss, step.seconds, workers)
        last = step.step + 1 == self._training.steps
        self._loop.report(progress, list(self._recent), last)

    def _remember(self, step: Step) -> None:
        self._history[step.step] = step
        self._recent.append(step)

    def fetch(self, address: str) -> bytes:
        """The pickled state of a replica that does not change any more."""

        async def ask() -> Any:
            return await self._plugin.worker.rpc(address).coded_trained(training=self._training.id)

        packed: bytes = sync(self._plugin.worker.loop, ask)["state"]
        return packed

    def history(self, losses: list[float]) -> list[Step]:
        """What was seen of each step, and where nobody saw it its loss."""
        known = self._history
        return [known.get(i) or Step(i, loss) for i, loss in enumerate(losses)]

    # -- forming a group -----------------------------------------------------------------------

    def _form(self) -> Group:
        training = self._training
        while True:
            candidates = sync(self._plugin.worker.loop, self._invite)
            found = self._enlisted(candidates)
            workers = [address for address in candidates if address in found]
            plan, addresses = form(training.aggregation, workers)
            if training.remembers:
                check_memory(plan)
            version = training.first
            sources: tuple[str, ...] = ()
            if states := [state for state in found.values() if state is not None]:
                best = max(states)
                if best[0] > version:
                    version, sources = best[0], tuple(a for a in found if found[a] == best)
            group = Group(self._run, training, plan, addresses, version, sources, plan.choose())
            sync(self._plugin.worker.loop, self._call, group)
            if self._all_joined(addresses):
                self._lost.clear()
                return group

    def lose(self, address: str) -> None:
        """A worker is gone: it is not asked again at once."""
        self._lost.add(address)

    async def _invite(self) -> list[str]:
        """Ask all workers how far they are; the leader's own comes first."""
        plugin, own = self._plugin, self._plugin.worker.address
        answer = await plugin.worker.scheduler.coded_candidates(
            key=self._task, worker=own, allowed=self._training.workers
        )
        workers: list[str] = sorted(answer["workers"], key=lambda address: address != own)
        workers = [address for address in workers if address not in self._lost]
        await self._leave()
        self._run = run = uuid.uuid4().hex
        for address in workers:
            channel = self._channels[address] = plugin.channel(address)
            channel.listen(run, partial(self._heard, address, run))
            channel.send({"op": "enlist", "run": run, "training": self._training.id})
        return workers

    def _heard(self, address: str, run: str, message: Message) -> None:
        self._events.put({**message, "run": run, "from": address})

    async def _leave(self) -> None:
        """Hear no more of the group before."""
        for channel in self._channels.values():
            channel.unlisten(self._run)
        self._channels = {}

    def _enlisted(self, candidates: list[str]) -> dict[str, tuple[int, str] | None]:
        """Who answers, and after how many updates in which group they are."""
        waiting, found = set(candidates), {}
        deadline = monotonic() + ANSWER
        while waiting and (event := self.next_event(max(deadline - monotonic(), 0))):
            if event.get("run") != self._run:
                continue
            if event["op"] == "enlisted":
                found[event["from"]] = event["state"] and tuple(event["state"])
            if event["op"] in ("enlisted", "closed"):
                waiting.discard(event["from"])
        return found

    async def _call(self, group: Group) -> None:
        # What is cancelled before the scheduler has been asked for workers, these never hear of.
        if self._plugin.is_cancelled(self._task):
            raise CancelledError(f"{self._task!r} was cancelled")
        for node, address in enumerate(group.addresses):
            message = {"op": "join", "run": group.run, "task": self._task}
            self._channels[address].send({**message, "node": node, "payload": group})

    def _all_joined(self, addresses: tuple[str, ...]) -> bool:
        """Wait until all are ready; False if one is gone, or does not answer at all."""
        silent = set(addresses)
        coming = set(silent)
        deadline = monotonic() + ANSWER
        while coming:
            event = self.next_event(max(deadline - monotonic(), 0) if silent else None)
            if event is None:
                return False
            if event["run"] != self._run:
                continue
            if event["op"] == "failed":
                raise pickle.loads(event["error"])
            if event["op"] == "closed" and event["from"] in addresses:
                self.lose(event["from"])
                return False
            if event["op"] == "unreachable":
                self.lose(event["worker"])
                return False
            if event["op"] in ("joining", "joined"):
                silent.discard(event["from"])
            if event["op"] == "joined":
                coming.discard(event["from"])
        return True
