"""Keeps each piece on its own worker, its home, while Dask moves and copies data.

A task that uses pieces, such as the one that makes the result of ``C.compute()``, leaves copies of
them on its worker. Meanwhile Dask's active memory manager drops all other copies, the originals
included. It also moves the data of a worker that retires to any other one. In both cases one worker
would hold several pieces, and the code could survive fewer losses.

Dask's policies stay as they are. While tasks use a piece, its home holds the array, and puts it
back among Dask's data if Dask has dropped it: nothing is copied. Otherwise a piece that is away is
copied home, and its home holds it, too, until the other copies are dropped. Pieces are looked at
after events only, and no timer runs once all are at home.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import dask
from dask.typing import Key
from dask.utils import parse_timedelta
from distributed import Status
from distributed.comm import CommClosedError
from distributed.metrics import time

from dask_coded.runtime.spec import NAME, as_key
from dask_coded.transport.exceptions import logged

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: The pieces in memory, each with the worker that it belongs to.
HeldPieces = Callable[[], Iterable[tuple["TaskState", "WorkerState"]]]

# Seconds between two looks at all pieces, at least: a look at a thousand takes a millisecond.
_APART = 0.05


class Homecoming:
    """Copies each piece to the worker that it belongs to, then drops the other copies.

    Parameters
    ----------
    scheduler : Scheduler
    rescue : callable() -> bool
        Called before. Returns whether a piece still waits for a worker.
    homes : callable() -> iterable of (TaskState, WorkerState)
    silent : collection of str
        Addresses of workers that may have stopped: a copy elsewhere may be the only one soon.
    stored : callable(key) -> (str, int) or None
        The array and the number of a piece that its home can read from a store.
    fits : callable(TaskState, WorkerState) -> bool
        Whether its home has room for a piece just now.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rescue: Callable[[], bool],
        homes: HeldPieces,
        silent: Collection[str],
        stored: Callable[[Key], tuple[str, int] | None],
        fits: Callable[[TaskState, WorkerState], bool],
    ) -> None:
        self._scheduler = scheduler
        self._fits = fits
        self._stored = stored
        # Pieces that a home could not read from their store.
        self._unread: set[Key] = set()
        scheduler.stream_handlers["coded-unread"] = logged(self.unread)
        self._silent = silent
        self._rescue = rescue
        self._homes = homes
        # The homes that hold pieces.
        self._holders: dict[Key, str] = {}
        self._due, self._looked = False, 0.0
        # As often as Dask looks at copies of other data.
        interval = dask.config.get("distributed.scheduler.active-memory-manager.interval")
        self._interval = parse_timedelta(interval)
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, key: Key, home: str) -> None:
        """Have its home hold a piece, once it has it, until it is the only one that does."""
        if self._holders.get(key) != home:
            self.let_go(key)
            self._holders[key] = home
            self._send(home, op="coded-hold", key=key, hold=True)

    def unread(self, worker: str, key: Key, reason: str = "") -> None:
        """Stream handler: a worker could not read a piece from its store, so it is copied there."""
        if self._stored(key := as_key(key)) is None:
            return  # released meanwhile, or known to be damaged
        self._unread.add(key)
        self._log("unread", key=str(key), worker=worker, reason=str(reason))
        self.soon()

    def _log(self, action: str, **fields: Any) -> None:
        self._scheduler.log_event(NAME, {"action": action, **fields})

    def let_go(self, key: Key) -> None:
        """Have a piece be as all other data again."""
        self._unread.discard(key)
        if (home := self._holders.pop(key, None)) is not None:
            self._send(home, op="coded-hold", key=key, hold=False)

    def is_held(self, key: Key) -> bool:
        """Whether its home holds a piece, as far as is known, even if Dask has dropped it."""
        return self._holders.get(key) in self._scheduler.workers

    def put_back(self, key: Key) -> None:
        """Have its home put a piece that it holds back among Dask's data."""
        self._send(self._holders[key], op="coded-put-back", key=key)

    def _send(self, address: str, **message: Any) -> None:
        if address in self._scheduler.stream_comms:
            self._scheduler.worker_send(address, message)

    def soon(self) -> None:
        """Look at all pieces after the present events, because many pieces move together."""
        if not self._due:
            self._due = True
            wait = max(self._looked + _APART - monotonic(), 0.0)
            self._scheduler.loop.call_later(wait, self._run)

    def stop(self) -> None:
        """Look no more until the next event, and hold nothing, because there are no pieces."""
        self._cancel()
        for key in list(self._holders):
            self.let_go(key)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._due, self._looked = False, monotonic()
        self._cancel()
        if self._look() and self._scheduler.status == Status.running:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._run)

    def _look(self) -> bool:
        """Ask workers for what is to be done now; return whether to look again."""
        again = self._rescue()
        wanted, spare = defaultdict[str, list[Key]](list), defaultdict[str, list[Key]](list)
        unused: list[Key] = []
        for ts, home in self._homes():
            holders, here = ts.who_has or set(), home.address not in self._silent
            if home not in holders:
                again = True
                if home in self._scheduler.running and here and self._fits(ts, home):
                    stored = None if ts.key in self._unread else self._stored(ts.key)
                    if stored is None:
                        wanted[home.address].append(ts.key)
                    else:  # its holders are at work
                        array, piece = stored
                        self._send(
                            home.address, op="coded-fetch", key=ts.key, array=array, piece=piece
                        )
                    self.hold(ts.key, home.address)  # it tells when the piece has come
            elif not ts.waiters and home.status == Status.running and here:
                # The copies of what a worker has that is about to close are made on purpose.
                for ws in holders - {home}:
                    spare[ws.address].append(ts.key)
                unused.append(ts.key)
        for request, found in (
            (self._scheduler.request_acquire_replicas, wanted),
            (self._scheduler.request_remove_replicas, spare),
        ):
            for address, keys in found.items():
                with suppress(CommClosedError):  # the scheduler is about to notice
                    request(address, keys, stimulus_id=f"coded-home-{time()}")
        for key in unused:
            self.let_go(key)
        return again
