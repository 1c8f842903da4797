"""Over-decomposition: small partitions, assigned by predicted speed and moved where needed.

Dynamic runtimes such as Charm++ do this. The data are cut into several partitions per worker, and
some partitions are stored twice. Before each round every worker gets a number of partitions in
proportion to its predicted speed. It first fetches those that it does not store, and that time is
charged. Nothing is done about a wrong prediction.
"""

from __future__ import annotations

import numpy as np

from dask_coded.codes import Code
from dask_coded.rounds import Layout, StripeRange
from dask_coded.typing import Bools, Floats, Ints


def over_decomposed(workers: int, factor: int = 4) -> Code:
    """Return a code of ``factor`` partitions per worker, each of which any worker may store."""
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
        Mean number of copies of each partition; by default as many as (10, 7) coding stores.
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
            Seconds for which each worker fetches before it can start.
        """
        workers, partitions = self.stored.shape
        exact = speeds / speeds.sum() * partitions
        quota = np.floor(exact).astype(np.intp)
        quota[np.argsort(quota - exact, kind="stable")[: partitions - quota.sum()]] += 1
        given = np.full(partitions, -1)
        # Partitions that the fewest workers store choose first.
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

    def assign(self, layout: Layout, speeds: Floats) -> tuple[list[list[StripeRange]], Floats]:
        """Return the first assignment of a round for :class:`~dask_coded.simulation.Simulation`.

        Returns
        -------
        assignment : list of lists of StripeRange
            For each worker, the ranges of stripes to compute.
        delays : ndarray, shape (workers,)
            Seconds for which each worker fetches before it can start.
        """
        given, delays = self.deal(speeds)
        assignment = [
            [
                StripeRange(piece, 0, layout.stripes)
                for piece in pieces
                if given[layout.group[piece]] == worker
            ]
            for worker, pieces in enumerate(layout.pieces_of)
        ]
        return assignment, delays

    def _store(self, worker: int, partition: int) -> None:
        """Store a fetched partition, and drop the least recently used spare copy of any worker."""
        self.stored[worker, partition] = True
        self._used[worker, partition] = self._rounds
        spare = self.stored & (self.stored.sum(axis=0) > 1) & (self._used < self._rounds)
        oldest = np.argmin(np.where(spare, self._used, np.iinfo(self._used.dtype).max))
        if spare.flat[oldest]:
            self.stored.flat[oldest] = False
