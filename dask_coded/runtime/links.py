"""What messages, sums and gradients cost on a running cluster, measured by one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Client

from dask_coded.planning.timing import Costs


def measure_costs(
    gradient: Callable[[], object] | None = None,
    *,
    client: Client,
    workers: Sequence[str] | None = None,
    nbytes: int = 2**20,
    repetitions: int = 5,
) -> Costs:
    """Measure what :func:`dask_coded.planning.timing.recommend` asks for.

    All workers are measured at once, each against the next one: in a step they share switches and
    processors as well. Medians are taken over repetitions and workers, and the slowest link counts,
    because a sum waits for it.

    Parameters
    ----------
    gradient : callable, optional
        Computes, on any worker, a gradient over an equal share of a batch: one part of as many as
        there are workers. If not given, computation is taken to cost nothing.
    client : distributed.Client
    workers : sequence of str, optional
        Addresses of at least two; by default all.
    nbytes : int
        Of the message that bandwidth is measured with.
    repetitions : int

    Returns
    -------
    Costs

    Raises
    ------
    ValueError
        If there are fewer than two workers.

    Examples
    --------
    >>> from distributed import Client
    >>> client = Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> costs = measure_costs(lambda: sum(range(1000)), client=client)
    >>> costs.latency > 0, costs.bandwidth > 0, costs.summation > 0, costs.computation > 0
    (True, True, True, True)
    >>> client.close()
    """
    there = sorted(client.scheduler_info(n_workers=-1)["workers"])
    addresses = there if workers is None else list(workers)
    if len(addresses) < 2:
        raise ValueError(f"There must be 2 workers or more to measure, not {len(addresses)}.")
    following = dict(zip(addresses, [*addresses[1:], addresses[0]]))
    empty, full = (
        client.run(_exchange, following, size, repetitions, workers=addresses).values()
        for size in (0, nbytes)
    )
    sums = client.run(_sum, nbytes, repetitions, workers=addresses).values()
    gradients = [0.0]
    if gradient is not None:
        gradients = client.run(_compute, gradient, repetitions, workers=addresses).values()
    latency = float(np.median(list(empty))) / 2
    # There and back again, one after the other.
    transfer = max(max(full) / 2 - latency, 1e-9)
    return Costs(
        latency=latency,
        bandwidth=nbytes / transfer,
        summation=float(np.median(list(sums))) / nbytes,
        computation=float(np.median(list(gradients))) * len(addresses),
    )


async def _exchange(
    following: dict[str, str], size: int, repetitions: int, dask_worker: Any
) -> float:
    """On a worker: seconds in which a message goes to the next worker and comes back."""
    peer = dask_worker.rpc(following[dask_worker.address])
    data = bytes(size)
    await peer.echo(data=data)  # which connects
    seconds = []
    for _ in range(repetitions):
        began = perf_counter()
        await peer.echo(data=data)
        seconds.append(perf_counter() - began)
    return float(np.median(seconds))


async def _sum(nbytes: int, repetitions: int) -> float:
    """On a worker: seconds to add a vector to another, beside its event loop."""

    def add() -> float:
        total, vector = np.zeros(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
        return _median_seconds(lambda: np.add(total, vector, out=total), repetitions)

    return await asyncio.to_thread(add)


async def _compute(gradient: Callable[[], object], repetitions: int) -> float:
    """On a worker: seconds of a gradient, after one that warms up, beside its event loop."""
    return await asyncio.to_thread(_median_seconds, gradient, repetitions)


def _median_seconds(call: Callable[[], object], repetitions: int) -> float:
    call()
    seconds = []
    for _ in range(repetitions):
        began = perf_counter()
        call()
        seconds.append(perf_counter() - began)
    return float(np.median(seconds))
