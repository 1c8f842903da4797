"""The coordinator: drives rounds from inside the cluster, and the operator that algorithms see.

An algorithm is an ordinary function over an operator with ``@``. It runs in one task; each
``operator @ x`` in it is one round: the operand goes to the workers that hold pieces, shares come
back, and the thread of the task decodes them while the rest is computed. The state machine of
:mod:`dask_coded.rounds` decides; this module carries its commands out and tells it what happened.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Self

import numpy as np
from dask.typing import Key
from distributed import get_worker
from distributed.utils import sync
from distributed.worker import thread_state

from dask_coded.planning import (
    Assign,
    Command,
    InfeasibleError,
    LagHistory,
    Layout,
    Pace,
    Run,
    Withdraw,
)
from dask_coded.planning.layout import Floats
from dask_coded.rounds import Round
from dask_coded.runtime.channels import CLOSED, Message
from dask_coded.runtime.linear import RoundOperator, refuse_transpose
from dask_coded.runtime.spec import ArraySpec, CodedDataLostError, RoundOptions
from dask_coded.runtime.worker import CodedWorkerPlugin, worker_plugin

# A fresh plan is worth waiting for only while the wait is small against a round: this share of it.
_PATIENCE = 0.02
# Rounds may be far shorter than this; the scheduler is not asked more often.
_ASK_SECONDS = 0.03
# Bytes that are decoded at a time while the rest is computed. Waking up the thread of the algorithm
# takes a share of the event loop's time, which small rounds cannot spare.
_DECODE_BYTES = 1 << 19

#: Has something done in the thread of the algorithm, soon.
InThread = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class Plan:
    """The scheduler's answer: who holds what, how fast and prompt all should be, who does what."""

    spec: ArraySpec
    layout: Layout
    addresses: tuple[str, ...]
    speeds: Floats
    lags: Floats
    first: list[list[Run]] | None


@dataclass
class RoundReport:
    """What happened in a round.

    Attributes
    ----------
    seconds : float
        From the operand to the decoded result.
    workers : int
        Workers whose shares were used.
    messages : int
        Messages sent and received by the coordinator.
    timeline : list of (address, piece, start stripe, stop stripe, begin, end)
        Who computed what when; seconds since the round began.
    """

    seconds: float = 0.0
    workers: int = 0
    messages: int = 0
    timeline: list[tuple[str, int, int, int, float, float]] = field(default_factory=list)


