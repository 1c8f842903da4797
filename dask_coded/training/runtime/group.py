"""One group of a training at work, as its leader sees it: late workers, lost workers, the root.

If the parts of a step are dealt out, the leader has them computed by others when a worker is lost
or silent, and another group goes on after the step.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

import dask
import numpy as np
from dask.utils import parse_bytes

from dask_coded.aggregation import ROOT, Command, Finished, Machine, Send, SqueezePlan, Tag
from dask_coded.aggregation.formation import can_finish, form
from dask_coded.aggregation.steps import KEPT, Order, SeenStep, SqueezedSteps
from dask_coded.compression import Partial
from dask_coded.config import timeouts
from dask_coded.prediction import SpeedHistory
from dask_coded.runtime.messages import Failed
from dask_coded.training.runtime.link import Event, Link
from dask_coded.training.runtime.memberships import Available, Silent, StopRequested
from dask_coded.training.runtime.messages import (
    BeginSteps,
    Enlisted,
    HaltTraining,
    NodeMessage,
    ReplicaState,
    SendState,
    SkipNode,
    StepProgress,
    StepsFinished,
    Unreachable,
)
from dask_coded.training.runtime.norms import norm_of
from dask_coded.training.runtime.spec import RECENT, Group, Outcome, Step
from dask_coded.training.runtime.storage import StateTaker
from dask_coded.training.runtime.trainer import READ_EVERY, node_message
from dask_coded.transport.exceptions import unpacked
from dask_coded.transport.messages import Closed, Message

# A ring may be this many steps ahead of its leader's view of it.
_AHEAD = 10
# Bytes of a parameter in a sum of units.
_INTEGER = 4
# Workers that join are taken in when a group has worked this many times as long as it took to form
# it, data included. So forming groups takes a sixth of the time at most.
_WORTH = 5
# Steps by which the last report of a worker may be behind while chunks of sums are kept for it.
_BEHIND = KEPT // 2  # a step may have two turns

logger = logging.getLogger("distributed.dask_coded")


class GroupOverError(Exception):
    """Another group has to go on: a worker is gone that this one needs, or others have joined."""


class LiveGroup:
    """One group at work.

    Parameters
    ----------
    link : Link
    group : Group
    asked : float
        When the leader began to form it, by :func:`time.monotonic`.
    ended : callable(Step, float)
        Called with each step that has ended, and the norm of its mean gradient.
    history : callable(losses) -> list of Step
        Returns what was seen of each step, given the losses of all steps.
    speeds : SpeedHistory, optional
        Of workers to which parts are dealt.
    takers : sequence of StateTaker
        They get the state every few updates, and the last one.
    """

    def __init__(
        self,
        link: Link,
        group: Group,
        asked: float,
        ended: Callable[[Step, float], None],
        history: Callable[[Sequence[float]], list[Step]],
        speeds: SpeedHistory | None = None,
        takers: Sequence[StateTaker] = (),
    ) -> None:
        self._link = link
        self._takers = takers
        # The last version that they were offered.
        self._taken: int | None = None
        self._group = group
        self._report_ended = ended
        self._history = history
        self._plan = group.plan
        self._batches = group.training.batches(group.plan.parts)
        self._members = group.addresses
        self._absent: set[int] = set()
        # Workers that give no sign of life, and those that a larger group could have.
        self._silent: set[str] = set()
        # Some may have become available while this group was formed.
        self._joinable = link.available.difference(group.addresses)
        self._leaving = False
        self._machines: dict[int, Machine] = {}
        self._segments: dict[int, dict[int, Partial]] = defaultdict(dict)
        self._choices = {group.version: group.choice}
        # The last choice for which it was asked whether silent workers are needed.
        self._chosen = group.choice
        self._seen: dict[int, Step] = {}
        # Steps whose sum is made: all below `_version`, and those in `_done`.
        self._version = group.version
        self._done: set[int] = set()
        self._asked = asked
        self._ended = monotonic()
        # From when on it is worth it to form another group because of workers that have joined.
        self._ripe: float | None = None
        # Up to which step each worker has read.
        self._read = dict.fromkeys(group.addresses, group.version)
        self._backlog = parse_bytes(dask.config.get("coded.train.backlog"))
        # Bytes of sums, by length, as they are sent.
        self._lengths: dict[int, int] = {}
        self._digests: dict[str, str] = {}
        self._dealt: SqueezedSteps | None = None
        if isinstance(plan := group.plan, SqueezePlan):
            end = group.training.steps
            speeds = SpeedHistory() if speeds is None else speeds
            self._dealt = SqueezedSteps(plan, group.addresses, speeds, group.version, end)

    def run(self) -> Outcome:
        """Run until the training ends.

        Raises
        ------
        GroupOverError
            If a new group has to continue the training.
        """
        self._tell(BeginSteps(self._group.run_id))
        if self._link.enough:
            self._halt()
        if self._dealt is not None:
            self._order(self._dealt.start(monotonic()))
        while True:
            event = self._next_event()
            self._silent.discard(event.sender)
            if isinstance(event.message, StepsFinished):
                return self._outcome(event.sender, event.message)
            self._react(event)

    def _next_event(self) -> Event:
        """Return the next event; meanwhile deal parts of late workers to others."""
        while True:
            dealt = self._dealt
            wake = None if dealt is None else dealt.wake
            event = self._link.next_event(None if wake is None else max(wake - monotonic(), 0.0))
            if event is not None:
                return event
            assert dealt is not None
            self._order(dealt.react(monotonic()))

    def _order(self, orders: Iterable[Order]) -> None:
        """Send what the ledger says of some steps."""
        self._link.send(
            (self._members[send.to], node_message(self._group.run_id, step, ROOT, send, None))
            for step, send in orders
        )

    def _tell(self, message: Message) -> None:
        self._link.send((address, message) for address in self._members)

    def _react(self, event: Event) -> None:
        if isinstance(event.message, Silent):
            self._joinable.discard(event.message.address)
        match event.message:
            case NodeMessage(_, step, _, tag, payload) if self._dealt is not None:
                self._order(self._dealt.received(step, Tag(*tag), payload, monotonic()))
            case NodeMessage():
                self._received(event.message)
            case StepProgress():
                self._progressed(event.sender, event.message)
            # The worker that sends them may be lost, and the next one behind it.
            case ReplicaState(_, version, state) if version > (self._taken or 0):
                for taker in self._takers:
                    if version % taker.every == 0:
                        taker.put(version, state)
                self._taken = version
            case StopRequested():
                self._halt()
            case Failed(_, error):
                raise unpacked(error)
            case Closed():
                self._lose(event.sender)
            case Unreachable(_, address):
                self._lose(address)
            case Silent(_, address) if address in self._members and self._dealt is not None:
                self._lose(address)
            case Silent(_, address) if address in self._members:
                self._silent.add(address)
                self._leave_silent()
            case Available(_, address):
                self._silent.discard(address)
                if address not in self._members or self._members.index(address) in self._absent:
                    self._joinable.add(address)
                self._leave_silent()
            case Enlisted():  # too late to be in this group
                self._joinable.add(event.sender)
                self._leave_silent()

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

    def _progressed(self, address: str, message: StepProgress) -> None:
        if message.seconds is not None:
            if message.step <= self._version - RECENT:
                return
            computing = self._step(message.step).computing
            computing[address] = computing.get(address, 0.0) + message.seconds
            return
        self._read[address] = message.step
        if message.loss is not None and message.norm is not None:
            if self._over(message.step):  # another worker has said it
                return
            seen = self._step(message.step)
            seen.loss = message.loss
            if self._dealt is not None:
                self._fill(seen, self._dealt.take(message.step))
            self._end(seen, message.norm)
            if self._dealt is not None:
                self._give_up(message.step, self._group.training.parameters * _INTEGER)

    def _fill(self, step: Step, seen: SeenStep) -> None:
        """Say of a step how it was dealt."""
        step.units = {self._members[node]: count for node, count in seen.units.items()}
        step.computing = {self._members[node]: spent for node, spent in seen.computing.items()}
        step.moved, step.speeds = seen.moved, seen.speeds

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
            seen, totals = self._step(step), [vector for _, vector in sorted(segments.items())]
            del self._segments[step]
            seen.loss = sum(total.loss for total in totals)
            seen.late = tuple(
                address
                for node, address in enumerate(self._members)
                if node not in self._absent and address not in seen.computing
            )
            del self._machines[step]
            self._give_up(step, sum(map(self._sent_bytes, totals)))
            norm = norm_of([t.vector for t in totals], self._group.training.averages)
            self._end(seen, norm)

    def _sent_bytes(self, total: Partial) -> int:
        """Return how many bytes of a sum travel to each worker, which depends on its length."""
        length = len(total.vector)
        if length not in self._lengths:
            codec = self._group.training.codec
            self._lengths[length] = codec.nbytes(codec.pack(total))
        return self._lengths[length]

    def _give_up(self, step: int, nbytes: int) -> None:
        """Leave out workers for which too many sums wait: slow ones, and those stopped for hours.

        The others stay in this group, because no worker could now fetch the data that such a worker
        stores.
        """
        patience = max(self._backlog / nbytes, 2 * READ_EVERY)
        for node, address in enumerate(self._members):
            if node not in self._absent and step - self._read[address] > patience:
                self._skip(node, unread=True)
                self._link.give_up(address)
                if self._dealt is not None:
                    self._order(self._dealt.lost([node], monotonic()))
                    if not self._can_finish():
                        self._link.lose(address)
                        raise GroupOverError

    def _skip(self, node: int, unread: bool) -> None:
        """Go on without a worker; the first of the others sends the states for checkpoints."""
        self._absent.add(node)
        self._tell(SkipNode(self._group.run_id, node, unread))

    def _end(self, step: Step, norm: float) -> None:
        """End a step. Slow workers may still report how long they have computed for it."""
        self._done.add(step.step)
        self._seen.pop(step.step - RECENT, None)
        while self._version in self._done:
            self._done.discard(self._version)
            self._version += 1
            self._choices.pop(self._group.begins_with(self._version) - 1, None)
        now = monotonic()
        step.seconds, self._ended = now - self._ended, now
        samples = max(self._batches.count(step.step), 1)
        step.loss /= samples
        self._report_ended(step, norm / samples)
        if self._ripe is None:
            self._ripe = now + _WORTH * (now - self._asked)
        if self._version >= self._group.training.steps:
            return  # another group would only fetch data, and some may be lost
        if self._leaving or (self._joinable and now > self._ripe and self._could_grow()):
            raise GroupOverError
        if (choice := self._choice()) != self._chosen:
            # It may need workers that the one before did not.
            self._chosen = choice
            self._leave_silent()

    # -- the end, and losses -------------------------------------------------------------------

    def _lose(self, address: str) -> None:
        """Record that a worker is gone. Steps in flight end without it, if that is possible."""
        if address not in self._members or (node := self._members.index(address)) in self._absent:
            return
        self._link.lose(address)
        self._skip(node, unread=False)
        if self._dealt is not None:
            self._order(self._dealt.lost([node], monotonic()))
        if not self._can_finish() or (self._dealt is not None and self._is_any_behind()):
            raise GroupOverError
        # If too few are left for another group, this one goes on as well as it can.
        self._leaving |= bool(self._other_group())

    def _is_any_behind(self) -> bool:
        """Whether a worker lacks sums of steps whose chunks the others do not keep any more.

        If the sender of these chunks is lost, that worker would wait for ever.
        """
        there = (a for node, a in enumerate(self._members) if node not in self._absent)
        behind = any(self._version - self._read[address] > _BEHIND for address in there)
        return behind and self._version < self._group.training.steps

    def _leave_silent(self) -> None:
        """Go on in another group if silent or absent workers are needed, and others suffice.

        A step may need them. The first worker sends the states for checkpoints.
        """
        if not (self._silent or self._absent):
            return
        there = (a for node, a in enumerate(self._members) if node not in self._absent)
        training = self._group.training
        writes = (training.checkpoint or training.scoring) and next(there, None) in self._silent
        if (writes or not self._can_finish()) and self._other_group():
            for address in self._silent:
                self._link.lose(address)
            raise GroupOverError

    def _can_finish(self) -> bool:
        """Return whether the steps in flight end without the workers that are gone or silent."""
        if self._dealt is not None:
            return self._dealt.failed is None
        return self._plan.rooted and can_finish(self._plan, self._away(), self._choice())

    def _away(self) -> set[int]:
        """Return the nodes whose workers are gone or silent."""
        return self._absent.union(map(self._members.index, self._silent))

    def _choice(self) -> tuple[int, ...]:
        return self._choices.get(self._group.begins_with(self._version), ())

    def _could_grow(self) -> bool:
        grown = len(self._other_group()) > len(self._members) - len(self._away())
        if not grown:
            self._joinable.clear()
        return grown

    def _other_group(self) -> tuple[str, ...]:
        """Return which workers would take part if a group was formed now."""
        training = self._group.training
        left = {self._members[node] for node in self._absent} | self._silent
        found = [address for address in self._members if address not in left]
        allowed = training.workers
        found += [a for a in self._joinable if allowed is None or a in allowed]
        try:
            return form(training.aggregation, found)[1]
        except ValueError:
            return ()

    def _outcome(self, sender: str, first: StepsFinished) -> Outcome:
        """Return the state of the first worker that is done, and digests of those close behind."""
        version = first.version
        self._digests[sender] = first.digest
        self._joinable.clear()  # too late
        last = self._seen.get(version - 1)
        times = timeouts()
        # The others are given as long as the last step took, and at least a tick.
        patience = min(max(times.tick, last.seconds if last else 0.0), times.answer)
        if not (self._plan.rooted or self._plan.dealt):
            # All workers of a ring end together, and only one of them reports the steps.
            patience = times.answer
        deadline = monotonic() + patience
        absent = {self._members[node] for node in self._absent}
        waiting = set(self._members) - absent - set(self._digests)
        gone: set[str] = set()
        while waiting and (event := self._link.next_event(max(deadline - monotonic(), 0))):
            match event.message:
                case StepsFinished():
                    waiting.discard(event.sender)
                    if event.message.version == version:
                        self._digests[event.sender] = event.message.digest
                case Closed():
                    waiting.discard(event.sender)
                    gone.add(event.sender)
                case Silent(_, address):
                    waiting.discard(address)
                    gone.add(address)
                case Unreachable(_, address) if address == event.sender:  # it closes
                    waiting.discard(address)
                    gone.add(address)
                case StepProgress() | ReplicaState():
                    self._react(event)
        if len(set(self._digests.values())) > 1:
            logger.warning(
                "The workers of a training have ended with different parameters: some of their "
                "processors compute the optimizer's update differently."
            )
        packed = self._final_state(gone)
        for taker in self._takers:
            if version != self._taken or version % taker.every:
                taker.put(version, packed)
        for taker in self._takers:
            taker.finish()
        state = pickle.loads(packed)
        history = self._history(state["losses"])
        return Outcome(state["parameters"], state["version"], history, self._digests)

    def _final_state(self, gone: set[str]) -> bytes:
        """Return the pickled state of any worker that is done, unless it is gone or silent."""
        for address in self._digests:
            self._link.send([(address, SendState(self._group.run_id))])
            while address not in gone:
                event = self._link.next_event()
                assert event is not None
                match event.message:
                    case ReplicaState(_, _, state) if event.sender == address:
                        return state
                    case Failed(_, error) if event.sender == address:
                        # It may lack the memory to pickle its state, and does not answer any more.
                        raise unpacked(error)
                    case Closed():
                        gone.add(event.sender)
                    case Unreachable(_, closing) if closing == event.sender:
                        gone.add(closing)
                    case Silent(_, silent):
                        gone.add(silent)
            self._link.lose(address)
        raise GroupOverError
