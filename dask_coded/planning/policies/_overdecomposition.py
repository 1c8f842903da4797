"""Over-decomposition: small partitions dealt out by predicted speed, moved to where they are due.

What dynamic runtimes such as Charm++ do. The data are cut into several partitions per worker, a
few of them stored twice. Before each round every worker is given as many as its predicted speed
deserves; those that it does not store it has to fetch first, and that time is charged.
"""

from __future__ import annotations

import numpy as np

from dask_coded.codes import Code
from dask_coded.planning.layout import Bools, Floats, Ints, Layout, Run
from dask_coded.planning.policies._policy import Policy


def over_decomposed(workers: int, factor: int = 4) -> Code:
    """``factor`` partitions per worker, each of which any worker might come to store."""
    partitions = factor * workers
    return Code(
        np.tile(np.eye(partitions), (workers, 1)),
        place=np.repeat(np.arange(workers), partitions),
        group=np.tile(np.arange(partitions), workers),
        need=np.ones(partitions, dtype=np.intp),
    )


class Stores:
    """Which worker stores which partition, from round to round.

    Parameters
    ----------
    workers, factor : int
    copies : float
        Copies stored of each partition, on average; as much as (10, 7) coding stores by default.
    move_seconds : float
        Seconds to fetch one partition.
    """

    def __init__(
        self, workers: int, factor: int = 4, copies: float = 10 / 7, move_seconds: float = 0.0
    ) -> None:
        partitions = workers * factor
        self.move_seconds = move_seconds
        self.moved = 0
        own = np.arange(partitions) // factor
        self.stored: Bools = np.zeros((workers, partitions), dtype=bool)
        self.stored[own, np.arange(partitions)] = True
        twice = np.linspace(0, partitions, round((copies - 1) * partitions), endpoint=False)
        second = twice.astype(np.intp)
        self.stored[(own[second] + 1) % workers, second] = True
        self._used = np.where(self.stored, 0, -1)
        self._rounds = 0

    def deal(self, speeds: Floats) -> tuple[Ints, Floats]:
        """Give every partition to a worker.

        Returns
        -------
        worker : ndarray of int, shape (partitions,)
        delays : ndarray, shape (workers,)
            Seconds for which each worker fetches before it can begin.
        """
        workers, partitions = self.stored.shape
        exact = speeds / speeds.sum() * partitions
        quota = np.floor(exact).astype(np.intp)
        quota[np.argsort(quota - exact, kind="stable")[: partitions - quota.sum()]] += 1
        given = np.full(partitions, -1)
        # Those that fewest can take without a move choose first.
        for partition in np.argsort(self.stored.sum(axis=0), kind="stable").tolist():
            room = np.where(self.stored[:, partition], quota, 0)
            if room.max() > 0:
                given[partition] = worker = int(np.argmax(room))
                quota[worker] -= 1
        self._rounds += 1
        local = np.flatnonzero(given >= 0)
        self._used[given[local], local] = self._rounds
        delays = np.zeros(workers)
        for partition in np.flatnonzero(given < 0).tolist():
            given[partition] = worker = int(np.argmax(quota))
            quota[worker] -= 1
            delays[worker] += self.move_seconds
            self.moved += 1
            self._store(worker, partition)
        return given, delays

    def _store(self, worker: int, partition: int) -> None:
        """Store what was fetched; the least lately used second copy anywhere makes room."""
        self.stored[worker, partition] = True
        self._used[worker, partition] = self._rounds
        spare = self.stored & (self.stored.sum(axis=0) > 1) & (self._used < self._rounds)
        oldest = np.argmin(np.where(spare, self._used, np.iinfo(self._used.dtype).max))
        if spare.flat[oldest]:
            self.stored.flat[oldest] = False


class OverDecomposition(Policy):
    """Deal partitions by predicted speed; nothing is done about a wrong prediction.

    Parameters
    ----------
    stores : Stores
        Kept from round to round.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._delays: Floats | None = None

    def first(self, layout: Layout, speeds: Floats, lags: Floats) -> list[list[Run]]:
        given, self._delays = self._stores.deal(speeds)
        runs: list[list[Run]] = [[] for _ in range(layout.workers)]
        for worker, pieces in enumerate(layout.pieces_of):
            for piece in pieces:
                if given[layout.group[piece]] == worker:
                    runs[worker].append(Run(piece, 0, layout.stripes))
        return runs

    def delays(self) -> Floats | None:
        return self._delays
