"""Checks of blocks, fetched by a worker that coordinates rounds and verifies their shares.

It fetches the checks of all blocks once, from the workers that made them: see
:mod:`dask_coded.runtime.worker.checks`. It makes those that it cannot have, from any pieces that
suffice. So rounds can be verified whenever they can be finished at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from dask_coded.rounds import Verifier
from dask_coded.rounds.verification import Verification
from dask_coded.runtime.answers import Recipe, RoundPlan, ask
from dask_coded.runtime.spec import CodedSpec
from dask_coded.runtime.worker.checks import check_of, weights_of
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin
from dask_coded.transport import ANSWER_SECONDS
from dask_coded.transport.rows import RowsGoneError, rows_of

# Arrays whose checks a worker keeps for the next rounds that it coordinates.
_KEPT = 8


class Checks:
    """The checks of one array, on a worker that coordinates its rounds."""

    def __init__(self, plugin: CodedWorkerPlugin, array_id: str) -> None:
        self._plugin = plugin
        self._id = array_id
        # By block; with how many roundings a check differs by, if its block was decoded.
        self._found: dict[int, Any] = {}
        self._growth: dict[int, float] = {}
        self._verification: Verification | None = None
        self._fetching: dict[int, asyncio.Task[None]] = {}
        # Workers that did not answer: what one block has found out, the others need not wait for.
        self._silent: set[str] = set()

    @classmethod
    def of(cls, plugin: CodedWorkerPlugin, array_id: str) -> Self:
        """Return the checks that a worker has of an array; it keeps those of the last arrays."""
        kept = plugin.checks
        found = kept[array_id] = kept.pop(array_id, None) or cls(plugin, array_id)
        # Those that are being fetched are waited for.
        for old in [key for key, checks in kept.items() if not checks._is_fetching][:-_KEPT]:
            del kept[old]
        return found

    @property
    def _is_fetching(self) -> bool:
        return not all(task.done() for task in self._fetching.values())

    async def fetch(self, spec: CodedSpec, holders: Sequence[str]) -> bool:
        """Fetch the checks that are not here yet; return whether all are here.

        If not, there may be other holders after a few seconds, so the scheduler is to be asked.
        """
        if not self._is_fetching:
            self._silent.clear()  # they may answer by now
        for block in range(spec.code.k):
            task = self._fetching.get(block)
            if block not in self._found and (task is None or task.done()):
                self._fetching[block] = asyncio.create_task(
                    self._fetch(spec, block, holders[block])
                )
        if fetching := [task for task in self._fetching.values() if not task.done()]:
            for task in (await asyncio.wait(fetching, timeout=2 * ANSWER_SECONDS))[0]:
                task.result()
        if len(self._found) < spec.code.k:
            return False
        self._fetching.clear()
        return True

    def close(self) -> None:
        """Stop fetching."""
        for task in self._fetching.values():
            task.cancel()

    async def _fetch(self, spec: CodedSpec, block: int, holder: str) -> None:
        plugin, key = self._plugin, spec.check_keys[block]
        try:
            # A closed channel does not matter: rows have a connection of their own.
            if holder in ("", *self._silent, *plugin.exchange.silent):
                raise RowsGoneError(holder, silent=False)
            self._found[block] = await rows_of(plugin.worker, holder, key, 0, spec.geometry.stripes)
        except RowsGoneError as gone:
            await self._make(spec, block, gone)

    async def _make(self, spec: CodedSpec, block: int, gone: RowsGoneError) -> None:
        """Make a check here, because its holder is lost or stopped, if that is possible now."""
        scheduler, array = self._plugin.worker.scheduler, self._id
        piece = int(spec.code.systematic_pieces[block])
        without: list[str] = []
        while True:
            if gone.silent:
                self._silent.add(gone.address)
            else:
                without.append(gone.address)
            avoid = [*without, *self._silent, *self._plugin.exchange.silent]
            answer = await ask(scheduler.coded_block, array=array, block=block, avoid=avoid)
            if not isinstance(answer, Recipe):
                # No worker that answers has the block. Others have what it can be decoded from.
                answer = await ask(scheduler.coded_sources, array=array, piece=piece, avoid=avoid)
            if not isinstance(answer, Recipe):
                return
            if any(source.holders[0] in self._silent for source in answer.sources):
                continue  # found out while the scheduler was asked
            try:
                self._found[block] = await check_of(self._plugin, answer, block)
                self._growth[block] = answer.growth
                return
            except RowsGoneError as exc:
                gone = exc

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
                    spec.code, spec.geometry, exponents, weights_of(spec), checks, spec.dtype
                )
            inexact = [self._growth.get(j, 0.0) for j in range(spec.code.k)]
            growth = np.asarray(plan.growth) + np.abs(spec.code.G) @ inexact
            return self._verification.verifier(operand, growth.tolist())

        return prepare
