"""Which samples a step uses: the same on every worker that holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Batches:
    """Mini-batches of data that are cut into cells, which workers store in parts.

    Cells are row ranges whose lengths differ by at most one sample, and a part is a run of cells.
    An *epoch* is the number of steps in which batches of ``batch_size`` samples cover all data. In
    each epoch the samples of a cell are permuted and spread evenly over its steps, so every sample
    is used exactly once. The permutation depends only on the seed, the cell and the epoch, so all
    workers that hold a cell draw the same samples.

    What a step uses of one cell is a *unit*. If the number of cells is fixed for a training, the
    same samples belong to each step and unit however many workers, and so parts, there are.

    Parameters
    ----------
    samples : int
        Total number of samples.
    parts : int
    batch_size : int or None
        Maximum number of samples in a step; rounding may add up to one per cell. None for all.
    seed : int
    cells : int, optional
        By default each part is one cell, so that samples depend on the number of parts.

    Attributes
    ----------
    steps : int
        Steps per epoch.

    Raises
    ------
    ValueError
        If there are fewer cells than parts.

    Examples
    --------
    >>> batches = Batches(samples=12, parts=2, batch_size=5, seed=0)
    >>> batches.steps, batches.count(0)
    (3, 4)
    >>> sorted(int(i) for step in range(3) for i in batches.rows(1, step))
    [0, 1, 2, 3, 4, 5]

    With six cells, three workers and two draw the same samples:

    >>> for parts in (3, 2):
    ...     batches = Batches(samples=12, parts=parts, batch_size=6, seed=0, cells=6)
    ...     firsts = [batches.part(part)[0] for part in range(parts)]
    ...     print(sorted(int(i) + first for part, first in enumerate(firsts)
    ...                  for i in batches.rows(part, step=0)))
    [0, 2, 4, 6, 8, 11]
    [0, 2, 4, 6, 8, 11]
    """

    def __init__(
        self,
        samples: int,
        parts: int,
        batch_size: int | None,
        seed: int,
        cells: int | None = None,
    ) -> None:
        cells = parts if cells is None else cells
        if cells < parts:
            raise ValueError(
                f"Argument 'cells' must be at least the number of parts, {parts}, it is {cells}: "
                f"pass more cells, or train with fewer workers."
            )
        self._edges = np.arange(cells + 1) * samples // cells
        self._runs = np.arange(parts + 1) * cells // parts
        self._seed = seed
        self.steps = 1 if batch_size is None else -(-samples // min(batch_size, samples))
        # By cell and epoch. Every step asks for the same epoch of all cells of a worker.
        self._permutations: dict[int, dict[int, npt.NDArray[Any]]] = {}

    def cells(self, part: int) -> range:
        """Return the cells of a part."""
        return range(int(self._runs[part]), int(self._runs[part + 1]))

    def part(self, part: int) -> tuple[int, int]:
        """Return the first row of a part and the row after its last."""
        return int(self._edges[self._runs[part]]), int(self._edges[self._runs[part + 1]])

    def rows(self, part: int, step: int) -> slice | npt.NDArray[np.intp]:
        """Return the rows of a part that a step uses, as an index into the part."""
        if self.steps == 1:
            return slice(None)
        epoch, turn = divmod(step, self.steps)
        starts, stops = self._cut(turn), self._cut(turn + 1)
        first, _ = self.part(part)
        rows = [
            self._permutation(cell, epoch)[starts[cell] : stops[cell]] + (self._edges[cell] - first)
            for cell in self.cells(part)
        ]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def count(self, step: int) -> int:
        """Return the number of samples that a step uses, over all cells."""
        turn = step % self.steps
        return int((self._cut(turn + 1) - self._cut(turn)).sum())

    def _cut(self, turn: int) -> npt.NDArray[np.intp]:
        """Return where each cell's samples for one step of the epoch start."""
        # Cells that do not divide evenly have their extra samples in different steps.
        shift = self._edges[:-1] % self.steps
        return (np.diff(self._edges) * turn + shift) // self.steps

    def _permutation(self, cell: int, epoch: int) -> npt.NDArray[Any]:
        known = self._permutations.setdefault(cell, {})
        if epoch not in known:
            rng = np.random.default_rng([self._seed, cell, epoch])
            known[epoch] = rng.permutation(int(self._edges[cell + 1] - self._edges[cell]))
            for old in [e for e in known if abs(e - epoch) > 1]:
                del known[old]
        return known[epoch]
