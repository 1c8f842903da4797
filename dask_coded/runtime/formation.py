"""Which workers can form a group, and whether a group can do without some of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from dask_coded.aggregation import ROOT, Aggregation, Command, Compute, Finished, Plan, Send
from dask_coded.compression import Partial

#: A node of a plan that is not there.
NOBODY = ""


def form(aggregation: Aggregation, workers: Sequence[str]) -> tuple[Plan, tuple[str, ...]]:
    """A plan for some workers, and who is which of its nodes.

    The largest plan that they can fill is taken. Where there is none, as for a tree that has lost a
    leaf, a larger one is, of which the code can do without the nodes that are not there.

    Parameters
    ----------
    aggregation : Aggregation
    workers : sequence of str
        Addresses, the best first.

    Returns
    -------
    plan : Plan
    addresses : tuple of str
        One per node; empty for one that is not there.

    Raises
    ------
    ValueError
        If there are too few.

    Examples
    --------
    >>> from dask_coded.aggregation import Star
    >>> form(Star(), ["a", "b"])[1]
    ('a', 'b')
    """
    available = len(workers)
    refusal: ValueError | None = None
    for count in range(available, 0, -1):
        try:
            return aggregation.plan(count), tuple(workers[:count])
        except ValueError as exc:
            refusal = refusal or exc
    for count in range(available + 1, 2 * available):
        try:
            plan = aggregation.plan(count)
        except ValueError:
            continue
        absent: set[int] = set()
        # Leaves have the highest numbers, and cost the least.
        for node in reversed(range(count)):
            if len(absent) < count - available and can_finish(plan, {*absent, node}):
                absent.add(node)
        if len(absent) == count - available:
            there = iter(workers)
            nodes = (NOBODY if node in absent else next(there) for node in range(count))
            return plan, tuple(nodes)
    raise refusal or ValueError("There is no worker that could take part in the training.")


def can_finish(plan: Plan, absent: Collection[int], choice: Sequence[int] | None = None) -> bool:
    """Whether all nodes get the sum of a step although some are not there.

    The plan's machines are run with gradients of one number each.

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
            # A machine that has the sum is asked no more, and nobody answers for an absent one.
            if command.to not in machines or done[command.to] == plan.segments:
                continue
            answers = machines[command.to].received(node, command.tag, command.payload)
            pending.extend((command.to, answer) for answer in answers)
            continue
        assert isinstance(command, Compute)
        for segment in range(plan.segments):
            if done[node] < plan.segments:
                # As many numbers as a ring has chunks, lest one of them be empty.
                partial = Partial(np.ones(plan.workers))
                answers = machines[node].computed(command, segment, partial)
                pending.extend((node, answer) for answer in answers)
    return all(count == plan.segments for count in done.values())
