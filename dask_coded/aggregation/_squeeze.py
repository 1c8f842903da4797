"""Squeezed steps: units of samples flow to fast workers, and the sum keeps its bits.

The samples of a step are cut into *units*, which never depend on the workers. Each unit is stored
by ``copies`` workers. The leader deals units out by predicted speed and moves them while the step
runs, see :class:`~dask_coded.rounds.Ledger`; a worker adds up the gradients of its units, see
:class:`~dask_coded.rounds.Contribution`. Gradients of units are integers on a grid, see
:mod:`dask_coded.aggregation.grid`, so their sum does not depend on who adds what.

The sum is *spread*: each worker with units owns a chunk of the gradient. All send it their part of
that chunk, and it sends the total to all. That takes as many bytes as a ring, and two latencies
instead of ``2 (n - 1)``. A worker without units sends nothing and owns nothing, so no worker waits
for it.

A step has one turn, or two: if a unit does not fit the predicted grid, the sum of the first turn
has only the peaks of the units, and the second turn is computed on the grid of these peaks. The
first step of a training always has two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_coded.aggregation._machine import (
    AGGREGATIONS,
    ROOT,
    Aggregation,
    Command,
    Compute,
    Machine,
    Plan,
    Send,
    Tag,
    check_workers,
)
from dask_coded.aggregation._units import ComputeUnit, FinishedUnits, UnitSum
from dask_coded.arguments import check_whole
from dask_coded.compression import EXACT, Codec, Partial
from dask_coded.squeeze import Contribute, Contribution, Drop, Fold, Restart, UnitCount, UnitLayout
from dask_coded.squeeze import contribution as ends
from dask_coded.squeeze.grants import Answer, Fetch, Grant, pack, unpack
from dask_coded.squeeze.units import seat

#: Turns of a step at most.
TURNS = 2
# Units of a step, if neither the user nor the batch says how many.
_UNITS = 64
# Names a total that was made once more for a worker that has asked for it.
_FETCHED = 0


@AGGREGATIONS.register("Squeeze")
@dataclass(frozen=True)
class Squeeze(Aggregation):
    """Units of samples are dealt out by speed, and the parameters never depend on the workers.

    A step takes about as long as all workers together need for its samples, however uneven they
    are, because units move between the workers that store them while the step runs. Whether workers
    are slow, are lost, stop or join changes no bit of the parameters.

    Parameters
    ----------
    copies : int
        Workers that store each unit. With 1, units cannot move, and each step waits for the slowest
        worker.
    units : int, optional
        Units of a step. By default :func:`~dask_coded.training.train` chooses, by the samples of a
        step alone: 16, or more of 64 samples each. The parameters depend on it, and no more workers
        than units can take part.

    Examples
    --------
    >>> plan = Squeeze(units=6).plan(3)
    >>> plan.parts, plan.stored
    (6, ((0, 1, 4, 5), (2, 3, 4, 5), (0, 1, 2, 3)))
    """

    copies: int = 2
    units: int | None = None
    moves = True

    def __post_init__(self) -> None:
        check_whole("copies", self.copies)
        if self.units is not None:
            check_whole("units", self.units)

    def plan(self, workers: int) -> SqueezePlan:
        """Return the plan for this number of workers, the fastest first."""
        check_workers(self, workers)
        units = self.units or _UNITS
        if workers > units:
            raise ValueError(
                f"{self!r} has work for {units} workers, there are {workers}: pass more units."
            )
        return SqueezePlan(workers, units, self.copies)


class SqueezePlan(Plan):
    """The plan of a :class:`Squeeze`: parts of the data are units.

    Attributes
    ----------
    layout : UnitLayout
        Slow workers sit beside fast ones.
    """

    rooted = False
    dealt = True

    def __init__(self, workers: int, units: int, copies: int) -> None:
        self.workers, self.parts = workers, units
        # Workers come in the order of their speeds.
        self.layout = UnitLayout(units, seat(-np.arange(workers, dtype=float)), copies)
        self.stored = tuple(tuple(sorted(own)) for own in self.layout.stored)

    @property
    def load(self) -> float:
        """The fraction of the data that a worker computes in a step, on average."""
        return 1 / self.workers

    def machine(
        self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT
    ) -> SqueezeMachine:
        """Return a worker's machine for one step."""
        return SqueezeMachine(node, self.workers, self.parts)


class SqueezeMachine(Machine):
    """State machine of one worker in one step.

    Besides what all machines do, it answers :attr:`Tag.kind` ``"fetch"``, also when it is finished.

    Parameters
    ----------
    node, workers, units : int
    """

    def __init__(self, node: int, workers: int, units: int) -> None:
        self._turns = [_Turn(node, workers, units, turn) for turn in range(TURNS)]
        self._turn = 0
        self._begun = self._finished = False

    def begin(self) -> list[Command]:
        """Start the step; what to compute, the leader says."""
        self._begun = True
        return [*self._go_on()]

    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        raise AssertionError("Units are computed one by one, see `computed_unit`.")

    def computed_unit(self, work: ComputeUnit, found: UnitSum, seconds: float) -> Iterator[Command]:
        """Handle the gradient of a unit; the next one can be computed while this one is added."""
        turn = self._turns[work.turn]
        commands = turn.finished(work.unit, found, seconds)
        yield from self._go_on()
        yield from turn.obey(commands)
        yield from self._go_on()

    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        """Handle a grant of the leader, a part of a chunk that this worker owns, or a total."""
        turn = self._turns[tag.segment]
        return [*turn.received(sender, tag, payload), *self._go_on()]

    def _go_on(self) -> Iterator[Command]:
        """Begin the next unit, the next turn, or end the step."""
        while not self._finished:
            turn = self._turns[self._turn]
            before = self._turns[self._turn - 1].total if self._turn else None
            grid = None if before is None else before.peaks
            if turn.total is None:
                if self._begun and (unit := turn.own.begin()) is not None:
                    yield ComputeUnit(unit, self._turn, grid)
                return
            if turn.total.integers is None and self._turn + 1 < TURNS:
                self._turn += 1
                continue
            self._finished = True
            turn.total.grid = grid
            yield FinishedUnits(turn.total)


