"""Check a matrix to encode, cut it into row blocks, and bring them into the cluster."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import scipy.sparse
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph
from dask.typing import Key
from distributed import as_completed, futures_of, wait

from dask_coded.arguments import check_unmasked
from dask_coded.codes import Code, Polynomial
from dask_coded.loop import PiecesMade
from dask_coded.runtime.worker.disk import keep, zeros

if TYPE_CHECKING:
    from distributed import Client, Future


def matrix_source(A: Any) -> Any:
    """Return ``A`` as a dask array, NumPy array or CSR array; reject anything else."""
    check_unmasked("The matrix to encode", A)
    if isinstance(A, da.Array) and np.isnan(A.shape).any():
        raise ValueError(
            "The array has chunks of unknown size: call `A.compute_chunk_sizes()` first."
        )
    meta = getattr(A, "_meta", A)
    if hasattr(meta, "todense") and not scipy.sparse.issparse(meta):
        each = "each chunk" if isinstance(A, da.Array) else "it"
        raise TypeError(
            f"The matrix to encode must be of NumPy or SciPy, its type is "
            f"{type(meta).__module__.partition('.')[0]}.{type(meta).__name__}: convert {each} with "
            f"`to_scipy_sparse()`."
        )
    if scipy.sparse.issparse(A):
        A = A.tocsr()
    elif hasattr(A, "to_dask_array"):
        raise TypeError(
            f"The matrix to encode must be an array, it is a {type(A).__name__}: pass "
            "`A.to_dask_array(lengths=True)`."
        )
    elif not isinstance(A, da.Array):
        A = np.asarray(A)
    if A.ndim != 2:
        raise TypeError(f"Only a matrix can be encoded, this array has {A.ndim} dimensions.")
    if not A.shape[0] or not A.shape[1]:
        raise ValueError(f"An empty array cannot be encoded, its shape is {A.shape}.")
    if A.dtype.kind not in "fcibu":
        raise TypeError(f"Only numbers and booleans can be encoded, the dtype is {A.dtype}.")
    return A


def check_code(source: Any, code: Code) -> None:
    """Check that a code can store a matrix.

    Raises
    ------
    TypeError
        If the code is not systematic, or is inexact for the matrix's dtype.
    """
    if not code.systematic:
        pair = " It is for pairs of matrices: use `coded.encode_pair`."
        raise TypeError(
            f"Argument 'code' must be systematic, so that the array's blocks are among its pieces; "
            f"{code!r} is not.{pair * isinstance(code, Polynomial)}"
        )
    check_dtype(source, code, instead=", or use `coded.Repetition`")


def check_dtype(source: Any, code: Code, instead: str = "") -> None:
    """Check that a code suits the dtype of a matrix; ``instead`` names an alternative.

    Raises
    ------
    TypeError
        If it does not.
    """
    if source.dtype.kind in "biu" and not code.exact:
        raise TypeError(
            f"{code!r} mixes rows in floating point, which makes dtype {source.dtype} inexact: "
            f"convert with `A.astype(float)`{instead}."
        )


def is_verified(source: Any, wanted: bool | None) -> bool:
    """Return whether shares of a matrix are verified, as wanted or as configured.

    Raises
    ------
    TypeError
        If it is wanted, but the matrix is sparse or does not hold floating-point numbers.
    """
    able = sparse_type(source) is None and source.dtype.kind in "fc"
    if wanted and not able:
        what = "sparse" if sparse_type(source) else f"of dtype {source.dtype}"
        raise TypeError(
            f"Argument 'verify' is for dense matrices of floating-point or complex numbers, this "
            f"one is {what}."
        )
    return able and bool(dask.config.get("coded.verify") if wanted is None else wanted)


def sparse_type(source: Any) -> type | None:
    """Return the CSR type for a sparse array, or for the chunks of a dask array; None if dense."""
    meta = getattr(source, "_meta", source)
    if isinstance(meta, scipy.sparse.sparray):
        return scipy.sparse.csr_array
    return scipy.sparse.csr_matrix if scipy.sparse.issparse(meta) else None


def block_rows(source: Any, code: Code) -> tuple[int, ...]:
    """Return the number of rows of each of the k blocks.

    Blocks are equal up to one row. If the code does not mix them, blocks of a SciPy sparse matrix
    have equal numbers of non-zeros instead.
    """
    rows, k = source.shape[0], code.k
    if code.exact and scipy.sparse.issparse(source) and source.nnz:
        # A row costs its non-zeros, plus one for writing its result.
        cost = np.cumsum(np.diff(source.indptr) + 1)
        cuts = np.searchsorted(cost, cost[-1] * np.arange(1, k) / k, side="right")
    else:
        cuts = np.arange(1, k) * rows // k
    return tuple(np.diff(np.concatenate([[0], cuts, [rows]])).tolist())


def stripes_of(rows: tuple[int, ...], work: float, least: int = 1) -> int:
    """Return the number of stripes that a piece is cut into, as configured.

    Parameters
    ----------
    rows : tuple of int
        Of each block.
    work : float
        Multiply-adds of a piece.
    least : int
        Rows of a stripe, at least.
    """
    limits = dask.config.get("coded.round")
    wanted = min(limits["stripes"], int(work / limits["stripe-work"]), max(rows) // least)
    return max(wanted, 1)


class Tally:
    """Counts pieces as they are made, and passes the numbers on.

    Parameters
    ----------
    callback : callable
        Called with a :class:`PiecesMade`: at once, and after each piece.
    pieces : int
        Number of pieces of all encodings that this tally counts.
    """

    def __init__(self, callback: Callable[[PiecesMade], object], pieces: int) -> None:
        self._callback = callback
        self._last = PiecesMade(0, pieces, 0)
        callback(self._last)

    def add(self, nbytes: int) -> None:
        """Count a piece of so many bytes."""
        made, all_bytes = self._last.made + 1, self._last.nbytes + nbytes
        self._last = replace(self._last, made=made, nbytes=all_bytes)
        self._callback(self._last)


async def settled(
    client: Client,
    futures: Sequence[Future],
    count: Callable[[Future], Awaitable[None]] | None = None,
) -> None:
    """Wait for all futures and count them, then raise the first error, if any."""
    with client.as_current():
        if count is None:
            await wait(list(futures))
        else:
            async for future in as_completed(list(futures)):
                if future.status == "finished":
                    await count(future)
    for future in futures:
        if future.status != "finished":
            await future


class Blocks:
    """A matrix as row blocks in the memory of the cluster."""

    def __init__(self, source: Any, rows: tuple[int, ...]) -> None:
        self._rows = rows
        self.futures: list[Future] = []
        #: For each block, the tasks that fill it before the last one.
        self.steps: list[list[Key]] = [[] for _ in rows]
        if isinstance(source, da.Array):
            chunks = (rows, (source.shape[1],))
            if source.chunks != chunks and sparse_type(source) is None and all(rows):
                source, self.steps = _filled(source, rows)
            else:
                source = source.rechunk(chunks)
            self.keys = [(source.name, j, 0) for j in range(len(rows))]
        else:
            name = f"coded-source-{uuid.uuid4().hex[:16]}"
            self.keys = [(name, j, 0) for j in range(len(rows))]
        self._source = source

    async def load(self, client: Client, workers: Sequence[str]) -> Any:
        """Bring each block to a worker. The blocks live as long as the returned object."""
        if isinstance(self._source, da.Array):
            persisted = client.persist(self._source)
            self.futures += futures_of(persisted, client=client)
            await settled(client, self.futures)
            return persisted
        ends = np.cumsum(self._rows)
        for key, end, size, worker in zip(self.keys, ends, self._rows, workers, strict=True):
            block = self._source[end - size : end]
            if worker.startswith("inproc://"):
                # It gets the caller's memory as it is, which the caller may change later.
                block = block.copy()
            scattered = await client.scatter({key: block}, workers=[worker], hash=False)
            self.futures.append(scattered[key])
        return self.futures


class _FillTask(Task):
    """A task that copies a chunk to its place in a block."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        return True


