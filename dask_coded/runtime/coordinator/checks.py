"""Checks of blocks, fetched by a worker that coordinates rounds and verifies their shares.

It fetches the checks of all blocks once, from the workers that made them: see
:mod:`dask_coded.runtime.worker.checks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Self

import numpy as np

from dask_coded.rounds import Verifier
from dask_coded.rounds.verification import Verification
from dask_coded.runtime.answers import Recipe, RoundPlan, ask
from dask_coded.runtime.spec import NAME, CodedSpec
from dask_coded.runtime.worker.checks import check_of, weights_of
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin
from dask_coded.transport import ANSWER_SECONDS
from dask_coded.transport.rows import RowsGoneError, rows_of

logger = logging.getLogger("distributed.dask_coded")

# Seconds for which rounds wait for checks.
_PATIENCE = 2 * ANSWER_SECONDS
# Arrays whose checks a worker keeps for the next rounds that it coordinates.
_KEPT = 8


class Checks:
    """The checks of one array, on a worker that coordinates its rounds."""

    def __init__(self, plugin: CodedWorkerPlugin, array_id: str) -> None:
        self._plugin = plugin
        self._id = array_id
        self._found: dict[int, Any] = {}
        self._verification: Verification | None = None
        # By block; and since when some check is missing.
        self._fetching: dict[int, asyncio.Task[None]] = {}
        self._since: float | None = None
        self._warned = False

    @classmethod
    def of(cls, plugin: CodedWorkerPlugin, array_id: str) -> Self:
        """Return the checks that a worker has of an array; it keeps those of the last arrays."""
        kept = plugin.checks
        found = kept[array_id] = kept.pop(array_id, None) or cls(plugin, array_id)
        while len(kept) > _KEPT:
            kept.pop(next(iter(kept))).close()
        return found

    async def fetch(self, spec: CodedSpec, holders: Sequence[str]) -> bool:
        """Fetch the checks that are not here yet; return whether rounds can go on.

        They can with all checks, or after a few seconds in which some could not be had, because the
        workers that hold a check and its block do not answer. Then rounds are not verified until
        these checks are here, which are fetched meanwhile. The worker logs a warning.
        """
        for block in range(spec.code.k):
            task = self._fetching.get(block)
            if block not in self._found and (task is None or task.done()):
                self._fetching[block] = asyncio.create_task(
                    self._fetch(spec, block, holders[block])
                )
        if fetching := [task for task in self._fetching.values() if not task.done()]:
            if self._since is None:
                self._since = monotonic()
            left = max(self._since + _PATIENCE - monotonic(), 0.0)
            for task in (await asyncio.wait(fetching, timeout=left))[0]:
                task.result()
        if self.complete(spec):
            self._since = None
            self._fetching.clear()
            return True
        if self._since is None or monotonic() < self._since + _PATIENCE:
            return False
        if not self._warned:
            self._warned = True
            missing = [j for j in range(spec.code.k) if j not in self._found]
            logger.warning(
                "Rounds are not verified until the checks of blocks %s are here: no worker that "
                "holds one of them, or the block, answers.",
                missing,
            )
            event = {"action": "unverified", "array": self._id, "blocks": missing}
            self._plugin.worker.log_event(NAME, event)
        return True

    def complete(self, spec: CodedSpec) -> bool:
        """Whether all checks are here."""
        return len(self._found) == spec.code.k

    def close(self) -> None:
        """Stop fetching."""
        for task in self._fetching.values():
            task.cancel()

    async def _fetch(self, spec: CodedSpec, block: int, holder: str) -> None:
        plugin, key = self._plugin, spec.check_keys[block]
        try:
            if not holder or not plugin.exchange.is_usable(holder):
                raise RowsGoneError(holder, silent=True)
            self._found[block] = await rows_of(plugin.worker, holder, key, 0, spec.geometry.stripes)
        except RowsGoneError:
            # Its holder is lost or stopped: make it here, if the block can be read.
            asked = ask(
                plugin.worker.scheduler.coded_block, array=self._id, block=block, avoid=[holder]
            )
            with contextlib.suppress(RowsGoneError):
                if isinstance(recipe := await asked, Recipe):
                    self._found[block] = await check_of(plugin, recipe, block)

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
            return self._verification.verifier(operand, plan.growth)

        return prepare
