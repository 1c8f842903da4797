"""What bounds the time of a round from below, and which workers had better be replaced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from dask_coded.codes import Code
from dask_coded.rounds.assignment import InfeasibleError, fluid_time
from dask_coded.rounds.layout import Layout
from dask_coded.typing import Floats, Ints


class Capacity:
    """The pieces of each worker, in stripes.

    Parameters
    ----------
    need : ndarray of int, shape (groups,)
        How many pieces of its group a stripe needs.
    pieces : ndarray of int, shape (workers,)
    stripes : int
        Stripes of a piece.

    Examples
    --------
    >>> four = Capacity(need=np.array([3]), pieces=np.array([1, 1, 1, 1]), stripes=100)
    >>> four.seconds(np.array([10.0, 10.0, 10.0, 10.0]))
    7.5
    >>> four.seconds(np.array([10.0, 10.0, 10.0, 0.0]))
    10.0
    """

    def __init__(self, need: Ints, pieces: Ints, stripes: int) -> None:
        self._stripes = stripes
        self._pieces = pieces
        self._need = int(need.sum())
        # Of copies, no more is known than total work over total speed.
        self._one_group = len(need) == 1

    @classmethod
    def of(cls, layout: Layout) -> Capacity:
        """Return the capacity of the workers of a layout."""
        hosts = layout.host[layout.host >= 0]
        pieces = np.bincount(hosts, minlength=layout.workers)
        return cls(layout.need, pieces, layout.stripes)

    def seconds(self, speeds: Floats) -> float:
        """Return the fluid bound at speeds in stripes per second; NaN without enough of them."""
        rates = np.nan_to_num(speeds, nan=0.0)
        if not self._one_group:
            return self._need * self._stripes / rates.sum() if rates.any() else math.nan
        try:
            return fluid_time(rates, self._need, self._stripes, pieces=self._pieces)
        except InfeasibleError:
            return math.nan


def worth_replacing(
    code: Code, homes: Sequence[str], speeds: Mapping[str, float], gain: float
) -> list[str]:
    """Return the workers whose pieces a worker of usual speed had better hold, the slowest first.

    Each replacement makes rounds shorter, once those before it have been made. Work is moved away
    from a slow worker in any round, so that it costs its own share of the capacity only: one of a
    hundred is never worth a new machine.

    Parameters
    ----------
    code : Code
    homes : sequence of str
        The worker of each piece.
    speeds : mapping of str to float
        Lasting speeds of workers, in any unit. Others are left alone.
    gain : float
        The fraction by which rounds must become shorter at least.

    Examples
    --------
    >>> from dask_coded.codes import MDS
    >>> speeds = {"a": 1.0, "b": 0.25, "c": 1.0, "d": 0.95, "e": 1.0}
    >>> worth_replacing(MDS(5, 4), ["a", "b", "c", "d", "e"], speeds, gain=0.05)
    ['b']
    """
    held = {home: count for home, count in Counter(homes).items() if home in speeds}
    workers = sorted(held, key=lambda worker: speeds[worker])
    rates = np.array([speeds[worker] for worker in workers])
    if not rates.any():
        return []
    usual = float(np.median(rates[rates > 0]))
    capacity = Capacity(code.need, np.array(list(map(held.__getitem__, workers))), stripes=1)
    found: list[str] = []
    for i, worker in enumerate(workers):
        before = capacity.seconds(rates)
        rates[i] = max(usual, rates[i])
        if not capacity.seconds(rates) <= (1 - gain) * before and not math.isnan(before):
            break
        found.append(worker)
    return found