class _Turn:
    """One worker's part in one turn: its own sum, and the sums of the chunks that it owns."""

    def __init__(self, node: int, workers: int, units: int, turn: int) -> None:
        self.own = Contribution(node, turn)
        self.total: UnitSum | None = None
        self._node, self._workers, self._units, self._number = node, workers, units, turn
        self._gradients: dict[int, UnitSum] = {}
        self._sum: UnitSum | None = None
        # By chunk: which contributions have come, and their sum.
        self._tallies: dict[int, UnitCount] = {}
        self._sums: dict[int, UnitSum] = {}
        # By the `Close` that they are of: the totals of chunks.
        self._spans: dict[int, dict[int, UnitSum]] = {}

    def finished(self, unit: int, found: UnitSum, seconds: float) -> list[ends.Command]:
        """Take the gradient of a unit that was computed; return what to obey."""
        if self.total is not None:
            return []
        self._gradients[unit] = found
        return self.own.finished(seconds, found.integers is None)

    def received(self, sender: int, tag: Tag, payload: Any) -> Iterable[Command]:
        """Handle a message."""
        match tag.kind:
            case "grant" if self.total is None:
                message = unpack(payload)
                assert isinstance(message, Grant)
                return self.obey(self.own.receive(message))
            case "part":
                return self._part(tag.chunk, *payload)
            case "sum":
                return self._have(tag.chunk, *payload)
            case "fetch" if self.total is not None:
                return [self._send(sender, "sum", 0, _FETCHED, 1, self.total.chunk(0, 1))]
        return []

    def obey(self, commands: Iterable[ends.Command]) -> Iterator[Command]:
        """Carry out commands of the contribution."""
        for command in commands:
            match command:
                case Fold(unit):
                    gradient = self._gradients.pop(unit)
                    self._sum = gradient if self._sum is None else self._sum.plus(gradient)
                case Drop(unit):
                    if (dropped := self._gradients.pop(unit, None)) is not None:
                        dropped.drop()
                case Restart():
                    self._gradients.clear()
                    self._sum = None
                case Contribute():
                    yield from self._contribute(command)
                case Fetch(sources=sources):
                    source = sources[self._node % len(sources)]
                    yield Send(source, Tag("fetch", self._number), None)
                case Answer():
                    yield Send(ROOT, Tag("answer", self._number), pack(command))

    def _contribute(self, command: Contribute) -> Iterator[Command]:
        """Send each owner its part of this worker's sum."""
        assert self._sum is not None and self._sum.losses.keys() == command.units
        # It is being sent from now on. If more units are added, they are added to a copy.
        self._sum.owned = False
        owners = command.owners
        for chunk in self._others_first(len(owners)):
            part = self._sum.chunk(chunk, len(owners))
            if owners[chunk] == self._node:
                yield from self._part(chunk, command.closing, len(owners), *part)
            else:
                yield self._send(owners[chunk], "part", chunk, command.closing, len(owners), part)

    def _part(
        self,
        chunk: int,
        closing: int,
        count: int,
        losses: dict[int, float],
        integers: Any,
        peaks: Any,
    ) -> Iterator[Command]:
        """Add a part of a chunk that this worker owns; once it has all units, pass the total on."""
        tally = self._tallies.setdefault(chunk, UnitCount(self._units))
        if tally.begin(closing):
            self._sums.pop(chunk, None)
        if self.total is not None or not tally.add(closing, losses):
            return
        part = UnitSum(integers, peaks, losses, owned=False)
        known = self._sums.get(chunk)
        found = self._sums[chunk] = part if known is None else known.plus(part)
        if tally.complete:
            del self._sums[chunk]
            losses, *arrays = found.chunk(0, 1)
            # Losses travel with the total of the first chunk.
            packed = ({} if chunk else losses, *arrays)
            for node in self._others_first(self._workers):
                if node != self._node:
                    yield self._send(node, "sum", chunk, closing, count, packed)
            yield from self._have(chunk, closing, count, *packed)

    def _have(
        self,
        chunk: int,
        closing: int,
        count: int,
        losses: dict[int, float],
        integers: Any,
        peaks: Any,
    ) -> Iterator[Command]:
        """Record the total of a chunk; with the last one this worker has the sum."""
        if self.total is not None:
            return
        chunks = self._spans.setdefault(closing, {})
        chunks[chunk] = UnitSum(integers, peaks, losses, owned=False)
        if len(chunks) == count:
            self.total = UnitSum.joined([chunks[i] for i in range(count)])
            self._spans.clear()
            self._sums.clear()
            self._gradients.clear()
            self._sum = None
            yield from self.obey(self.own.have_sum(self.total.integers is None))

    def _send(
        self,
        to: int,
        kind: str,
        chunk: int,
        closing: int,
        count: int,
        part: tuple[Any, ...],
    ) -> Send:
        return Send(to, Tag(kind, self._number, chunk), (closing, count, *part))

    def _others_first(self, count: int) -> Iterator[int]:
        """Yield ``0 … count - 1``, but not from all workers to the same one at once."""
        return ((self._node + turn) % count for turn in range(1, count + 1))
