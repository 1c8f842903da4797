"""Pieces that a worker reads from a store, and writes there."""

from __future__ import annotations

import asyncio
import errno
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dask.typing import Key

from dask_coded.runtime.answers import Stored, ask
from dask_coded.runtime.spec import CodedSpec, as_key
from dask_coded.runtime.worker.disk import Disk, MappedArray
from dask_coded.storage import DamagedError, Storage, read_piece, write_piece

if TYPE_CHECKING:
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")

# Pieces that are read or written at once. A store that hangs stops nothing else of the worker.
_THREADS = 3
# Waiting does not help if a worker may not read a store.
_REFUSED = {errno.EACCES, errno.EPERM}


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
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="Coded-store")
        # By piece: the reason that was last logged.
        self._said: dict[Key, str] = {}

    def close(self) -> None:
        """End the threads, without waiting for a store."""
        for task in self._coming.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

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
        try:
            found = await self._run(_read, self._disk, spec, storage, piece)
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
            refused = isinstance(exc, OSError) and exc.errno in _REFUSED
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

        If it need not be, it is one that was damaged, and is replaced.

        Raises
        ------
        OSError
            If it must be, and the disk is full, for example.
        StoreError
            If it must be, and the place is another one on this worker.
        """

        def written(first: int, last: int) -> None:
            if isinstance(data, MappedArray):
                data.release(first, last)

        write = partial(write_piece, storage, piece, data, growth, written, replace=not must)
        try:
            await self._run(write)
        except Exception as exc:
            if must:
                raise
            if self._is_news(spec.keys[piece], exc):
                logger.warning("A piece that was made again is not written to its store: %s", exc)
            return False
        self._said.pop(spec.keys[piece], None)
        return True

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


def _read(disk: Disk, spec: CodedSpec, storage: Storage, piece: int) -> tuple[Any, float]:
    shape, key = (spec.piece_rows(piece), spec.columns), spec.keys[piece]
    made: list[Any] = []

    def empty() -> Any:
        try:
            made.append(disk.zeros(key, shape, spec.dtype))
        except OSError as exc:
            raise NoRoomError(str(exc)) from exc
        return made[0]

    def read(first: int, last: int) -> None:
        if isinstance(made[0], MappedArray):
            made[0].release(first, last)
        disk.filled(key, made[0][first:last].nbytes)

    return read_piece(storage, piece, shape, spec.dtype, spec.sparse_type, empty, read)
