"""Trainings in virtual time: an aggregation's state machines over links, with stragglers.

Gradients are stand-ins of a few numbers whose size in bytes is declared. Each worker has one thread
that computes and another that adds up incoming messages; both take virtual time. A message leaves
through its sender's link after the messages sent before it, and enters through its receiver's link
after the messages that arrived before it. Messages to the same receiver therefore arrive one after
another.

As in the cluster, a step starts once the updates that the schedule requires are applied, and a
straggler continues with the newest step that still lacks a sum. It gives up between two parts of
the data if the sum is complete without it. Messages that it sends too late still occupy the links.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial as bound

import numpy as np

from dask_coded.aggregation import (
    ROOT,
    Command,
    Compute,
    Finished,
    Machine,
    Plan,
    Send,
    Tag,
)
from dask_coded.aggregation.timing import Costs
from dask_coded.arguments import check_positive, check_whole
from dask_coded.compression import EXACT, Partial
from dask_coded.simulation.delays import Delays, undelayed
from dask_coded.typing import Floats


@dataclass(frozen=True, eq=False)
class SimulatedTraining:
    """The outcome of simulated steps.

    Attributes
    ----------
    ended : ndarray, shape (steps,)
        Virtual seconds after which each step had its sum: at the root or, without a root, at the
        last worker.
    late : ndarray of bool, shape (steps, workers)
        True for workers that had not computed their part when the step ended.
    messages : int
    received : ndarray, shape (workers + 1,)
        Bytes that entered each node's link; the root is last.
    """

    ended: Floats
    late: np.ndarray
    messages: int
    received: Floats

    @property
    def seconds(self) -> Floats:
        """Duration of each step, in the order in which the steps ended."""
        return np.diff(np.sort(self.ended), prepend=0.0)


@dataclass
class _Node:
    """A worker, or the root, which computes nothing."""

    machines: dict[int, Machine] = field(default_factory=dict)
    #: Segments of the sum that are complete, by step, for steps that are not over.
    finished: dict[int, set[int]] = field(default_factory=dict)
    #: Steps beyond ``updates`` whose sum is complete.
    over: set[int] = field(default_factory=set)
    updates: int = 0
    begun: int = -1
    computing: bool = False
    works: deque[tuple[int, Compute]] = field(default_factory=deque)
    #: Times at which each direction of its link, and its communication thread, become free.
    sending: float = 0.0
    entering: float = 0.0
    adding: float = 0.0


class TrainingSimulation:
    """Simulate an aggregation among workers in virtual time.

    Parameters
    ----------
    plan : Plan
        A plan that has not been used before, because some plans remember which workers were late.
    costs : Costs
        ``costs.computation`` is the time in which one worker computes the gradient of the whole
        batch.
    nbytes : int
        Size of a gradient as it is sent.
    delays : Delays, optional
    width : int
        How many steps may be in flight at once; 1 runs one after another.
    root_bandwidth : float, optional
        Bytes per second of the root's link; by default that of the workers.

    Raises
    ------
    ValueError
        If delays and plan have different numbers of workers, or a number is out of range.

    Examples
    --------
    >>> from dask_coded.aggregation import Ring
    >>> costs = Costs(latency=1e-3, bandwidth=1e6, computation=0.4)
    >>> training = TrainingSimulation(Ring().plan(4), costs, nbytes=40_000).run(3)
    >>> training.seconds.round(6).tolist()  # 0.4 / 4, and six messages of 10 KB
    [0.166, 0.166, 0.166]
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        nbytes: int,
        delays: Delays | None = None,
        *,
        width: int = 1,
        root_bandwidth: float | None = None,
    ) -> None:
        check_positive("nbytes", nbytes, or_zero=True)
        check_whole("width", width)
        if plan.dealt:
            raise ValueError("The steps of `Squeeze` are simulated by SqueezeSimulation.")
        self._delays = undelayed(plan.workers) if delays is None else delays
        if self._delays.workers != plan.workers:
            raise ValueError(
                f"The plan has {plan.workers} workers, the delays have {self._delays.workers}."
            )
        self._plan = plan
        self._costs = costs
        self._width = width
        self._bandwidth = np.full(plan.workers + 1, costs.bandwidth)
        if root_bandwidth is not None:
            check_positive("root_bandwidth", root_bandwidth, or_infinite=True)
            self._bandwidth[ROOT] = root_bandwidth
        # Enough numbers for every chunk of a ring to have one.
        self._numbers = plan.segments * (1 if plan.rooted else plan.workers)
        self._scale = nbytes / (8 * self._numbers)

    def run(self, steps: int) -> SimulatedTraining:
        """Simulate ``steps`` steps from the start.

        Raises
        ------
        RuntimeError
            If a step never gets its sum.
        """
        check_whole("steps", steps, least=0)
        workers = self._plan.workers
        self._now = 0.0
        self._steps = steps
        self._count = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._nodes = [_Node() for _ in range(workers + 1)]  # the root is last, so its index is -1
        self._choices: dict[int, tuple[int, ...]] = {0: self._plan.choose()}
        self._computed: dict[int, set[int]] = {}
        self._waited = [1 if self._plan.rooted else workers] * steps
        self._ended = np.full(steps, np.nan)
        self._late = np.zeros((steps, workers), dtype=bool)
        self._messages = 0
        self._received = np.zeros(workers + 1)
        for node in range(workers):
            self._advance(node)
        self._left = steps
        while self._events and self._left:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        if self._left:
            raise RuntimeError(f"{self._left} of {steps} steps never get their sum.")
        return SimulatedTraining(self._ended, self._late, self._messages, self._received)

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._count), happen))

    # -- computing -----------------------------------------------------------------------------

    def _advance(self, number: int) -> None:
        """Continue with requested work, or else start the next step if the schedule allows it."""
        node = self._nodes[number]
        if node.computing:
            return
        while node.works:
            step, work = node.works.popleft()
            if not self._over(node, step):
                node.computing = True
                self._compute(number, step, work, 0)
                return
        step = max(node.begun + 1, node.updates)
        if step < self._steps and self._version(step) <= node.updates:
            node.begun = step
            self._obey(number, step, self._machine(number, step).begin())

    def _version(self, step: int) -> int:
        """Return the number of updates in the parameters that a step starts with."""
        return max(step - self._width + 1, 0)

    def _compute(self, number: int, step: int, work: Compute, done: int) -> None:
        """Compute one part after another, until the sum is complete without this worker."""
        node = self._nodes[number]
        if done == len(work.parts):
            self._compute_ended(number, step, work)
            return
        if self._over(node, step):
            node.computing = False
            self._advance(number)
            return
        seconds = self._delays.seconds(step, number, self._costs.computation / self._plan.parts)
        if done:  # additive delays count once per step
            seconds -= self._delays.seconds(step, number, 0.0)
        self._at(self._now + seconds, bound(self._compute, number, step, work, done + 1))

    def _compute_ended(self, number: int, step: int, work: Compute) -> None:
        node = self._nodes[number]
        node.computing = False
        self._computed.setdefault(step, set()).add(number)
        for segment in range(self._plan.segments):
            if self._over(node, step):
                break
            stand_in = Partial(np.ones(self._numbers // self._plan.segments))
            commands = self._machine(number, step).computed(work, segment, stand_in)
            self._obey(number, step, commands)
        self._advance(number)

    # -- machines ------------------------------------------------------------------------------

    def _over(self, node: _Node, step: int) -> bool:
        return step < node.updates or step in node.over

    def _machine(self, number: int, step: int) -> Machine:
        machines = self._nodes[number].machines
        if step not in machines:
            choice = self._choices.get(self._version(step), ())
            machines[step] = self._plan.machine(number, choice)
            if number == ROOT:
                self._obey(number, step, machines[step].begin())
        return machines[step]

    def _obey(self, number: int, step: int, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Finished):
                self._finished(number, step, command.segment)
        for command in commands:
            if isinstance(command, Send):
                self._send(number, step, command)
            elif isinstance(command, Compute):
                self._nodes[number].works.append((step, command))
        if number != ROOT:
            self._advance(number)

    def _finished(self, number: int, step: int, segment: int) -> None:
        node = self._nodes[number]
        segments = node.finished.setdefault(step, set())
        segments.add(segment)
        if len(segments) < self._plan.segments:
            return
        del node.machines[step], node.finished[step]
        node.over.add(step)
        while node.updates in node.over:
            node.over.discard(node.updates)
            node.updates += 1
        if number == ROOT or not self._plan.rooted:
            self._waited[step] -= 1
            if not self._waited[step]:
                self._end(step)

    def _end(self, step: int) -> None:
        self._ended[step] = self._now
        self._left -= 1
        self._late[step] = True
        self._late[step, list(self._computed.get(step, ()))] = False
        if self._plan.rooted:
            self._choices[step + 1] = self._plan.choose(self._late[step])

    # -- links ---------------------------------------------------------------------------------

    def _send(self, number: int, step: int, command: Send) -> None:
        node = self._nodes[number]
        self._messages += 1
        size = EXACT.nbytes(command.payload) * self._scale
        adds = command.tag.kind == "part"
        begins = max(self._now, node.sending)
        node.sending = begins + size / self._bandwidth[number]
        enters = begins + self._costs.latency
        self._at(enters, bound(self._enter, command, number, step, size, adds))

    def _enter(self, command: Send, sender: int, step: int, size: float, adds: bool) -> None:
        """Receive the first byte; the rest follows when the link has room."""
        to = command.to
        node = self._nodes[to]
        self._received[to] += size
        slower = min(self._bandwidth[sender], self._bandwidth[to])
        node.entering = max(
            max(self._now, node.entering) + size / self._bandwidth[to], self._now + size / slower
        )
        node.adding = max(node.entering, node.adding)
        if adds and not self._over(node, step):
            node.adding += self._costs.summation * size
        self._at(node.adding, bound(self._receive, command, sender, step))

    def _receive(self, command: Send, sender: int, step: int) -> None:
        if self._over(self._nodes[command.to], step):
            return
        machine = self._machine(command.to, step)
        if step in self._nodes[command.to].machines:
            tag: Tag = command.tag
            self._obey(command.to, step, machine.received(sender, tag, command.payload))
