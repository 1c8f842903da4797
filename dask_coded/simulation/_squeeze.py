"""Squeezed trainings in virtual time: the ledger and both its ends, with a sum over links.

The leader drives a :class:`~dask_coded.rounds.Ledger`, each worker a
:class:`~dask_coded.rounds.Contribution`. Workers compute one unit after another and answer messages
meanwhile. A pass over a unit may cost a fixed time beside that of its samples, which keeps units
from being as small as one likes. The sum is a direct exchange: each worker owns a chunk of the
gradient, adds up the contributions to it as they come, and sends the total to all others. Workers
start a step together.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as bound
from typing import NamedTuple

import numpy as np

from dask_coded.aggregation.timing import Costs
from dask_coded.arguments import check_positive, check_whole
from dask_coded.rounds import Forecast
from dask_coded.simulation.speeds import Speeds
from dask_coded.squeeze import Contribute, Contribution, Dealer, Ledger, UnitCount, UnitLayout
from dask_coded.squeeze.grants import Answer, Grant
from dask_coded.squeeze.ledger import Letter
from dask_coded.typing import Floats


class UnitSpan(NamedTuple):
    """When a worker computed a unit, in virtual seconds since the step began.

    Attributes
    ----------
    worker, unit : int
    begin, end : float
    """

    worker: int
    unit: int
    begin: float
    end: float


@dataclass(frozen=True)
class SqueezedStep:
    """The outcome of a step.

    Attributes
    ----------
    seconds : float
        Virtual time until the last worker has the sum.
    computing : float
        Virtual time until the last unit is computed.
    bound : float
        The fluid bound: the seconds that workers of these speeds take together for all units,
        without the fixed cost of a pass and without messages.
    units : tuple of int
        Units in the sum of each worker.
    moved : int
        Units that were granted to another worker than at first.
    closings : int
        How often the step was closed.
    messages : int
        Sent and received by the leader.
    spans : tuple of UnitSpan
        All units that were computed, also twice, in the order of their ends.
    """

    seconds: float
    computing: float
    bound: float
    units: tuple[int, ...]
    moved: int
    closings: int
    messages: int
    spans: tuple[UnitSpan, ...]


class SqueezeSimulation:
    """Simulate squeezed training steps on workers of uneven speed.

    Parameters
    ----------
    speeds : Speeds
        Above zero; at 1.0 a worker computes the gradient of the whole batch in
        ``costs.computation`` seconds. One column for each worker.
    costs : Costs
    nbytes : int
        Size of a gradient as it is sent.
    units : int
        Units of a step.
    copies : int
        Workers that store each unit.
    seats : sequence of int, optional
        The worker on each seat of the ring; by default in their order.
    pass_seconds : float
        Fixed cost of a unit on a worker of speed 1.
    predictor : str
        A key of ``PREDICTORS``.
    foresight : callable(ndarray) -> ndarray, optional
        Replaces the predictor, as in :class:`Simulation`.

    Raises
    ------
    ValueError
        If a speed is not above zero, or a number is out of range.

    Examples
    --------
    >>> from dask_coded.simulation import constant
    >>> costs = Costs(latency=5e-4, bandwidth=1e9, computation=1.0)
    >>> simulation = SqueezeSimulation(constant([1, 1, 1, 0.25]), costs, nbytes=300_000, units=32)
    >>> first, *_, last = simulation.run(4)
    >>> first.seconds > last.seconds, last.units, last.seconds < 1.1 * last.bound
    (True, (10, 10, 10, 2), True)
    """

    def __init__(
        self,
        speeds: Speeds,
        costs: Costs,
        nbytes: int,
        *,
        units: int,
        copies: int = 2,
        seats: Sequence[int] | None = None,
        pass_seconds: float = 0.0,
        predictor: str = "adaptive",
        foresight: Callable[[Floats], Floats] | None = None,
    ) -> None:
        check_positive("nbytes", nbytes, or_zero=True)
        check_positive("costs.computation", costs.computation)
        check_positive("pass_seconds", pass_seconds, or_zero=True)
        if not (speeds.values > 0).all():
            raise ValueError("Argument 'speeds' must be above zero for every worker and step.")
        self.speeds = speeds
        self._costs = costs
        self._workers = speeds.workers
        seats = range(self._workers) if seats is None else seats
        self._layout = UnitLayout(units, list(seats), copies, self._workers)
        self._chunk = nbytes / self._workers
        self._unit = costs.computation / units + pass_seconds
        self._foresight = foresight
        names = [str(worker) for worker in range(self._workers)]
        self._dealer = Dealer(self._layout, names, costs.latency, predictor=predictor)
        self.now, self.steps = 0.0, 0

    def run(self, steps: int) -> list[SqueezedStep]:
        """Run steps, each started when the previous one has ended."""
        check_whole("steps", steps, least=0)
        return [self.step() for _ in range(steps)]

    def step(self) -> SqueezedStep:
        """Run one step."""
        began, dealer = self.now, self._dealer
        forecast = dealer.forecast()
        if self._foresight is not None:
            actual, _ = self.speeds.at(self.steps, began)
            lags = np.full(self._workers, 2 * self._costs.latency)
            forecast = Forecast(self._foresight(actual) / self._unit, lags, dealer.doubt)
        elif not dealer.steps:
            forecast = forecast._replace(speeds=forecast.speeds / self._unit)
        ledger = dealer.begin(self.steps, began, forecast)
        virtual = _Step(self, ledger)
        virtual.run()
        self.now = virtual.now
        elapsed = self.now - began
        dealer.ended(ledger, self.now)
        self.steps += 1
        return SqueezedStep(
            seconds=elapsed,
            computing=virtual.computed_at - began,
            bound=self.bound(self.steps - 1, began),
            units=tuple(len(own.folded) for own in virtual.own),
            moved=ledger.moved,
            closings=ledger.closing,
            messages=virtual.messages,
            spans=tuple(virtual.spans),
        )

    def bound(self, step: int, time: float) -> float:
        """Return the fluid bound of a step that starts at a time."""
        return self._until(step, time, self._costs.computation, slice(None)) - time

    def unit_ends(self, worker: int, time: float) -> float:
        """Return when a unit that a worker begins at a time is computed."""
        return self._until(self.steps, time, self._unit, slice(worker, worker + 1))

    def _until(self, step: int, time: float, work: float, workers: slice) -> float:
        while True:
            speeds, until = self.speeds.at(step, time)
            speed = float(speeds[workers].sum())
            if work <= speed * (until - time):
                return time + work / speed
            work, time = work - speed * (until - time), until

    @property
    def latency(self) -> float:
        return self._costs.latency

    @property
    def units(self) -> int:
        return self._layout.units

    @property
    def workers(self) -> int:
        return self._workers

    def seconds_to_send(self) -> float:
        """Return how long a chunk occupies a link."""
        return self._chunk / self._costs.bandwidth

    def seconds_to_add(self) -> float:
        """Return how long it takes to add up a chunk."""
        return self._chunk * self._costs.summation


class _Step:
    """One step on its way."""

    def __init__(self, simulation: SqueezeSimulation, ledger: Ledger) -> None:
        self._simulation = simulation
        self._ledger = ledger
        count = simulation.workers
        self.now = self.computed_at = simulation.now
        self.messages = 0
        self.spans: list[UnitSpan] = []
        self.own = [Contribution(worker, simulation.steps) for worker in range(count)]
        self._tallies = [UnitCount(simulation.units) for _ in range(count)]
        # Chunks of the total that each worker has.
        self._totals: list[set[int]] = [set() for _ in range(count)]
        self._sending = [self.now] * count
        self._entering = [self.now] * count
        self._adding = [self.now] * count
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._left = count

    def run(self) -> None:
        """Run until all workers have the sum."""
        ledger = self._ledger
        self._send(ledger.start())
        while self._left:
            wake = ledger.wake
            if wake is not None and (not self._events or wake < self._events[0][0]):
                self.now = max(self.now, wake)
                self._send(ledger.react(self.now))
                continue
            assert self._events, "nothing happens, and the step is not over"
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._count), happen))

    # -- the leader ----------------------------------------------------------------------------

    def _send(self, letters: list[Letter]) -> None:
        for worker, message in letters:
            self.messages += 1
            self._at(self.now + self._simulation.latency, bound(self._receive, worker, message))

    def _answer(self, answer: Answer) -> None:
        self.messages += 1
        self._send(self._ledger.receive([answer], self.now))

    # -- workers -------------------------------------------------------------------------------

    def _receive(self, worker: int, message: Grant) -> None:
        self._obey(worker, self.own[worker].receive(message))
        self._begin(worker)

    def _begin(self, worker: int) -> None:
        unit = self.own[worker].begin()
        if unit is not None:
            ends = self._simulation.unit_ends(worker, self.now)
            self._at(ends, bound(self._finish, worker, unit, self.now))

    def _finish(self, worker: int, unit: int, begun: float) -> None:
        self.computed_at, began = self.now, self._simulation.now
        self.spans.append(UnitSpan(worker, unit, begun - began, self.now - began))
        self._obey(worker, self.own[worker].finished(self.now - begun))
        self._begin(worker)

    def _obey(self, worker: int, commands: Sequence[object]) -> None:
        for command in commands:
            if isinstance(command, Answer):
                self._at(self.now + self._simulation.latency, bound(self._answer, command))
            elif isinstance(command, Contribute):
                for owner in self._others_first(worker):
                    self._pass(worker, owner, bound(self._part, owner, command))

    # -- the sum -------------------------------------------------------------------------------

    def _pass(self, sender: int, receiver: int, arrived: Callable[[], None]) -> None:
        """Send a chunk: it leaves after what was sent before, and enters after what came before."""
        if sender == receiver:
            self._at(self.now, arrived)
            return
        begins = max(self.now, self._sending[sender])
        self._sending[sender] = begins + self._simulation.seconds_to_send()
        self._at(begins + self._simulation.latency, bound(self._enter, receiver, arrived))

    def _enter(self, receiver: int, arrived: Callable[[], None]) -> None:
        """Receive the first byte; the rest follows when the link has room."""
        begins = max(self.now, self._entering[receiver])
        self._entering[receiver] = begins + self._simulation.seconds_to_send()
        self._at(self._entering[receiver], arrived)

    def _part(self, owner: int, contribution: Contribute) -> None:
        tally = self._tallies[owner]
        if not tally.add(contribution.closing, contribution.units):
            return
        added = max(self.now, self._adding[owner]) + self._simulation.seconds_to_add()
        self._adding[owner] = added
        if tally.complete:
            self._at(added, bound(self._total, owner))

    def _total(self, owner: int) -> None:
        for worker in self._others_first(owner):
            self._pass(owner, worker, bound(self._have, worker, owner))

    def _others_first(self, worker: int) -> list[int]:
        """Return all workers, the next one first, so that not all send to the same one at once."""
        count = len(self.own)
        return [(worker + turn) % count for turn in range(1, count + 1)]

    def _have(self, worker: int, chunk: int) -> None:
        totals = self._totals[worker]
        totals.add(chunk)
        if len(totals) == len(self.own) and not self.own[worker].summed:
            self._left -= 1
            self._obey(worker, self.own[worker].have_sum())