class _LiveRound:
    """A round on the wire: commands become messages, messages become events."""

    def __init__(
        self,
        plugin: CodedWorkerPlugin,
        plan: Plan,
        x: np.ndarray[Any, Any] | None,
        options: RoundOptions,
        pace: Pace,
        in_thread: InThread,
    ) -> None:
        self.run = uuid.uuid4().hex
        self.spec = plan.spec
        self.plan = plan
        self.x = x
        self.report = RoundReport()
        self._assembler = plan.spec.assembler(x)
        self._in_thread = in_thread
        # Shares that wait for being decoded, and their bytes.
        self._waiting: list[tuple[Run, np.ndarray[Any, Any]]] = []
        self._size = 0
        self._options = options
        self._lead, self._reporting = pace.lead, pace.reporting
        self._channels = [plugin.channel(address) for address in plan.addresses]
        self._started: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self.began = monotonic()

    async def play(self) -> None:
        """Run to the end.

        Raises
        ------
        _Unfinishable
            If too many pieces have gone out of reach.
        """
        plan = self.plan
        # Ask nothing of a worker that has not answered yet: its messages would only pile up.
        self._silent = {w for w, channel in enumerate(self._channels) if channel.silent}
        speeds, first = plan.speeds, plan.first
        if self._silent:
            speeds, first = speeds.copy(), None
            speeds[list(self._silent)] = 0.0
        self.round = Round(
            plan.layout,
            self._options.make_policy(),
            speeds,
            self.began,
            self._reporting,
            plan.lags,
        )
        for worker, channel in enumerate(self._channels):
            channel.listen(self.run, partial(self._receive, worker))
        try:
            try:
                commands = self.round.start(first)
            except InfeasibleError:
                # Not enough of the others: then those that are silent have to be tried.
                self.round.progress.prior[:] = np.maximum(plan.speeds, plan.speeds.max() * 1e-3)
                commands = self.round.start()
            self._carry_out(commands)
            await self._done
        finally:
            self._end()

    def learnt(self) -> tuple[dict[str, float], dict[str, float]]:
        """Speeds, work per second, and lags, seconds, as this round had them; by address."""
        elapsed = monotonic() - self.began
        progress, addresses = self.round.progress, self.plan.addresses
        speeds = {addresses[w]: s for w, s in progress.measured_speeds(elapsed).items()}
        lags = {addresses[w]: s for w, s in progress.measured_lags(elapsed).items()}
        return speeds, lags

    def _welcome_back(self) -> None:
        """Workers that were silent when the round began and have answered may take part again."""
        for worker in [w for w in self._silent if not self._channels[w].silent]:
            self._silent.discard(worker)
            self.round.progress.prior[worker] = self.plan.speeds[worker]

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Assign):
                self._assign(command)
            elif isinstance(command, Withdraw):
                runs = [tuple(run) for run in command.runs]
                self._send(command.worker, {"op": "withdraw", "run": self.run, "runs": runs})
        if self._done.done():
            return
        if self.round.finished:
            self._done.set_result(None)
        elif self.round.failed:
            self._done.set_exception(_Unfinishable(self.round.failed))
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.round.wake is not None:
            delay = max(self.round.wake - monotonic(), 0.0)
            self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._welcome_back()
        self._carry_out(self.round.react(monotonic()))

    def _assign(self, command: Assign) -> None:
        worker = command.worker
        runs = [tuple(run) for run in command.runs]
        if worker in self._started:
            self._send(worker, {"op": "assign", "run": self.run, "runs": runs})
            return
        self._started.add(worker)
        spec = self.spec
        self._send(
            worker,
            {
                "op": "start",
                "run": self.run,
                "kernel": spec.kernel,
                "x": self.x,
                "stripes": spec.geometry.stripes,
                "pieces": [
                    (p, spec.keys[p], int(spec.geometry.edges(int(spec.code.group[p]))[-1]))
                    for p in self.plan.layout.pieces_of[worker]
                ],
                "runs": runs,
                "reporting": (self._reporting.interval, self._reporting.growth, self._lead),
            },
        )

    def _send(self, worker: int, message: Message) -> None:
        self.report.messages += 1
        channel = self._channels[worker]
        if channel.closed:
            self._loop.call_soon(self._receive, worker, CLOSED)
        else:
            channel.send(message)

    def _receive(self, worker: int, message: Message) -> None:
        if self._done.done():
            return
        self.report.messages += 1
        self._welcome_back()
        now = monotonic()
        op = message["op"]
        if op == "share":
            runs = [Run(*run) for run in message["runs"]]
            fresh, commands = self.round.share(worker, runs, message["seconds"], now)
            new = set(fresh)
            shares = [s for s in zip(runs, message["rows"], strict=True) if s[0] in new]
            self._decode(shares)
            self._log(worker, runs, message["seconds"], now - self.began)
        elif op == "closed":
            commands = self.round.lost([worker], now)
        elif op == "absent":
            commands = self.round.lost_pieces(message["pieces"], now)
        elif op == "error":
            self._done.set_exception(
                RuntimeError(f"Worker {self.plan.addresses[worker]} failed: {message['error']}")
            )
            return
        else:
            return
        self._carry_out(commands)

    def _decode(self, shares: list[tuple[Run, np.ndarray[Any, Any]]]) -> None:
        """Have decoded what has come, once that is much or all."""
        self._waiting += shares
        self._size += sum(rows.nbytes for _, rows in shares)
        if self._size < _DECODE_BYTES and not self.round.finished:
            return
        progress = self.round.progress
        self._in_thread(
            partial(self._assembler.add, self._waiting, progress.computed.copy(), progress.complete)
        )
        self._waiting, self._size = [], 0

    def result(self) -> np.ndarray[Any, Any]:
        """What the finished round gives, when all has been done that the thread was given."""
        return self.spec.result(self._assembler.rows)

    def _log(self, worker: int, runs: list[Run], seconds: float, end: float) -> None:
        address = self.plan.addresses[worker]
        total = sum(run.stop - run.start for run in runs)
        begin = end - seconds
        for run in runs:
            until = begin + seconds * (run.stop - run.start) / total
            self.report.timeline.append((address, *run, begin, until))
            begin = until

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for channel in self._channels:
            channel.end(self.run, self.began)
        self.report.workers = int((self.round.progress.done > 0).sum())


class _Unfinishable(Exception):
    """Too many pieces are out of reach, at least for now."""


