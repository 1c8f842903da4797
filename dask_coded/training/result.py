"""What a training ends with, and what its history says about the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.aggregation import Aggregation
from dask_coded.runtime.training_spec import Step
from dask_coded.training.optimizers import Vector

# A worker straggles in a step if it computes for more than so many times as long as the median one.
_SLOW = 2.0


@dataclass(frozen=True)
class WorkerReport:
    """One worker in a training.

    Parameters
    ----------
    steps : int
        In which it took part.
    late : float
        Share of them that ended before it had computed its part.
    seconds : float
        Median time that it computed in a step, before it waited for anybody; NaN if it never did.
    """

    steps: int
    late: float
    seconds: float


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What a training ends with.

    Attributes
    ----------
    parameters : ndarray, shape (n,)
    steps : int
        How many updates the parameters have seen.
    history : list of Step
        Of every step its loss, how long it took, who was late, and how long each worker computed.
    digests : dict of str to str
        A digest of the parameters of each worker, by address, of those that were done when the
        training was: they are all the same.
    aggregation : Aggregation
        That was used.
    """

    parameters: Vector
    steps: int
    # Too long to be shown with the rest.
    history: list[Step] = field(repr=False)
    digests: dict[str, str] = field(repr=False)
    aggregation: Aggregation

    @property
    def workers(self) -> dict[str, WorkerReport]:
        """How each worker did, by address."""
        out = {}
        for address in _addresses(self.history):
            took_part = [s for s in self.history if address in s.computing or address in s.late]
            seconds = [s.computing[address] for s in took_part if address in s.computing]
            out[address] = WorkerReport(
                len(took_part),
                sum(address in s.late for s in took_part) / len(took_part),
                float(np.median(seconds)) if seconds else float("nan"),
            )
        return out

    @property
    def straggling_correlation(self) -> float:
        """Correlation of straggling from one step to the next, over all workers.

        In a step a worker straggles that computes for more than twice the median time, or has not
        reported it at all. Near 0, nobody can tell who will be late, and
        :class:`~dask_coded.aggregation.DynamicClusters` gain nothing. NaN if nobody straggles, or
        everybody.
        """
        return correlation(straggling(self.history))


def straggling(history: list[Step]) -> npt.NDArray[np.float64]:
    """Who straggled when.

    Returns
    -------
    ndarray, shape (steps, workers)
        1 and 0; NaN where a worker took no part. Workers are in order of their addresses.
    """
    addresses = _addresses(history)
    flags = np.full((len(history), len(addresses)), np.nan)
    for row, step in zip(flags, history, strict=True):
        limit = _SLOW * np.median([*step.computing.values()]) if step.computing else np.inf
        for i, address in enumerate(addresses):
            if address in step.computing or address in step.late:
                row[i] = step.computing.get(address, np.inf) > limit
    return flags


def correlation(flags: npt.NDArray[Any]) -> float:
    """Of flags with those of the step after.

    Examples
    --------
    >>> round(correlation(np.array([[0, 1], [0, 1], [0, 1], [1, 0], [1, 0]])), 6)
    0.5
    """
    before, after = flags[:-1].ravel(), flags[1:].ravel()
    known = ~(np.isnan(before) | np.isnan(after))
    before, after = before[known], after[known]
    if not before.size or not before.std() or not after.std():
        return float("nan")
    return float(np.corrcoef(before, after)[0, 1])


def _addresses(history: list[Step]) -> list[str]:
    return sorted({a for step in history for a in (*step.computing, *step.late)})
