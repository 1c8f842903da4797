"""Speculative execution: no code, but a second worker computes the parts that are late.

Every part of the data is stored on two workers: its own and the previous one on a ring. No part is
computed twice until most workers have delivered. Workers that have delivered and that store a
missing part are then asked to compute it. The first result counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_coded.aggregation._machine import (
    AGGREGATIONS,
    ROOT,
    Aggregation,
    Command,
    Compute,
    Finished,
    Machine,
    Plan,
    Send,
    Tag,
    check_workers,
)
from dask_coded.aggregation._sum import Sum
from dask_coded.arguments import check_whole
from dask_coded.compression import EXACT, Codec, Partial


@AGGREGATIONS.register("Speculation")
@dataclass(frozen=True)
class Speculation(Aggregation):
    """A :class:`Star` in which a second worker also computes the parts that are late.

    The load is that of a star, and twice that for workers that help. A step takes the time of two
    computations if a worker is late; with a code, every step does.

    Parameters
    ----------
    share : float
        Fraction of the workers that must have delivered before any is asked to help, above 0 and at
        most 1.
    segments : int
        Number of segments of the gradient.

    Examples
    --------
    >>> plan = Speculation().plan(4)
    >>> plan.stored, plan.load
    (((0, 1), (1, 2), (2, 3), (3, 0)), 0.25)
    """

    share: float = 0.75
    segments: int = 1
    helps = True
    moves = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"Argument 'share' must be above 0 and at most 1, it is {self.share}.")
        check_whole("segments", self.segments)

    def plan(self, workers: int) -> SpeculativePlan:
        """Return the plan for this number of workers."""
        check_workers(self, workers)
        return SpeculativePlan(workers, self.share, self.segments)


class SpeculativePlan(Plan):
    """The plan of a :class:`Speculation`: worker ``i`` can help worker ``i + 1``."""

    rooted = True

    def __init__(self, workers: int, share: float, segments: int) -> None:
        self.workers = self.parts = workers
        self.segments = segments
        # The margin absorbs rounding: 0.55 of 100 workers are 55, but 0.55 * 100 is above 55.
        self.enough = math.ceil(share * workers - 1e-9)
        self.stored = tuple(
            tuple(dict.fromkeys((worker, (worker + 1) % workers))) for worker in range(workers)
        )

    @property
    def load(self) -> float:
        """The fraction of the data that a worker computes in a step without late workers."""
        return 1 / self.workers

    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        """Return a node's machine for one step."""
        if node == ROOT:
            return _Root(self, codec)
        return _Worker(node, self.segments, codec)


@dataclass
class _Segment:
    parts: set[int] = field(default_factory=set)
    sum: Sum = field(default_factory=Sum)


class _Root(Machine):
    def __init__(self, plan: SpeculativePlan, codec: Codec) -> None:
        self._plan = plan
        self._codec = codec
        self._segments = [_Segment() for _ in range(plan.segments)]
        # Segments of its own part that each worker has delivered, and workers with all of them.
        self._delivered: dict[int, set[int]] = {worker: set() for worker in range(plan.workers)}
        self._done: set[int] = set()
        # Parts that lack a segment and that no helper was asked for.
        self._missing = set(range(plan.workers))

    def begin(self) -> list[Command]:
        return []

    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        raise AssertionError("The root computes nothing.")

    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        """Handle a segment of a worker's own part, or of the part that it was asked for."""
        workers = self._plan.workers
        state = self._segments[tag.segment]
        if tag.kind == "part":
            self._delivered[sender].add(tag.segment)
            if len(self._delivered[sender]) == self._plan.segments:
                self._done.add(sender)
        part = sender if tag.kind == "part" else (sender + 1) % workers
        if part in state.parts:
            return self._ask()
        state.parts.add(part)
        if all(part in other.parts for other in self._segments):
            self._missing.discard(part)
        state.sum.add(self._codec.unpack(payload))
        if len(state.parts) < workers:
            return self._ask()
        packed = self._codec.pack(state.sum.take())
        answer = Tag("sum", tag.segment)
        return [
            *(Send(worker, answer, packed) for worker in range(workers)),
            Finished(tag.segment, self._codec.unpack(packed)),
            *self._ask(),
        ]

    def _ask(self) -> list[Command]:
        """Ask workers that are done for missing parts, if enough workers are done."""
        if len(self._done) < self._plan.enough:
            return []
        commands: list[Command] = []
        for part in sorted(self._missing):
            if (helper := (part - 1) % self._plan.workers) in self._done:
                self._missing.remove(part)
                commands.append(Send(helper, Tag("redo"), (part,)))
        return commands


class _Worker(Machine):
    def __init__(self, node: int, segments: int, codec: Codec) -> None:
        self._node = node
        self._codec = codec
        self._left = set(range(segments))
        self._sent: set[tuple[str, int]] = set()
        self._asked = False

    def begin(self) -> list[Command]:
        return [Compute((self._node,), (1.0,))]

    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        """Send the root this worker's own part, or the part that it was asked for."""
        kind = "part" if work.parts == (self._node,) else "redo"
        if segment not in self._left or (kind, segment) in self._sent:
            return []
        self._sent.add((kind, segment))
        return [Send(ROOT, Tag(kind, segment), self._codec.pack(partial))]

    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        """Handle the total of a segment from the root, or its request to compute a part."""
        if tag.kind == "sum" and tag.segment in self._left:
            self._left.remove(tag.segment)
            return [Finished(tag.segment, self._codec.unpack(payload))]
        if tag.kind == "redo" and self._left and not self._asked:
            self._asked = True
            return [Compute(tuple(payload), (1.0,) * len(payload))]
        return []
