"""How fast simulated workers are, by round or by time.

Speeds are relative: at 1.0 a worker computes its whole piece in the simulation's ``piece_seconds``.
Zero means that a worker has stopped silently, NaN that it is gone, which its peers notice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_fraction, check_positive, check_whole
from dask_coded.typing import Bools, Floats


@dataclass(frozen=True, eq=False)
class Speeds:
    """Speeds of all workers over time.

    Parameters
    ----------
    values : ndarray, shape (rows, workers)
        One row after another; after the last row comes the first.
    seconds : float or None
        How long each row holds, in virtual seconds. None: each row holds for one round.

    Raises
    ------
    ValueError
        If there are no values, a speed is negative or infinite, or the seconds are not positive.
    """

    values: Floats
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or not self.values.size:
            raise ValueError(
                f"Argument 'values' must have one row per step and one column per worker, "
                f"its shape is {self.values.shape}."
            )
        if (self.values < 0).any() or np.isinf(self.values).any():
            raise ValueError("Speeds must be finite and non-negative, or NaN for a lost worker.")
        if self.seconds is not None:
            check_positive("seconds", self.seconds)

    @property
    def workers(self) -> int:
        return int(self.values.shape[1])

    def at(self, round_: int, time: float) -> tuple[Floats, float]:
        """Return the speeds in a round at a time, and the time until which they hold."""
        if self.seconds is None:
            return self.values[round_ % len(self.values)], np.inf
        # A time that equals the end of a row up to rounding belongs to the next row.
        row = int(np.floor(time / self.seconds + 1e-9))
        return self.values[row % len(self.values)], (row + 1) * self.seconds

    def ever(self, round_: int) -> Bools:
        """Return which workers compute at all from any time of a round on, shape (workers,)."""
        rows = self.values
        if self.seconds is None:
            rows = rows[[round_ % len(rows)]]
        return np.asarray((rows > 0).any(axis=0))

    def restarted(self, seed: int, workers: int) -> Speeds:
        """Return random columns, each started at a random row: many clusters from one trace."""
        rng = np.random.default_rng(seed)
        rows, columns = self.values.shape
        chosen = rng.choice(columns, workers, replace=workers > columns)
        begun = (np.arange(rows)[:, None] + rng.integers(rows, size=workers)) % rows
        return Speeds(self.values[begun, chosen], self.seconds)


def constant(speeds: npt.ArrayLike) -> Speeds:
    """Return speeds that never change, one per worker."""
    return Speeds(np.atleast_2d(np.asarray(speeds, dtype=np.float64)))


def drifting(
    workers: int, rounds: int, *, spread: float = 0.2, memory: float = 0.95, seed: int = 0
) -> Speeds:
    """Return speeds whose logarithm is an AR(1) process of standard deviation ``spread``."""
    check_positive("spread", spread, or_zero=True)
    check_fraction("memory", memory)
    rng = _random(workers, rounds, seed)
    noise = rng.standard_normal((rounds, workers)) * spread
    log = noise[0]
    rows = [log]
    for shock in noise[1:]:
        log = memory * log + np.sqrt(1 - memory**2) * shock
        rows.append(log)
    return Speeds(np.exp(np.array(rows)))


def shifted_exponential(
    workers: int, rounds: int, *, straggling: float = 0.5, seed: int = 0
) -> Speeds:
    """Return speeds at which a unit of work takes 1 plus an exponential of mean ``straggling``.

    Times are redrawn every round. This is the usual model of the coded computing literature;
    nothing in it can be predicted.
    """
    check_positive("straggling", straggling, or_zero=True)
    rng = _random(workers, rounds, seed)
    return Speeds(1 / (1 + rng.exponential(straggling, (rounds, workers))))


def gilbert_elliott(
    workers: int,
    rounds: int,
    *,
    slowdown: float = 5.0,
    to_bad: float = 0.02,
    to_good: float = 0.1,
    seed: int = 0,
) -> Speeds:
    """Return two-state Markov speeds: workers turn bad, ``slowdown`` times slower, and recover."""
    check_positive("slowdown", slowdown)
    check_fraction("to_bad", to_bad)
    check_fraction("to_good", to_good)
    rng = _random(workers, rounds, seed)
    bad = rng.random(workers) * (to_bad + to_good) < to_bad
    rows = []
    for change in rng.random((rounds, workers)):
        bad = np.where(bad, change >= to_good, change < to_bad)
        rows.append(np.where(bad, 1 / slowdown, 1.0))
    return Speeds(np.array(rows))


def changed(speeds: Speeds, workers: list[int], first: int, last: int, factor: float) -> Speeds:
    """Return the same speeds with some workers ``factor`` as fast in rows ``first … last - 1``.

    A factor of 0.2 is a sudden slow-down, 0 a stop, NaN a death. From row ``last`` on, these
    workers have their old speeds. After the last row the first one follows again, so pass
    ``speeds`` of as many rows as are needed: ``constant([1.0] * 4)`` has only one.
    """
    given = len(speeds.values)
    rows = max(-(-last // given), 1) * given
    values = np.resize(speeds.values, (rows, speeds.workers))
    values[first:last, workers] *= factor
    return Speeds(values, speeds.seconds)


def _random(workers: int, rounds: int, seed: int) -> np.random.Generator:
    check_whole("workers", workers)
    check_whole("rounds", rounds)
    return np.random.default_rng(seed)
