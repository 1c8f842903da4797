"""A matrix as row blocks in the memory of the cluster, from which pieces are made.

The chunks of a dense dask array are copied into the blocks one after the other, so a worker needs
memory for a block and a chunk, not for two blocks. Dask would compute chunks faster than they can
be copied. They would pile up, until workers spill, pause or are killed. So a chunk waits until the
chunk a few places before it is copied.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from dask.typing import Key
from dask.utils import ensure_dict
from distributed import futures_of

from dask_coded.arguments import check_chunk, meta_of
from dask_coded.chunks import as_declared
from dask_coded.compat import Alias, GraphNode, Task, TaskRef, UnfusedTask, convert_legacy_graph
from dask_coded.config import timeouts
from dask_coded.runtime.client.source import settled, sparse_type
from dask_coded.runtime.spec import coded_task
from dask_coded.runtime.worker.disk import keep, zeros

if TYPE_CHECKING:
    from distributed import Client, Future


class Blocks:
    """A matrix as row blocks in the memory of the cluster.

    Parameters
    ----------
    source : dask array, ndarray or sparse array
    rows : tuple of int
        Of each block.
    ahead : int
        How many chunks of a block may be computed and not copied yet.
    """

    def __init__(self, source: Any, rows: tuple[int, ...], ahead: int) -> None:
        self._rows = rows
        self.futures: list[Future] = []
        #: For each block, the tasks that fill it before the last one.
        self.steps: list[list[Key]] = [[] for _ in rows]
        if isinstance(source, da.Array):
            chunks = (rows, (source.shape[1],))
            if source.chunks != chunks and sparse_type(source) is None and all(rows):
                source, self.steps = _filled(source, rows, ahead)
            elif source.chunks != chunks:
                declared = partial(_checked, source.dtype, sparse_type(source))
                source = da.map_blocks(declared, source, meta=meta_of(source)).rechunk(chunks)
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
            block = await asyncio.to_thread(self._block, end - size, end, worker)
            # It ends even if this is cancelled: the scheduler keeps the block for the client, and
            # only its future can let it go.
            scattering = asyncio.ensure_future(_scattered(client, key, block, worker))
            try:
                self.futures.append(await asyncio.shield(scattering))
            except asyncio.CancelledError:
                scattering.add_done_callback(_let_go)
                raise
        return self.futures

    def _block(self, begin: int, end: int, worker: str) -> Any:
        """Return a block for a worker. Sparse rows are copied, which may take long."""
        block = self._source[begin:end]
        # A worker of this process gets the caller's memory as it is, which may change later.
        return block.copy() if worker.startswith("inproc://") else block


def _let_go(scattering: asyncio.Task[Future]) -> None:
    if not scattering.cancelled() and scattering.exception() is None:
        scattering.result().release()


async def _scattered(client: Client, key: Key, block: Any, worker: str) -> Future:
    """Bring a block to a worker; if that has left or is paused, to any other one."""
    try:
        found = await client.scatter(
            {key: block}, workers=[worker], hash=False, timeout=timeouts().silence
        )
    except (KeyError, OSError):
        found = await client.scatter({key: block}, hash=False)
    future: Future = found[key]
    return future


async def chunks_ahead(client: Client, blocks: int) -> int:
    """Return how many chunks of a block may be computed and not copied yet.

    So many that all threads of the cluster have work.
    """
    scheduler: Any = client.scheduler
    threads = sum((await scheduler.ncores()).values())
    return max(2, math.ceil(1.5 * threads / blocks))


class _FillTask(UnfusedTask):
    """A task on the way from chunks to a block."""

    __slots__ = ()


def _filled(
    source: da.Array, rows: tuple[int, ...], ahead: int
) -> tuple[da.Array, list[list[Key]]]:
    """Cut a dense dask array into row blocks, and return the keys of all steps before the last.

    ``rechunk`` concatenates all chunks of a block at once, so they exist beside the block. Here
    each chunk is copied to its place by a task of its own, one after the other, and can be released
    then. All these tasks return the same array, which the first one makes.

    After a copy a second, empty task follows. The chunk ``ahead`` places later waits for that, and
    gets another key. No chunk of an annotated source waits, as its task would lose its annotations.

    A chunk with rows of several blocks, as all chunks of a transposed array are, is cut where it
    is, so that only these rows are sent.
    """
    graph: dict[Key, GraphNode] = {}
    if not any(layer.annotations for layer in source.dask.layers.values()):
        # Only for a look at the tasks: Dask drops futures from the graphs of optimized collections.
        (optimized,) = dask.optimize(source)
        graph = convert_legacy_graph(ensure_dict(optimized.dask))
    name = f"coded-source-{uuid.uuid4().hex[:16]}"
    columns = source.shape[1]
    parts = [
        [
            (
                (source.name, i, j),
                (source.chunks[0][i], source.chunks[1][j]),
                (taken, slice(None)),
                (place, across),
            )
            for i, taken, place in _overlaps(source.chunks[0], begin, end)
            for j, _, across in _overlaps(source.chunks[1], 0, columns)
        ]
        for begin, end in pairwise(accumulate(rows, initial=0))
    ]
    blocks_with: Counter[Key] = Counter(chunk for found in parts for chunk, *_ in found)
    users = blocks_with.copy()
    users.update(key for node in graph.values() for key in node.dependencies)
    tasks: dict[Key, Task] = {}
    steps: list[list[Key]] = []
    for block, height in enumerate(rows):
        found = parts[block]
        keys: list[Key] = [(name, block, left) for left in reversed(range(len(found)))]
        steps.append(keys[:-1])
        waited_for: list[TaskRef] = []
        for i, (key, (chunk, shape, taken, place)) in enumerate(zip(keys, found, strict=True)):
            if i >= ahead and (node := _own_task(graph, chunk, users, source)):
                copied = (f"{name}-copied", block, i - ahead)
                tasks[copied] = _FillTask(copied, _nothing, TaskRef(keys[i - ahead]))
                steps[block].append(copied)
                waited_for.append(TaskRef(copied))
                chunk = (f"{name}-chunk", block, i)
                tasks[chunk] = _FillTask(chunk, _second, TaskRef(copied), node)
            elif blocks_with[chunk] > 1:
                part = (f"{name}-part", block, i)
                tasks[part] = _FillTask(
                    part, _part, TaskRef(chunk), shape, taken, dtype=source.dtype
                )
                chunk, taken = part, (slice(None), slice(None))
                shape = (place[0].stop - place[0].start, place[1].stop - place[1].start)
            so_far = TaskRef(keys[i - 1]) if i else (height, columns)
            # Until the last step. Otherwise a chunk that is lost with its worker would have the
            # whole block made again, because the step that it waited for is released.
            kept = waited_for if i == len(found) - 1 else []
            tasks[key] = _FillTask(
                key, _fill, so_far, TaskRef(chunk), shape, taken, place, *kept, dtype=source.dtype
            )
    chunks: Any = source
    layers = HighLevelGraph.from_collections(name, tasks, dependencies=[chunks])
    filled = da.Array(layers, name, (rows, (columns,)), dtype=source.dtype, meta=meta_of(source))
    return filled, steps


def _own_task(
    graph: Mapping[Key, GraphNode], key: Key, users: Counter[Key], source: da.Array
) -> Task | None:
    """Return the task that makes a chunk, if it can wait.

    It can if a single step of one block needs the chunk, and if the task needs no results of other
    tasks, which would pile up instead. The object that all chunks are read from does no harm.
    """
    node = graph.get(key)
    while isinstance(node, Alias) and users[key] == 1:
        (key,) = node.dependencies
        node = graph.get(key)
    # The scheduler watches over coded rounds, which it would not find in another task.
    if not isinstance(node, Task) or coded_task(node) is not None or users[key] > 1:
        return None
    needs = node.dependencies
    leaves = all(need in graph and not graph[need].dependencies for need in needs)
    return node if leaves and all(need in source.dask for need in needs) else None


def _part(
    chunk: Any, shape: tuple[int, int], taken: tuple[slice, slice], *, dtype: np.dtype[Any]
) -> Any:
    """Return a copy of the part of a chunk that a block needs, which does not keep the chunk."""
    return _declared(chunk, shape, dtype)[taken].copy()


def _declared(
    chunk: Any, shape: tuple[int, int], dtype: np.dtype[Any], sparse: type | None = None
) -> Any:
    """Return a chunk of a dask array, which must be as the array declares."""
    chunk = as_declared("the matrix to encode", chunk, dtype, sparse)
    check_chunk("the matrix to encode", chunk.shape, shape)
    return chunk


def _second(_: None, chunk: Any) -> Any:
    """Return a chunk that had to wait."""
    return chunk


def _nothing(_: Any) -> None:
    """Return nothing, once a chunk is copied."""


def _overlaps(sizes: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each chunk with a part in a range: its number, that part, and its place there."""
    for i, (first, last) in enumerate(pairwise(accumulate(sizes, initial=0))):
        a, b = max(first, begin), min(last, end)
        if a < b:
            yield i, slice(a - first, b - first), slice(a - begin, b - begin)


def _checked(dtype: np.dtype[Any], sparse: type | None, chunk: Any, block_info: Any = None) -> Any:
    return _declared(chunk, block_info[None]["chunk-shape"], dtype, sparse)


def _fill(
    so_far: tuple[int, int] | np.ndarray[Any, Any],
    chunk: np.ndarray[Any, Any],
    shape: tuple[int, int],
    taken: tuple[slice, slice],
    place: tuple[slice, slice],
    *_: None,
    dtype: np.dtype[Any],
) -> np.ndarray[Any, Any]:
    """Copy a part of a chunk to its place in a block, or in a new block of a shape."""
    chunk = _declared(chunk, shape, dtype)
    if isinstance(so_far, tuple):
        block = zeros(so_far, dtype)
    elif so_far.flags.writeable:
        block = so_far
    else:  # it may have been on the disk, or on another worker
        block = zeros(so_far.shape, dtype)
        block[...] = so_far
    block[place] = chunk[taken]
    return keep(block)
