"""The coordinator: runs the rounds of an array from inside the cluster, for one task.

Each ``operator @ x`` of an algorithm is one round. The operand goes to the workers that hold
pieces, shares come back, and the task's thread decodes them while the rest is computed. The state
machine of :mod:`dask_coded.rounds` decides what happens. This module asks the scheduler plugin for
a plan, and :mod:`dask_coded.runtime.coordinator.live_round` carries it out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from distributed import get_worker, secede

from dask_coded.compat import current_key, in_pool
from dask_coded.config import timeouts
from dask_coded.membership import Timeouts
from dask_coded.rounds import Layout, LoopHistory, Rest, RoundOptions
from dask_coded.rounds.accuracy import NotSolvableError, lose_half
from dask_coded.runtime.answers import Lost, Over, RoundPlan, Waiting, ask
from dask_coded.runtime.coordinator.alone import Alone
from dask_coded.runtime.coordinator.checks import Checks, WrongCheck
from dask_coded.runtime.coordinator.delivery import Delivery, Offer, offered
from dask_coded.runtime.coordinator.live_round import InThread, LiveRound, RoundUnfinishableError
from dask_coded.runtime.coordinator.report import RoundReport
from dask_coded.runtime.coordinator.run_spec import RunSpec
from dask_coded.runtime.spec import (
    CodedDataLostError,
    CodedSpec,
    CorruptSharesError,
    PairSpec,
    inaccurate,
    say_inaccurate,
)
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin, worker_plugin
from dask_coded.transport.attempts import RunOverError
from dask_coded.transport.backoff import Backoff
from dask_coded.transport.messages import Attempt

# A round may wait for a new plan for this fraction of the last round's time.
_PATIENCE = 0.02
# Pairs may lose five digits without a warning: four by their code, one by their data.
_PAIRS = 1e5
# Rounds in a row that may fail because shares contradict each other and no check is found wrong.
_FAILURES = 8


T = TypeVar("T")


def _leave_pool() -> None:
    """Leave the thread pool of the worker, if this is the thread of a task in it."""
    if in_pool():
        secede()


class _Current(NamedTuple):
    """The plan in use, with the spec and the layout that belong to it."""

    spec: CodedSpec
    plan: RoundPlan
    layout: Layout
    checks: Checks | None
    #: Shape of a row of the operand with which the plan's speeds were measured.
    row: tuple[int, ...]


class Coordinator:
    """Runs the rounds of one coded array for one run of a task."""

    def __init__(
        self,
        plugin: CodedWorkerPlugin,
        array_id: str,
        options: RoundOptions,
        attempt: Attempt | None,
    ) -> None:
        self._plugin = plugin
        self._id = array_id
        self._options = options
        self._attempt = attempt
        self._task = attempt and attempt[0]
        self._current: _Current | None = None
        self._asking: asyncio.Task[_Current] | None = None
        self._asked = -math.inf
        self._seconds = 0.0  # of the last round
        self._row: tuple[int, ...] = ()  # of its operand
        self._history = LoopHistory(options.lead, options.reporting)
        self._alone = Alone(plugin)
        self._warned = False
        # Seconds of failed attempts at the present round, without those in which pieces were made.
        self._failing = 0.0
        # Workers whose shares were wrong, not reported yet.
        self._corrupt: set[str] = set()
        self._wrong_checks: list[WrongCheck] = []
        # Workers that have raised exceptions; and those exceptions, not reported yet.
        self._resting = Rest()
        self._failed: dict[str, str] = {}
        self._others: list[Coordinator] = []

    @classmethod
    def of(cls, array_id: str, options: RoundOptions) -> Self:
        """Return the coordinator of a registered array, in a task.

        Raises
        ------
        RuntimeError
            If the task does not run on a worker of the cluster.
        """
        try:
            plugin = worker_plugin(get_worker())
        except ValueError:
            raise RuntimeError(
                "A product of a coded array is computed by the cluster that holds its pieces, but "
                "Dask has run it in this process, because no client is the current one or it is "
                "closed. Call `client.compute(product)` with the array's client; if that is "
                "closed, the pieces are released: encode the array again with another client."
            ) from None
        return cls(plugin, array_id, options, plugin.exchange.attempt(current_key()))

    def other(self, array_id: str) -> Coordinator:
        """Return the coordinator of another array, in the same task."""
        found = Coordinator(self._plugin, array_id, self._options, self._attempt)
        self._others.append(found)
        return found

    def close(self) -> None:
        """Tell the scheduler plugin what has not been told yet; called from a thread.

        A task may end before it asks for another plan. Products of less than 50 ms always do, and
        if only longer ones were told, all speeds would be those of bad moments.
        """
        for other in self._others:
            other.close()
        loop: Any = self._plugin.worker.loop
        loop.add_callback(self._tell)

    async def _tell(self) -> None:
        findings = self._take_findings()
        if any(findings.values()):
            with suppress(OSError, RuntimeError):  # the scheduler is gone, or the worker closes
                await self._plugin.worker.scheduler.coded_learn(array=self._id, **findings)

    def _take_findings(self) -> dict[str, Any]:
        """Return what rounds have found out about workers since it was last told."""
        findings = {
            "measured": self._history.take_speeds(),
            "corrupt": sorted(self._corrupt),
            "failed": self._failed,
            "wrong_checks": self._wrong_checks,
        }
        self._corrupt, self._failed, self._wrong_checks = set(), {}, []
        return findings

    def run(self, operand: np.ndarray[Any, Any] | None) -> tuple[np.ndarray[Any, Any], RoundReport]:
        """Run one round, from a thread; return its decoded result and a report.

        Raises
        ------
        CodedDataLostError
            If too few pieces are left.
        CorruptSharesError
            If too many shares are wrong, round after round.
        RunOverError
            If the task was cancelled, or another worker has taken it over.
        Exception
            That of a worker, if so many raise exceptions that the others do not suffice.
        """
        began = monotonic()
        if operand is not None and self._options.alone:
            self._check_run()
            if (found := self._alone.product(operand)) is not None:
                self._plugin.activity.alone(self._id, found[1].seconds)
                return found
        # Here and not on the event loop, because a large operand takes milliseconds to copy.
        with offered(self._plugin.exchange, operand) as offer:
            live = None
            with suppress(NotSolvableError):
                live = self._drive(partial(self._round, offer))
            if live is None:
                # The operand or a product is not finite, or products are too small for the dtype.
                # All rows come from their own blocks then, so that the result does not depend on
                # which workers are late.
                live = self._drive(partial(self._round, offer, parity=False))
        result = live.result()
        live.report.seconds = self._seconds = monotonic() - began
        if operand is not None:
            self._alone.took_round(operand, self._seconds)
        self._warn_of(live, result.dtype)
        # The thread has decoded all its rows, so another round may overwrite them.
        self._plugin.worker.loop.add_callback(
            self._plugin.put_series, self._id, live.run_spec.series
        )
        return result, live.report

    def _check_run(self) -> None:
        """Raise a RunOverError if the run of the task is over: its thread goes on until then."""
        if self._plugin.closed:
            raise RunOverError(self._task)
        self._plugin.exchange.check(self._attempt)

    def _warn_of(self, live: LiveRound, dtype: np.dtype[Any]) -> None:
        """Warn once of rows that have lost digits."""
        report, spec = live.report, live.run_spec.spec
        if not report.doubtful or self._warned:
            return
        eps = float(np.finfo(spec.dtype).eps)
        if isinstance(spec, PairSpec):
            # What they lose by a code that is chosen for them is known beforehand, see their page.
            few = report.error < _PAIRS * eps
        else:
            few = self._options.tolerant
        if few and not lose_half(report.error, eps):
            return
        self._warned = True
        say_inaccurate(inaccurate(report.doubtful, report.error, spec, dtype))

    def _drive(self, work: Callable[[InThread], Awaitable[T]]) -> T:
        """Await something on the event loop; meanwhile this thread does what that schedules."""
        # `run_coroutine_threadsafe` does not fit, because this thread decodes.
        steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        ended: Future[T] = Future()
        running: list[asyncio.Task[Any] | None] = []

        async def run() -> None:
            running.append(asyncio.current_task())
            try:
                with self._plugin.coordinating(self._task):
                    ended.set_result(await work(steps.put))
            except asyncio.CancelledError:
                ended.set_exception(RunOverError(self._task))
            except BaseException as exc:
                ended.set_exception(exc)
            finally:
                steps.put(None)

        loop: Any = self._plugin.worker.loop
        loop.add_callback(run)
        failure: BaseException | None = None
        while True:
            try:
                step = steps.get(timeout=Timeouts.LOOK)
            except Empty:
                if loop.asyncio_loop.is_closed():  # nothing runs there any more
                    raise RunOverError(self._task) from None
                continue
            if step is None:
                break
            if failure is None:
                try:
                    step()
                except BaseException as exc:  # such as a MemoryError
                    failure = exc
                    loop.add_callback(lambda: [task.cancel() for task in running if task])
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame
        return ended.result()

    def open(self) -> CodedSpec:
        """Return the spec of the array; called from a thread."""
        return self._drive(self._plan).spec

    async def _round(self, operand: Offer, in_thread: InThread, parity: bool = True) -> LiveRound:
        try:
            return await self._attempts(operand, in_thread, parity)
        finally:
            # Until they hear that it is over, participants hold the pieces of a round.
            self._plugin.round_over()

    async def _attempts(self, operand: Offer, in_thread: InThread, parity: bool) -> LiveRound:
        history, failed, again, backoff = self._history, 0, False, Backoff()
        row = () if operand.array is None else operand.array.shape[1:]
        series = self._plugin.take_series(self._id)
        while True:
            self._check_run()
            spec, plan, layout, checks, measured_with = await self._plan(in_thread)
            # Without the worker of a block, what is not finite spreads to the rows of that block.
            spreads = not parity and not self._has_blocks(plan.without_parity(spec), spec)
            if not parity and not spreads:
                plan = plan.without_parity(spec)
                layout = plan.layout(spec)
            plan = plan.without(self._resting)
            verifier, version = None, checks.version if checks else 0
            if checks is not None and operand.array is not None:
                verifier = checks.verifier(spec, plan, operand.array)
            exchange = self._plugin.exchange
            assembler = spec.assembler(operand.array, exchange.empty, plan.errors)
            assembler.spreads |= spreads
            columns = assembler.rows.shape[1:]
            run_spec = RunSpec(
                spec, plan, layout, columns, self._options, history.pace, series, self._attempt
            )
            # A stripe takes longer with wider rows, so speeds measured with others are in another
            # unit.
            in_seconds = measured_with == row
            live = LiveRound(
                self._plugin,
                run_spec,
                Delivery(exchange, run_spec, operand),
                assembler,
                in_seconds,
                in_thread,
                partial(self._replan, in_thread),
                verifier,
            )
            began = monotonic()
            try:
                await live.run()
            except RoundUnfinishableError:
                self._note_failures(live)
                contradicting = live.verdict.contradicting()
                wrong, changed = await self._judge(live, checks, spec, version)
                # From now on, other checks are used if any was wrong.
                failed = failed + 1 if contradicting and not changed else 0
                if failed == _FAILURES:
                    raise CorruptSharesError(_too_few(failed, wrong, contradicting)) from None
                # Pieces were lost or moved since the plan was made: ask where they are now.
                self._current = None
                self._asking = None
                if failed or again:
                    # Lost pieces may be rebuilt on other workers meanwhile. Workers that are out
                    # of reach from here alone are in each plan.
                    await backoff.wait()
                again = True
                # A long round that fails at its end does not fail for long.
                self._failing += min(monotonic() - began, timeouts().longest)
                continue
            self._failing = 0.0
            self._note_failures(live)
            seconds = monotonic() - live.began
            speeds = history.record(live.round, plan.addresses, seconds)
            if self._options.alone:
                self._alone.look(spec, layout, plan.addresses, speeds.get(exchange.address, 0.0))
            self._plugin.activity.ended(self._id, live.report, seconds)
            self._row = row
            _, changed = await self._judge(live, checks, spec, version)
            if changed:
                # Shares of a damaged block agree with the check that was made from it.
                continue
            fresh = history.pace.slowed or not live.round.state.available.all()
            fresh = fresh or bool(self._wrong_checks)
            if fresh or monotonic() - self._asked >= Timeouts.PLANS:
                self._ask_ahead(fresh=fresh)
            return live

    async def _judge(
        self, live: LiveRound, checks: Checks | None, spec: CodedSpec, version: int
    ) -> tuple[set[str], bool]:
        """Find out whose fault it is that shares contradict their checks.

        Return the workers with wrong shares, and whether checks were wrong.
        """
        verdict = live.verdict
        self._corrupt |= verdict.odd
        evidence = verdict.evidence(live.round.state.computed.array())
        if evidence is None or checks is None:
            return verdict.odd, False
        review = await checks.review(spec, evidence.disputed(), verdict.contradicting(), version)
        wrong = verdict.odd | verdict.holders(evidence.to_blame(review.right))
        self._corrupt |= wrong
        self._wrong_checks += checks.take_wrong()
        return wrong, review.changed

    def _note_failures(self, live: LiveRound) -> None:
        self._resting.record(live.report.failed)
        self._failed |= live.report.failed

    def _ask_ahead(self, fresh: bool) -> None:
        """Have the next round planned while the algorithm does its own arithmetic."""
        if self._asking is None or self._asking.done():
            self._asking = self._begin_asking()
        if fresh:
            self._current = None

    def _begin_asking(self) -> asyncio.Task[_Current]:
        asking = asyncio.create_task(self._ask())
        # No round may come that reads why there is no plan: the task is over, for example.
        asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())
        return asking

    async def _plan(self, in_thread: InThread) -> _Current:
        while True:
            if self._current is None and self._asking is None:
                self._asking = self._begin_asking()
            if (asking := self._asking) is not None:
                if self._current is None:
                    await self._answer(asking, in_thread)
                else:
                    await asyncio.wait([asking], timeout=_PATIENCE * self._seconds)
                # An algorithm may run rounds in several threads: another one may have taken it.
                if asking.done() and asking is self._asking:
                    # Before the result, which may be an error: the next round asks again.
                    self._asking = None
                    self._current = asking.result()
            if (current := self._current) is not None:
                return current

    async def _replan(self, in_thread: InThread) -> tuple[RoundPlan, Layout]:
        """Ask for a new plan during a round."""
        asking = self._begin_asking()
        try:
            await self._answer(asking, in_thread)
            _, plan, layout, *_ = asking.result()
        finally:
            asking.cancel()
        return plan, layout

    async def _answer(self, asking: asyncio.Task[_Current], in_thread: InThread) -> None:
        """Wait for a plan; leave the thread to tasks that may be needed for it, after a while."""
        lacking = self._plugin.lacking
        lacking[self._id] += 1
        try:
            while not (await asyncio.wait([asking], timeout=timeouts().silence))[0]:
                if self._plugin.is_in_the_way():
                    in_thread(_leave_pool)
                    await asyncio.wait([asking])
        finally:
            lacking[self._id] -= 1
            if not lacking[self._id]:
                del lacking[self._id]

    def _has_blocks(self, plan: RoundPlan, spec: CodedSpec) -> bool:
        """Whether workers that answer hold what a plan needs."""
        usable = [self._plugin.exchange.is_usable(address) for address in plan.addresses]
        layout = plan.layout(spec)
        here = np.array([host >= 0 and usable[host] for host in layout.host.tolist()])
        return not (layout.lacking(here[:, None]) > 0).any()

    async def _ask(self) -> _Current:
        """Send measurements to the scheduler plugin, and return its plan."""
        plugin = self._plugin
        findings, row = self._take_findings(), self._row
        self._asked = monotonic()
        backoff = Backoff()
        while True:
            spec = plugin.spec(self._id)
            answer = await ask(
                plugin.worker.scheduler.coded_plan,
                array=self._id,
                lags=self._history.lags.known,
                policy=self._options.policy,
                predictor=self._options.predictor,
                silent=plugin.exchange.silent,
                known=len(spec.keys) if spec else 0,
                attempt=self._attempt,
                failing=self._failing,
                **findings,
            )
            match answer:
                case Over():
                    raise RunOverError(self._task)
                case Lost(message):
                    raise CodedDataLostError(message)
                case RoundPlan():
                    self._history.lags.keep(answer.addresses)
                    self._resting.keep(answer.addresses)
                    if answer.spec is not None:
                        spec = answer.spec
                        if (footprints := spec.footprints) is not None:
                            # In a thread, because millions of columns take tens of milliseconds.
                            await asyncio.to_thread(lambda: footprints.indices)
                        plugin.remember(self._id, spec)
                    assert spec is not None
                    if not spec.check_keys:
                        return _Current(spec, answer, answer.layout(spec), None, row)
                    checks = Checks.of(plugin, self._id)
                    fetched = await checks.fetch(spec, answer.checks)
                    self._wrong_checks += checks.take_wrong()
                    if fetched:
                        return _Current(spec, answer, answer.layout(spec), checks, row)
                case Waiting(waited):
                    self._failing = 0.0  # pieces are being made
                    backoff = Backoff() if waited else backoff
            findings = {}
            await backoff.wait()


def _too_few(times: int, wrong: set[str], contradicting: set[str]) -> str:
    """Say that a round cannot be finished with shares that agree with their checks."""
    start = f"Too few shares agree with their checks, {times} times in a row. In the last round "
    if wrong:
        return f"{start}wrong ones came from {sorted(wrong)}: restart these workers."
    return (
        f"{start}those from {sorted(contradicting)} did not, and too few other workers are left to "
        f"tell whether these shares or the checks are wrong: encode the array again."
    )