class Coordinator:
    """Runs the rounds of one coded array for one task."""

    def __init__(
        self, plugin: CodedWorkerPlugin, array_id: str, options: RoundOptions, task: Key | None
    ) -> None:
        self._plugin = plugin
        self._id = array_id
        self._options = options
        self._task = task
        self._plan: Plan | None = None
        self._asking: asyncio.Task[Plan] | None = None
        self._asked = -math.inf
        self._last = 0.0
        self._pace = Pace(options.lead, options.reporting)
        self._measured: dict[str, float] = {}
        self._lags = LagHistory()

    @classmethod
    def of(cls, array_id: str, options: RoundOptions) -> Self:
        """The coordinator of a registered array, in a task."""
        plugin = worker_plugin(get_worker())
        return cls(plugin, array_id, options, getattr(thread_state, "key", None))

    def other(self, array_id: str) -> Coordinator:
        """The same for another array, in the same task."""
        return Coordinator(self._plugin, array_id, self._options, self._task)

    def play(self, x: np.ndarray[Any, Any] | None) -> tuple[np.ndarray[Any, Any], RoundReport]:
        """One round, from a thread: its decoded result, and what happened."""
        began = monotonic()
        # A queue, not `run_coroutine_threadsafe` and its future: this thread decodes meanwhile, and
        # who cancels a task expects the CancelledError of concurrent.futures, not asyncio's.
        steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        ended: Future[_LiveRound] = Future()

        async def run() -> None:
            try:
                ended.set_result(await self._round(x, steps.put))
            except BaseException as exc:
                ended.set_exception(exc)
            finally:
                steps.put(None)

        self._plugin.worker.loop.add_callback(run)
        while (step := steps.get()) is not None:
            step()
        live = ended.result()
        result = live.result()
        live.report.seconds = self._last = monotonic() - began
        return result, live.report

    def open(self) -> ArraySpec:
        """Learn what the array is, from a thread."""
        plan: Plan = sync(self._plugin.worker.loop, self._current_plan)
        return plan.spec

    async def _round(self, x: np.ndarray[Any, Any] | None, in_thread: InThread) -> _LiveRound:
        while True:
            # The thread of a cancelled task runs on: its next round is where it can be stopped.
            if self._task and self._plugin.is_cancelled(self._task):
                raise CancelledError(f"{self._task} was cancelled")
            plan = await self._current_plan()
            live = _LiveRound(self._plugin, plan, x, self._options, self._pace, in_thread)
            try:
                await live.play()
            except _Unfinishable:
                # Pieces have been lost or moved since the plan was made: ask where they are now.
                self._plan = None
                self._asking = None
                continue
            speeds, lags = live.learnt()
            self._measured |= speeds
            self._lags.record(lags)
            progress = live.round.progress
            self._pace.record(monotonic() - live.began, progress.lag)
            lost = not progress.available.all()
            if lost or monotonic() - self._asked >= _ASK_SECONDS:
                self._ask_ahead(fresh=lost)
            return live

    def _ask_ahead(self, fresh: bool) -> None:
        """Have the plan for the next round made while the algorithm does its own arithmetic."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        if fresh:
            self._plan = None

    async def _current_plan(self) -> Plan:
        if self._plan is None and self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            timeout = None if self._plan is None else _PATIENCE * self._last
            await asyncio.wait([self._asking], timeout=timeout)
            if self._asking.done():
                self._plan, self._asking = self._asking.result(), None
        assert self._plan is not None
        return self._plan

    async def _ask(self) -> Plan:
        """One exchange with the scheduler plugin: measurements up, assignment down."""
        plugin = self._plugin
        measured, self._measured = self._measured, {}
        self._asked = monotonic()
        for attempt in itertools.count():
            spec = plugin.specs.get(self._id)
            answer = await plugin.worker.scheduler.coded_plan(
                array=self._id,
                measured=measured,
                lags=self._lags.known,
                policy=self._options.policy,
                predictor=self._options.predictor,
                silent=[a for a, c in plugin.channels.items() if c.silent],
                known=len(spec.keys) if spec else 0,
            )
            if answer["status"] == "lost":
                raise CodedDataLostError(answer["message"])
            if answer.get("spec") is not None:
                spec = plugin.specs[self._id] = answer["spec"]
            if answer["status"] == "OK":
                assert spec is not None
                return self._read(spec, answer)
            measured = {}
            await asyncio.sleep(min(0.01 * 2**attempt, 0.5))
        raise AssertionError("unreachable")  # pragma: no cover

    @staticmethod
    def _read(spec: ArraySpec, answer: dict[str, Any]) -> Plan:
        addresses = tuple(answer["addresses"])
        work = answer["work"] if answer["work"] is not None else spec.uniform_work
        layout = Layout.of(spec.code, answer["host"], work, len(addresses))
        first = answer["first"] and [[Run(*run) for run in runs] for runs in answer["first"]]
        speeds = np.asarray(answer["speeds"], dtype=np.float64)
        return Plan(spec, layout, addresses, speeds, np.asarray(answer["lags"]), first)


class Operator(RoundOperator):
    """A coded array inside the cluster: ``operator @ x`` is one round, and gives a NumPy array.

    Algorithms get it in the place of a :class:`dask_coded.CodedArray`. It has what a NumPy matrix
    would have there: ``shape``, ``dtype``, ``@`` on either side, ``.T``, ``.dot``. And it is a
    :class:`scipy.sparse.linalg.LinearOperator`, so that SciPy's solvers take it.

    Attributes
    ----------
    code : Code
    last_round : RoundReport or None
        What happened in the round before.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        spec = coordinator.open()
        super().__init__(spec.dtype, spec.shape)
        self._coordinator = coordinator
        self.code = spec.code
        self.last_round: RoundReport | None = None
        self._transposed: Operator | None = None

    def _matmat(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        result, self.last_round = self._coordinator.play(x)
        return result

    def _transpose(self) -> Operator:
        if self._transposed is None:
            spec = self._coordinator.open()
            if spec.transposed is None:
                refuse_transpose()
            self._transposed = Operator(self._coordinator.other(spec.transposed))
            self._transposed._transposed = self
        return self._transposed
