"""Checks of blocks: made when an array is encoded, fetched by the workers that verify its shares.

The check of a block is made and kept by another worker than the block, so that a worker whose
memory or arithmetic is broken cannot spoil both. A worker that coordinates rounds fetches the
checks of all blocks once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from distributed import get_worker, secede
from distributed.utils import sync

from dask_coded.rounds import Verifier
from dask_coded.rounds.scaling import scaled
from dask_coded.rounds.verification import Verification, add_rows, empty_check, random_weights
from dask_coded.runtime.answers import Lost, Recipe, RoundPlan, ask
from dask_coded.runtime.pieces import rows_from, slice_rows
from dask_coded.runtime.spec import CodedDataLostError, CodedSpec
from dask_coded.runtime.worker import CodedWorkerPlugin, worker_plugin
from dask_coded.transport import ANSWER_SECONDS
from dask_coded.transport.backoff import Backoff
from dask_coded.transport.rows import RowsGoneError, rows_of

# Arrays whose checks a worker keeps for the next rounds that it coordinates.
_KEPT = 8


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
            case Recipe() as recipe:
                try:
                    return await _sum(plugin, recipe, block)
                except RowsGoneError as gone:
                    if gone.silent:
                        avoid.append(gone.address)
        await backoff.wait()


async def _sum(plugin: CodedWorkerPlugin, recipe: Recipe, block: int) -> Any:
    spec, (source,) = recipe.spec, recipe.sources
    assert spec.exponents is not None
    exponents = spec.exponents[block]
    check = empty_check(spec.geometry.stripes, spec.columns, spec.dtype)
    weights, edges = _weights(spec), spec.geometry.edges(block)
    loop, step = asyncio.get_running_loop(), slice_rows(spec)
    for first in range(0, source.rows, step):
        rows = await rows_from(plugin, source, first, min(first + step, source.rows))

        def add(rows: Any = rows, first: int = first) -> None:
            part = scaled(rows, exponents[first : first + len(rows)])
            add_rows(check, weights, edges, first, part)

        await loop.run_in_executor(None, add)
    return check


def _weights(spec: CodedSpec) -> Any:
    return random_weights(spec.id, max(spec.geometry.rows))


class Checks:
    """The checks of one array, on a worker that coordinates its rounds."""

    def __init__(self, plugin: CodedWorkerPlugin, array_id: str) -> None:
        self._plugin = plugin
        self._id = array_id
        self._found: dict[int, Any] = {}
        self._verification: Verification | None = None

    @classmethod
    def of(cls, plugin: CodedWorkerPlugin, array_id: str) -> Self:
        """Return the checks that a worker has of an array; it keeps those of the last arrays."""
        kept = plugin.checks
        found = kept[array_id] = kept.pop(array_id, None) or cls(plugin, array_id)
        while len(kept) > _KEPT:
            del kept[next(iter(kept))]
        return found

    async def fetch(self, spec: CodedSpec, holders: Sequence[str]) -> bool:
        """Fetch the checks that are not here yet; return whether all of them are."""
        missing = [j for j in range(spec.code.k) if j not in self._found]
        await asyncio.gather(*(self._fetch(spec, j, holders[j]) for j in missing))
        return len(self._found) == spec.code.k

    async def _fetch(self, spec: CodedSpec, block: int, holder: str) -> None:
        plugin, key = self._plugin, spec.check_keys[block]
        try:
            if not holder or not plugin.exchange.is_usable(holder):
                raise RowsGoneError(holder, silent=True)
            asked = rows_of(plugin.worker, holder, key, 0, spec.geometry.stripes)
            self._found[block] = await asyncio.wait_for(asked, ANSWER_SECONDS)
        except (RowsGoneError, TimeoutError):
            # Its holder is lost or stopped: make it here, if the block can be read.
            asked = ask(
                plugin.worker.scheduler.coded_block, array=self._id, block=block, avoid=[holder]
            )
            with contextlib.suppress(RowsGoneError):
                if isinstance(recipe := await asked, Recipe):
                    self._found[block] = await _sum(plugin, recipe, block)

    def verifier(
        self, spec: CodedSpec, plan: RoundPlan, operand: np.ndarray[Any, Any]
    ) -> Callable[[], Verifier]:
        """Return what prepares the verifier of a round, to be called in a thread."""

        def prepare() -> Verifier:
            pieces, exponents = spec.code.pieces, spec.exponents
            if self._verification is None or self._verification.code.pieces != pieces:
                assert exponents is not None
                checks = [self._found[j] for j in range(spec.code.k)]
                self._verification = Verification(
                    spec.code, spec.geometry, exponents, _weights(spec), checks, spec.dtype
                )
            return self._verification.verifier(operand, plan.growth)

        return prepare