def _filled(source: da.Array, rows: tuple[int, ...]) -> tuple[da.Array, list[list[Key]]]:
    """Cut a dense dask array into row blocks, and return the keys of all steps before the last.

    ``rechunk`` concatenates all chunks of a block at once, so they exist beside the block. Here
    each chunk is copied to its place by a task of its own, one after the other, and can be released
    then. All these tasks return the same array, which the first one makes.
    """
    name = f"coded-source-{uuid.uuid4().hex[:16]}"
    columns = source.shape[1]
    tasks: dict[Key, Task] = {}
    steps: list[list[Key]] = []
    for block, (begin, end) in enumerate(pairwise(accumulate(rows, initial=0))):
        parts = [
            ((source.name, i, j), (taken, slice(None)), (place, across))
            for i, taken, place in _overlaps(source.chunks[0], begin, end)
            for j, _, across in _overlaps(source.chunks[1], 0, columns)
        ]
        keys: list[Key] = [(name, block, left) for left in reversed(range(len(parts)))]
        for before, key, (chunk, taken, place) in zip([None, *keys], keys, parts, strict=False):
            so_far = (end - begin, columns) if before is None else TaskRef(before)
            tasks[key] = _FillTask(
                key, _fill, so_far, TaskRef(chunk), taken, place, dtype=source.dtype
            )
        steps.append(keys[:-1])
    chunks: Any = source
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=[chunks])
    filled = da.Array(graph, name, (rows, (columns,)), dtype=source.dtype, meta=source._meta)
    return filled, steps


def _overlaps(sizes: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each chunk with a part in a range: its number, that part, and its place there."""
    for i, (first, last) in enumerate(pairwise(accumulate(sizes, initial=0))):
        a, b = max(first, begin), min(last, end)
        if a < b:
            yield i, slice(a - first, b - first), slice(a - begin, b - begin)


def _fill(
    so_far: tuple[int, int] | np.ndarray[Any, Any],
    chunk: np.ndarray[Any, Any],
    taken: tuple[slice, slice],
    place: tuple[slice, slice],
    dtype: np.dtype[Any],
) -> np.ndarray[Any, Any]:
    """Copy a part of a chunk to its place in a block, or in a new block of a shape."""
    check_unmasked("A chunk of the matrix to encode", chunk)
    if isinstance(so_far, tuple):
        block = zeros(so_far, dtype)
    elif so_far.flags.writeable:
        block = so_far
    else:  # it may have been on the disk, or on another worker
        block = zeros(so_far.shape, dtype)
        block[...] = so_far
    block[place] = chunk[taken]
    return keep(block)
