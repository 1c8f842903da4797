"""``dask-coded bench``: whether coding pays on a cluster, for a matrix and its products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from distributed import Client

from dask_coded.array import encode
from dask_coded.demo import CHUNKS, blocks_on, split
from dask_coded.submission import submit
from dask_coded.uncoded import uncoded_product

# Coding must save this fraction of the time, at least: otherwise it is not worth its memory.
_WORTH = 0.1
ONE_PROCESS, DASK, LAZILY, LOOP = "one process", "dask.array", "coded, lazily", "coded, in a loop"
# With many small tasks, Dask balances workers that are not equally fast.
SMALL = "dask.array, small chunks"


@dataclass(frozen=True)
class Way:
    """One way to compute the product.

    Parameters
    ----------
    name : str
    seconds : list of float
        Of each round.
    """

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """The times of all ways, for one matrix on one cluster.

    Parameters
    ----------
    workers : int
    shape : (int, int)
    code : str
    encoding : float
        Seconds that it took to encode the matrix.
    ways : list of Way
    alone : bool
        Whether the coordinator has computed most products of the loop alone.
    """

    workers: int
    shape: tuple[int, int]
    code: str
    encoding: float
    ways: list[Way]
    alone: bool = False

    @property
    def verdict(self) -> str:
        """Whether coding pays, in one sentence."""
        medians = {way.name: way.median for way in self.ways}
        plain = min((ONE_PROCESS, DASK, SMALL), key=medians.__getitem__)
        coded = min((LAZILY, LOOP), key=medians.__getitem__)
        ratio = medians[coded] / medians[plain]
        if ratio > 1 - _WORTH:
            return (
                f"Coding does not pay here: {plain} takes {1 / ratio:.2f} of the time of "
                f"{coded}, as long as all workers stay as fast as they are now."
            )
        if self.alone and coded == LOOP:
            return (
                f"This matrix is too small to code: {coded} takes {ratio:.2f} of the time of "
                f"{plain}, but one worker has computed most of these products alone."
            )
        saved = medians[plain] - medians[coded]
        return (
            f"Coding pays after {self.encoding / saved:,.0f} rounds, which save as much time as "
            f"encoding took: {coded} takes {ratio:.2f} of the time of {plain}."
        )

    def as_json(self) -> dict[str, Any]:
        """Return all figures, and the verdict."""
        return asdict(self) | {"verdict": self.verdict}


def compare(
    client: Client,
    matrix: Any,
    shape: tuple[int, int],
    width: int,
    rounds: int,
    say: Callable[[str], object],
) -> Comparison:
    """Time products of a matrix in turn: by one process, by dask.array and coded.

    A task of dask.array uses one thread, so there is a chunk for each thread, or four.

    Parameters
    ----------
    client : distributed.Client
    matrix : ndarray, SciPy sparse array or None
        By default random numbers.
    shape : (int, int)
    width : int
        Columns of the operand.
    rounds : int
        How often to compute each product.
    say : callable(str)
        Called with what is done next.

    Returns
    -------
    Comparison

    Raises
    ------
    ClusterUnfitError
        If the cluster cannot hold the pieces.
    """
    say("Making the matrix")
    threads = client.nthreads()
    owners = [worker for worker in sorted(threads) for _ in range(threads[worker])]
    plain = blocks_on(client, matrix, shape, owners[: shape[0]])
    small = split(client, plain, owners[: shape[0]], CHUNKS)
    here = plain.compute() if matrix is None else matrix
    x = np.random.default_rng(1).standard_normal((shape[1], width) if width > 1 else shape[1])
    say("Encoding")
    began = time.perf_counter()
    coded = encode(plain, client=client)
    encoding = time.perf_counter() - began
    alone: list[bool] = []

    def loop() -> float:
        seconds, by_one = submit(_round, coded, x, client=client).result()
        alone.append(by_one)
        return float(seconds)

    ways: dict[str, Callable[[], float]] = {
        ONE_PROCESS: lambda: _timed(lambda: here @ x),
        DASK: lambda: _timed(lambda: _plain(plain, x)),
        SMALL: lambda: _timed(lambda: _plain(small, x)),
        LAZILY: lambda: _timed(lambda: (coded @ x).compute()),
        LOOP: loop,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        say(f"Round {turn} of {rounds}" if turn else "Warming up")
        for name, way in ways.items():
            seconds = way()
            if turn:
                times[name].append(seconds)
    return Comparison(
        len(threads),
        shape,
        repr(coded.code),
        encoding,
        [Way(*way) for way in times.items()],
        alone=2 * sum(alone) > len(alone),
    )


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _plain(matrix: da.Array, x: npt.NDArray[Any]) -> object:
    return uncoded_product(matrix, x).compute()


def _round(operator: Any, x: npt.NDArray[Any]) -> tuple[float, bool]:
    """Return the median seconds of a few products, and whether most were computed alone.

    Runs in the cluster.
    """
    seconds, alone = [], 0
    for _ in range(10):
        seconds.append(_timed(lambda: operator @ x))
        alone += operator.last_round.alone
    return statistics.median(seconds), alone > 5
