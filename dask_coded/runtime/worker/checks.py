"""Making the checks of blocks, by which coordinators verify shares, when an array is encoded.

The check of a block is made and kept by another worker than the block, so that a worker whose
memory or arithmetic is broken cannot spoil both.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import get_worker, secede
from distributed.utils import sync

from dask_coded.rounds.scaling import scaled
from dask_coded.rounds.verification import add_rows, empty_check, random_weights
from dask_coded.runtime.answers import Lost, Recipe, Waiting, ask
from dask_coded.runtime.spec import CodedDataLostError, CodedSpec
from dask_coded.runtime.worker.pieces import rows_from, slice_rows
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
                    if gone.silent:
                        avoid.append(gone.address)
        await backoff.wait()


async def check_of(plugin: CodedWorkerPlugin, recipe: Recipe, block: int) -> Any:
    """Return the check of a block, whose rows are read from the worker that the recipe names.

    Raises
    ------
    RowsGoneError
        If that worker no longer holds them, or does not answer.
    """
    spec, (source,) = recipe.spec, recipe.sources
    assert spec.exponents is not None
    exponents = spec.exponents[block]
    check = empty_check(spec.geometry.stripes, spec.columns, spec.dtype)
    weights, edges = weights_of(spec), spec.geometry.edges(block)
    loop, step = asyncio.get_running_loop(), slice_rows(spec)
    reader = RowReader(plugin.worker, plugin.exchange.readable_memory)
    for first in range(0, source.rows, step):
        last = min(first + step, source.rows)
        rows = await rows_from(plugin, reader, source, first, last, spec)

        def add(rows: Any = rows, first: int = first) -> None:
            part = scaled(rows, exponents[first : first + len(rows)])
            add_rows(check, weights, edges, first, part)

        await loop.run_in_executor(None, add)
    return check


def weights_of(spec: CodedSpec) -> Any:
    """Return the random weights of the rows of each block."""
    return random_weights(spec.id, max(spec.geometry.rows))
