"""The smallest honest asynchronous parameter server, as a baseline.

The server is an actor on one worker; its link has the rate of the others. Each of the other workers
repeats on its own: compute the gradient of its share of a batch, send it, and get the current
parameters in the answer. The server applies each gradient as it comes. A gradient's *staleness* is
the number of updates since its parameters were sent. No worker waits for another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from distributed import Client

from dask_coded.training import SGD


class Snapshot(NamedTuple):
    """The parameters at some moment: seconds since the first gradient was asked for."""

    seconds: float
    updates: int
    parameters: np.ndarray


class Server:
    """Parameters, and what was done to them.

    Parameters
    ----------
    parameters : ndarray, shape (n,)
    optimizer : SGD
    most : int
        Updates after which workers are sent home.
    every : int
        Updates from one snapshot to the next.
    """

    def __init__(self, parameters: np.ndarray, optimizer: SGD, most: int, every: int) -> None:
        self._parameters = parameters.copy()
        self._optimizer = optimizer
        self._state = optimizer.start(self._parameters)
        self._most, self._every = most, every
        self._began: float | None = None
        self.staleness: list[int] = []
        self.snapshots: list[Snapshot] = []

    def exchange(self, gradient: np.ndarray | None, version: int) -> tuple[np.ndarray | None, int]:
        """Apply a mean gradient and return the parameters and their version.

        Parameters
        ----------
        gradient : ndarray, shape (n,), or None
            None asks for the first parameters.
        version : int
            Version of the parameters that it was computed with.

        Returns
        -------
        parameters : ndarray, shape (n,), or None
            None when there were enough updates.
        version : int
        """
        if self._began is None:
            self._began = time.perf_counter()
        done = len(self.staleness)
        if gradient is not None and done < self._most:
            self._optimizer.update(self._parameters, gradient, self._state, done)
            self.staleness.append(done - version)
            done += 1
            if not done % self._every:
                seconds = time.perf_counter() - self._began
                self.snapshots.append(Snapshot(seconds, done, self._parameters.copy()))
        return (None if done >= self._most else self._parameters.copy()), done

    def found(self) -> tuple[list[int], list[Snapshot]]:
        """Return staleness of each update, and the snapshots."""
        return self.staleness, self.snapshots


def batches(samples: int, batch: int, seed: int, worker: int) -> Iterator[np.ndarray]:
    """Yield the rows of one mini-batch after the other; an epoch uses every row once.

    Examples
    --------
    >>> rows = batches(6, 3, seed=0, worker=0)
    >>> sorted([*next(rows).tolist(), *next(rows).tolist()])
    [0, 1, 2, 3, 4, 5]
    """
    rng = np.random.default_rng([seed, worker])
    while True:
        order = rng.permutation(samples)
        yield from (order[i : i + batch] for i in range(0, samples - batch + 1, batch))


def work(
    server: Any,
    gradient: Callable[..., tuple[float, np.ndarray]],
    samples: np.ndarray,
    targets: np.ndarray,
    batch: int,
    seed: int,
    worker: int,
) -> int:
    """Be one worker until the server has had enough; return how many gradients were sent."""
    parameters, version = server.exchange(None, 0).result()
    sent = 0
    for rows in batches(len(targets), batch, seed, worker):
        if parameters is None:
            break
        _, total = gradient(parameters, samples[rows], targets[rows])
        parameters, version = server.exchange(total / np.float32(len(rows)), version).result()
        sent += 1
    return sent


@dataclass(frozen=True)
class Trained:
    """What a training has done: staleness of each update, snapshots, and gradients by worker."""

    staleness: np.ndarray
    snapshots: list[Snapshot]
    sent: list[int]


def train(
    client: Client,
    workers: list[str],
    server_on: str,
    gradient: Callable[..., tuple[float, np.ndarray]],
    parameters: np.ndarray,
    data: tuple[list[Any], list[Any]],
    *,
    optimizer: SGD,
    batch: int,
    updates: int,
    every: int,
    seed: int = 0,
) -> Trained:
    """Train with an asynchronous parameter server.

    Parameters
    ----------
    data : (samples, targets)
        Futures of each worker's rows, in the order of the workers.
    batch : int
        Samples of a gradient of one worker.
    updates, every : int
        How many gradients to apply, and after how many to take a snapshot.
    """
    server: Any = client.submit(
        Server, parameters, optimizer, updates, every, actor=True, workers=[server_on], pure=False
    ).result()
    running = [
        client.submit(work, server, gradient, *rows, batch, seed, i, workers=[worker], pure=False)
        for i, (worker, *rows) in enumerate(zip(workers, *data, strict=True))
    ]
    sent = client.gather(running)
    staleness, snapshots = server.found().result()
    return Trained(np.array(staleness), snapshots, sent)


def replay(
    gradient: Callable[..., tuple[float, np.ndarray]],
    parameters: np.ndarray,
    data: tuple[np.ndarray, np.ndarray],
    *,
    workers: int,
    optimizer: SGD,
    batch: int,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Yield the parameters after each update if equally fast workers take turns.

    Every gradient but the first is then as stale as there are other workers. This tunes rates.
    """
    parts = [np.array_split(part, workers) for part in data]
    rows = [batches(len(parts[1][i]), batch, seed, i) for i in range(workers)]
    current = parameters.copy()
    state = optimizer.start(current)
    seen = [current.copy() for _ in range(workers)]
    step = 0
    while True:
        i = step % workers
        chosen = next(rows[i])
        _, total = gradient(seen[i], parts[0][i][chosen], parts[1][i][chosen])
        optimizer.update(current, total / np.float32(len(chosen)), state, step)
        seen[i] = current.copy()
        yield current
        step += 1
