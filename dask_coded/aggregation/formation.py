"""Fit a plan to the available workers, and check whether a step can end without some of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from dask_coded.aggregation._machine import (
    ROOT,
    Aggregation,
    Command,
    Compute,
    Finished,
    Plan,
    Send,
)
from dask_coded.compression import Partial


def form(aggregation: Aggregation, workers: Sequence[str]) -> tuple[Plan, tuple[str, ...]]:
    """Return the largest plan that these workers can fill, and the worker at each of its nodes.

    Parameters
    ----------
    aggregation : Aggregation
    workers : sequence of str
        Addresses, best first.

    Returns
    -------
    plan : Plan
    addresses : tuple of str
        Address of the worker at each node.

    Raises
    ------
    ValueError
        If there are too few workers.

    Examples
    --------
    >>> from dask_coded.aggregation import Star
    >>> form(Star(), ["a", "b"])[1]
    ('a', 'b')
    """
    refusal = ValueError("No worker can take part in the training.")
    for count in range(len(workers), 0, -1):
        try:
            return aggregation.plan(count), tuple(workers[:count])
        except ValueError as exc:
            # The error for all workers is the most informative one.
            refusal = exc if count == len(workers) else refusal
    raise refusal


def refusal(aggregation: Aggregation, workers: int) -> str | None:
    """Return why an aggregation has no plan for so many workers, None if it has one.

    Examples
    --------
    >>> from dask_coded.aggregation import Squeeze
    >>> refusal(Squeeze(units=4), 4), refusal(Squeeze(units=4), 5)[-18:]
    (None, ': pass more units.')
    """
    try:
        aggregation.plan(workers)
    except ValueError as exc:
        return str(exc)
    return None


def check_memory(plan: Plan) -> None:
    """Check that a plan may be used with a compression that keeps a residual between steps.

    Raises
    ------
    ValueError
        If the plan has a code that subtracts.
    """
    if not plan.plain:
        raise ValueError(
            "The compression keeps a residual of each worker's own gradients, which does not "
            "cancel in a code that subtracts: use code='fractional', or a compression without a "
            "residual, for example GradiVeQ(residual=False)."
        )


def can_finish(plan: Plan, absent: Collection[int], choice: Sequence[int] | None = None) -> bool:
    """Return whether all other nodes get the sum of a step if some workers are absent.

    To find out, it runs the plan's machines with short vectors instead of gradients.

    Examples
    --------
    >>> from dask_coded.aggregation import Star
    >>> can_finish(Star().plan(3), absent=()), can_finish(Star().plan(3), absent=[1])
    (True, False)
    """
    choice = plan.choose() if choice is None else choice
    nodes = [node for node in range(plan.workers) if node not in absent]
    machines = {node: plan.machine(node, choice) for node in ([ROOT] * plan.rooted + nodes)}
    done: dict[int, int] = dict.fromkeys(machines, 0)
    pending: deque[tuple[int, Command]] = deque()
    for node, machine in machines.items():
        pending.extend((node, command) for command in machine.begin())
    while pending:
        node, command = pending.popleft()
        if isinstance(command, Finished):
            done[node] += 1
            continue
        if isinstance(command, Send):
            # Machines that have the sum are not called any more; absent nodes have no machine.
            if command.to not in machines or done[command.to] == plan.segments:
                continue
            answers = machines[command.to].received(node, command.tag, command.payload)
            pending.extend((command.to, answer) for answer in answers)
            continue
        assert isinstance(command, Compute)
        for segment in range(plan.segments):
            if done[node] < plan.segments:
                # As many numbers as a ring has chunks, so that no chunk is empty.
                partial = Partial(np.ones(plan.workers))
                answers = machines[node].computed(command, segment, partial)
                pending.extend((node, answer) for answer in answers)
    return all(count == plan.segments for count in done.values())
