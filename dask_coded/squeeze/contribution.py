"""A worker's part in the sum of a step: its units, from the grant to the sum that carries them.

A granted unit is *queued*, then *running*, then *in hand*, then *folded* into the worker's one
running sum. It stays in hand until the next unit is finished, so that the last one can still be
dropped. A queued unit may be *released* instead, and any unit that is not folded may be *dropped*.
A copy of another worker's unit is kept *apart* until the step is closed. So a worker has at most
the gradient that it computes and three others: the sum, the last unit, and the copy.

The sum carries its units: :class:`Contribute` names them, and :class:`UnitCount` adds up
contributions only if no unit is in two of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dask_coded.squeeze.grants import (
    Answer,
    Close,
    Copy,
    Deal,
    Done,
    Fetch,
    Grant,
    Recall,
    Refused,
    Released,
    Summed,
)


@dataclass(frozen=True)
class Fold:
    """Command: add the gradient of this unit to the running sum."""

    unit: int


@dataclass(frozen=True)
class Drop:
    """Command: the gradient of this unit is not needed."""

    unit: int


@dataclass(frozen=True)
class Restart:
    """Command: drop all gradients and begin with a sum of nothing."""


@dataclass(frozen=True)
class Contribute:
    """Command: send the running sum, which has exactly these units. Keep it until the total comes.

    Attributes
    ----------
    closing : int
        Number of the `Close`.
    units : frozenset of int
    owners : tuple of int
        The workers that have any units. Each adds up its part of all sums.
    """

    closing: int
    units: frozenset[int]
    owners: tuple[int, ...]


Command = Fold | Drop | Restart | Contribute | Answer | Fetch


@dataclass
class Contribution:
    """What one worker has of one step; the trainer of a worker drives it, or a simulated worker.

    Every event returns commands, in the order in which they must be obeyed: messages to the leader,
    and what to do with gradients.

    Parameters
    ----------
    worker, step : int

    Examples
    --------
    >>> own = Contribution(worker=0, step=0)
    >>> own.receive(Deal(0, 0, units=(4, 5)))
    []
    >>> own.begin(), own.receive(Recall(0, 0, units=(4, 5)))
    (4, [Released(step=0, worker=0, epoch=0, asked=(4, 5), units=(5,))])
    >>> own.receive(Close(0, 0, closing=1, units=(4,), owners=(0,)))
    []
    >>> for command in own.finished(seconds=0.1)[1:]:
    ...     print(command)
    Fold(unit=4)
    Contribute(closing=1, units=frozenset({4}), owners=(0,))
    """

    worker: int
    step: int
    epoch: int = 0
    #: Units that were granted and not taken back.
    granted: set[int] = field(default_factory=set)
    #: The copy that was asked for, and whether it is computed.
    copy: int | None = None
    apart: bool = False
    queued: deque[int] = field(default_factory=deque)
    running: int | None = None
    in_hand: int | None = None
    folded: set[int] = field(default_factory=set)
    #: Whether the worker has the sum over all units, or fetches it.
    summed: bool = False
    fetching: bool = False
    _close: Close | None = None
    _contributed: int | None = None

    # -- computing -----------------------------------------------------------------------------

    def begin(self) -> int | None:
        """Begin the next unit, None if there is nothing to compute now."""
        if self.running is not None or self.summed or self.fetching or not self.queued:
            return None
        self.running = self.queued.popleft()
        return self.running

    def finished(self, seconds: float, overflow: bool = False) -> list[Command]:
        """Record that the running unit is computed."""
        unit, self.running = self.running, None
        assert unit is not None, "no unit is running"
        if unit in self.granted:
            return [self._done(unit, seconds, overflow), *self._take(unit), *self._contribute()]
        if unit == self.copy:
            self.apart = True
            return [self._done(unit, seconds, overflow)]
        return [Drop(unit)]

    def have_sum(self, overflow: bool = False) -> list[Command]:
        """Record that the worker has the sum over all units, or knows that one did not fit."""
        if self.summed:
            return []
        self.summed = True
        return [Summed(self.step, self.worker, self.epoch, overflow)]

    def _done(self, unit: int, seconds: float, overflow: bool = False) -> Done:
        return Done(self.step, self.worker, self.epoch, (unit,), seconds, overflow)

    def _take(self, unit: int) -> list[Command]:
        """Take a finished unit in hand, and fold the one before."""
        before, self.in_hand = self.in_hand, unit
        if before is None:
            return []
        self.folded.add(before)
        return [Fold(before)]

    # -- messages of the leader ----------------------------------------------------------------

    def receive(self, message: Grant) -> list[Command]:
        """Act on a message of the leader; those of other steps and earlier epochs are dropped."""
        if message.step != self.step or message.epoch < self.epoch:
            return []
        commands: list[Command] = []
        if message.epoch > self.epoch:
            self._restart(message.epoch)
            commands.append(Restart())
        match message:
            case Deal(units=units):
                commands += self._dealt(units)
            case Recall(units=units):
                commands += self._recalled(units)
            case Copy(unit=unit):
                if unit not in self.granted and unit != self.copy:
                    self.copy, self.apart = unit, False
                    self._queue(unit)
            case Close():
                commands += self._closed(message)
            case Fetch():
                if not self.summed:
                    self.fetching = True
                    commands.append(message)
        return commands

    def _restart(self, epoch: int) -> None:
        self.epoch = epoch
        self.granted, self.folded = set(), set()
        self.queued.clear()
        self.in_hand = self.copy = self._close = self._contributed = None
        self.apart = False

    def _queue(self, unit: int) -> None:
        # A unit that was dropped while it was running, and is wanted again, is not computed twice.
        if unit != self.running and unit not in self.queued:
            self.queued.append(unit)

    def _dealt(self, units: Iterable[int]) -> list[Command]:
        commands: list[Command] = []
        # The step is open again. What is new to this worker is in no set of an earlier `Close`.
        self._close, self.fetching = None, False
        for unit in units:
            if unit in self.granted:
                continue
            self.granted.add(unit)
            if unit != self.copy:
                self._queue(unit)
                continue
            # The other worker is lost.
            apart, self.copy, self.apart = self.apart, None, False
            if apart:
                commands += [self._done(unit, 0.0), *self._take(unit)]
        return commands

    def _recalled(self, asked: tuple[int, ...]) -> list[Command]:
        commands: list[Command] = []
        released = []
        for unit in asked:
            if unit == self.copy:
                if self.apart:
                    commands.append(Drop(unit))
                self.copy, self.apart = None, False
            elif unit in self.granted and unit not in self.queued:
                continue
            released.append(unit)
            self.granted.discard(unit)
            if unit in self.queued:
                self.queued.remove(unit)
        if self._close and not self.granted.issuperset(self._close.units):
            self._close = None
        answer = Released(self.step, self.worker, self.epoch, asked, tuple(released))
        return [*commands, answer]

    def _closed(self, close: Close) -> list[Command]:
        own = set(close.units)
        if not self.folded <= own:
            self._close = None
            return [Refused(self.step, self.worker, self.epoch, close.closing)]
        commands: list[Command] = []
        self._close, self.fetching = close, False
        if self.in_hand is not None and self.in_hand not in own:
            commands.append(Drop(self.in_hand))
            self.in_hand = None
        if self.copy is not None and self.apart:
            commands += self._take(self.copy) if self.copy in own else [Drop(self.copy)]
        self.copy, self.apart = None, False
        self.granted = own
        finished = self.folded | {self.in_hand}
        self.queued = deque(unit for unit in self.queued if unit in own)
        for unit in sorted(own - finished):
            self._queue(unit)
        return commands + self._contribute()

    def _contribute(self) -> list[Command]:
        """Contribute the sum once all units of the set are finished."""
        close = self._close
        own = frozenset(close.units if close else ())
        if close is None or not own or not own <= self.folded | {self.in_hand}:
            return []
        if self._contributed == close.closing:
            return []
        commands: list[Command] = []
        if self.in_hand is not None:
            commands.append(Fold(self.in_hand))
            self.folded.add(self.in_hand)
            self.in_hand = None
        assert self.folded == own, "the sum has other units than its label says"
        self._contributed = close.closing
        return [*commands, Contribute(close.closing, own, close.owners)]


@dataclass
class UnitCount:
    """Which contributions a receiver may add up: those of one `Close`, until no unit is missing.

    Parameters
    ----------
    units : int
        Of the step.

    Examples
    --------
    >>> tally = UnitCount(units=3)
    >>> tally.add(1, {0, 2}), tally.complete
    (True, False)
    >>> tally.add(1, {2}), tally.add(1, {1}), tally.complete
    (False, True, True)
    """

    units: int
    closing: int = 0
    _have: set[int] = field(default_factory=set)

    def begin(self, closing: int) -> bool:
        """Begin another attempt, if it is later than the present one; return whether it is."""
        if closing <= self.closing:
            return False
        self.closing, self._have = closing, set()
        return True

    def add(self, closing: int, units: Iterable[int]) -> bool:
        """Return whether to add a contribution to the sum, which is one of ``closing`` alone.

        With the first contribution to a later `Close` the sum begins again with nothing.
        """
        added = set(units)
        self.begin(closing)
        if closing != self.closing or not added.isdisjoint(self._have):
            return False
        self._have |= added
        return True

    @property
    def complete(self) -> bool:
        """Whether the sum has all units."""
        return len(self._have) == self.units
