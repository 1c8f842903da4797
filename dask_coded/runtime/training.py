"""The leader of a training: forms the group, holds the root's machine, sees to it that it ends.

It runs in a task. Parameters it has none: every worker of the group is a replica. What it keeps of
its own, through a :class:`~dask_coded.loop.Loop`, is the history; when it is lost with its worker,
another leader asks all workers how far they are, and goes on with the most advanced.

A worker whose channel closes is lost. If the code can do without, the steps in flight are ended by
the others first; then there is a new group, without the lost and with whoever has come meanwhile. A
worker that is only slow, or stopped, is left alone: it finds the sums when it looks.
"""

from __future__ import annotations

import math
import os
import pickle
import tempfile
import uuid
from collections import defaultdict
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import numpy as np
from dask.typing import Key
from distributed import get_worker
from distributed.utils import sync
from distributed.worker import thread_state

from dask_coded.aggregation import ROOT, Command, Finished, Machine, Send, Tag
from dask_coded.compression import Partial
from dask_coded.loop import Loop, Progress
from dask_coded.runtime.channels import Channel, Message
from dask_coded.runtime.formation import can_finish, check_memory, form
from dask_coded.runtime.trainer import hop_message
from dask_coded.runtime.training_spec import Group, Outcome, Step, Training
from dask_coded.runtime.worker import CodedWorkerPlugin, worker_plugin

# An event loop that runs answers within this many seconds; who does not is not taken in.
_ANSWER = 2.0
# As many steps may a ring be ahead of its leader's view of it.
_AHEAD = 10
# At the end, workers that are not done when the first is are waited for as long as a step took, and
# at least this long.
_LAST = 0.25


def lead(training: Training, loop: Loop) -> Outcome:
    """Task: lead a training to its end."""
    return _Leader(worker_plugin(get_worker()), training, thread_state.key, loop).run()


class _Lost(Exception):
    """A worker of the group is gone."""


class _Leader:
    def __init__(
        self, plugin: CodedWorkerPlugin, training: Training, task: Key, loop: Loop
    ) -> None:
        self._plugin = plugin
        self._training = training
        self._task = task
        self._loop = loop
        self._events: SimpleQueue[Message] = SimpleQueue()
        self._history: dict[int, Step] = {}
        self._channels: dict[str, Channel] = {}
        self._run = ""
        #: Lost just now: the scheduler may not know it yet.
        self._lost: set[str] = set()
        #: Whether the client has seen enough.
        self.enough = False

    def run(self) -> Outcome:
        self._plugin.memberships.leaders[self._task] = self._events.put
        self._history = self._loop.resume(self._history)
        try:
            while True:
                group = self._form()
                try:
                    return _Play(self, group).run()
                except _Lost:
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

    def ended(self, step: Step, norm: float) -> None:
        """A step has ended."""
        self._history[step.step] = step
        workers = len(step.computing) or None
        loss = None if math.isnan(step.loss) else step.loss
        progress = Progress(step.step + 1, norm, loss, step.seconds, workers)
        last = step.step + 1 == self._training.steps
        self._loop.report(progress, self._history, last)

    def fetch(self, address: str) -> dict[str, Any]:
        """The state of a replica that does not change any more."""

        async def ask() -> Any:
            return await self._plugin.worker.rpc(address).coded_trained(training=self._training.id)

        state: dict[str, Any] = pickle.loads(sync(self._plugin.worker.loop, ask)["state"])
        return state

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
            version, source = training.first, None
            for address, ahead in found.items():
                if ahead is not None and ahead > version:
                    version, source = ahead, address
            group = Group(self._run, training, plan, addresses, version, source, plan.choose())
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

    def _enlisted(self, candidates: list[str]) -> dict[str, int | None]:
        """Who answers, and how far they are."""
        waiting, found = set(candidates), {}
        deadline = monotonic() + _ANSWER
        while waiting and (event := self.next_event(max(deadline - monotonic(), 0))):
            if event.get("run") != self._run:
                continue
            if event["op"] == "enlisted":
                found[event["from"]] = event["version"]
            if event["op"] in ("enlisted", "closed"):
                waiting.discard(event["from"])
        return found

    async def _call(self, group: Group) -> None:
        for node, address in enumerate(group.addresses):
            message = {"op": "join", "run": group.run, "task": self._task}
            self._channels[address].send({**message, "node": node, "payload": group})

    def _all_joined(self, addresses: tuple[str, ...]) -> bool:
        """Wait until all are ready; False if one is gone, or does not answer at all."""
        silent = set(addresses)
        coming = set(silent)
        deadline = monotonic() + _ANSWER
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
            if event["op"] in ("joining", "joined"):
                silent.discard(event["from"])
            if event["op"] == "joined":
                coming.discard(event["from"])
        return True


