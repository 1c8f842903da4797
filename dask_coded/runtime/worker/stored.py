"""Pieces that a worker reads from a store, and writes there.

A store may hang: then a read or a write never ends, and nothing can end its thread. So each
location has threads of its own, and a piece is not waited for once its store has sent nothing for
long.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
from dask.typing import Key
from dask.utils import parse_timedelta

from dask_coded.chunks import unchanging
from dask_coded.runtime.answers import Stored, ask
from dask_coded.runtime.spec import CodedSpec, as_key
from dask_coded.runtime.worker.disk import Disk, MappedArray
from dask_coded.storage import DamagedError, Location, Storage, read_piece, write_piece

if TYPE_CHECKING:
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")

# Pieces of one location that are read or written at once.
_THREADS = 3


class NoRoomError(Exception):
    """This worker has no room for a piece: this says nothing of the store."""


class Unread(NamedTuple):
    """Why a piece could not be read.

    Parameters
    ----------
    kind : str
        ``damaged``; ``refused`` if this worker may not read it; ``unreachable`` if the store cannot
        be used at present, or there is no room.
    reason : str
        For people.
    """

    kind: str
    reason: str


class _Call:
    """A read or a write in a thread, which says when it gets on.

    Parameters
    ----------
    location : Location
    threads : _Threads

    Attributes
    ----------
    moved : float
        When it last did.
    over : bool
        Whether nothing waits for it any more, so that it is to end.
    """

    def __init__(self, location: Location, threads: _Threads) -> None:
        self._location = location
        self._threads = threads
        self.over = False
        self.moves()

    def moves(self) -> None:
        """Record that it gets on.

        Raises
        ------
        TimeoutError
            If nothing waits for it. The piece may be made from others by now: in memory of the same
            key, and written by another worker.
        """
        self.moved = self._threads.moved = monotonic()
        if self.over:
            raise TimeoutError(f"{self._location} has answered too late")


class _Threads:
    """The threads that use one location: so few that those of a store that hangs do no harm.

    Each ends with its call. None of them keeps the process at the end; threads of Zarr's own, in
    which it reads local folders, may.

    Attributes
    ----------
    calls : set of Future
        Those that run, also if nothing waits for them.
    moved : float
        When any of them last got on.
    """

    def __init__(self) -> None:
        self.calls: set[asyncio.Future[Any]] = set()
        self.moved = monotonic()

    def start(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call a function in a new thread."""
        loop = asyncio.get_running_loop()
        call: asyncio.Future[Any] = loop.create_future()

        def end(settle: Callable[[Any], None], found: Any) -> None:
            self.calls.discard(call)
            self.moved = monotonic()
            settle(found)
            call.exception()  # perhaps nothing else looks at it

        def run() -> None:
            try:
                settle, found = call.set_result, function()
            except BaseException as exc:
                settle, found = call.set_exception, exc
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(end, settle, found)

        threading.Thread(target=run, name="Coded-store", daemon=True).start()
        self.calls.add(call)
        return call


