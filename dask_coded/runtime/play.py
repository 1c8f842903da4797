"""One group at work, as its leader sees it: the root's machines, who was late, who is lost."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections import defaultdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import dask
import numpy as np
from dask.utils import parse_bytes

from dask_coded.aggregation import ROOT, Command, Finished, Machine, Send, Tag
from dask_coded.compression import Partial
from dask_coded.runtime.channels import Message
from dask_coded.runtime.formation import can_finish
from dask_coded.runtime.trainer import READ_EVERY, hop_message
from dask_coded.runtime.training_spec import Group, Outcome, Step

if TYPE_CHECKING:
    from dask_coded.runtime.training import Leader

#: An event loop that runs answers within this many seconds; who does not is not taken in.
ANSWER = 2.0
# As many steps may a ring be ahead of its leader's view of it.
_AHEAD = 10
# At the end, workers that are not done when the first is are waited for as long as a step took, and
# at least this long.
_LAST = 0.25


class Lost(Exception):
    """A worker of the group is gone."""


class Play:
    """One group at work."""

    def __init__(self, leader: Leader, group: Group) -> None:
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
        #: Up to which step each worker has read.
        self._read = dict.fromkeys(group.addresses, group.version)
        self._backlog = parse_bytes(dask.config.get("coded.train.backlog"))
        self._digests: dict[str, str] = {}

    def run(self) -> Outcome:
        """Until the training is done.

        Raises
        ------
        Lost
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
        elif op == "read":
            self._read[event["from"]] = event["step"]
        elif op == "summed":
            step = self._step(event["step"])
            step.loss = event["loss"]
            self._end(step, event["norm"])
        elif op == "checkpoint":
            self._write(event["state"])
        elif op == "enough":
            self._halt()
        elif op == "failed":
            raise pickle.loads(event["error"])
        elif op == "closed":
            self._lose(event["from"])
        elif op == "unreachable":
            self._lose(event["worker"])

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
                if isinstance(c, Send) and c.to not in self._absent
            ]
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
        """Break with workers for which too many sums wait: they may be stopped for hours.

        The others go on as they are: what such a worker stores nobody else could fetch now.
        """
        patience = max(self._backlog / nbytes, 2 * READ_EVERY)
        for node, address in enumerate(self._members):
            if node not in self._absent and step - self._read[address] > patience:
                self._absent.add(node)
                self._tell({"op": "skip", "run": self._group.run, "node": node})
                self._leader.give_up(address)

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
            raise Lost

    # -- the end, and losses -------------------------------------------------------------------

    def _lose(self, address: str) -> None:
        """A worker is gone: what is in flight is ended without it, if that is possible."""
        if address not in self._members or (node := self._members.index(address)) in self._absent:
            return
        self._leader.lose(address)
        self._absent.add(node)
        self._leaving = True
        choice = self._choices.get(self._group.begins_with(self._version), ())
        if not self._plan.rooted or not can_finish(self._plan, self._absent, choice):
            raise Lost

    def _outcome(self, first: Message) -> Outcome:
        """The state of the first that is done; those that are not far behind say what they have."""
        version = first["version"]
        self._digests[first["from"]] = first["digest"]
        last = self._seen.get(version - 1)
        patience = min(max(_LAST, last.seconds if last else 0.0), ANSWER)
        if not self._plan.rooted:
            # All of a ring end together, and one of them alone tells of the steps.
            patience = ANSWER
        deadline = monotonic() + patience
        absent = {self._members[node] for node in self._absent}
        waiting = set(self._members) - absent - set(self._digests)
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
            packed = self._leader.fetch(first["from"])
        except OSError:
            self._leader.lose(first["from"])
            raise Lost from None
        self._write(packed)
        state = pickle.loads(packed)
        return Outcome(state, self._leader.history(state["losses"]), self._digests)

    def _write(self, state: bytes) -> None:
        if checkpoint := self._group.training.checkpoint:
            write(checkpoint[0], state)


def check_folder(path: str, address: str) -> None:
    """Check that a file has a folder, before hours are spent on what is to be in it.

    Raises
    ------
    FileNotFoundError
        If it is not there.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"The checkpoint's folder {str(folder)!r} must be there on the workers, it is not on "
            f"{address}, which leads the training: make it first."
        )


def write(path: str, data: bytes) -> None:
    """Write a file in one go: whoever reads it finds all of it, or what was there before."""
    folder = Path(path).absolute().parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".coded-", delete=False) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
