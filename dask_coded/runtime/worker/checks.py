"""Making the checks of blocks, by which coordinators verify shares, when an array is encoded.

The check of a block is made and kept by another worker than the block, so that a worker whose
memory or arithmetic is broken cannot spoil both.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from distributed import get_worker, secede
from distributed.utils import sync

from dask_coded.rounds.scaling import scaled
from dask_coded.rounds.verification import add_rows, empty_check, random_weights
from dask_coded.runtime.answers import Lost, Recipe, Source, Waiting, ask
from dask_coded.runtime.spec import CodedDataLostError, CodedSpec
from dask_coded.runtime.worker.pieces import parts_from, rotated, slice_rows
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin, worker_plugin
from dask_coded.transport.backoff import Backoff
from dask_coded.transport.rows import RowReader, RowsGoneError


def make_check(array_id: str, block: int) -> Any:
    """Make the check of one block on this worker, as a task."""
    # The block may have been lost as well, and the task that rebuilds it may need this thread.
    secede()
    plugin = worker_plugin(get_worker())
    return sync(plugin.worker.loop, _make, plugin, array_id, block)


async def _make(plugin: CodedWorkerPlugin, array_id: str, block: int) -> Any:
    avoid: list[str] = []
    backoff = Backoff()
    scheduler = plugin.worker.scheduler
    while True:
        match await ask(scheduler.coded_block, array=array_id, block=block, avoid=avoid):
            case Lost(message):
                raise CodedDataLostError(message)
            case Waiting():
                avoid.clear()  # these workers may answer by now
            case Recipe() as recipe:
                try:
                    return await check_of(plugin, recipe, block)
                except RowsGoneError as gone:
                    avoid.append(gone.address)
        await backoff.wait()


async def check_of(plugin: CodedWorkerPlugin, recipe: Recipe, block: int) -> Any:
    """Return the check of a block, from the block itself or from pieces that determine it.

    Raises
    ------
    RowsGoneError
        If a worker that the recipe names no longer holds its rows, or does not answer.
    """
    spec = recipe.spec
    rows = spec.geometry.rows[block]
    check = empty_check(spec.geometry.stripes, spec.columns, spec.dtype)
    weights, edges = weights_of(spec), spec.geometry.edges(block)
    loop, step = asyncio.get_running_loop(), slice_rows(spec)
    reader = RowReader(plugin.worker, plugin.exchange.readable_memory)
    # Each check starts with another source, so that all of them together soon find silent workers.
    turns = rotated(recipe.sources, block)
    for first in range(0, rows, step):
        total = np.zeros((min(step, rows - first), spec.columns), check.dtype)
        async for source, begin, part, into in parts_from(
            plugin, reader, turns, total, first, spec
        ):
            await loop.run_in_executor(None, _add, spec, into, part, source, begin)
        await loop.run_in_executor(None, add_rows, check, weights, edges, first, total)
    return check


def _add(spec: CodedSpec, into: Any, part: Any, source: Source, first: int) -> None:
    """Add rows of a source, from row ``first`` on, scaled as the rows of blocks are."""
    if source.block >= 0:
        assert spec.exponents is not None
        part = scaled(part, spec.exponents[source.block][first : first + len(part)])
    into += source.weight * part


def weights_of(spec: CodedSpec) -> Any:
    """Return the random weights of the rows of each block."""
    return random_weights(spec.id, max(spec.geometry.rows))
