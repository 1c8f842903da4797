"""One worker's part of one round: stripes in, shares out, stoppable between any two batches."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from dask_coded.rounds import Reporting, StripeRange, batch_size, stripes_in, without
from dask_coded.rounds.kernels import Product, Rows
from dask_coded.runtime.messages import Failed, Share, StartRound
from dask_coded.runtime.worker.output import Output
from dask_coded.transport import Answer
from dask_coded.transport.exceptions import portable
from dask_coded.transport.memory import Memory
from dask_coded.transport.messages import Message

# A job of fewer multiplications (about 0.1 ms) is done on the event loop. To hand it to a thread,
# and its rows back, would take as long.
_INLINE = 1 << 17


class Held(NamedTuple):
    """A piece that a job computes stripes of.

    Parameters
    ----------
    rows : int
        Of its product, if all its stripes are equal.
    length : int
        Rows that it really has; they may end within the last stripe.
    bind : callable(operand)
        Returns its product with an operand.
    largest : int
        Stripes in one batch, at most.
    entries : float
        How many numbers a product with one column touches; infinity if they may be slow.
    """

    rows: int
    length: int
    bind: Callable[[Any], Product]
    largest: int
    entries: float = math.inf


class Place(NamedTuple):
    """Where all jobs of a worker are computed.

    Parameters
    ----------
    executor : concurrent.futures.Executor
    threads : int
        How many of its threads may work on one job.
    crowded : callable
        Whether there are several jobs, which take turns after each batch; called from any thread.
    where : str
        The same for the notes of exceptions.
    """

    executor: Executor
    threads: int
    crowded: Callable[[], bool]
    where: str


class Job:
    """Computes the stripes that one worker is assigned in one round.

    Public methods run on the worker's event loop. Stripes are computed in threads of the executor,
    unless the whole job is next to nothing. Between two products caches are cold, so a NumPy call
    costs tens of microseconds. The code there is therefore plain Python: 60 us instead of 150, next
    to a product of 3 ms.

    Parameters
    ----------
    start : StartRound
        The message that the round began with here.
    pieces : dict of int to Held
    answer : callable(Message)
        Sends a message to the coordinator, from any thread.
    place : Place
        Where to compute.
    memory : Memory, optional
        Where to leave large shares for the coordinator; by default they travel in messages.
    previous : Output, optional
        The memory of the rows of an earlier round, to use again if the rows are alike.
    """

    def __init__(
        self,
        start: StartRound,
        pieces: dict[int, Held],
        answer: Answer,
        place: Place,
        memory: Memory | None = None,
        previous: Output | None = None,
    ) -> None:
        self.start = start
        self.answer = answer
        self._pieces = pieces
        self._place = place
        self._memory = memory
        self._previous = previous
        self._reporting = Reporting(start.interval, start.growth)
        self._kernels: dict[int, Product] = {}  # empty until the operand is here
        self._output: Output | None = None
        self._given_up: set[int] = set()  # pieces that raise exceptions
        self._inline = False  # whether stripes are computed on the event loop
        self._decided = False  # whether and where there is an output
        self._lock = threading.Lock()
        self._deciding = threading.Lock()  # the event loop never waits for it
        self._queue: deque[StripeRange] = deque()
        self._taken = {number: bytearray(start.stripes) for number in pieces}
        self._shares: list[tuple[StripeRange, Rows]] = []
        self._active = 0
        self._in_hand = 0  # stripes that threads are computing
        self._began: float | None = None
        self._started = perf_counter()
        self._reported = self._started
        self._busy = 0.0  # seconds with at least one thread at work, not yet reported
        self._stripe = 0.0  # seconds per stripe and thread, of the last batch
        self._hinted = False

    @property
    def computed(self) -> int:
        """Stripes that were computed, or are being computed."""
        return sum(taken.count(1) for taken in self._taken.values())

    def begin(self, operand: Any) -> None:
        """Begin to compute: the operand is here."""
        kernels: dict[int, Product] = {}
        entries = 0.0
        for number, piece in self._pieces.items():
            # The operand may have come from another worker, whose channel is not to blame.
            try:
                if operand is not None:
                    operand = np.require(operand, requirements=["C", "A"])
                kernels[number] = piece.bind(operand)
                entries += piece.entries
            except Exception as exc:
                self._failed((number,), exc)
        with self._lock:
            self._given_up |= self._pieces.keys() - kernels.keys()
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
        held = [part for part in ranges if part.piece in self._pieces]
        for piece, start, stop in held:
            if not 0 <= start <= stop <= self.start.stripes:
                raise ValueError(f"Piece {piece} has no stripes {start} to {stop}")
        with self._lock:
            self._queue.extend(part for part in held if self._computes(part.piece))
            self._hinted = False
            # A thread at work may still need long for what it has taken.
            free = self._place.threads - self._active if self._kernels else 0
            missing = min(free, stripes_in(self._queue))
            self._active += missing
        for _ in range(missing):
            if self._inline:
                self._work()
            else:
                self._place.executor.submit(self._work)

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

    def fail(self, exc: Exception) -> None:
        """Leave everything to other workers."""
        self.stop()
        self._failed(tuple(self._pieces), exc)

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
                if self._place.crowded() and not self._inline and self._continue_later():
                    return
        except Exception as exc:
            # Shares may be lost. The thread stays counted, so that none replaces it.
            self.fail(exc)

    def _failed(self, pieces: tuple[int, ...], exc: Exception) -> None:
        """Report that no more of these pieces is computed here."""
        self.answer(Failed(self.start.run_id, portable(exc, self._place.where), pieces))

    def _fail(self, batch: StripeRange, exc: Exception) -> None:
        """Leave the rest of a piece to other workers; those of other pieces go on."""
        with self._lock:
            self._in_hand -= batch.stop - batch.start
            self._given_up.add(batch.piece)
            self._queue = deque(part for part in self._queue if part.piece != batch.piece)
        self._failed((batch.piece,), exc)

    def _continue_later(self) -> bool:
        """Let other jobs use this thread first; return whether it will continue."""
        try:
            self._place.executor.submit(self._work)
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
                size = batch_size(left, self._stripe, self._place.threads, self.start.least_batch)
                size = min(size, self._pieces[piece].largest)
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
            left = stripes_in(self._queue) * self._stripe / self._place.threads
            in_hand = self._in_hand * self._stripe / self._place.threads
            silent, elapsed = now - self._reported, self._reported - self._started
            # The thread that ends last reports what others have ended just before.
            due = silent >= self._reporting.gap(elapsed, silent + left + in_hand)
            if not self._hinted and left <= self.start.lead <= now - self._started:
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
        return Share(self.start.run_id, tuple(part for part, _ in shares), rows, busy)

    def _row(self, piece: int, stripe: int) -> int:
        """Return the first row of a stripe; pieces may end within the last stripe."""
        held = self._pieces[piece]
        return min(stripe * held.rows // self.start.stripes, held.length)

    def _computes(self, piece: int) -> bool:
        return piece in self._pieces and piece not in self._given_up

    def _none(self, piece: int) -> Rows:
        """Return no rows; they have the type and the width of all rows."""
        return self._kernels[piece](0, 0, None)

    def _output_for(self, piece: int) -> Output | None:
        """Return where to compute the job's rows; None if each batch makes its own array."""
        if not self._decided:
            # The first product of a kernel may convert half of a piece, once for all threads.
            with self._deciding:
                if not self._decided:
                    lengths = {p: self._row(p, self.start.stripes) for p in self._pieces}
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
