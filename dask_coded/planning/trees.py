"""Trees of workers: who is whose child, and which parts of the data everybody computes.

The root makes the sum and computes nothing. Every worker adds to its own gradients what its
children deliver, decoded by the gradient code of that parent, and delivers the result to its own
parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dask_coded.codes import GradientCode

#: The node that makes the sum, where there is one.
ROOT = -1

#: Parts of the data, each with what its gradient is multiplied with.
Work = tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Allocation:
    """A tree of workers, the code of every parent, and the work of every worker.

    Parameters
    ----------
    parents : tuple of int
        The parent of each worker, :data:`ROOT` for the children of the root.
    codes : mapping of int to GradientCode
        The code of every node that has children: its rows are the children in the order of
        :attr:`children`.
    work : tuple of Work
        What each worker computes.
    parts : int
        How many equal parts the data are cut into.
    """

    parents: tuple[int, ...]
    codes: Mapping[int, GradientCode]
    work: tuple[Work, ...]
    parts: int

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The children of every node that has some, in the order of their numbers."""
        lists: dict[int, list[int]] = {}
        for worker, parent in enumerate(self.parents):
            lists.setdefault(parent, []).append(worker)
        return {node: tuple(found) for node, found in lists.items()}

    @property
    def load(self) -> float:
        """The largest share of the data that a worker computes."""
        return max(len(work) for work in self.work) / self.parts


def star(code: GradientCode) -> Allocation:
    """All workers are children of the root, each computes the blocks that its row mentions."""
    work = tuple(
        tuple((part, float(row[part])) for part in row.nonzero()[0].tolist()) for row in code.B
    )
    return Allocation((ROOT,) * code.n, {ROOT: code}, work, code.blocks)
