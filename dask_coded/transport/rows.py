"""Rows of an array on another worker, fetched straight from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from dask.utils import parse_timedelta
from distributed.protocol import to_serialize

from dask_coded.arguments import check_chunk
from dask_coded.config import timeouts
from dask_coded.transport.memory import LEAST_BYTES, Memory, Segment, SharedArray, leave

if TYPE_CHECKING:
    from distributed.worker import Worker


class RowsGoneError(Exception):
    """A worker does not answer, or no longer holds the array.

    Attributes
    ----------
    address : str
    silent : bool
        Whether it did not answer in time. It may be stopped, so do not ask it again.
    """

    def __init__(self, address: str, silent: bool) -> None:
        super().__init__(address)
        self.address = address
        self.silent = silent


async def rows_of(worker: Worker, address: str, key: Any, start: int, stop: int) -> Any:
    """Fetch the rows ``start … stop - 1`` of an array or a sparse matrix on another worker.

    Many rows may take long. Meanwhile the worker is asked for no rows at all, which it answers at
    once unless it is stopped or cut off.

    Raises
    ------
    RowsGoneError
        If the worker no longer holds it, does not answer these questions within a few seconds, or
        does not send the rows within ``coded.encode.timeout``.
    """
    return (await _ask(worker, address, key, start, stop))["rows"]


class RowReader:
    """Fetches rows one after the other, from workers of this host through memory.

    A worker of this host writes dense rows straight into memory of the reader, with which an array
    is encoded in two thirds of the time. Workers that cannot open this memory send the rows.

    Parameters
    ----------
    worker : Worker
    memory : Memory or None
        None if messages are to be used.
    """

    def __init__(self, worker: Worker, memory: Memory | None) -> None:
        self._worker = worker
        self._memory = memory
        self._segment: Segment | None = None

    async def read(
        self,
        address: str,
        key: Any,
        start: int,
        stop: int,
        row: int,
        declared: tuple[int, int] | None = None,
    ) -> Any:
        """Return rows as :func:`rows_of` does, if need be in place of those returned before.

        Parameters
        ----------
        address : str
        key : Key
        start, stop : int
        row : int
            Bytes of a row; 0 for rows that do not fit into memory, such as sparse ones.
        declared : tuple of int, optional
            The shape that the whole array must have.

        Raises
        ------
        ValueError
            If it has another shape.
        """
        size = (stop - start) * row
        if self._memory is None or size < LEAST_BYTES:
            return (await _ask(self._worker, address, key, start, stop, declared))["rows"]
        segment, self._segment = self._segment, None
        if segment is None or segment.size < size:
            segment = self._memory.new(size)
        if segment is None:
            return (await _ask(self._worker, address, key, start, stop, declared))["rows"]
        room = segment.place(segment.array(np.dtype(np.uint8), (size,)))
        # If this fails, the segment is not used again: the other worker may be late and still
        # write into it.
        answer = await _ask(self._worker, address, key, start, stop, declared, tuple(room))
        self._segment = segment
        if answer["left"] is None:
            return answer["rows"]
        dtype, shape = answer["left"]
        return segment.array(np.dtype(dtype), tuple(shape))


async def _ask(
    worker: Worker,
    address: str,
    key: Any,
    start: int,
    stop: int,
    declared: tuple[int, int] | None = None,
    room: tuple[Any, ...] | None = None,
) -> Any:
    timeout = parse_timedelta(dask.config.get("coded.encode.timeout"))
    try:
        async with asyncio.timeout(timeout):
            answer = await large_answer(
                worker.rpc(address).coded_rows(key=key, start=start, stop=stop, room=room),
                lambda: worker.rpc(address).coded_rows(key=key, start=0, stop=0),
            )
    except (OSError, MemoryError) as exc:  # of either worker; a TimeoutError is an OSError, too
        raise RowsGoneError(address, isinstance(exc, TimeoutError)) from exc
    # A worker that has just joined, and has no plugin yet, answers with None.
    if not answer or answer["gone"]:
        raise RowsGoneError(address, silent=False)
    if declared is not None and answer["shape"] is not None:
        check_chunk("the matrix to encode", answer["shape"], declared)
    return answer


async def large_answer(asked: Awaitable[Any], question: Callable[[], Awaitable[Any]]) -> Any:
    """Await a large answer of a worker, which meanwhile has to answer small questions.

    Parameters
    ----------
    asked : awaitable
        The large answer, which may take long to travel.
    question : callable() -> awaitable
        Asks the same worker for something small.

    Raises
    ------
    OSError
        If the connection breaks, or the worker answers no question.
    """
    coming = asyncio.ensure_future(asked)
    try:
        # What takes longer may be large, or its worker is stopped: so it is asked.
        while not (await asyncio.wait([coming], timeout=timeouts().quiet()))[0]:
            await asyncio.wait_for(question(), timeouts().answer)
        return coming.result()
    finally:
        coming.cancel()


def dense_rows(rows: np.ndarray[Any, Any], room: tuple[Any, ...] | None) -> dict[str, Any]:
    """Return the answer to a request for rows; they are left in the reader's memory if possible."""
    # Rows of another type, masked ones for example, must reach the reader, which may refuse them.
    plain = type(rows) is np.ndarray and rows.dtype.kind in "biufc"
    if room is not None and plain and leave(rows, SharedArray.received(room)):
        return {"gone": False, "rows": None, "left": (rows.dtype.str, rows.shape)}
    return sent_rows(rows)


def sent_rows(rows: Any) -> dict[str, Any]:
    """Return the answer to a request for rows, with the rows."""
    return {"gone": False, "rows": to_serialize(rows), "left": None}


#: The answer to a request for rows of an array that is not here.
NO_ROWS = {"gone": True}
