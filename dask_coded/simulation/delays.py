"""How long simulated workers compute, step by step: nobody late, or delays of a stated kind.

A gradient of ``w`` seconds of work takes a worker ``factor * w + extra`` seconds, each of which may
differ from worker to worker and from step to step. The kinds differ in what redundancy can do:

- delays that are *added* have nothing to do with the work (a garbage collection, another tenant):
  a worker that computes more is delayed no more often;
- delays in *proportion* to the work make redundant work as slow as any other;
- in a *Markov* chain those who were slow stay slow for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dask_coded.planning.layout import Floats


@dataclass(frozen=True, eq=False)
class Delays:
    """What makes workers slow, in every step.

    Parameters
    ----------
    factor : ndarray, shape (rows, workers)
        By which the time of the work is multiplied. One row per step; after the last the first.
    extra : ndarray, shape (rows, workers)
        Seconds that are added, once a step.

    Raises
    ------
    ValueError
        If the shapes differ, or a number is negative or not finite.
    """

    factor: Floats
    extra: Floats

    def __post_init__(self) -> None:
        if self.factor.ndim != 2 or not self.factor.size or self.factor.shape != self.extra.shape:
            raise ValueError(
                f"Arguments 'factor' and 'extra' must have one row per step and one column per "
                f"worker, their shapes are {self.factor.shape} and {self.extra.shape}."
            )
        for values in (self.factor, self.extra):
            if not (np.isfinite(values) & (values >= 0)).all():
                raise ValueError("Factors and delays must be finite numbers of 0 or above.")

    @property
    def workers(self) -> int:
        return int(self.factor.shape[1])

    def seconds(self, step: int, worker: int, work: float) -> float:
        """How long a worker takes in a step for what is ``work`` seconds without delays."""
        row = step % len(self.factor)
        return float(self.factor[row, worker]) * work + float(self.extra[row, worker])


def undelayed(workers: int) -> Delays:
    """Nobody is ever late."""
    return Delays(np.ones((1, workers)), np.zeros((1, workers)))


def additive(
    workers: int, steps: int, *, share: float = 0.05, mean: float = 0.2, seed: int = 0
) -> Delays:
    """In every step a share of the workers, drawn afresh, is held up, exponentially distributed.

    Parameters
    ----------
    workers, steps : int
    share : float
        The probability of a worker to be held up.
    mean : float
        Seconds.
    seed : int
    """
    rng = np.random.default_rng(seed)
    held_up = rng.random((steps, workers)) < share
    extra = np.where(held_up, rng.exponential(mean, (steps, workers)), 0.0)
    return Delays(np.ones_like(extra), extra)


def proportional(workers: int, steps: int, *, straggling: float = 0.5, seed: int = 0) -> Delays:
    """Work takes 1 plus an exponential of mean ``straggling`` times as long, afresh every step."""
    rng = np.random.default_rng(seed)
    factor = 1 + rng.exponential(straggling, (steps, workers))
    return Delays(factor, np.zeros_like(factor))


def markov(
    workers: int,
    steps: int,
    *,
    share: float = 0.2,
    memory: float = 0.9,
    slowdown: float = 10.0,
    shift: float = 0.1,
    seed: int = 0,
) -> Delays:
    """Workers turn slow and fast again in a Markov chain of two states (Gilbert and Elliott).

    Parameters
    ----------
    workers, steps : int
    share : float
        Of the workers that are slow, in the long run.
    memory : float
        The correlation of being slow from one step to the next, from 0 (drawn afresh) to 1.
    slowdown : float
        The mean of the exponential part of a slow worker, in those of a fast one.
    shift : float
        What every worker needs, in means of the exponential part of a fast one.
    seed : int

    Notes
    -----
    A fast worker takes ``(shift + E) / (shift + 1)`` times the work, with E exponential of mean 1;
    a slow one ``(shift + slowdown * E) / (shift + 1)`` times.

    Examples
    --------
    >>> delays = markov(20, 1000, share=0.2, memory=0.9, slowdown=10)
    >>> delays.workers, bool(delays.factor.mean() > 2)
    (20, True)
    """
    rng = np.random.default_rng(seed)
    slow = rng.random(workers) < share
    rows = []
    for change in rng.random((steps, workers)):
        # From either state to that drawn afresh, unless it is remembered.
        rows.append(slow)
        slow = np.where(slow, change < memory + (1 - memory) * share, change < (1 - memory) * share)
    means = np.where(np.array(rows), slowdown, 1.0)
    factor = (shift + rng.exponential(size=means.shape) * means) / (shift + 1)
    return Delays(factor, np.zeros_like(factor))


def replayed(seconds: npt.ArrayLike) -> Delays:
    """The delays of a record: each worker's times in proportion to the median of all.

    Parameters
    ----------
    seconds : array_like, shape (steps, workers)
        How long the workers took for the same work.
    """
    times = np.asarray(seconds, dtype=np.float64)
    factor = times / np.median(times)
    return Delays(factor, np.zeros_like(factor))
