"""Who computes which unit of a training step, so that every unit counts exactly once.

The round engine decides which worker should compute what. Its commands are wishes here: a
:class:`~dask_coded.rounds.state.Withdraw` cannot be refused, and two workers may compute the same
stripe, but a gradient that was added to a worker's running sum cannot be taken out of it. The
ledger turns wishes into *exclusive grants*, and tells the engine of those that were refused:

1. A unit is granted to one worker. To move it, the ledger sends `Recall` and grants it to another
   worker only once it is released. A unit that was begun stays where it is.
2. A second worker computes a *copy* only of the last unit that a worker owes, and keeps it apart.
   Its worker is granted nothing more unless the copy is given up, so that it still has the unit in
   hand, and either of the two can be dropped. If the step is closed already, the copy counts once
   it is computed first; a worker that has added the unit meanwhile refuses.
3. `Close` divides the units among the workers and begins the sum. It precedes computing: it is sent
   as soon as no move is worth a message, so that a step in which nothing moves has no message of
   the leader on its critical path. If a worker turns out to be late afterwards, units move as
   before, and `Close` comes again.
4. If a worker is lost or does not answer a `Recall`, its *epoch* ends. Its units are free again,
   also those that it has computed, because they were only in its sum.

However often the step is closed, each total has all units once: contributions carry their units,
and receivers add up disjoint sets only. The ledger is there so that a total comes about, and soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import numpy as np

from dask_coded.rounds.assignment import InfeasibleError
from dask_coded.rounds.policies import Policy
from dask_coded.rounds.reporting import Reporting
from dask_coded.rounds.round import Round
from dask_coded.rounds.state import Assign, Command, Withdraw
from dask_coded.rounds.workers import Forecast
from dask_coded.squeeze.closing import best_gain
from dask_coded.squeeze.granted import Granted
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
from dask_coded.squeeze.patience import Patience
from dask_coded.squeeze.summing import Summing
from dask_coded.squeeze.units import UnitLayout

#: A message and the worker that it is for.
Letter = tuple[int, Grant]


class Ledger:
    """One step, as its leader sees it: messages of workers in, messages to workers out.

    The leader of a group drives it, or :class:`dask_coded.simulation.SqueezeSimulation`. Every
    method takes the time of its event. After each, call :meth:`react` at :attr:`wake` if nothing
    else happens.

    Parameters
    ----------
    units : UnitLayout
    policy : Policy
        A new instance.
    forecast : Forecast
    now : float
        Seconds on the caller's clock.
    step : int

    Attributes
    ----------
    round : Round
        What the engine believes; it teaches the speeds of workers.
    failed : str or None
        Why the step cannot end: no worker that stores some unit is left.
    closed : bool
        Whether the last `Close` holds.
    closing : int
        How often the step was closed.
    moved : int
        Units granted to another worker than at first.
    overflow : bool
        Whether a unit did not fit its grid. Once the sum is there, it is certain.
    wake : float or None
    """

    def __init__(
        self,
        units: UnitLayout,
        policy: Policy,
        forecast: Forecast,
        now: float,
        *,
        step: int = 0,
    ) -> None:
        self.units = units
        self.step = step
        speeds, lags, self._doubt = forecast
        # Workers report each unit.
        self.round = Round(units.layout, policy, speeds, now, Reporting(0.0, 0.0), lags)
        self.closed, self.closing, self.moved, self.overflow = False, 0, 0, False
        self.wake: float | None = None
        self._epochs = [0] * units.layout.workers
        self._granted = Granted(units.units, units.layout.workers)
        # Of units that were recalled: the worker that gets them if they are released, if any.
        self._target: dict[int, int | None] = {}
        self._patience = Patience(self.round.state, self._epochs)
        # When to have the engine look again, because it may count on wishes that were refused.
        self._again = inf
        # Units that were not released because they were begun, and when they may be recalled again.
        self._begun: dict[int, float] = {}
        # Workers whose epoch ended because they were silent; a sign of life brings them back.
        self._silent: set[int] = set()
        self._summing = Summing()
        # Whether an epoch has ended, so that some contributions may never come.
        self._disturbed = False
        self._letters: list[Letter] = []

    # -- events --------------------------------------------------------------------------------

    @property
    def failed(self) -> str | None:
        return None if self.over else self.round.failed

    @property
    def over(self) -> bool:
        """Whether a worker that is left has the sum; the others can fetch it."""
        return bool(self._summing.has)

    @property
    def shares(self) -> dict[int, int]:
        """How many units each worker holds."""
        return self._granted.shares()

    @property
    def computed(self) -> bool:
        """Whether the step is closed and all units are computed."""
        return self.closed and not any(self._granted.owed)

    def start(
        self, dealt: Mapping[int, Sequence[int]] | None = None, closed: bool = False
    ) -> list[Letter]:
        """Deal the units and close the step, as far as it was not done before.

        Parameters
        ----------
        dealt : mapping of int to sequence of int, optional
            The units that workers have a `Deal` of.
        closed : bool
            Whether all workers have the first `Close`, which divides the units in the same way.
        """
        layout, state, holder = self.units.layout, self.round.state, self._granted.holder
        state.credit(self.units.absent)
        for worker, units in (dealt or {}).items():
            self._granted.grant(worker, units)
            state.assign(worker, self.units.ranges(worker, units))
        self.closed, self.closing = closed, int(closed)
        state.take()
        try:
            first = self.round.policy.first(layout, state.workers.prior, state.workers.lags)
        except InfeasibleError:
            # The round asks all workers.
            first = [[] for _ in range(layout.workers)]
        ranges = [
            self.units.ranges(worker, [u for u in self.units.units_in(own) if holder[u] is None])
            for worker, own in enumerate(first)
        ]
        self._follow(self.round.start(ranges))
        return self.react(state.now)

    def receive(self, answers: Iterable[Answer], now: float) -> list[Letter]:
        """Act once on messages that came together; those of other steps are dropped."""
        self.round.state.now = now
        for answer in answers:
            if answer.step != self.step:
                continue
            worker = answer.worker
            if worker in self._silent:
                self._silent.discard(worker)
                self._follow(self.round.regained([worker], now))
            if isinstance(answer, Summed):
                # That of the sum counts, which all workers go by.
                self.overflow = answer.overflow
                self._have_sum(worker)
            elif self.round.state.present[worker] and answer.epoch == self._epochs[worker]:
                match answer:
                    case Done(units=units, seconds=seconds, overflow=overflow):
                        self.overflow |= overflow
                        self._computed(worker, units, seconds)
                    case Released(asked=asked, units=units):
                        self._released(worker, asked, units)
                    case Refused(closing=closing) if self.closed and closing == self.closing:
                        self._end_epoch(worker)
                        self._follow(self.round.regained([worker], now))
        return self.react(now)

    def lost(self, workers: Iterable[int], now: float) -> list[Letter]:
        """Record that workers are gone, with what they have computed, and react."""
        self.round.state.now = now
        for worker in workers:
            self._silent.discard(worker)
            self._end_epoch(worker)
            if worker in self._summing.has:
                # If no other worker has the sum, it is made again.
                self.closed = False
            self._summing.lose(worker)
        return self.react(now)

    def react(self, now: float) -> list[Letter]:
        """React to what was recorded, or to time that has passed."""
        self.round.state.now = now
        self._give_up(now)
        if not self.over:
            if self.round.finished and self.round.state.unfinished:
                # A copy was given up that had finished the round.
                self._follow(self.round.regained([], now))
            self._follow(self.round.react(now))
            if self._settled():
                self._close()
        self._ask_owners(now)
        if self._disturbed:
            self._fetch(now)
        if self._again <= now or self.over:
            self._again = inf
        summing = self._summing
        wakes = [*self._patience.due.values(), self._again, summing.due, summing.overdue]
        if self.round.wake is not None and not self.over:
            wakes.append(self.round.wake)
        self.wake = wake if (wake := min(wakes)) < inf else None
        letters, self._letters = self._letters, []
        return letters

    # -- wishes of the engine ------------------------------------------------------------------

    def _follow(self, commands: list[Command]) -> None:
        """Turn commands of the engine into messages."""
        recalled: dict[int, list[int]] = {}
        wished: dict[int, list[int]] = {}
        for command in commands:
            if isinstance(command, Withdraw):
                for unit in self.units.units_in(command.ranges):
                    if self._target.get(unit) == command.worker:
                        self._target[unit] = None
                    elif self._granted.holder[unit] != command.worker or unit in self._target:
                        pass
                    elif unit in self._granted.maker or self._asked_before(unit):
                        self._believe(command.worker, unit)
                    elif unit not in self._granted.done:
                        self._recall(unit, None, recalled)
        for command in commands:
            if isinstance(command, Assign):
                self._again = min(self._again, self._patience.until(command.worker))
                for unit in self.units.units_in(command.ranges):
                    self._wish(command.worker, unit, recalled, wished)
        for worker, units in recalled.items():
            self._send(worker, Recall, units=tuple(units))
            self._patience.wait(worker, again=False)
        for worker, units in wished.items():
            self._grant(worker, units)

    def _wish(
        self,
        worker: int,
        unit: int,
        recalled: dict[int, list[int]],
        wished: dict[int, list[int]],
    ) -> None:
        holder = self._granted.holder[unit]
        if holder is None:
            wished.setdefault(worker, []).append(unit)
        elif unit in self._target:
            if self._target[unit] in (None, worker):
                self._target[unit] = worker
            elif worker != holder:
                self._forget(worker, unit)
        elif worker in (holder, self._granted.maker.get(unit)):
            pass
        elif self._granted.may_copy(worker, unit):
            self._granted.maker[unit] = worker
            self._send(worker, Copy, unit=unit)
        elif self._may_ask(unit):
            # Its worker is late. It gives the unit back, has begun it, or does not answer.
            self._recall(unit, worker, recalled)
        else:
            self._forget(worker, unit)

    def _may_ask(self, unit: int) -> bool:
        """Whether to have a worker give back a unit that the engine wants to be computed twice."""
        granted = self._granted
        return not (unit in granted.done or unit in granted.maker or self._asked_before(unit))

    def _asked_before(self, unit: int) -> bool:
        return self._begun.get(unit, -inf) > self.round.state.now

    def _recall(self, unit: int, target: int | None, recalled: dict[int, list[int]]) -> None:
        holder = self._granted.holder[unit]
        assert holder is not None
        self._target[unit] = target
        recalled.setdefault(holder, []).append(unit)

    def _grant(self, worker: int, units: Iterable[int]) -> None:
        """Grant those units that are free to a worker."""
        given = []
        for unit in units:
            if self._granted.holder[unit] is None:
                given.append(unit)
            elif self._granted.holder[unit] != worker:
                self._forget(worker, unit)
        if not given:
            return
        for unit in [
            u for u in self._granted.maker if self._granted.holder[u] == worker and u not in given
        ]:
            self._give_up_copy(unit)
        self._granted.grant(worker, given)
        self.closed = False
        self._send(worker, Deal, units=tuple(given))

    def _give_up_copy(self, unit: int) -> None:
        """Let only its holder compute a unit, so that this worker can be granted more."""
        maker = self._granted.give_up_copy(unit)
        self._send(maker, Recall, units=(unit,))
        self._forget(maker, unit)

    # -- answers -------------------------------------------------------------------------------

    def _computed(self, worker: int, units: Iterable[int], seconds: float) -> None:
        new = self._granted.new(worker, units)
        if new:
            self.round.state.record(worker, self.units.ranges(worker, new), seconds)
        for unit in new:
            if self._granted.holder[unit] == worker:
                target = self._target.pop(unit, None)
                if target not in (None, worker):  # it may have been asked for and left again
                    self._forget(target, unit)
                if unit in self._granted.maker:
                    self._give_up_copy(unit)

    def _released(self, worker: int, asked: tuple[int, ...], units: tuple[int, ...]) -> None:
        self._patience.due.pop(worker, None)
        free: dict[int, list[int]] = {}
        orphans = False
        for unit in asked:
            if unit not in self._target or self._granted.holder[unit] != worker:
                continue
            target = self._target.pop(unit)
            if unit not in units:
                self._begun[unit] = self._patience.until(worker)
                if target is not None and target != worker:
                    self._forget(target, unit)
                self._believe(worker, unit)
                continue
            self._granted.release(unit)
            self._begun.pop(unit, None)
            self.closed = False
            if target != worker:
                self._forget(worker, unit)
                self.moved += 1
            if target is None:
                orphans = True
            else:
                free.setdefault(target, []).append(unit)
        if any(self._granted.holder[unit] == worker for unit in self._target):
            self._patience.wait(worker)
        for target, given in free.items():
            self._grant(target, given)
        if orphans:
            self._follow(self.round.regained([], self.round.state.now))

    def _forget(self, worker: int, unit: int) -> None:
        """Have the engine know that a worker does not compute a unit."""
        self.round.state.forget(self.units.ranges(worker, [unit]))

    def _believe(self, worker: int, unit: int) -> None:
        """Have the engine know that a worker still owes a unit."""
        state = self.round.state
        [part] = self.units.ranges(worker, [unit])
        if state.free(part.piece) >> part.start & 1:
            before, state.commands = state.commands, []
            state.assign(worker, [part])
            state.commands = before

    # -- faults --------------------------------------------------------------------------------

    def _end_epoch(self, worker: int) -> None:
        """Free all units of a worker, also those that it has computed."""
        self._epochs[worker] += 1
        self._disturbed = True
        self._patience.due.pop(worker, None)
        for unit in [u for u, target in self._target.items() if target == worker]:
            self._target[unit] = None
        freed, heirs = self._granted.free(worker)
        moves: dict[int, list[int]] = {}
        for unit in freed:
            self.closed = False
            self._begun.pop(unit, None)
            target = heirs.get(unit, self._target.pop(unit, None))
            if target is not None:
                moves.setdefault(target, []).append(unit)
        own = self.units.ranges(worker, self.units.stored[worker])
        commands = self.round.forgot(worker, own, self.round.state.now)
        for target, units in moves.items():
            self._grant(target, units)
            for unit in units:
                self._granted.promote(unit)
        self._follow(commands)

    def _give_up(self, now: float) -> None:
        """End the epochs of workers that did not answer, unless no other worker could go on."""
        present = self.round.state.present
        for worker in [w for w, due in self._patience.due.items() if due <= now]:
            if self.over:
                # It may never pass on the chunk that it owns.
                del self._patience.due[worker]
                self._disturbed = True
                continue
            if any(
                not any(present[other] for other in holders if other != worker)
                for holders in self.units.holders
            ):
                self._patience.wait(worker)
                continue
            self._end_epoch(worker)
            self._silent.add(worker)

    # -- the sum -------------------------------------------------------------------------------

    def _have_sum(self, worker: int) -> None:
        if not self.over:
            self._patience.due.clear()
            self._summing.stop()
        self._patience.due.pop(worker, None)
        self._summing.has.add(worker)

    def _fetch(self, now: float) -> None:
        """Tell workers that lack the sum to fetch it from one that has it."""
        state = self.round.state
        there = np.flatnonzero(state.present).tolist()
        for worker, source in self._summing.to_fetch(there, now, now - state.started):
            self._send(worker, Fetch, sources=(source,))

    def _ask_owners(self, now: float) -> None:
        """Once all units are computed, ask those who add them up whether they are there."""
        state, has = self.round.state, self._summing.has
        fetched = self.over and self._disturbed  # by all that do not have it
        owners = []
        if self.computed and not fetched:
            owners = [w for w in self._granted.shares() if state.present[w] and w not in has]
        if not owners:
            self._summing.stop()
            return
        if self._summing.due == inf:
            self._summing.expect(now, max(map(self._patience.until, owners)))
        if self._summing.due <= now:
            self._summing.ask_again(now)
            for worker in owners:
                if worker not in self._patience.due:
                    self._send(worker, Recall, units=())
                    # An answer may wait behind parts of the sum.
                    late = now + (now - state.started)
                    self._patience.due[worker] = max(self._patience.until(worker), late)

    # -- closing -------------------------------------------------------------------------------

    def _settled(self) -> bool:
        """Whether to close the step: every unit is granted, and no move is worth a message."""
        granted, state = self._granted, self.round.state
        if self.closed and not granted.made:  # a copy that is computed first reopens the step
            return False
        waits = self._target or self._patience.due or granted.maker.keys() - granted.made
        if waits or None in granted.holder or self.round.failed:
            return False
        owed = [units - granted.made for units in granted.owed]
        return best_gain(self.units, owed, state.estimate(), state, self._doubt) <= 0

    def _close(self) -> None:
        for unit, holder in self._granted.settle().items():
            self._forget(holder, unit)
        self.closed = True
        self.closing += 1
        sets = self._granted.sets()
        for worker in np.flatnonzero(self.round.state.present).tolist():
            # The sets of all would be as many numbers as there are units, for each worker.
            units = sets.get(worker, ())
            self._send(worker, Close, closing=self.closing, units=units, owners=tuple(sets))

    def _send(self, worker: int, kind: type[Grant], **fields: object) -> None:
        self._letters.append((worker, kind(self.step, self._epochs[worker], **fields)))
