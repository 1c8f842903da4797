"""How long simulated workers compute in each step: undelayed, or with delays of a stated kind.

A gradient of ``w`` seconds of work takes a worker ``factor * w + extra`` seconds. Both numbers may
differ between workers and between steps. The kinds differ in what redundancy can achieve:

- *additive* delays do not depend on the work (a garbage collection, another tenant), so a worker
  that computes more is delayed no more often;
- *proportional* delays make redundant work as slow as any other;
- in a *Markov* chain, slow workers stay slow for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_fraction, check_positive, check_whole
from dask_coded.typing import Floats


@dataclass(frozen=True, eq=False)
class Delays:
    """Delays of all workers in every step.

    Parameters
    ----------
    factor : ndarray, shape (rows, workers)
        Multiplies the time of the work. One row per step; after the last row comes the first.
    extra : ndarray, shape (rows, workers)
        Seconds that are added once per step.

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
                raise ValueError("Arguments 'factor' and 'extra' must be finite and non-negative.")

    @property
    def workers(self) -> int:
        return int(self.factor.shape[1])

    def seconds(self, step: int, worker: int, work: float) -> float:
        """Return the seconds that ``work`` seconds of undelayed work take a worker in a step."""
        row = step % len(self.factor)
        return float(self.factor[row, worker]) * work + float(self.extra[row, worker])


def undelayed(workers: int) -> Delays:
    """Return delays under which no worker is ever late."""
    check_whole("workers", workers)
    return Delays(np.ones((1, workers)), np.zeros((1, workers)))


def additive(
    workers: int, steps: int, *, share: float = 0.05, mean: float = 0.2, seed: int = 0
) -> Delays:
    """Hold up a random share of the workers in each step, for exponentially distributed times.

    Parameters
    ----------
    workers, steps : int
    share : float
        Probability that a worker is held up in a step.
    mean : float
        Mean delay in seconds.
    seed : int
    """
    check_fraction("share", share)
    check_positive("mean", mean, or_zero=True)
    rng = _random(workers, steps, seed)
    held_up = rng.random((steps, workers)) < share
    extra = np.where(held_up, rng.exponential(mean, (steps, workers)), 0.0)
    return Delays(np.ones_like(extra), extra)


def proportional(workers: int, steps: int, *, straggling: float = 0.5, seed: int = 0) -> Delays:
    """Multiply work by 1 plus an exponential of mean ``straggling``, redrawn every step."""
    check_positive("straggling", straggling, or_zero=True)
    rng = _random(workers, steps, seed)
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
    """Make workers slow and fast again by a Markov chain of two states (Gilbert and Elliott).

    Parameters
    ----------
    workers, steps : int
    share : float
        Long-run share of slow workers.
    memory : float
        Correlation of being slow from one step to the next, from 0 (independent) to 1.
    slowdown : float
        Mean of a slow worker's exponential part, in units of a fast worker's mean.
    shift : float
        Constant part of every worker's time, in units of a fast worker's exponential mean.
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
    check_fraction("share", share)
    check_fraction("memory", memory)
    check_positive("slowdown", slowdown, or_zero=True)
    check_positive("shift", shift, or_zero=True)
    rng = _random(workers, steps, seed)
    slow = rng.random(workers) < share
    rows = []
    for change in rng.random((steps, workers)):
        # A worker keeps its state with probability `memory`; otherwise it is drawn again.
        rows.append(slow)
        slow = np.where(slow, change < memory + (1 - memory) * share, change < (1 - memory) * share)
    means = np.where(np.array(rows), slowdown, 1.0)
    factor = (shift + rng.exponential(size=means.shape) * means) / (shift + 1)
    return Delays(factor, np.zeros_like(factor))


def replayed(seconds: npt.ArrayLike) -> Delays:
    """Replay recorded delays: the factors are the recorded times over their overall median.

    Parameters
    ----------
    seconds : array_like, shape (steps, workers)
        Times that the workers took for the same work.
    """
    times = np.asarray(seconds, dtype=np.float64)
    factor = times / np.median(times)
    return Delays(factor, np.zeros_like(factor))


def _random(workers: int, steps: int, seed: int) -> np.random.Generator:
    check_whole("workers", workers)
    check_whole("steps", steps)
    return np.random.default_rng(seed)
