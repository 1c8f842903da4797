"""Checks of blocks, fetched by a worker that coordinates rounds and verifies their shares.

It fetches the checks of all blocks once, from the workers that made them: see
:mod:`dask_coded.runtime.worker.checks`. It makes those that it cannot have, from any pieces that
suffice. So rounds can be verified whenever they can be finished at all. Checks may be wrong as
well; if shares dispute them, they are made again until two agree: see
:mod:`dask_coded.rounds.blame`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from dask_coded.config import timeouts
from dask_coded.rounds import Verifier
from dask_coded.rounds.blame import Witness, proven
from dask_coded.rounds.verification import Verification, is_possible, size_bounds
from dask_coded.runtime.answers import Recipe, RoundPlan, ask
from dask_coded.runtime.spec import CodedSpec
from dask_coded.runtime.worker.checks import check_of, weights_of
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin
from dask_coded.transport.rows import RowsGoneError, rows_of
from dask_coded.typing import Floats

# Arrays whose checks a worker keeps for the next rounds that it coordinates.
_KEPT = 8


class WrongCheck(NamedTuple):
    """A check that was wrong.

    Parameters
    ----------
    block : int
    holder : str
        Address of the worker that it came from.
    sound : bool
        Whether a right one can be made from the block as it is stored.
    """

    block: int
    holder: str
    sound: bool


class Review(NamedTuple):
    """What a review of disputed checks has found.

    Parameters
    ----------
    right : set of int
        Blocks whose checks are right.
    changed : bool
        Whether any was wrong, and other checks are used from now on.
    """

    right: set[int]
    changed: bool


class Checks:
    """The checks of one array, on a worker that coordinates its rounds.

    Attributes
    ----------
    version : int
        How many checks have been replaced.
    """

    def __init__(self, plugin: CodedWorkerPlugin, array_id: str) -> None:
        self._plugin = plugin
        self._id = array_id
        # By block.
        self._found: dict[int, Witness] = {}
        # Blocks whose checks two witnesses agree on; and for which sets of workers none did.
        self._proven: set[int] = set()
        self._open: dict[int, set[str]] = {}
        # The worker from which each check was fetched; and those of checks that were wrong.
        self._makers: dict[int, str] = {}
        self._wrong: list[WrongCheck] = []
        # How many checks have been replaced; and which number each replaced one has.
        self.version = 0
        self._since: dict[int, int] = {}
        self._weights: Floats | None = None
        # With the checks that it was made of.
        self._verification: tuple[list[Witness], Verification | None] = [], None
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
            for task in (await asyncio.wait(fetching, timeout=2 * timeouts().answer))[0]:
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
            check = await rows_of(plugin.worker, holder, key, 0, spec.geometry.stripes)
            # Millions of rows take tens of milliseconds.
            bounds = await asyncio.to_thread(self._bounds, spec, block)
            if is_possible(check, bounds, spec.columns):
                # If the block was wrong when the check was made from it, both are wrong alike.
                source = spec.keys[spec.code.systematic_pieces[block]]
                self._found[block] = Witness(check, frozenset([key, (source, 1.0)]))
                self._makers[block] = holder
                return
            self._wrong.append(WrongCheck(block, holder, True))
            raise RowsGoneError("", silent=False)
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
                self._found[block] = await self._witness(answer, block)
                return
            except RowsGoneError as exc:
                gone = exc

    async def _witness(self, recipe: Recipe, block: int) -> Witness:
        """Make a check here, by a recipe."""
        check = await check_of(self._plugin, recipe, block)
        return Witness(check, _parts(recipe), recipe.growth)

    # -- checks that may be wrong --------------------------------------------------------------

    async def review(
        self, spec: CodedSpec, blocks: Iterable[int], contradicting: set[str], version: int
    ) -> Review:
        """Make disputed checks again, from rows of several workers, and replace wrong ones.

        Parameters
        ----------
        spec : CodedSpec
        blocks : iterable of int
            Whose checks are disputed.
        contradicting : set of str
            The workers whose shares contradict them.
        version : int
            The :attr:`version` of the checks that these shares were verified by.
        """
        for block in blocks:
            # What the same workers could not prove before, they cannot prove now.
            tried = contradicting <= self._open.get(block, set())
            if block not in self._proven and not tried:
                await self._review(spec, block, contradicting)
        fresh = {block for block, since in self._since.items() if since > version}
        return Review(self._proven.intersection(blocks) - fresh, not fresh.isdisjoint(blocks))

    async def _review(self, spec: CodedSpec, block: int, contradicting: set[str]) -> None:
        before = self._found[block]
        agreeing = await self._prove(spec, block, contradicting)
        found = agreeing[0] if agreeing else None
        if found is None:
            self._open.setdefault(block, set()).update(contradicting)
        elif block not in self._proven:  # two rounds may have reviewed it at once
            self._proven.add(block)
            if found is not before:
                self._found[block] = found
                self.version += 1
                self._since[block] = self.version
                if maker := self._makers.pop(block, None):
                    # Whether the rows of the block itself agree.
                    itself = frozenset([(spec.keys[spec.code.systematic_pieces[block]], 1.0)])
                    sound = any(w.parts == itself and w is not before for w in agreeing)
                    self._wrong.append(WrongCheck(block, maker, sound))

    def take_wrong(self) -> list[WrongCheck]:
        """Return which checks were wrong, and forget them."""
        wrong, self._wrong = self._wrong, []
        return wrong

    def _bounds(self, spec: CodedSpec, block: int) -> Floats:
        """Return what the sizes of columns in a check of a block are at most, (stripes,)."""
        assert spec.exponents is not None
        if self._weights is None:
            self._weights = weights_of(spec)
        edges = spec.geometry.edges(block)
        return size_bounds(self._weights, edges, spec.exponents[block])

    async def _prove(self, spec: CodedSpec, block: int, contradicting: set[str]) -> list[Witness]:
        """Make a check again until two witnesses agree; return those that do, the best first."""
        witnesses = [self._found[block]]
        bounds = await asyncio.to_thread(self._bounds, spec, block)
        async for recipe in self._recipes(spec, block, contradicting):
            if any(_parts(recipe) == witness.parts for witness in witnesses):
                continue
            try:
                witnesses.append(await self._witness(recipe, block))
            except RowsGoneError:
                continue
            checks = [self._found[j].check for j in range(spec.code.k)]
            if agreeing := await asyncio.to_thread(
                proven, witnesses, spec.code, block, checks, bounds, spec.dtype
            ):
                return agreeing
        return []

    async def _recipes(
        self, spec: CodedSpec, block: int, contradicting: set[str]
    ) -> AsyncIterator[Recipe]:
        """Yield ways to make a check, the cheapest first, then without those that contradict it."""
        scheduler, piece = self._plugin.worker.scheduler, int(spec.code.systematic_pieces[block])
        silent = {*self._silent, *self._plugin.exchange.silent}
        answer = await ask(scheduler.coded_block, array=self._id, block=block, avoid=[*silent])
        if isinstance(answer, Recipe):
            yield answer
        for avoid in (contradicting, *({one} for one in sorted(contradicting)), set()):
            answer = await ask(
                scheduler.coded_sources, array=self._id, piece=piece, avoid=[*silent, *avoid]
            )
            if isinstance(answer, Recipe):
                yield answer

    def verifier(
        self, spec: CodedSpec, plan: RoundPlan, operand: np.ndarray[Any, Any]
    ) -> Callable[[], Verifier]:
        """Return what prepares the verifier of a round, to be called in a thread."""

        # Those of now: a review may replace some while the thread prepares.
        found = [self._found[j] for j in range(spec.code.k)]

        def prepare() -> Verifier:
            made_of, made = self._verification
            if made is None or made_of != found or made.code.pieces != spec.code.pieces:
                assert spec.exponents is not None
                checks = [one.check for one in found]
                made = Verification(
                    spec.code, spec.geometry, spec.exponents, weights_of(spec), checks, spec.dtype
                )
                self._verification = found, made
            growth = np.asarray(plan.growth) + np.abs(spec.code.G) @ [one.growth for one in found]
            return made.verifier(operand, growth.tolist())

        return prepare


def _parts(recipe: Recipe) -> frozenset[Any]:
    """Return what a check is made from; weights count up to their rounding errors."""
    return frozenset((source.key, round(source.weight, 9)) for source in recipe.sources)
