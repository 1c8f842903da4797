"""One worker's part of one round: stripes in, shares out, stoppable between any two batches."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from time import perf_counter

import numpy as np
from dask.typing import Key

from dask_coded.rounds import Reporting, StripeRange, batch_size, stripes_in, without
from dask_coded.rounds.kernels import Product, Rows
from dask_coded.runtime.messages import Failed, Share
from dask_coded.runtime.worker.output import Output
from dask_coded.transport import Answer
from dask_coded.transport.exceptions import portable
from dask_coded.transport.memory import Memory
from dask_coded.transport.messages import Attempt, Message

# A job of fewer multiplications (about 0.1 ms) is done on the event loop. To hand it to a thread,
# and its rows back, would take as long.
_INLINE = 1 << 17


class Job:
    """Computes the stripes that one worker is assigned in one round.

    Public methods run on the worker's event loop. Stripes are computed in threads of the executor,
    unless the whole job is next to nothing. Between two products caches are cold, so a NumPy call
    costs tens of microseconds. The code there is therefore plain Python: 60 us instead of 150, next
    to a product of 3 ms.

    Parameters
    ----------
    run_id : Key
        Of the round.
    edges : dict of int to ndarray
        First row of each stripe of each piece, and the end.
    lengths : dict of int to int
        Rows that each piece really has; they may end within the last stripe.
    answer : callable(Message)
        Sends a message to the coordinator, from any thread.
    executor : concurrent.futures.Executor
    threads : int
        How many threads may work on this job.
    reporting : Reporting
    lead : float
        Seconds before running dry at which a report is due, so that more work can come in time.
    memory : Memory, optional
        Where to leave large shares for the coordinator; by default they travel in messages.
    attempt : Attempt, optional
        The run of the coordinator's task.
    series : str, optional
        As in :class:`StartRound`.
    previous : Output, optional
        The memory of the rows of an earlier round, to use again if the rows are alike.
    largest : dict of int to int, optional
        Stripes of each piece in one batch, at most.
    least : int
        Stripes of one batch, at least.
    crowded : callable, optional
        Whether there are other jobs, which take turns with this one after each batch; called from
        any thread. By default there are none.
    where : str, optional
        Where the job runs, for the notes of exceptions.
    """

    def __init__(
        self,
        run_id: Key,
        edges: dict[int, Rows],
        lengths: dict[int, int],
        answer: Answer,
        executor: Executor,
        threads: int,
        reporting: Reporting,
        lead: float,
        memory: Memory | None = None,
        attempt: Attempt | None = None,
        series: str = "",
        previous: Output | None = None,
        largest: dict[int, int] | None = None,
        least: int = 1,
        crowded: Callable[[], bool] = lambda: False,
        where: str = "on a worker",
    ) -> None:
        self.series = series
        self.run_id = run_id
        self.attempt = attempt
        self.answer = answer
        self._kernels: dict[int, Product] = {}  # empty until the operand is here
        self._edges = {p: e.tolist() for p, e in edges.items()}
        self._lengths = lengths
        self._executor = executor
        self._threads = threads
        self._reporting = reporting
        self._lead = lead
        self._memory = memory
        self._previous = previous
        self._largest, self._least = largest or {}, least
        self._crowded = crowded
        self._output: Output | None = None
        self._given_up: set[int] = set()  # pieces that raise exceptions
        self._where = where
        self._inline = False  # whether stripes are computed on the event loop
        self._decided = False  # whether and where there is an output
        self._lock = threading.Lock()
        self._queue: deque[StripeRange] = deque()
        self._taken = {p: bytearray(len(e) - 1) for p, e in edges.items()}
        self._shares: list[tuple[StripeRange, Rows]] = []
        self._active = 0
        self._in_hand = 0  # stripes that threads are computing
        self._began: float | None = None
        self._started = perf_counter()
        self._reported = self._started
        self._busy = 0.0  # seconds with at least one thread at work, not yet reported
        self._stripe = 0.0  # seconds per stripe and thread, of the last batch
        self._hinted = False

    def begin(self, kernels: dict[int, Product], entries: float = math.inf) -> None:
        """Begin to compute: the operand is here, and each piece has its bound kernel.

        Pieces without one were reported by :meth:`failed`. ``entries`` says how many numbers a
        product with one column touches, if they are fast.
        """
        with self._lock:
            self._given_up |= self._edges.keys() - kernels.keys()
            self._queue = deque(part for part in self._queue if self._computes(part.piece))
        self._kernels = kernels
        if kernels and entries < _INLINE:
            with suppress(Exception):  # the first batch raises it again, and reports it
                self._inline = (
                    entries * math.prod(self._none(next(iter(kernels))).shape[1:]) < _INLINE
                )
        self._started = self._reported = perf_counter()
        self.assign([])

    def assign(self, ranges: Iterable[StripeRange]) -> None:
        """Compute these stripes, after those that are in the list already.

        Raises
        ------
        ValueError
            If a piece has no such stripes.
        """
        held = [part for part in ranges if part.piece in self._edges]
        for piece, start, stop in held:
            if not 0 <= start <= stop < len(self._edges[piece]):
                raise ValueError(f"Piece {piece} has no stripes {start} to {stop}")
        with self._lock:
            self._queue.extend(part for part in held if self._computes(part.piece))
            self._hinted = False
            # A thread at work may still need long for what it has taken.
            free = self._threads - self._active if self._kernels else 0
            missing = min(free, stripes_in(self._queue))
            self._active += missing
        for _ in range(missing):
            if self._inline:
                self._work()
            else:
                self._executor.submit(self._work)

    def withdraw(self, ranges: Iterable[StripeRange]) -> None:
        """Do not compute these stripes, unless a thread has started on them."""
        with self._lock:
            for gone in ranges:
                self._queue = deque(without(self._queue, gone))

    def stop(self) -> Output | None:
        """Drop everything; return the memory of the rows, unless a thread still writes to it."""
        with self._lock:
            self._queue.clear()
            return None if self._active else self._output

    def _work(self) -> None:
        try:
            while (batch := self._next()) is not None:
                began = perf_counter()
                try:
                    rows = self._compute(batch)
                except Exception as exc:
                    self._fail(batch, exc)
                    continue
                self._finish(batch, rows, perf_counter() - began)
                if self._crowded() and not self._inline and self._continue_later():
                    return
        except Exception as exc:
            # Shares may be lost, so other workers compute everything. The thread stays counted, so
            # that none replaces it.
            self.stop()
            self.failed(tuple(self._edges), exc)

    def failed(self, pieces: tuple[int, ...], exc: Exception) -> None:
        """Report that no more of these pieces is computed here."""
        self.answer(Failed(self.run_id, portable(exc, self._where), pieces))

    def _fail(self, batch: StripeRange, exc: Exception) -> None:
        """Leave the rest of a piece to other workers; those of other pieces go on."""
        with self._lock:
            self._in_hand -= batch.stop - batch.start
            self._given_up.add(batch.piece)
            self._queue = deque(part for part in self._queue if part.piece != batch.piece)
        self.failed((batch.piece,), exc)

    def _continue_later(self) -> bool:
        """Let other jobs use this thread first; return whether it will continue."""
        try:
            self._executor.submit(self._work)
        except RuntimeError:  # the worker closes
            return False
        return True

    def _next(self) -> StripeRange | None:
        """Take the next few stripes from the head of the list; None if this thread is to end."""
        with self._lock:
            while self._queue:
                piece, start, end = self._queue.popleft()
                taken = self._taken[piece]
                # A stripe withdrawn too late and assigned again has been computed. It must not be
                # computed again, because the coordinator may be reading it in shared memory.
                while start < end and taken[start]:
                    start += 1
                if start == end:
                    continue
                left = end - start + stripes_in(self._queue)
                size = batch_size(left, self._stripe, self._threads, self._least)
                size = min(size, self._largest.get(piece, size))
                stop = min(start + size, end)
                if (again := taken.find(1, start, stop)) >= 0:
                    stop = again
                if stop < end:
                    self._queue.appendleft(StripeRange(piece, stop, end))
                taken[start:stop] = bytes([True]) * (stop - start)
                self._in_hand += stop - start
                if self._began is None:
                    self._began = perf_counter()
                return StripeRange(piece, start, stop)
            # Under the same lock, so that work assigned from now on gets a new thread.
            self._active -= 1
            message = None
            if not self._active:
                message = self._report(perf_counter()) if self._shares else None
                self._began = None
        if message:
            self.answer(message)
        return None

    def _compute(self, batch: StripeRange) -> Rows:
        piece, start, stop = batch
        first, end = self._row(piece, start), self._row(piece, stop)
        output = self._output_for(piece)
        out = None if output is None else output.rows(piece, first, end - first)
        return self._kernels[piece](first, end, out)

    def _finish(self, batch: StripeRange, rows: Rows, seconds: float) -> None:
        with self._lock:
            self._shares.append((batch, rows))
            self._stripe = seconds / (batch.stop - batch.start)
            self._in_hand -= batch.stop - batch.start
            now = perf_counter()
            left = stripes_in(self._queue) * self._stripe / self._threads
            in_hand = self._in_hand * self._stripe / self._threads
            silent, elapsed = now - self._reported, self._reported - self._started
            # The thread that ends last reports what others have ended just before.
            due = silent >= self._reporting.gap(elapsed, silent + left + in_hand)
            if not self._hinted and left <= self._lead <= now - self._started:
                # Nearly dry: report now, and not again until more work has come. The first batches
                # may be a burst, from which the time of the others does not follow.
                self._hinted = due = True
            message = self._report(now) if due else None
        if message:
            self.answer(message)

    def _report(self, now: float) -> Message:
        busy = self._busy
        if self._began is not None:
            busy += now - self._began
            self._began = now
        self._busy = 0.0
        self._reported = now
        shares, self._shares = _merged(self._shares), []
        output = self._output
        rows = tuple(
            _joined(parts)
            if output is None
            else output.place(piece, self._row(piece, start), sum(map(len, parts)))
            for (piece, start, _), parts in shares
        )
        return Share(self.run_id, tuple(part for part, _ in shares), rows, busy)

    def _row(self, piece: int, stripe: int) -> int:
        """Return the first row of a stripe; pieces may end within the last stripe."""
        return min(self._edges[piece][stripe], self._lengths[piece])

    def _computes(self, piece: int) -> bool:
        return piece in self._edges and piece not in self._given_up

    def _none(self, piece: int) -> Rows:
        """Return no rows; they have the type and the width of all rows."""
        return self._kernels[piece](0, 0, None)

    def _output_for(self, piece: int) -> Output | None:
        """Return where to compute the job's rows; None if each batch makes its own array."""
        if not self._decided:
            with self._lock:
                if not self._decided:
                    lengths = {p: self._row(p, len(e) - 1) for p, e in self._edges.items()}
                    self._output = Output.of(
                        lengths, self._none(piece), self._memory, self._previous
                    )
                    self._previous = None
                    self._decided = True
        return self._output


def _merged(shares: list[tuple[StripeRange, Rows]]) -> list[tuple[StripeRange, list[Rows]]]:
    """Join ranges of neighbouring stripes, each with the rows of its parts."""
    groups: list[tuple[StripeRange, list[Rows]]] = []
    for part, rows in sorted(shares, key=lambda share: share[0]):
        if groups and groups[-1][0].piece == part.piece and groups[-1][0].stop == part.start:
            groups[-1] = (groups[-1][0]._replace(stop=part.stop), [*groups[-1][1], rows])
        else:
            groups.append((part, [rows]))
    return groups


def _joined(parts: list[Rows]) -> Rows:
    """Return rows of neighbouring stripes as one array, so that there is less to serialise."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
