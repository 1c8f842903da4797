"""The result of a training, and what its history says about the workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import dropwhile

import numpy as np
import numpy.typing as npt

from dask_coded.aggregation import Aggregation, Ring, Star, Tree
from dask_coded.aggregation.spreading import lag_one_correlation
from dask_coded.summary import Summary
from dask_coded.training.optimizers import Vector
from dask_coded.training.runtime.spec import Step

# A worker straggles in a step if it computes more than this many times the median time.
_SLOW = 2.0
# Dealing out a step costs some messages and additions, so it should save a third, and this time.
_WORTH, _WORTH_SECONDS = 1.5, 0.01


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part in a training, or in its last 1000 steps if it has more.

    Parameters
    ----------
    steps : int
        Number of steps in which the worker took part.
    late : float
        Share of these steps that ended before it had computed its part.
    seconds : float
        Median time that it computed in a step, without waiting; NaN if it never reported one.
    units : int
        With :class:`~dask_coded.aggregation.Squeeze`, the units that it has computed of all sums.
    """

    steps: int
    late: float
    seconds: float
    units: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class TrainingResult(Summary):
    """The result of a training.

    Attributes
    ----------
    parameters : ndarray, shape (n,)
    steps : int
        Number of updates applied to the parameters.
    history : list of Step
        For each step its loss and duration; for the last 1000 also the late workers, how long each
        worker computed, and how the step was dealt out.
    digests : dict of str to str
        Digest of each worker's parameters, by address, for the workers that were done when the
        training ended. All digests are equal.
    aggregation : Aggregation
        The aggregation that was used.
    can_squeeze : bool
        Whether :class:`~dask_coded.aggregation.Squeeze` takes the compression and the schedule.
    """

    parameters: Vector
    steps: int
    history: list[Step]
    digests: dict[str, str] = field(repr=False)
    aggregation: Aggregation
    can_squeeze: bool = field(default=True, repr=False)

    @property
    def scores(self) -> dict[int, float]:
        """Scores of a :class:`Validation`, by the number of updates of the parameters."""
        return {step.step + 1: step.score for step in self.history if step.score is not None}

    @property
    def workers(self) -> dict[str, WorkerReport]:
        """A report on each worker, by address."""
        # One pass: there may be many workers, and many steps.
        steps, late, units = Counter[str](), Counter[str](), Counter[str]()
        seconds: dict[str, list[float]] = {}
        for step in self.history:
            took_part = {*step.computing, *step.late}
            steps.update(took_part)
            late.update(step.late)
            units.update({a: count for a, count in step.units.items() if a in took_part})
            for address, taken in step.computing.items():
                seconds.setdefault(address, []).append(taken)
        return {
            address: WorkerReport(
                steps[address],
                late[address] / steps[address],
                float(np.median(seconds[address])) if address in seconds else float("nan"),
                units[address],
            )
            for address in sorted(steps)
        }

    @property
    def advice(self) -> str | None:
        """What would make steps shorter, if all of them waited for one slow worker, or None.

        The steps of :class:`~dask_coded.aggregation.Squeeze` take about as long as all workers
        together need. None as well if it refuses the compression or the schedule, or the checkpoint
        that the training has gone on from.
        """
        known = sum(1 for step in self.history if step.computing or step.late)
        seconds = {a: r.seconds for a, r in self.workers.items() if 2 * r.steps > known}
        seconds = {a: taken for a, taken in seconds.items() if taken > 0}
        plain = type(self.aggregation) in (Ring, Star, Tree)
        if len(seconds) < 2 or not plain or not self.can_squeeze:
            return None
        slow = max(seconds, key=lambda address: seconds[address])
        together = len(seconds) / sum(1 / taken for taken in seconds.values())
        if seconds[slow] < max(_WORTH * together, together + _WORTH_SECONDS):
            return None
        return (
            f"Steps waited for worker {slow}, which computed {seconds[slow] * 1e3:.0f} ms in each; "
            f"divided by speed, the work of all takes {together * 1e3:.0f} ms: pass "
            f"`aggregation=Squeeze()`, which has faster workers compute more."
        )

    @property
    def straggling_correlation(self) -> float:
        """Correlation of straggling from one step to the next, over all workers.

        A worker straggles in a step if it computes for more than twice the median time, or has not
        reported its time at all. Near 0, late workers cannot be predicted, and
        :class:`~dask_coded.aggregation.DynamicClusters` gain nothing. NaN if no worker straggles,
        or all workers do.
        """
        known = dropwhile(lambda step: not (step.computing or step.late), self.history)
        return lag_one_correlation(straggling([*known]))


def straggling(history: list[Step]) -> npt.NDArray[np.float64]:
    """Return which workers straggled in which steps.

    Returns
    -------
    ndarray, shape (steps, workers)
        1 if the worker straggled, else 0; NaN if it took no part. Workers are sorted by address.
    """
    addresses = _addresses(history)
    flags = np.full((len(history), len(addresses)), np.nan)
    for row, step in zip(flags, history, strict=True):
        limit = _SLOW * np.median([*step.computing.values()]) if step.computing else np.inf
        for i, address in enumerate(addresses):
            if address in step.computing or address in step.late:
                row[i] = step.computing.get(address, np.inf) > limit
    return flags


def _addresses(history: list[Step]) -> list[str]:
    return sorted({a for step in history for a in (*step.computing, *step.late)})
