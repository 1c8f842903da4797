"""A round on the wire: the engine's commands become messages, messages become its events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, wraps
from time import monotonic
from typing import Any

import numpy as np

from dask_coded.config import timeouts
from dask_coded.rounds import (
    Assembler,
    Assign,
    Command,
    InfeasibleError,
    Layout,
    Round,
    StripeRange,
    Verifier,
    Withdraw,
)
from dask_coded.rounds.assignment import all_tried
from dask_coded.runtime.answers import RoundPlan
from dask_coded.runtime.coordinator.delivery import Delivery
from dask_coded.runtime.coordinator.report import RoundReport, StripeCount
from dask_coded.runtime.coordinator.run_spec import RunSpec
from dask_coded.runtime.coordinator.verdict import Verdict
from dask_coded.runtime.messages import (
    ChangeRound,
    Failed,
    PiecesAbsent,
    Share,
)
from dask_coded.runtime.operand import ChunkConfirmed, ChunksLacking, OperandAt
from dask_coded.runtime.spec import CodedDataLostError
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin
from dask_coded.transport.attempts import RunOverError
from dask_coded.transport.exceptions import unpacked
from dask_coded.transport.memory import LEAST_BYTES, SharedArray
from dask_coded.transport.messages import Closed, EndRun, Message, Ping
from dask_coded.typing import Bools

# Bytes of shares that are decoded together while the rest is computed. Waking up the algorithm's
# thread takes time from the event loop, which small rounds cannot spare. In rounds of 1.2 s with a
# result of 19 MB, decoding ends 4 ms after the last share, and 9 ms after it with 512 KB.
_DECODE_BYTES = 1 << 16
# Segments of each participant that stay mapped: those of a matrix and its transpose, in turns.
_SEGMENTS = 2

#: Schedules a call in the algorithm's thread.
InThread = Callable[[Callable[[], None]], None]
Replan = Callable[[], Awaitable[tuple[RoundPlan, Layout]]]


class RoundUnfinishableError(Exception):
    """Too many pieces are out of reach, at least for now."""


def _ends_round(callback: Callable[..., None]) -> Callable[..., None]:
    """End the round with the exception of a callback; otherwise the round would wait for ever."""

    @wraps(callback)
    def call(self: LiveRound, *args: Any) -> None:
        try:
            callback(self, *args)
        except Exception as exc:
            if self._done.done():
                raise
            self._done.set_exception(exc)

    return call


class LiveRound:
    """One round of one array, from its plan to the shares in the assembler.

    Parameters
    ----------
    plugin : CodedWorkerPlugin
        Of the coordinator's worker.
    run_spec : RunSpec
    delivery : Delivery
        Of the operand.
    assembler : Assembler
        Of this operand.
    in_seconds : bool
        Whether the plan's speeds are work per second with this operand.
    in_thread : callable
        Schedules decoding in the algorithm's thread.
    replan : callable
        Asks the scheduler for the plan of a new round, and returns it with its layout.
    verifier : callable, optional
        Prepares what checks the shares, in that thread; by default they are not checked.

    Attributes
    ----------
    run_spec : RunSpec
    verdict : Verdict
    """

    def __init__(
        self,
        plugin: CodedWorkerPlugin,
        run_spec: RunSpec,
        delivery: Delivery,
        assembler: Assembler,
        in_seconds: bool,
        in_thread: InThread,
        replan: Replan,
        verifier: Callable[[], Verifier] | None = None,
    ) -> None:
        plan, layout = run_spec.plan, run_spec.layout
        self.run_spec = run_spec
        self.report = RoundReport(coordinator=plugin.exchange.address)
        self.began = monotonic()
        self._run_id = run_spec.run_id
        self._exchange = exchange = plugin.exchange
        self._plan = plan
        self._layout = layout
        self._mappings = plugin.mappings
        self._mappings.keep(_SEGMENTS * len(plan.addresses))
        self._delivery = delivery
        self._assembler = assembler
        self._in_thread = in_thread
        self._in_seconds = in_seconds and any(plan.lags)  # without lags, nothing was measured
        self._tally = StripeCount(layout)
        self._failure: Exception | None = None
        self.verdict = Verdict(run_spec, verifier)
        # Shares that came before the verifier was prepared.
        self._early: list[tuple[int, Share]] = []
        # Shares that have not been handed to the assembler yet, and their bytes.
        self._waiting: list[tuple[StripeRange, np.ndarray[Any, Any]]] = []
        self._size = 0
        self._channels = [exchange.channel(address) for address in plan.addresses]
        self._started: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._replan = replan
        self._watch: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._lost_since: float | None = None
        # Assign nothing to a worker that still owes an answer: messages would only pile up there.
        self._silent = {w for w, channel in enumerate(self._channels) if channel.silent}
        speeds = plan.speed
        # Workers that are predicted to do nothing, because they were silent or have computed
        # wrongly, are given work when another one falls silent.
        self._reserve = set(np.flatnonzero(speeds == 0).tolist()) - self._silent
        speeds[list(self._silent)] = 0.0
        self.round = Round(
            layout,
            run_spec.policy,
            speeds,
            self.began,
            run_spec.pace.reporting,
            np.asarray(plan.lags) if in_seconds else None,
            run_spec.least_batch,
        )

    async def run(self) -> None:
        """Run the round to its end.

        Raises
        ------
        RoundUnfinishableError
            If too many pieces are out of reach.
        Exception
            That of a worker, if kernels fail on so many that the others do not suffice.
        """
        for worker, channel in enumerate(self._channels):
            channel.listen(self._run_id, partial(self._receive, worker))
        if self.verdict.waits:
            self._in_thread(self._prepare_verifier)
        try:
            first = None if self._silent else self._plan.first
            try:
                commands = self.round.start(first)
            except InfeasibleError:
                for worker, speed in enumerate(all_tried(self._plan.speed).tolist()):
                    self.round.expect(worker, speed)
                commands = self.round.start()
            self._tally.begin(commands)
            self._delivery.plan(c.worker for c in commands if isinstance(c, Assign))
            self._carry_out(commands)
            self._delivery.begin()
            self._watch = self._loop.call_later(timeouts().tick, self._look_elsewhere)
            await self._done
        finally:
            self._end()

    def result(self) -> np.ndarray[Any, Any]:
        """Return the result of the finished round, once all decoding in the thread is done."""
        found, result = self._assembler, self._assembler.result
        self.report.doubtful = found.doubtful
        if found.doubtful:
            self.report.error = found.worst * float(np.finfo(result.dtype).eps) / 2
        return self.run_spec.spec.result(result)

    def _welcome_back(self) -> None:
        """Let workers that were silent when the round started take part once they have answered."""
        for worker in [w for w in self._silent if not self._channels[w].silent]:
            self._silent.discard(worker)
            if self._plan.speeds[worker] > 0:
                self.round.expect(worker, self._plan.speeds[worker])
            else:
                # The plan counts on it as little as on a worker that computes wrongly.
                self._reserve.add(worker)

    def _call_reserve(self) -> None:
        """Let reserves take part if a worker that owes stripes has fallen silent."""
        owing = self.round.state.workers.todo
        if self._reserve and any(
            owing[worker] and channel.silent for worker, channel in enumerate(self._channels)
        ):
            usual = [speed for speed in self._plan.speeds if speed > 0]
            for worker in self._reserve:
                self.round.expect(worker, min(usual, default=1.0))
            self._reserve.clear()

    @_ends_round
    def _look_elsewhere(self) -> None:
        """Ask for a new plan if only workers that are silent could finish the round.

        What they hold may have been rebuilt, or moved from workers that have left meanwhile.
        """
        self._watch = self._loop.call_later(timeouts().tick, self._look_elsewhere)
        self._call_participants()
        if not self._lacks():
            self._lost_since = None
        elif self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._end_if_possible_elsewhere())

    def _lacks(self) -> bool:
        """Whether workers that answer cannot finish the round."""
        state = self.round.state
        reachable = state.available & self._usable(self._layout, self._plan)
        lacking = self._layout.lacking(reachable[:, None] | state.computed.array())
        return bool((lacking > 0).any())

    def _call_participants(self) -> None:
        """Ask workers that owe stripes whether they run, if they have been quiet for long."""
        workers, membership = self.round.state.workers, self._exchange.membership
        lags = np.nan_to_num(workers.measured_lag).tolist()
        owing = {self._plan.addresses[w]: w for w in workers.todo.nonzero()[0].tolist()}
        # Before a worker's first report its lag is unknown, and that of a slow worker may be short
        # by chance.
        watched = {
            address: membership.timeouts.quiet(max(lags[w], membership.answer_time(address)))
            for address, w in owing.items()
        }
        for address in self._exchange.look(watched):
            self._send(owing[address], Ping(self._run_id))

    async def _end_if_possible_elsewhere(self) -> None:
        try:
            plan, layout = await self._replan()
        except OSError:
            return
        except CodedDataLostError as lost:
            # The holders have left. Those that were only cut off may still answer, those that were
            # frozen never will.
            self._lost_since = self._lost_since or monotonic()
            gone = monotonic() - self._lost_since > timeouts().lease
            if gone and self._lacks() and not self._done.done():
                self._done.set_exception(lost)
            return
        except RunOverError as over:
            if not self._done.done():
                self._done.set_exception(over)
            return
        self._lost_since = None
        # A channel that had closed opens again; whether it connects shows when we look again.
        channels = [self._exchange.channel(address) for address in plan.addresses]
        connected = np.array([host >= 0 and channels[host].connected for host in layout.host])
        usable = self._usable(layout, plan) & connected
        elsewhere = not (layout.lacking(usable[:, None]) > 0).any()
        # Workers may have answered meanwhile.
        if elsewhere and self._lacks() and not self._done.done():
            message = "Workers that hold what is lacking are silent; others hold it, too."
            self._done.set_exception(RoundUnfinishableError(message))

    def _usable(self, layout: Layout, plan: RoundPlan) -> Bools:
        """Return which pieces are on workers that answer, shape (pieces,)."""
        usable = [
            self._exchange.is_usable(address) and address not in self.report.failed
            for address in plan.addresses
        ]
        return np.array([host >= 0 and usable[host] for host in layout.host.tolist()])

    # -- commands to messages ------------------------------------------------------------------

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Assign(worker, ranges) if worker in self._started:
                    self._send(worker, ChangeRound(self._run_id, ranges, ()))
                case Assign(worker, ranges):
                    self._started.add(worker)
                    ticket, shares = self._delivery.ticket(worker), self._channels[worker].shared
                    self._send(worker, self.run_spec.start(worker, ranges, ticket, bool(shares)))
                case Withdraw(worker, ranges):
                    self._send(worker, ChangeRound(self._run_id, (), ranges))
        if self._done.done():
            return
        if self.round.finished:
            self._done.set_result(None)
        elif self.round.failed:
            self._done.set_exception(self._reason())
        else:
            self._set_timer()

    def _reason(self) -> Exception:
        """Return why the round cannot finish."""
        if self._failure is None or not self.round.erred or self.verdict.contradicting():
            return RoundUnfinishableError(self.round.failed)
        others = "".join(f"\n  {where}: {what}" for where, what in self.report.failed.items())
        self._failure.add_note(f"Too few workers can compute the product. These failed:{others}")
        return self._failure

    def _send(self, worker: int, message: Message) -> None:
        self.report.messages += 1
        channel = self._channels[worker]
        if channel.closed:
            self._loop.call_soon(self._receive, worker, Closed(self._run_id))
        else:
            channel.send(message)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delays = [] if self.round.wake is None else [max(self.round.wake - monotonic(), 0.0)]
        if self._reserve or self._silent:
            # The policy knows nothing of them, and need not wake.
            delays.append(timeouts().tick)
        if delays:
            self._timer = self._loop.call_later(min(delays), self._tick)

    # -- messages and time to events -----------------------------------------------------------

    @_ends_round
    def _tick(self) -> None:
        self._timer = None
        self._welcome_back()
        self._call_reserve()
        self._carry_out(self.round.react(monotonic()))

    def _prepare_verifier(self) -> None:
        """Prepare the verifier in the algorithm's thread, while the workers compute."""
        self._loop.call_soon_threadsafe(self._verify_with, self.verdict.prepare())

    @_ends_round
    def _verify_with(self, verifier: Verifier) -> None:
        self.verdict.begin(verifier)
        early, self._early = self._early, []
        for worker, share in early:
            self._receive(worker, share)

    @_ends_round
    def _receive(self, worker: int, message: Message) -> None:
        if self._done.done():
            return
        if self.verdict.waits and isinstance(message, Share):
            self._early.append((worker, message))
            return
        self.report.messages += 1
        self._welcome_back()
        now = monotonic()
        match message:
            case Share():
                self._carry_out(self._share(worker, message, now))
            case ChunkConfirmed() | ChunksLacking() | OperandAt():
                self._delivery.heard(worker, message)
            case Closed():
                self._delivery.lost(worker)
                self._carry_out(self.round.lost([worker], now))
            case EndRun():
                attempt = self.run_spec.attempt
                self._done.set_exception(RunOverError(attempt and attempt[0]))
            case PiecesAbsent(_, pieces):
                self._carry_out(self.round.lost_pieces(pieces, now))
            case Failed(_, error, pieces):
                failure, address = unpacked(error), self._plan.addresses[worker]
                self._failure = self._failure or failure
                self.report.failed[address] = f"{type(failure).__name__}: {failure}"
                self._carry_out(self.round.raised(pieces, now))

    def _share(self, worker: int, share: Share, now: float) -> list[Command]:
        ranges = [StripeRange(*part) for part in share.ranges]
        try:
            rows = [self._rows(found) for found in share.rows]
        except OSError:
            # The worker died just now, or this process cannot map any more segments. In the second
            # case the next round must not use shared memory.
            self._channels[worker].shared = False
            return self.round.lost([worker], now)
        if not self.verdict.accepts(self._plan.addresses[worker], ranges, rows):
            # Whatever else this worker holds is computed elsewhere in this round.
            return self.round.lost([worker], now)
        self._tally.share(ranges, self.round.state.open)
        self.report.share_bytes += sum(found.nbytes for found in rows)
        fresh, commands = self.round.share(worker, ranges, share.seconds, now)
        new = set(fresh)
        self._decode([s for s in zip(ranges, rows, strict=True) if s[0] in new])
        address = self._plan.addresses[worker]
        self.report.add(address, ranges, share.seconds, now - self.began)
        return commands

    def _rows(self, rows: Any) -> np.ndarray[Any, Any]:
        """Return the rows of a share, wherever they lie."""
        found: np.ndarray[Any, Any] = rows
        if isinstance(rows, tuple):
            found = self._mappings.view(SharedArray.received(rows))
        return found

    def _decode(self, shares: list[tuple[StripeRange, np.ndarray[Any, Any]]]) -> None:
        """Hand shares to the assembler, once they are many or the round is finished."""
        self._waiting += shares
        self._size += sum(rows.nbytes for _, rows in shares)
        if self._size < _DECODE_BYTES and not self.round.finished:
            return
        waiting, self._waiting, self._size = self._waiting, [], 0
        state = self.round.state
        computed, complete = state.computed.array(), state.complete

        def add() -> None:
            self._assembler.add(waiting, computed, complete)
            self._mappings.release()  # most shares are not read again

        self._in_thread(add)

    def _end(self) -> None:
        for pending in (self._timer, self._watch, self._asking):
            if pending is not None:
                pending.cancel()
        # For the next rounds, but nothing of a dead participant.
        usual = self.round.finished and self.round.state.available.all()
        self._mappings.trim(_SEGMENTS * len(self._plan.addresses) if usual else 0)
        self._delivery.end()
        self.report.operand_bytes = self._delivery.size
        large = self._delivery.size >= LEAST_BYTES or self._assembler.rows.nbytes >= LEAST_BYTES
        for channel in self._channels:
            channel.end(self._run_id)
            if large:
                # Participants hold the operand and their rows until they hear of the end.
                channel.flush()
        state = self.round.state
        self.report.close(self._plan.addresses, self._tally.stripes, state, self._in_seconds)
