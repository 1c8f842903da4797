"""Replay a training of the cluster in this process: the same numbers, without the timing.

The replicas and state machines of the cluster are driven one after the other. The parameters after
each step therefore equal those of the cluster to the last bit, and can be inspected. Trees add sums
in the order of their arrival, so only rings can be replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dask_coded.aggregation import Aggregation, Compute, Finished, Machine, Ring, Send
from dask_coded.compression import EXACT, Compression, Partial
from dask_coded.training.optimizers import Optimizer
from dask_coded.training.replica import Gradient, Model, Replica
from dask_coded.training.schedules import Schedule, Synchronous


def replay(
    gradient: Gradient,
    parameters: np.ndarray,
    data: tuple[np.ndarray, np.ndarray],
    *,
    workers: int,
    optimizer: Optimizer,
    batch_size: int | None = None,
    aggregation: Aggregation | None = None,
    compression: Compression | None = None,
    schedule: Schedule | None = None,
    seed: int = 0,
    layers: Sequence[tuple[int, ...]] | None = None,
) -> Iterator[np.ndarray]:
    """Train indefinitely.

    Parameters
    ----------
    workers
        Number of workers to replay.
    data
        Samples and targets.

    The others are those of `dask_coded.training.train`.

    Yields
    ------
    ndarray
        The parameters after each update, the same array every time.

    Raises
    ------
    ValueError
        If the order of the sums would depend on the speeds of the workers.
    """
    plan = (aggregation or Ring()).plan(workers)
    if plan.rooted:
        raise ValueError("Sums in a tree depend on the order of arrival: replay a Ring.")
    schedule = schedule or Synchronous()
    codec = EXACT if compression is None else compression.codec
    model = Model(
        gradient=gradient,
        parameters=parameters,
        optimizer=optimizer,
        samples=len(data[0]),
        batch_size=batch_size,
        seed=seed,
        compression=compression,
        layers=tuple(layers or [parameters.shape]),
        width=schedule.width,
    )
    replicas = [model.replica(plan.parts, plan.segments) for _ in range(workers)]
    step = 0
    waiting: deque[list[list[Partial]]] = deque()
    while True:
        while replicas[0].version < schedule.version(step):
            for replica, totals in zip(replicas, waiting.popleft()):
                replica.apply(totals)
            yield replicas[0].state()["parameters"]
        machines = [plan.machine(node, codec=codec) for node in range(workers)]
        waiting.append(_sum(machines, replicas, step, data, plan.segments))
        step += 1


def _sum(
    machines: list[Machine],
    replicas: list[Replica],
    step: int,
    data: tuple[np.ndarray, np.ndarray],
    segments: int,
) -> list[list[Partial]]:
    """Return the final sums of each worker, segment by segment."""
    finished: list[dict[int, Partial]] = [{} for _ in machines]
    commands: deque[tuple[int, Any]] = deque()
    for node, machine in enumerate(machines):
        commands += [(node, command) for command in machine.begin()]
    while commands:
        node, command = commands.popleft()
        if isinstance(command, Compute):
            for segment, partial in enumerate(
                _compute(replicas[node], step, command, data, segments)
            ):
                answer = machines[node].computed(command, segment, partial)
                commands += [(node, c) for c in answer]
        elif isinstance(command, Send):
            answer = machines[command.to].received(node, command.tag, command.payload)
            commands += [(command.to, c) for c in answer]
        elif isinstance(command, Finished):
            finished[node][command.segment] = command.total
    return [[totals[segment] for segment in range(segments)] for totals in finished]


def _compute(
    replica: Replica, step: int, work: Compute, data: tuple[np.ndarray, np.ndarray], segments: int
) -> list[Partial]:
    samples, targets = data
    total: Partial | None = None
    for part, coefficient in zip(work.parts, work.coefficients, strict=True):
        rows = slice(*replica.part(part))
        partial = Partial(*replica.gradient(step, part, samples[rows], targets[rows]))
        if total is None:
            total = Partial(np.zeros_like(partial.vector))
        total.add(partial, coefficient)
    assert total is not None
    vectors = enumerate(np.array_split(total.vector, segments))
    return [
        Partial(replica.compress(step, segment, vector), 0.0 if segment else total.loss)
        for segment, vector in vectors
    ]
