"""Drives all machines of a plan in this process, with messages in any order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from dask_coded.aggregation import ROOT, Command, Compute, Finished, Plan, Send
from dask_coded.compression import EXACT, Codec, Partial, sum_dtype

Event = tuple[str, int, Any]


class Group:
    """One step of a plan, whose events are delivered in an order that a test chooses.

    Parameters
    ----------
    plan : Plan
    gradients : ndarray, shape (parts, length)
    choice : tuple of int
    codec : Codec
    stopped : collection of int
        Workers that do not finish computing before :meth:`wake`, but forward what they receive.
    dead : collection of int
        Workers that do nothing.
    """

    def __init__(
        self,
        plan: Plan,
        gradients: np.ndarray,
        choice: tuple[int, ...] = (),
        codec: Codec = EXACT,
        stopped: Collection[int] = (),
        dead: Collection[int] = (),
    ) -> None:
        assert len(gradients) == plan.parts
        self.plan = plan
        self.gradients = gradients
        self.stopped = set(stopped) | set(dead)
        self.dead = set(dead)
        nodes = [*range(plan.workers), *([ROOT] if plan.rooted else [])]
        self.machines = {node: plan.machine(node, choice, codec) for node in nodes}
        self.totals: dict[int, dict[int, Partial]] = {node: {} for node in nodes}
        self.under_way: list[Event] = [("begin", node, None) for node in nodes]
        self.asleep: list[Event] = []
        self.sent: list[tuple[int, Send]] = []

    def run(self, pick: Callable[[int], int], twice: bool = False) -> None:
        """Deliver events until none is left; ``pick(count)`` chooses the next one."""
        while self.under_way:
            event = self.under_way.pop(pick(len(self.under_way)))
            kind, node, what = event
            if node in self.dead:
                continue
            machine = self.machines[node]
            if kind == "begin":
                self._follow(node, machine.begin())
            elif kind == "computed":
                if node in self.stopped:
                    self.asleep.append(event)
                else:
                    work, segment = what
                    self._follow(node, machine.computed(work, segment, self._gradient(*what)))
            else:
                sender, send = what
                self._follow(node, machine.received(sender, send.tag, send.payload))
                if twice:
                    self._follow(node, machine.received(sender, send.tag, send.payload))

    def wake(self) -> None:
        """Let the stopped workers finish computing."""
        self.stopped -= self.stopped - self.dead
        self.under_way += self.asleep
        self.asleep = []

    def total(self, node: int) -> tuple[np.ndarray, float]:
        """Return the sum that a node has, and its loss."""
        parts = [self.totals[node][segment] for segment in range(self.plan.segments)]
        return np.concatenate([p.vector for p in parts]), sum(p.loss for p in parts)

    def complete(self) -> Iterator[int]:
        """Return the nodes that have the whole sum."""
        return (n for n, found in self.totals.items() if len(found) == self.plan.segments)

    def _gradient(self, work: Compute, segment: int) -> Partial:
        rows = self.gradients[list(work.parts)].astype(sum_dtype(self.gradients.dtype))
        total = np.asarray(work.coefficients, dtype=rows.dtype) @ rows
        # The loss of a part is one; it travels with the first segment.
        loss = float(sum(work.coefficients)) if segment == 0 else 0.0
        return Partial(np.array_split(total, self.plan.segments)[segment].copy(), loss)

    def _follow(self, node: int, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                assert command.to != node
                self.sent.append((node, command))
                self.under_way.append(("received", command.to, (node, command)))
            elif isinstance(command, Compute):
                assert set(command.parts) <= set(self.plan.stored[node])
                for segment in range(self.plan.segments):
                    self.under_way.append(("computed", node, (command, segment)))
            else:
                assert isinstance(command, Finished)
                assert command.segment not in self.totals[node]
                self.totals[node][command.segment] = command.total


def agree(group: Group, nodes: Collection[int], rtol: float = 1e-10) -> None:
    """Check that these nodes have the exact sum over all parts, with the same bits."""
    expected = group.gradients.sum(axis=0)
    scale = np.abs(group.gradients).sum(axis=0).max()
    first = group.total(next(iter(nodes)))
    np.testing.assert_allclose(first[0], expected, rtol=0, atol=rtol * scale)
    np.testing.assert_allclose(first[1], group.plan.parts, rtol=1e-9)
    for node in nodes:
        total, loss = group.total(node)
        assert total.tobytes() == first[0].tobytes()
        assert loss == first[1]
