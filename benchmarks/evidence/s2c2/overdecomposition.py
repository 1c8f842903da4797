"""Over-decomposition: small partitions, assigned by predicted speed and moved where needed.

Dynamic runtimes such as Charm++ do this. The data are cut into several partitions per worker, and
some partitions are stored twice. Before each round every worker gets a number of partitions in
proportion to its predicted speed. It first fetches those that it does not store, and that time is
charged. Nothing is done about a wrong prediction.
"""

from __future__ import annotations

from operator import itemgetter
from time import perf_counter

import dask.array as da
import numpy as np
from distributed import Client, wait

from dask_coded.codes import Code
from dask_coded.prediction import SpeedHistory
from dask_coded.rounds import Layout, StripeRange
from dask_coded.typing import Bools, Floats, Ints

#: Partitions for each worker.
PARTS = 4


def over_decomposed(workers: int, factor: int = PARTS) -> Code:
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
        self, workers: int, factor: int = PARTS, copies: float = 10 / 7, move_seconds: float = 0.0
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


class DealtRounds:
    """Products of partitions that are dealt out by predicted speed, on worker processes.

    A worker computes its partitions of a round in one task, which Dask runs nowhere else. Dask
    fetches the partitions that it does not store, and no copy is ever dropped.

    Parameters
    ----------
    client : Client
        Client of the cluster, which no longer removes copies of data.
    data : dask.array.Array
        A matrix; each chunk of rows is a partition, as many for each worker.
    x : ndarray
        Its operand.
    workers : list of str
        Addresses of the workers that multiply.
    worker : str
        Address of the worker that has the operand and gets the result.
    predictor : str
        Of the speeds of a worker's products, without what it fetches.
    """

    def __init__(
        self,
        client: Client,
        data: da.Array,
        x: np.ndarray,
        workers: list[str],
        worker: str,
        predictor: str,
    ) -> None:
        self._client, self._x, self._predictor = client, x, predictor
        self._workers, self._worker = workers, worker
        self._history = SpeedHistory()
        client.amm.stop()
        partitions = data.to_delayed().ravel().tolist()
        self._stores = Stores(len(workers), len(partitions) // len(workers))
        where = [[workers[i] for i in np.flatnonzero(some)] for some in self._stores.stored.T]
        self._partitions = [
            client.compute(partition, workers=places[:1])
            for partition, places in zip(partitions, where, strict=True)
        ]
        wait(self._partitions)
        for partition, places in zip(self._partitions, where, strict=True):
            client.replicate([partition], workers=places)

    @property
    def moved(self) -> int:
        """How many partitions have been moved."""
        return self._stores.moved

    def run_round(self) -> float:
        """Run one product and return its seconds."""
        client = self._client
        speeds = self._history.predict(self._workers, self._predictor)
        given, _ = self._stores.deal(speeds)
        own = [np.flatnonzero(given == i).tolist() for i in range(len(self._workers))]
        x = client.scatter(self._x, workers=[self._worker], hash=False)
        began = perf_counter()
        parts = [
            client.submit(
                _multiplied, [self._partitions[i] for i in some], x, workers=[worker], pure=False
            )
            for worker, some in zip(self._workers, own, strict=True)
        ]
        whole = client.submit(_in_order, parts, own, workers=[self._worker], pure=False)
        wait(whole)
        seconds = perf_counter() - began
        measured = client.submit(itemgetter(1), whole, workers=[self._worker]).result()
        rates = zip(self._workers, measured, strict=True)
        self._history.record({worker: rate for worker, rate in rates if rate})
        return seconds


def _multiplied(partitions: list[np.ndarray], x: np.ndarray) -> tuple[list[np.ndarray], float]:
    """Return products of partitions, and how many rows a second they took; 0 if there are none."""
    began = perf_counter()
    products = [partition @ x for partition in partitions]
    return products, sum(map(len, products)) / (perf_counter() - began)


def _in_order(
    parts: list[tuple[list[np.ndarray], float]], own: list[list[int]]
) -> tuple[np.ndarray, list[float]]:
    """Return the whole product, and the rows a second of each worker."""
    product = {
        i: rows
        for some, (products, _) in zip(own, parts, strict=True)
        for i, rows in zip(some, products, strict=True)
    }
    return np.concatenate([product[i] for i in sorted(product)]), [rate for _, rate in parts]
