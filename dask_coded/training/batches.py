"""Which samples a step uses: the same on every worker that holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


class Batches:
    """Mini-batches of data that are cut into parts.

    Parts are row ranges whose lengths differ by at most one sample. An *epoch* is the number of
    steps in which batches of ``batch_size`` samples cover all data. In each epoch the samples of a
    part are permuted and spread over its steps, so every sample is used exactly once. Steps differ
    by at most one sample, and so do the steps of a part. The permutation depends only on the seed,
    the part and the epoch, so all workers that hold a part draw the same samples. If the number of
    parts is fixed for a training, what a step uses of a part never depends on the workers.

    Parameters
    ----------
    samples : int
        Total number of samples.
    parts : int
    batch_size : int or None
        Maximum number of samples in a step. None for all.
    seed : int

    Attributes
    ----------
    steps : int
        Steps per epoch.

    Examples
    --------
    >>> batches = Batches(samples=12, parts=2, batch_size=5, seed=0)
    >>> batches.steps, batches.count(0)
    (3, 4)
    >>> sorted(int(i) for step in range(3) for i in batches.rows(1, step))
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, samples: int, parts: int, batch_size: int | None, seed: int) -> None:
        self._edges = np.arange(parts + 1) * samples // parts
        self._seed = seed
        self.steps = 1 if batch_size is None else -(-samples // min(batch_size, samples))
        # Of each part so many samples in each step, and one more in so many steps from one on.
        # Parts take turns, so that each step has as many of these, or one less.
        self._even, self._more = np.divmod(np.diff(self._edges), self.steps)
        self._from = (np.cumsum(self._more) - self._more) % self.steps
        # By part and epoch. Every step asks for the same epoch of all parts of a worker.
        self._permutations: dict[int, dict[int, npt.NDArray[Any]]] = {}
        self._keys: dict[int, dict[int, npt.NDArray[Any]]] = {}

    def part(self, part: int) -> tuple[int, int]:
        """Return the first row of a part and the row after its last."""
        return int(self._edges[part]), int(self._edges[part + 1])

    def rows(self, part: int, step: int) -> slice | npt.NDArray[np.intp]:
        """Return the rows of a part that a step uses, as an index into the part."""
        if self.steps == 1:
            return slice(None)
        epoch, turn = divmod(step, self.steps)
        permutation = self._permutation(part, epoch)
        return permutation[self._cut(turn)[part] : self._cut(turn + 1)[part]]

    def keys(self, part: int, step: int) -> npt.NDArray[np.uint64]:
        """Return a random number for each sample of a part that a step uses, in their order.

        It depends on the seed, the epoch and the sample's row in all data, and on nothing else.
        """
        epoch = step // self.steps

        def drawn() -> npt.NDArray[Any]:
            first, end = self.part(part)
            # A generator that can be advanced to any row. Each step of it makes four numbers.
            source = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
            source.advance(first // 4)
            found: npt.NDArray[Any] = source.random_raw(first % 4 + end - first)[first % 4 :]
            return found

        found = _of_epoch(self._keys, part, epoch, drawn)[self.rows(part, step)]
        return found.copy()  # whoever gets them may change them

    def count(self, step: int) -> int:
        """Return the number of samples that a step uses, over all parts."""
        turn = step % self.steps
        return int((self._cut(turn + 1) - self._cut(turn)).sum())

    def _cut(self, turn: int) -> npt.NDArray[np.intp]:
        """Return where each part's samples for one step of the epoch start."""
        ends = self._from + self._more  # these go on at the first step
        more = np.clip(turn - self._from, 0, self._more) + np.clip(ends - self.steps, 0, turn)
        found: npt.NDArray[np.intp] = self._even * turn + more
        return found

    def _permutation(self, part: int, epoch: int) -> npt.NDArray[Any]:
        def drawn() -> npt.NDArray[Any]:
            first, end = self.part(part)
            rng = np.random.default_rng([self._seed, part, epoch])
            return rng.permutation(end - first)

        return _of_epoch(self._permutations, part, epoch, drawn)


def _of_epoch(
    kept: dict[int, dict[int, npt.NDArray[Any]]],
    part: int,
    epoch: int,
    draw: Callable[[], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    """Return the numbers of a part in an epoch. Draw them if they are not kept yet."""
    known = kept.setdefault(part, {})
    if epoch not in known:
        known[epoch] = draw()
        for old in [e for e in known if abs(e - epoch) > 1]:
            del known[old]
    return known[epoch]
