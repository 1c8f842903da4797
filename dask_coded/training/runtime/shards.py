"""Rows of training data, fetched straight from the workers that hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from operator import getitem
from threading import Lock
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import scipy.sparse
from dask.typing import Key
from dask.utils import parse_bytes

from dask_coded.arguments import check_unmasked, to_csr
from dask_coded.runtime.answers import Holders, Lost, ask
from dask_coded.runtime.spec import CodedDataLostError
from dask_coded.runtime.worker.disk import Disk
from dask_coded.training.runtime.spec import Blocks
from dask_coded.transport.backoff import Backoff
from dask_coded.transport.rows import RowsGoneError, rows_of

if TYPE_CHECKING:
    from distributed.worker import Worker


def runs(parts: Sequence[int]) -> list[list[int]]:
    """Return parts as runs of neighbours, which are fetched together.

    Examples
    --------
    >>> runs([0, 1, 2, 6, 7])
    [[0, 1, 2], [6, 7]]
    """
    found: list[list[int]] = []
    for part in parts:
        if found and part == found[-1][-1] + 1:
            found[-1].append(part)
        else:
            found.append([part])
    return found


class KeptParts:
    """Parts of a training's data that a worker has, from one of its groups to the next.

    Used by one thread at a time, but closed by any.

    Parameters
    ----------
    samples, targets : Blocks
        What they are parts of.

    Examples
    --------
    >>> blocks = Blocks(("rows",), (4,))
    >>> kept = KeptParts(blocks, blocks)
    >>> kept.add({(0, 2): ("samples", "targets"), (2, 4): ("more", "others")})
    >>> kept.only([(2, 4), (0, 4)])
    {(2, 4): ('more', 'others')}
    """

    def __init__(self, samples: Blocks, targets: Blocks) -> None:
        self._of = samples, targets
        self._lock = Lock()
        # By the first row and the one after the last: samples and targets.
        self._parts: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._closed = False

    def serve(self, samples: Blocks, targets: Blocks) -> bool:
        """Whether they are parts of these data, and not dropped for good."""
        return not self._closed and self._of == (samples, targets)

    def only(self, edges: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Any, Any]]:
        """Drop all other parts; return those of these that are there."""
        with self._lock:
            self._parts = {own: self._parts[own] for own in edges if own in self._parts}
            return dict(self._parts)

    def add(self, parts: dict[tuple[int, int], tuple[Any, Any]]) -> None:
        """Keep some parts, unless all was dropped for good."""
        with self._lock:
            if not self._closed:
                self._parts |= parts

    def close(self) -> None:
        """Drop all for good, at the end of the training."""
        with self._lock:
            self._closed, self._parts = True, {}


async def fetch_rows(worker: Worker, blocks: Blocks, start: int, stop: int, avoid: set[str]) -> Any:
    """Fetch rows of an array in blocks, as a new array on this worker.

    It waits for lost blocks while the cluster computes them again. Workers that do not answer are
    added to ``avoid`` and not asked any more, unless only they hold a block that cannot be computed
    again.

    Raises
    ------
    CodedDataLostError
        If the cluster cannot compute them again.
    """
    parts = [
        await _fetch(worker, key, first, end, avoid)
        for key, first, end in _overlap(blocks, start, stop)
    ]
    # Always a copy: arrays from a comm may be unaligned, and others may change the original.
    return await asyncio.to_thread(_stacked, parts)


async def fetch_parts(
    worker: Worker, blocks: Blocks, edges: Sequence[tuple[int, int]], avoid: set[str]
) -> list[Any]:
    """Fetch parts that lie one after the other, from their first rows to those after their last."""
    first = edges[0][0]
    rows = await fetch_rows(worker, blocks, first, edges[-1][1], avoid)
    if len(edges) == 1:
        return [rows]
    # Copies, so that they are aligned alike on all workers.
    slices = [slice(start - first, stop - first) for start, stop in edges]
    return await asyncio.to_thread(lambda: [_constant(rows[own].copy()) for own in slices])


def _overlap(blocks: Blocks, start: int, stop: int) -> Iterator[tuple[Key, int, int]]:
    """Yield which rows of which blocks; if there are none, an empty range for shape and dtype."""
    ends = np.cumsum(blocks.rows).tolist()
    found = False
    for key, rows, end in zip(blocks.keys, blocks.rows, ends, strict=True):
        first = end - rows
        if max(first, start) < min(end, stop):
            found = True
            yield key, max(start - first, 0), min(stop, end) - first
    if not found:
        filled = (key for key, rows in zip(blocks.keys, blocks.rows, strict=True) if rows)
        yield next(filled, blocks.keys[0]), 0, 0


async def _fetch(worker: Worker, key: Key, start: int, stop: int, avoid: set[str]) -> Any:
    """Fetch some rows of one block, from any holder that answers."""
    backoff = Backoff()
    avoided = avoid
    while True:
        local: Any = Disk.of(worker).held(key)
        if local is not None:
            # Rows of some sparse formats cannot be selected.
            sparse = scipy.sparse.issparse(local)
            rows = await asyncio.to_thread(to_csr, local) if sparse else local
            return await asyncio.to_thread(getitem, rows, slice(start, stop))
        holders: tuple[str, ...] = ()
        match await ask(worker.scheduler.coded_holders, key=key, avoid=sorted(avoided)):
            case Lost(message):
                raise CodedDataLostError(message)
            case Holders(addresses):
                holders = addresses
        if holders:
            holder = holders[backoff.attempts % len(holders)]
            try:
                return await _slices(worker, holder, key, start, stop)
            except RowsGoneError as gone:
                if gone.silent:  # otherwise it died or released the block just now: ask again
                    avoid.add(gone.address)
                    avoided = avoid
        else:
            # It is computed again, wherever the scheduler likes. If that is a worker that did not
            # answer for a while, the block must not be computed a third time.
            avoided = set()
        await backoff.wait()


async def _slices(worker: Worker, address: str, key: Key, start: int, stop: int) -> Any:
    """Fetch rows from one holder slice by slice, to spare its memory and its event loop."""
    limit = parse_bytes(dask.config.get("coded.encode.slice"))
    step, parts = 1, []
    while True:
        end = min(start + step, stop)
        rows = await rows_of(worker, address, key, start, end)
        parts.append(rows)
        if end >= stop:
            break
        # The first row shows how many bytes a row has.
        size = rows.data.nbytes if scipy.sparse.issparse(rows) else rows.nbytes
        start, step = end, max(1, limit * (end - start) // max(size, 1))
    return await asyncio.to_thread(_stacked, parts)


def _stacked(parts: list[Any]) -> Any:
    for part in parts:
        check_unmasked("A block of the training's data", part)
    if scipy.sparse.issparse(parts[0]):
        return scipy.sparse.vstack(parts, format="csr")
    # Rows of one block may lie in another order, and a gradient would have other bits.
    return _constant(np.ascontiguousarray(np.concatenate(parts)))


def _constant(rows: Any) -> Any:
    """Return rows that no gradient function changes: it gets them again in the next step."""
    if isinstance(rows, np.ndarray):
        rows.flags.writeable = False
    return rows
