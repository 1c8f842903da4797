"""Pieces that a worker reads from a store, and writes there."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from dask_coded.runtime.answers import Stored, ask
from dask_coded.runtime.spec import CodedSpec, as_key
from dask_coded.runtime.worker.disk import Disk, MappedArray
from dask_coded.storage import DamagedError, Storage, read_piece, write_piece

if TYPE_CHECKING:
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")


async def read_stored(
    disk: Disk, spec: CodedSpec, storage: Storage, piece: int
) -> tuple[Any, float, str]:
    """Read a piece; return it with its growth, and why it could not be read if it could not.

    The reason is ``damaged``, or ``unreachable`` if the store cannot be used at present.
    """
    try:
        data, growth = await asyncio.to_thread(_read, disk, spec, storage, piece)
    except DamagedError as exc:
        logger.warning("A stored piece is damaged, and is made from others: %s", exc)
        return None, 0.0, "damaged"
    except (ImportError, MemoryError):
        raise
    except Exception as exc:
        logger.warning("A stored piece cannot be read at present: %s", exc)
        return None, 0.0, "unreachable"
    return data, growth, ""


def _read(disk: Disk, spec: CodedSpec, storage: Storage, piece: int) -> tuple[Any, float]:
    shape, key = (spec.piece_rows(piece), spec.columns), spec.keys[piece]
    made: list[Any] = []

    def empty() -> Any:
        made.append(disk.zeros(key, shape, spec.dtype))
        return made[0]

    def read(first: int, last: int) -> None:
        if isinstance(made[0], MappedArray):
            made[0].release(first, last)

    return read_piece(storage, piece, shape, spec.dtype, spec.sparse_type, empty, read)


async def write_stored(storage: Storage, piece: int, data: Any, growth: float, must: bool) -> None:
    """Write a piece; if it cannot be written, this is an error only if it ``must`` be.

    If it need not be, it is one that was damaged, and is replaced.

    Raises
    ------
    OSError
        If the disk is full, for example.
    StoreError
        If the place is another one on this worker.
    """

    def written(first: int, last: int) -> None:
        if isinstance(data, MappedArray):
            data.release(first, last)

    try:
        await asyncio.to_thread(write_piece, storage, piece, data, growth, written, not must)
    except Exception as exc:
        if must:
            raise
        logger.warning("A piece that was made again is not written to its store: %s", exc)


class Fetches:
    """Reads pieces that belong to a worker which has joined, instead of copying them from others.

    Parameters
    ----------
    worker : Worker
    disk : Disk
    """

    def __init__(self, worker: Worker, disk: Disk) -> None:
        self._worker = worker
        self._disk = disk
        self._coming: set[Key] = set()

    async def fetch(self, key: Key, array: str, piece: int) -> None:
        """Stream handler: read a piece from its store, and have it among Dask's data."""
        key = as_key(key)
        if key in self._coming or key in self._worker.data:
            return
        self._coming.add(key)
        try:
            data = None
            answer = await ask(self._worker.scheduler.coded_stored, array=array)
            if isinstance(answer, Stored):
                data, _, _ = await read_stored(self._disk, answer.spec, answer.storage, piece)
            task = self._worker.state.tasks.get(key)
            if data is None:
                self._worker.batched_send({"op": "coded-unread", "key": key})
            elif task is None or task.state == "released":  # otherwise it comes another way
                self._worker.update_data({key: self._disk.keep(key, data)})
                self._worker.batched_send({"op": "add-keys", "keys": [key]})
        except Exception:
            logger.exception("Worker %s cannot read the piece %r", self._worker.address, key)
            self._worker.batched_send({"op": "coded-unread", "key": key})
        finally:
            self._coming.discard(key)
