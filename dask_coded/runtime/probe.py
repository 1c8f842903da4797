"""How long a small product takes on a worker: what is known of its speed before any round."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import suppress
from math import inf
from time import monotonic, perf_counter

import numpy as np

# Seconds between two measurements, which take about 6 ms: a thousandth of a core.
_EVERY = 5.0
_REPEATS = 2
# Products by this matrix fit in a core's cache. They take some milliseconds together, longer than
# the turns that an operating system gives to a throttled process.
_SHAPE = (100, 1000)
_PRODUCTS = 50


class Probe:
    """Measures a small product on a worker, now and then, in a thread.

    Parameters
    ----------
    executor : concurrent.futures.Executor

    Attributes
    ----------
    seconds : float or None
        What the product took last time; None until it has been measured.
    """

    def __init__(self, executor: Executor) -> None:
        self.seconds: float | None = None
        self._executor = executor
        self._last = -inf

    def refresh(self) -> None:
        """Start a measurement unless there was one a short while ago."""
        if monotonic() - self._last > _EVERY:
            self._last = monotonic()
            with suppress(RuntimeError):  # a worker that closes sends a last heartbeat
                self._executor.submit(self._measure)

    def _measure(self) -> None:
        matrix, vector = np.ones(_SHAPE), np.ones(_SHAPE[1])
        best = inf
        for _ in range(_REPEATS):
            began = perf_counter()
            for _ in range(_PRODUCTS):
                # Unlike `@`, this never starts threads of a BLAS.
                np.einsum("ij,j->i", matrix, vector)
            best = min(best, perf_counter() - began)
        self.seconds = best
