"""How long a small product takes on a worker: what is known of its speed before any round."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from contextlib import suppress
from math import inf
from time import monotonic, perf_counter

import numpy as np

from dask_coded.membership import Timeouts

# Products by this matrix fit in a core's cache. Together they take longer than the turns that an
# operating system gives to a throttled process, so they are timed as a whole.
_SHAPE = (100, 1000)
_PRODUCTS = 150


class Probe:
    """Measures a small product on a worker, in a thread: at its start, and when it is asked to.

    Parameters
    ----------
    executor : concurrent.futures.Executor

    Attributes
    ----------
    seconds : float
        What the product took last time.
    """

    def __init__(self, executor: Executor) -> None:
        self.seconds = inf
        self._executor = executor
        self._last = -inf
        self._due: Future[None] | None = None

    async def start(self) -> float:
        """Measure for the first time, and return the seconds."""
        self._last = monotonic()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._measure)
        return self.seconds

    def refresh(self) -> None:
        """Start a measurement unless there was one a short while ago.

        The last one may still wait for a thread, because a round takes minutes. After that round
        there must not be dozens of them, which the next one would have to wait for.
        """
        waits = self._due is not None and not self._due.done()
        if monotonic() - self._last > Timeouts.PROBES and not waits:
            self._last = monotonic()
            with suppress(RuntimeError):  # a worker that closes sends a last heartbeat
                self._due = self._executor.submit(self._measure)

    def _measure(self) -> None:
        matrix, vector = np.ones(_SHAPE), np.ones(_SHAPE[1])
        began = perf_counter()
        for _ in range(_PRODUCTS):
            # Unlike `@`, this never starts threads of a BLAS.
            np.einsum("ij,j->i", matrix, vector)
        self.seconds = perf_counter() - began