class _Play:
    """One group at work."""

    def __init__(self, leader: _Leader, group: Group) -> None:
        self._leader = leader
        self._group = group
        self._plan = group.plan
        self._batches = group.training.batches(group.plan.parts)
        self._members = group.addresses
        self._absent: set[int] = set()
        self._leaving = False
        self._machines: dict[int, Machine] = {}
        self._segments: dict[int, dict[int, Partial]] = defaultdict(dict)
        self._choices = {group.version: group.choice}
        self._seen: dict[int, Step] = {}
        #: Steps of which the sum is there: all below the version, and these.
        self._version = group.version
        self._done: set[int] = set()
        self._ended = monotonic()
        self._digests: dict[str, str] = {}

    def run(self) -> Outcome:
        """Until the training is done.

        Raises
        ------
        _Lost
            If it takes another group.
        """
        self._tell({"op": "begin", "run": self._group.run})
        if self._leader.enough:
            self._halt()
        while True:
            event = self._leader.next_event()
            assert event is not None
            if event["run"] != self._group.run:
                continue
            if event["op"] == "finished":
                return self._outcome(event)
            self._react(event)

    def _tell(self, message: Message) -> None:
        self._leader.send([(address, message) for address in self._members])

    def _react(self, event: Message) -> None:
        op = event["op"]
        if op == "hop":
            self._received(event)
        elif op == "computed":
            self._computed(event["step"], event["from"], event["seconds"])
        elif op == "summed":
            step = self._step(event["step"])
            step.loss = event["loss"]
            self._end(step, event["norm"])
        elif op == "checkpoint":
            assert self._group.training.checkpoint is not None
            write(self._group.training.checkpoint[0], event["state"])
        elif op == "enough":
            self._halt()
        elif op == "failed":
            raise pickle.loads(event["error"])
        elif op == "closed":
            self._lose(event["from"])
        elif op == "unreachable":
            self._lose(self._members[event["node"]])

    def _halt(self) -> None:
        """End where all can end alike: after the steps that may have been begun."""
        ahead = self._group.training.schedule.width
        if not self._plan.rooted:
            # A ring is as far as it is: what the leader has heard of it is old.
            ahead += _AHEAD
        version = self._version + ahead
        self._tell({"op": "halt", "run": self._group.run, "version": version})

    def _step(self, step: int) -> Step:
        return self._seen.setdefault(step, Step(step, math.nan))

    def _over(self, step: int) -> bool:
        return step < self._version or step in self._done

    def _computed(self, step: int, address: str, seconds: float) -> None:
        computing = self._step(step).computing
        computing[address] = computing.get(address, 0.0) + seconds

    # -- the root ------------------------------------------------------------------------------

    def _received(self, event: Message) -> None:
        step = event["step"]
        if self._over(step):
            return
        if step not in self._machines:
            choice = self._choices.get(self._group.begins_with(step), ())
            machine = self._plan.machine(ROOT, choice, self._group.training.codec)
            self._machines[step] = machine
            self._carry_out(step, machine.begin())
        tag = Tag(*event["tag"])
        commands = self._machines[step].received(event["sender"], tag, event["payload"])
        self._carry_out(step, commands)

    def _carry_out(self, step: int, commands: list[Command]) -> None:
        segments = self._segments[step]
        segments.update((c.segment, c.total) for c in commands if isinstance(c, Finished))
        whole = len(segments) == self._plan.segments
        choice = None
        if whole:
            # It rides on the last segment, which goes out below: nobody begins a step without.
            computing = self._step(step).computing
            late = [address not in computing for address in self._members]
            self._choices[step + 1] = choice = self._plan.choose(np.array(late))
        self._leader.send(
            [
                (self._members[c.to], hop_message(self._group.run, step, ROOT, c, choice))
                for c in commands
                if isinstance(c, Send)
            ]
        )
        if whole:
            seen, totals = self._step(step), self._segments.pop(step).values()
            seen.loss = sum(total.loss for total in totals)
            seen.late = tuple(a for a in self._members if a not in seen.computing)
            del self._machines[step]
            norm = math.sqrt(sum(float(np.vdot(t.vector, t.vector)) for t in totals))
            self._end(seen, norm)

    def _end(self, step: Step, norm: float) -> None:
        """All is known of a step that ended, but what slow workers may still report of it."""
        self._done.add(step.step)
        while self._version in self._done:
            self._done.discard(self._version)
            self._version += 1
            self._choices.pop(self._group.begins_with(self._version) - 1, None)
        now = monotonic()
        step.seconds, self._ended = now - self._ended, now
        samples = max(self._batches.count(step.step), 1)
        step.loss /= samples
        self._leader.ended(step, norm / samples)
        if self._leaving:
            raise _Lost

    # -- the end, and losses -------------------------------------------------------------------

    def _lose(self, address: str) -> None:
        """A worker is gone: what is in flight is ended without it, if that is possible."""
        if address not in self._members:
            return
        self._leader.lose(address)
        self._absent.add(self._members.index(address))
        self._leaving = True
        choice = self._choices.get(self._group.begins_with(self._version), ())
        if not self._plan.rooted or not can_finish(self._plan, self._absent, choice):
            raise _Lost

    def _outcome(self, first: Message) -> Outcome:
        """The state of the first that is done; those that are not far behind say what they have."""
        version = first["version"]
        self._digests[first["from"]] = first["digest"]
        last = self._seen.get(version - 1)
        patience = min(max(_LAST, last.seconds if last else 0.0), _ANSWER)
        deadline = monotonic() + patience
        waiting = set(self._members) - set(self._digests)
        while waiting and (event := self._leader.next_event(max(deadline - monotonic(), 0))):
            if event["run"] != self._group.run:
                continue
            if event["op"] in ("finished", "closed"):
                waiting.discard(event["from"])
            if event["op"] == "finished" and event["version"] == version:
                self._digests[event["from"]] = event["digest"]
            if event["op"] in ("computed", "summed", "checkpoint"):
                self._react(event)
        try:
            state = self._leader.fetch(first["from"])
        except OSError:
            self._leader.lose(first["from"])
            raise _Lost from None
        return Outcome(state, self._leader.history(state["losses"]), self._digests)


def write(path: str, data: bytes) -> None:
    """Write a file in one go: whoever reads it finds all of it, or what was there before."""
    folder = Path(path).absolute().parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".coded-", delete=False) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
