"""Measure what messages, sums and gradients cost on a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Client

from dask_coded.aggregation import Ring
from dask_coded.aggregation.timing import Costs
from dask_coded.arguments import check_whole, check_workers
from dask_coded.runtime.client.waiting import waiting_client
from dask_coded.training._train import train


def measure_costs(
    gradient: Callable[[], object] | None = None,
    *,
    client: Client | None = None,
    workers: Sequence[str] | None = None,
    leader: str | Sequence[str] | None = None,
    nbytes: int = 2**20,
    repetitions: int = 5,
) -> Costs:
    """Measure the costs that :func:`dask_coded.aggregation.timing.recommend` needs.

    The latency is the time per message of a short training with a tiny gradient. It includes the
    whole path from one worker's arithmetic to that of the next. Links are measured one after
    another, and the slowest counts because a sum waits for it. Sums and gradients are timed on all
    workers at once, as in a step.

    Parameters
    ----------
    gradient : callable, optional
        Computes, on any worker, a gradient over one part of a batch that is cut into as many equal
        parts as there are workers. If not given, computation is assumed to cost nothing.
    client : distributed.Client, optional
        The cluster; by default the current one.
    workers : sequence of str, optional
        Addresses of at least two workers; by default all.
    leader : str or sequence of str, optional
        Addresses of workers that may lead the short training.
    nbytes : int
        Size of the message that measures the bandwidth.
    repetitions : int
        How often each cost is measured.

    Returns
    -------
    Costs

    Raises
    ------
    TypeError
        If ``workers`` is not a list of addresses.
    ValueError
        If there are fewer than two workers, ``repetitions`` is less than 1, or ``nbytes`` less
        than 4.

    Examples
    --------
    >>> from distributed import Client
    >>> client = Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> costs = measure_costs(lambda: sum(range(1000)), client=client)
    >>> costs.latency > 0, costs.bandwidth > 0, costs.summation > 0, costs.computation > 0
    (True, True, True, True)
    >>> client.close()
    """
    check_whole("nbytes", nbytes, least=4)  # one number is added
    check_whole("repetitions", repetitions)
    addresses = check_workers(workers)
    client = waiting_client(client)
    if addresses is None:
        addresses = sorted(client.nthreads())
    if len(addresses) < 2:
        raise ValueError(
            f"Measuring costs needs at least 2 workers, there are {len(addresses)}: pass more "
            f"addresses or scale the cluster."
        )
    result = train(
        _nothing,
        np.zeros(len(addresses)),
        (np.zeros((len(addresses), 1)), np.zeros(len(addresses))),
        steps=2 * repetitions + 1,
        aggregation=Ring(),
        client=client,
        workers=addresses,
        leader=leader,
    )
    # The first step also waits for the last workers to join.
    step = float(np.median([step.seconds for step in result.history[1:]]))
    slowest = max(
        client.run(_exchange, peer, nbytes, repetitions, workers=[worker])[worker]
        for worker, peer in zip(addresses, [*addresses[1:], addresses[0]])
    )
    sums = client.run(_sum, nbytes, repetitions, workers=addresses).values()
    gradients = [0.0]
    if gradient is not None:
        gradients = client.run(_compute, gradient, repetitions, workers=addresses).values()
    return Costs(
        latency=step / (2 * (len(addresses) - 1)),
        bandwidth=2 * nbytes / slowest,
        summation=float(np.median(list(sums))) / nbytes,
        computation=float(np.median(list(gradients))) * len(addresses),
    )


def _nothing(parameters: Any, samples: Any, targets: Any) -> Any:
    return np.zeros_like(parameters)


async def _exchange(peer: str, size: int, repetitions: int, dask_worker: Any) -> float:
    """Return the seconds of a round trip to ``peer``, minus those of an empty message."""
    seconds = {}
    for data in (b"", bytes(size)):
        times = []
        for _ in range(repetitions + 1):  # the first connects
            began = perf_counter()
            await dask_worker.rpc(peer).echo(data=data)
            times.append(perf_counter() - began)
        # The minimum, because other load on the machine can only slow a message down.
        seconds[len(data)] = min(times[1:])
    return max(seconds[size] - seconds[0], 1e-9)


async def _sum(nbytes: int, repetitions: int) -> float:
    """Return the seconds to add two vectors on this worker, outside its event loop."""

    def add() -> float:
        total, vector = np.zeros(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
        return _median_seconds(lambda: np.add(total, vector, out=total), repetitions)

    return await asyncio.to_thread(add)


async def _compute(gradient: Callable[[], object], repetitions: int) -> float:
    """Return the seconds of a gradient after a warm-up, on this worker, outside its event loop."""
    return await asyncio.to_thread(_median_seconds, gradient, repetitions)


def _median_seconds(call: Callable[[], object], repetitions: int) -> float:
    call()
    seconds = []
    for _ in range(repetitions):
        began = perf_counter()
        call()
        seconds.append(perf_counter() - began)
    return float(np.median(seconds))
