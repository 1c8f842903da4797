"""What runs while faults happen: products, loops and trainings whose results are all checked."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client

import dask_coded as coded
from benchmarks.graphs import random_matrix
from dask_coded.aggregation import Aggregation, GradientCoding, Squeeze

_ROWS, _COLUMNS = 2100, 300
_SIDE = 60
_SAMPLES, _FEATURES, _STEPS, _RATE = 700, 20, 60, 0.1
# Rounds of a loop that keeps no state, which starts again when it is lost.
_ROUNDS = 15
# Seconds between two results of a load, so that none of them takes all of the processor.
_PAUSE = 0.02


class Arrays:
    """What all loads work on: matrices in this process, and the same encoded in the cluster.

    Parameters
    ----------
    client
    workers
        How many there are.
    tolerance
        How many workers may be lost at once.
    large
        Rows of the sparse matrix.
    """

    def __init__(self, client: Client, workers: int, tolerance: int, large: int) -> None:
        self.tolerance = tolerance
        rng = np.random.default_rng(0)
        self.dense = rng.standard_normal((_ROWS, _COLUMNS))
        self.sparse = random_matrix(large)
        self.left, self.right = rng.standard_normal((2, 4 * _SIDE, _SIDE))
        self.verified = coded.encode(
            self.dense, coded.MDS(workers, workers - tolerance), client, verify=True
        )
        self.copies = coded.encode(self.sparse, coded.Repetition(workers, tolerance + 1), client)
        # Any four of the pieces suffice.
        self.pair = coded.encode_pair(
            self.left, self.right, coded.Polynomial(workers, a=2, b=2), client
        )
        self.samples = rng.standard_normal((_SAMPLES, _FEATURES))
        self.targets = self.samples @ rng.standard_normal(_FEATURES)


class Load(ABC, threading.Thread):
    """Runs something again and again, and checks its results.

    Attributes
    ----------
    times : list of float
        When there were results.
    wrong : int
        How many of them were wrong.
    errors : list of str
        What was raised instead of a result.
    """

    name: str

    def __init__(self, client: Client, arrays: Arrays) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.arrays = arrays
        self.over = threading.Event()
        self.times = [time.time()]
        self.wrong = 0
        self.errors: list[str] = []
        self.rng = np.random.default_rng(1)

    def run(self) -> None:
        while not self.over.is_set():
            try:
                self.once()
            except Exception:
                self.errors.append(traceback.format_exc())
                time.sleep(0.5)

    @abstractmethod
    def once(self) -> None:
        """Produce some results, and report each of them to :meth:`came`."""

    def came(self, right: bool, at: float | None = None) -> None:
        self.times.append(time.time() if at is None else at)
        self.wrong += not right

    def release(self) -> None:
        """Let go of what the load holds in the cluster."""
        del self.arrays

    def gap(self) -> float:
        """Return the seconds since the last result."""
        return time.time() - self.times[-1]


class LazyProducts(Load):
    """Lazy products with an array whose shares are verified."""

    name = "lazy rounds"

    def once(self) -> None:
        x = self.rng.standard_normal(_COLUMNS)
        y = self.client.compute(self.arrays.verified @ x).result()
        self.came(np.allclose(y, self.arrays.dense @ x, rtol=1e-9, atol=1e-9))
        time.sleep(_PAUSE)


class LazyPairs(Load):
    """Lazy products of two matrices with weights."""

    name = "pairs"

    def once(self) -> None:
        arrays, weights = self.arrays, self.rng.standard_normal(4 * _SIDE)
        found = self.client.compute(arrays.pair.product(weights)).result()
        expected = (arrays.left.T * weights) @ arrays.right
        self.came(np.allclose(found, expected, rtol=1e-9, atol=1e-9))
        time.sleep(_PAUSE)


class StockProducts(Load):
    """Lazy products with an ordinary dask array, for comparison."""

    name = "Dask alone"

    def __init__(self, client: Client, arrays: Arrays) -> None:
        super().__init__(client, arrays)
        chunks = -(-_ROWS // len(client.nthreads()))
        self._array = client.persist(da.from_array(arrays.dense, chunks=(chunks, -1)))

    def once(self) -> None:
        x = self.rng.standard_normal(_COLUMNS)
        y = self.client.compute(self._array @ x).result()
        self.came(np.allclose(y, self.arrays.dense @ x, rtol=1e-9, atol=1e-9))
        time.sleep(_PAUSE)

    def release(self) -> None:
        super().release()
        del self._array


class _Rounds(Load):
    """A loop in the cluster, which writes a line for each checked round."""

    def follow(self, submit: Callable[[str, str], Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            log, over = Path(folder) / "log", Path(folder) / "over"
            log.touch()
            future = submit(str(log), str(over))
            seen = 0
            while True:
                done = future.done()
                lines = log.read_text().splitlines()
                for line in lines[seen:]:
                    at, wrong = line.split()
                    self.came(not int(wrong), float(at))
                seen = len(lines)
                if done:
                    future.result()
                    return
                if self.over.is_set():
                    over.touch()
                time.sleep(_PAUSE)


class Loops(_Rounds):
    """Short loops without a state, with an array whose shares are verified."""

    name = "loops without state"

    def once(self) -> None:
        arrays = self.arrays
        left = np.ones(_ROWS)
        self.follow(
            lambda log, over: coded.submit(
                checked_rounds,
                arrays.verified,
                left,
                left @ arrays.dense,
                log,
                over,
                client=self.client,
            )
        )


class KeptLoop(_Rounds):
    """A loop that keeps its state on other workers, with a sparse array and large operands."""

    name = "loop with state"

    def once(self) -> None:
        arrays = self.arrays
        left = np.random.default_rng(2).random(arrays.sparse.shape[0])
        self.follow(
            lambda log, over: coded.submit(
                checked_rounds,
                arrays.copies,
                left,
                left @ arrays.sparse,
                log,
                over,
                coded.Loop(),
                client=self.client,
            )
        )


def checked_rounds(
    operator: Any,
    left: np.ndarray,
    product: np.ndarray,
    log: str,
    over: str,
    loop: coded.Loop | None = None,
) -> int:
    """Run rounds and check each; return how many there were.

    Without a ``loop`` that keeps its state there are a few rounds, otherwise they go on until the
    file ``over`` is there. ``product`` is ``left @ A``, so ``left @ (A @ x)`` must be
    ``product @ x``.
    """
    i = loop.resume(0) if loop else 0
    while True:
        x = np.sin(i + np.arange(operator.shape[1]))
        y = operator @ x
        scale = float(np.abs(left) @ np.abs(y))
        wrong = not abs(float(left @ y) - float(product @ x)) <= 1e-10 * scale
        i += 1
        with open(log, "a") as file:
            file.write(f"{time.time()} {int(wrong)}\n")
        last = os.path.exists(over) or (loop is None and i == _ROUNDS)
        if loop:
            loop.report(coded.Progress(i, 0.0), state=i, last=last)
        if last:
            return i
        time.sleep(_PAUSE)


class Trainings(Load):
    """Trainings by coded gradients, compared with gradient descent in NumPy."""

    name = "training"
    steps = _STEPS

    def __init__(self, client: Client, arrays: Arrays) -> None:
        super().__init__(client, arrays)
        weights = np.zeros(_FEATURES)
        for _ in range(self.steps):
            _, gradient = squares(weights, arrays.samples, arrays.targets)
            weights -= _RATE * gradient / _SAMPLES
        self._expected = weights
        # In the cluster from the start, so that no training waits for Dask to compute them.
        parts = (arrays.samples, arrays.targets)
        self._data = client.persist(
            [da.from_array(part, chunks=(50, *part.shape[1:])) for part in parts]
        )

    @property
    def aggregation(self) -> Aggregation:
        return GradientCoding(stragglers=self.arrays.tolerance)

    def once(self) -> None:
        found = coded.training.train(
            squares,
            np.zeros(_FEATURES),
            tuple(self._data),
            optimizer=coded.training.SGD(_RATE),
            steps=self.steps,
            aggregation=self.aggregation,
            callback=lambda progress: self.came(True),
            client=self.client,
        )
        self.came(self.right(found.parameters))

    def right(self, parameters: np.ndarray) -> bool:
        """Say whether these are the parameters in the end."""
        return np.allclose(parameters, self._expected, rtol=1e-9, atol=1e-12)

    def release(self) -> None:
        super().release()
        del self._data


class SqueezedTrainings(Trainings):
    """Squeezed trainings: all have the same bits as the first one, which no fault disturbs."""

    name = "squeezed training"
    steps = 200
    aggregation = Squeeze(units=24)

    def __init__(self, client: Client, arrays: Arrays) -> None:
        super().__init__(client, arrays)
        self._first: np.ndarray | None = None
        self.ended = 0

    def right(self, parameters: np.ndarray) -> bool:
        self.ended += 1
        if self._first is None:
            self._first = parameters
        # Gradients of units are rounded to a grid, so NumPy's parameters are near, but not equal.
        near = np.allclose(parameters, self._expected, rtol=1e-5, atol=1e-6)
        return near and parameters.tobytes() == self._first.tobytes()


def squares(w: np.ndarray, X: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and gradient of least squares; slow enough that workers can be hit meanwhile."""
    time.sleep(0.002)
    error = X @ w - y
    return float(error @ error / 2), X.T @ error


LOADS: tuple[type[Load], ...] = (
    LazyProducts,
    LazyPairs,
    Loops,
    KeptLoop,
    Trainings,
    SqueezedTrainings,
    StockProducts,
)


def start_all(client: Client, arrays: Arrays, kinds: tuple[type[Load], ...] = LOADS) -> list[Load]:
    """Start one of each kind."""
    loads = [kind(client, arrays) for kind in kinds]
    for load in loads:
        load.start()
    return loads
