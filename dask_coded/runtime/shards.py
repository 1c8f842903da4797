"""Rows of data that lie in the cluster, fetched straight from the workers that hold them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from operator import getitem
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import scipy.sparse
from dask.typing import Key
from dask.utils import parse_bytes

from dask_coded.runtime.rows import RowsGoneError, rows_of
from dask_coded.runtime.spec import CodedDataLostError
from dask_coded.runtime.training_spec import Blocks

if TYPE_CHECKING:
    from dask_coded.runtime.worker import CodedWorkerPlugin


async def fetch_rows(plugin: CodedWorkerPlugin, blocks: Blocks, start: int, stop: int) -> Any:
    """Rows of an array that is in blocks, as an array of this worker's own.

    Blocks that were lost are waited for, as long as the cluster computes them again.

    Raises
    ------
    CodedDataLostError
        If it cannot.
    """
    parts = [
        await _fetch(plugin, key, first, end) for key, first, end in _overlap(blocks, start, stop)
    ]
    # A copy in any case: what came over a comm may be unaligned, and nobody else may change it.
    return await asyncio.to_thread(_stacked, parts)


def _overlap(blocks: Blocks, start: int, stop: int) -> Iterator[tuple[Key, int, int]]:
    """Which rows of which blocks; at least one, be it empty, for shape and dtype."""
    ends = np.cumsum(blocks.rows).tolist()
    found = False
    for key, rows, end in zip(blocks.keys, blocks.rows, ends, strict=True):
        first = end - rows
        if max(first, start) < min(end, stop):
            found = True
            yield key, max(start - first, 0), min(stop, end) - first
    if not found:
        yield blocks.keys[0], 0, 0


async def _fetch(plugin: CodedWorkerPlugin, key: Key, start: int, stop: int) -> Any:
    """Some rows of one block, from whoever holds it and answers."""
    avoid: set[str] = set()
    for attempt in itertools.count():
        local: Any = plugin.worker.data.get(key)
        if local is not None:
            return await asyncio.to_thread(getitem, local, slice(start, stop))
        answer = await plugin.worker.scheduler.coded_holders(key=key)
        if answer["status"] == "lost":
            raise CodedDataLostError(
                f"A block of the training's data, {key!r}, is lost with the worker that held it: "
                "train on dask arrays that can be computed again, not on data that was scattered."
            )
        holders = [address for address in answer["holders"] if address not in avoid]
        if holders:
            try:
                return await _slices(plugin, holders[attempt % len(holders)], key, start, stop)
            except RowsGoneError as gone:
                if gone.silent:  # else it died or let go of it just now: ask again
                    avoid.add(gone.address)
        else:
            avoid.clear()
        await asyncio.sleep(min(0.01 * 2**attempt, 0.5))
    raise AssertionError("unreachable")  # pragma: no cover


async def _slices(plugin: CodedWorkerPlugin, address: str, key: Key, start: int, stop: int) -> Any:
    """The rows from one holder, a slice at a time: its memory and its event loop stay free."""
    limit = parse_bytes(dask.config.get("coded.encode.slice"))
    step, parts = 1, []
    while True:
        end = min(start + step, stop)
        rows = await rows_of(plugin.worker, address, key, start, end)
        parts.append(rows)
        if end >= stop:
            break
        # The first row tells how long rows are.
        size = rows.data.nbytes if scipy.sparse.issparse(rows) else rows.nbytes
        start, step = end, max(1, limit * (end - start) // max(size, 1))
    return await asyncio.to_thread(_stacked, parts)


def _stacked(parts: list[Any]) -> Any:
    if scipy.sparse.issparse(parts[0]):
        return scipy.sparse.vstack(parts, format="csr")
    return np.concatenate(parts)