class Stores:
    """Reads and writes pieces in stores, in threads of its own.

    Parameters
    ----------
    worker : Worker
    disk : Disk
    """

    def __init__(self, worker: Worker, disk: Disk) -> None:
        self._worker = worker
        self._disk = disk
        #: By piece, what reads it for a worker that has joined.
        self._coming: dict[Key, asyncio.Task[None]] = {}
        # Those that have run calls lately.
        self._threads: dict[Location, _Threads] = {}
        # What waits for a store, and what writes a piece again.
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._writing: set[asyncio.Task[None]] = set()
        # By piece: the reason that was last logged.
        self._said: dict[Key, str] = {}

    def close(self) -> None:
        """Wait for no store any more."""
        for task in {*self._coming.values(), *self._writing, *self._waiting}:
            if task is not None:
                task.cancel()

    async def _run(
        self, location: Location, function: Callable[[_Call], Any], limit: float | None
    ) -> Any:
        """Call a function in a thread of a location.

        Raises
        ------
        TimeoutError
            If it has not got on for ``limit`` seconds, or no thread is free and none has got on.
        """
        waiting = asyncio.current_task()
        self._waiting.add(waiting)
        try:
            while len((threads := self._of(location)).calls) >= _THREADS:
                await _ended(location, threads.calls, threads, limit)
            call = _Call(location, threads)
            running = threads.start(partial(function, call))
            try:
                await _ended(location, [running], call, limit)
            finally:
                call.over = True
            return running.result()
        finally:
            self._waiting.discard(waiting)

    def _of(self, location: Location) -> _Threads:
        """Return the threads of a location, and forget those of locations that are not used."""
        idle = [known for known, threads in self._threads.items() if not threads.calls]
        for known in idle:
            del self._threads[known]
        return self._threads.setdefault(location, _Threads())

    def _is_news(self, key: Key, exc: Exception) -> bool:
        """Whether why a piece cannot be read or written is not what was last said of it."""
        reason = repr(exc)
        news = self._said.get(key) != reason
        self._said[key] = reason
        return news

    async def read(
        self, spec: CodedSpec, storage: Storage, piece: int
    ) -> tuple[Any, float, Unread | None]:
        """Read a piece; return it with its growth, and why it could not be read if it could not."""
        key = spec.keys[piece]
        read = partial(_read, self._disk, spec, storage, piece)
        try:
            found = await self._run(storage.location, read, _limit())
        except DamagedError as exc:
            if self._is_news(key, exc):
                logger.warning("A stored piece is damaged, and is made from others: %s", exc)
            unread = Unread("damaged", str(exc))
        except (ImportError, MemoryError):
            self._disk.not_filled(key)
            raise
        except NoRoomError as exc:
            if self._is_news(key, exc):
                logger.warning(
                    "A stored piece is not read yet, because there is no room for it: %s", exc
                )
            unread = Unread("unreachable", str(exc))
        except Exception as exc:
            # Those of object stores have no number.
            refused = isinstance(exc, PermissionError)
            if self._is_news(key, exc):
                if refused:
                    logger.warning(
                        "This worker may not read a stored piece, which is made from others: %s",
                        exc,
                    )
                else:
                    logger.warning("A stored piece cannot be read at present: %s", exc)
            unread = Unread("refused" if refused else "unreachable", str(exc) or repr(exc))
        else:
            self._said.pop(key, None)
            return *found, None
        self._disk.not_filled(key)
        return None, 0.0, unread

    async def write(
        self, spec: CodedSpec, storage: Storage, piece: int, data: Any, growth: float, must: bool
    ) -> bool:
        """Write a piece; return whether it is written.

        Without ``must`` the piece replaces a damaged one. It is in memory already, so nothing waits
        for the write, and the scheduler hears of it afterwards.

        Raises
        ------
        OSError
            If it must be, and the disk is full, for example.
        StoreError
            If it must be, and the place is another one on this worker.
        """

        def write(call: _Call) -> None:
            def written(first: int, last: int) -> None:
                call.moves()
                if isinstance(data, MappedArray):
                    data.release(first, last)

            write_piece(storage, piece, data, growth, written, replace=not must)

        if must:
            await self._run(storage.location, write, None)
            return True
        writing = asyncio.create_task(self._write_again(spec, storage, piece, write))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return False

    async def _write_again(
        self, spec: CodedSpec, storage: Storage, piece: int, write: Callable[[_Call], None]
    ) -> None:
        try:
            await self._run(storage.location, write, _limit())
        except Exception as exc:
            if self._is_news(spec.keys[piece], exc):
                logger.warning("A piece that was made again is not written to its store: %s", exc)
            return
        self._said.pop(spec.keys[piece], None)
        self._worker.batched_send({"op": "coded-written", "array": spec.id, "piece": piece})

    def fetch(self, key: Key, array: str, piece: int) -> None:
        """Stream handler: read a piece that belongs to this worker, which has joined.

        It is then among Dask's data, and need not be copied from another worker. Dask would handle
        no other message of the scheduler until a coroutine has ended, and a store may hang.
        """
        key = as_key(key)
        if key not in self._coming and key not in self._worker.data:
            self._coming[key] = asyncio.create_task(self._fetch(key, array, piece))

    async def _fetch(self, key: Key, array: str, piece: int) -> None:
        try:
            data, reason = None, "the array is released"
            answer = await ask(self._worker.scheduler.coded_stored, array=array)
            if isinstance(answer, Stored):
                data, _, unread = await self.read(answer.spec, answer.storage, piece)
                reason = unread.reason if unread else ""
            task = self._worker.state.tasks.get(key)
            if data is None:
                self._unread(key, reason)
            elif task is None or task.state == "released":  # otherwise it comes another way
                self._worker.update_data({key: self._disk.keep(key, data)})
                self._worker.batched_send({"op": "add-keys", "keys": [key]})
        except Exception as exc:
            logger.exception("Worker %s cannot read the piece %r", self._worker.address, key)
            self._unread(key, repr(exc))
        finally:
            del self._coming[key]

    def _unread(self, key: Key, reason: str) -> None:
        self._worker.batched_send({"op": "coded-unread", "key": key, "reason": reason})


def _limit() -> float:
    """Return for how many seconds a store may send or take nothing: a chunk is like a slice."""
    return float(parse_timedelta(dask.config.get("coded.encode.timeout")))


async def _ended(
    location: Location,
    calls: Collection[asyncio.Future[Any]],
    watched: _Call | _Threads,
    limit: float | None,
) -> None:
    """Wait until one of some calls has ended.

    Raises
    ------
    TimeoutError
        If what is watched has not got on for ``limit`` seconds.
    """
    while True:
        left = None if limit is None else watched.moved + limit - monotonic()
        if left is not None and left <= 0:
            raise TimeoutError(f"{location} has not answered for {limit:g} seconds")
        if (await asyncio.wait(calls, timeout=left, return_when=asyncio.FIRST_COMPLETED))[0]:
            return


def _read(
    disk: Disk, spec: CodedSpec, storage: Storage, piece: int, call: _Call
) -> tuple[Any, float]:
    shape, key = (spec.piece_rows(piece), spec.columns), spec.keys[piece]
    made: list[Any] = []

    def empty() -> Any:
        call.moves()
        try:
            made.append(disk.zeros(key, shape, spec.dtype))
        except OSError as exc:
            raise NoRoomError(str(exc)) from exc
        return made[0]

    def read(first: int, last: int) -> None:
        call.moves()
        if made:  # it is dense
            if isinstance(made[0], MappedArray):
                made[0].release(first, last)
            disk.filled(key, made[0][first:last].nbytes)

    data, growth = read_piece(storage, piece, shape, spec.dtype, spec.sparse_type, empty, read)
    return (unchanging(data) if spec.sparse_type else data), growth
