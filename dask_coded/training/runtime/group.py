"""One group of a training at work, as its leader sees it: late workers, lost workers, the root."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import monotonic

import dask
import numpy as np
from dask.utils import parse_bytes

from dask_coded.aggregation import ROOT, Command, Finished, Machine, Send, Tag
from dask_coded.aggregation.formation import can_finish
from dask_coded.compression import Partial
from dask_coded.training.runtime.link import Event, Link
from dask_coded.training.runtime.spec import Group, Outcome, Step
from dask_coded.training.runtime.storage import write
from dask_coded.training.runtime.trainer import READ_EVERY, node_message
from dask_coded.transport import ANSWER_SECONDS
from dask_coded.transport.messages import (
    BeginSteps,
    CheckpointReady,
    Closed,
    GradientComputed,
    HaltTraining,
    Message,
    NodeMessage,
    SkipNode,
    StepsFinished,
    StepSummed,
    StopRequested,
    SumsRead,
    TrainingFailed,
    Unreachable,
)

# A ring may be this many steps ahead of its leader's view of it.
_AHEAD = 10
# When the first worker has finished, the others are given as long as the last step took, and at
# least this many seconds.
_LAST = 0.25


class WorkerLostError(Exception):
    """A worker of the group is gone, and the group cannot go on without it."""


class LiveGroup:
    """One group at work.

    Parameters
    ----------
    link : Link
    group : Group
    ended : callable(Step, float)
        Called with each step that has ended, and the norm of its mean gradient.
    history : callable(losses) -> list of Step
        Returns what was seen of each step, given the losses of all steps.
    """

    def __init__(
        self,
        link: Link,
        group: Group,
        ended: Callable[[Step, float], None],
        history: Callable[[Sequence[float]], list[Step]],
    ) -> None:
        self._link = link
        self._group = group
        self._report_ended = ended
        self._history = history
        self._plan = group.plan
        self._batches = group.training.batches(group.plan.parts)
        self._members = group.addresses
        self._absent: set[int] = set()
        self._leaving = False
        self._machines: dict[int, Machine] = {}
        self._segments: dict[int, dict[int, Partial]] = defaultdict(dict)
        self._choices = {group.version: group.choice}
        self._seen: dict[int, Step] = {}
        # Steps whose sum is made: all below `_version`, and those in `_done`.
        self._version = group.version
        self._done: set[int] = set()
        self._ended = monotonic()
        # Up to which step each worker has read.
        self._read = dict.fromkeys(group.addresses, group.version)
        self._backlog = parse_bytes(dask.config.get("coded.train.backlog"))
        self._digests: dict[str, str] = {}

    def run(self) -> Outcome:
        """Run until the training ends.

        Raises
        ------
        WorkerLostError
            If a new group has to continue the training.
        """
        self._tell(BeginSteps(self._group.run_id))
        if self._link.enough:
            self._halt()
        while True:
            event = self._link.next_event()
            assert event is not None
            if isinstance(event.message, StepsFinished):
                return self._outcome(event.sender, event.message)
            self._react(event)

    def _tell(self, message: Message) -> None:
        self._link.send((address, message) for address in self._members)

    def _react(self, event: Event) -> None:
        match event.message:
            case NodeMessage():
                self._received(event.message)
            case GradientComputed(_, step, seconds):
                self._computed(step, event.sender, seconds)
            case SumsRead(_, step):
                self._read[event.sender] = step
            case StepSummed(_, number, loss, norm):
                seen = self._step(number)
                seen.loss = loss
                self._end(seen, norm)
            case CheckpointReady(_, state):
                self._write(state)
            case StopRequested():
                self._halt()
            case TrainingFailed(_, error):
                raise pickle.loads(error)
            case Closed():
                self._lose(event.sender)
            case Unreachable(_, address):
                self._lose(address)

    def _halt(self) -> None:
        """End the training where all workers can: after the steps that may have been started."""
        ahead = self._group.training.schedule.width
        if not self._plan.rooted:
            # The leader's view of a ring is behind.
            ahead += _AHEAD
        self._tell(HaltTraining(self._group.run_id, self._version + ahead))

    def _step(self, step: int) -> Step:
        return self._seen.setdefault(step, Step(step, math.nan))

    def _over(self, step: int) -> bool:
        return step < self._version or step in self._done

    def _computed(self, step: int, address: str, seconds: float) -> None:
        computing = self._step(step).computing
        computing[address] = computing.get(address, 0.0) + seconds

    # -- the root ------------------------------------------------------------------------------

    def _received(self, message: NodeMessage) -> None:
        step = message.step
        if self._over(step):
            return
        if step not in self._machines:
            choice = self._choices.get(self._group.begins_with(step), ())
            machine = self._plan.machine(ROOT, choice, self._group.training.codec)
            self._machines[step] = machine
            self._carry_out(step, machine.begin())
        tag = Tag(*message.tag)
        commands = self._machines[step].received(message.sender, tag, message.payload)
        self._carry_out(step, commands)

    def _carry_out(self, step: int, commands: list[Command]) -> None:
        segments = self._segments[step]
        segments.update((c.segment, c.total) for c in commands if isinstance(c, Finished))
        whole = len(segments) == self._plan.segments
        choice = None
        if whole:
            # Sent below with the last segment, so no worker starts a step without its choice.
            computing = self._step(step).computing
            late = [address not in computing for address in self._members]
            self._choices[step + 1] = choice = self._plan.choose(np.array(late))
        self._link.send(
            (self._members[c.to], node_message(self._group.run_id, step, ROOT, c, choice))
            for c in commands
            if isinstance(c, Send) and c.to not in self._absent
        )
        if whole:
            seen, totals = self._step(step), self._segments.pop(step).values()
            seen.loss = sum(total.loss for total in totals)
            seen.late = tuple(
                address
                for node, address in enumerate(self._members)
                if node not in self._absent and address not in seen.computing
            )
            del self._machines[step]
            norm = math.sqrt(sum(float(np.vdot(t.vector, t.vector)) for t in totals))
            self._give_up(step, sum(total.vector.nbytes for total in totals))
            self._end(seen, norm)

    def _give_up(self, step: int, nbytes: int) -> None:
        """Close channels to workers for which too many sums wait: they may be stopped for hours.

        The others stay in this group, because no worker could now fetch the data that such a worker
        stores.
        """
        patience = max(self._backlog / nbytes, 2 * READ_EVERY)
        for node, address in enumerate(self._members):
            if node not in self._absent and step - self._read[address] > patience:
                self._absent.add(node)
                self._tell(SkipNode(self._group.run_id, node))
                self._link.give_up(address)

    def _end(self, step: Step, norm: float) -> None:
        """End a step. Slow workers may still report how long they have computed for it."""
        self._done.add(step.step)
        while self._version in self._done:
            self._done.discard(self._version)
            self._version += 1
            self._choices.pop(self._group.begins_with(self._version) - 1, None)
        now = monotonic()
        step.seconds, self._ended = now - self._ended, now
        samples = max(self._batches.count(step.step), 1)
        step.loss /= samples
        self._report_ended(step, norm / samples)
        if self._leaving:
            raise WorkerLostError

    # -- the end, and losses -------------------------------------------------------------------

    def _lose(self, address: str) -> None:
        """Record that a worker is gone. Steps in flight end without it, if that is possible."""
        if address not in self._members or (node := self._members.index(address)) in self._absent:
            return
        self._link.lose(address)
        self._absent.add(node)
        self._leaving = True
        choice = self._choices.get(self._group.begins_with(self._version), ())
        if not self._plan.rooted or not can_finish(self._plan, self._absent, choice):
            raise WorkerLostError

    def _outcome(self, sender: str, first: StepsFinished) -> Outcome:
        """Return the state of the first worker that is done, and digests of those close behind."""
        version = first.version
        self._digests[sender] = first.digest
        last = self._seen.get(version - 1)
        patience = min(max(_LAST, last.seconds if last else 0.0), ANSWER_SECONDS)
        if not self._plan.rooted:
            # All workers of a ring end together, and only one of them reports the steps.
            patience = ANSWER_SECONDS
        deadline = monotonic() + patience
        absent = {self._members[node] for node in self._absent}
        waiting = set(self._members) - absent - set(self._digests)
        while waiting and (event := self._link.next_event(max(deadline - monotonic(), 0))):
            match event.message:
                case StepsFinished():
                    waiting.discard(event.sender)
                    if event.message.version == version:
                        self._digests[event.sender] = event.message.digest
                case Closed():
                    waiting.discard(event.sender)
                case GradientComputed() | StepSummed() | CheckpointReady():
                    self._react(event)
        try:
            packed = self._link.fetch(sender)
        except OSError:
            self._link.lose(sender)
            raise WorkerLostError from None
        self._write(packed)
        state = pickle.loads(packed)
        return Outcome(state, self._history(state["losses"]), self._digests)

    def _write(self, state: bytes) -> None:
        if checkpoint := self._group.training.checkpoint:
            self._link.confirm()
            write(checkpoint[0], state)
