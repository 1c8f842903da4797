"""Ring all-reduce: every worker sends only to the next one, and all links are busy all the time.

A segment of the gradient is cut into as many chunks as there are workers. Chunk ``c`` starts at
worker ``c`` and travels around the ring. Every worker adds its own chunk and passes the sum on,
until worker ``c - 1`` has the total (*reduce-scatter*). That worker packs the total once, and those
bits travel around the ring (*all-gather*). With three workers, each sends four messages::

    worker     0             1             2
               chunk 0       chunk 1       chunk 2
               chunk 2       chunk 0       chunk 1        sums over two workers
               sum of 1      sum of 2      sum of 0
               sum of 0      sum of 1      sum of 2

Each worker sends ``2 (n - 1) / n`` gradients, fewer than two for any number of workers, in
``2 (n - 1)`` messages. None of them can be left out, so every step waits for the slowest worker.

References
----------
.. [1] Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
   Journal of Parallel and Distributed Computing 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_coded.aggregation._machine import (
    AGGREGATIONS,
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
from dask_coded.arguments import check_whole
from dask_coded.compression import EXACT, Codec, Partial


@AGGREGATIONS.register("Ring")
@dataclass(frozen=True)
class Ring(Aggregation):
    """Ring all-reduce: best for large gradients and workers that are equally fast.

    Parameters
    ----------
    segments : int
        Number of segments of the gradient. Each travels around the ring separately, as soon as it
        is computed and compressed.

    Examples
    --------
    >>> plan = Ring().plan(4)
    >>> plan.stored, plan.rooted
    (((0,), (1,), (2,), (3,)), False)
    """

    segments: int = 1

    def __post_init__(self) -> None:
        check_whole("segments", self.segments)

    def plan(self, workers: int) -> RingPlan:
        """Return the plan for this number of workers."""
        check_workers(self, workers)
        return RingPlan(workers, self.segments)


class RingPlan(Plan):
    """The plan of a :class:`Ring`: worker ``i`` computes part ``i`` and sends to ``i + 1``."""

    rooted = False

    def __init__(self, workers: int, segments: int) -> None:
        self.workers = self.parts = workers
        self.segments = segments
        self.stored = tuple((worker,) for worker in range(workers))

    @property
    def load(self) -> float:
        """The largest fraction of the data that a worker computes in a step."""
        return 1 / self.workers

    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        """Return a worker's machine for one step."""
        return RingMachine(node, self.workers, self.segments, codec)


@dataclass
class _Segment:
    """State of one segment at one worker."""

    #: This worker's own gradient; its chunks become partial sums and then totals, in place.
    own: Partial | None = None
    #: Packed chunks that arrived before it was computed.
    early: dict[int, Any] = field(default_factory=dict)
    #: Chunks to which this worker has added its own part, and chunks whose total is known.
    added: set[int] = field(default_factory=set)
    final: set[int] = field(default_factory=set)


class RingMachine(Machine):
    """State machine of one worker of a ring in one step.

    Chunks are views of the worker's own vector, and the exact codec sends views. That is safe,
    because a chunk is written again only when its total is known, and the total cannot be known
    before the receiver has read what was sent.
    """

    def __init__(self, node: int, workers: int, segments: int, codec: Codec) -> None:
        self._node = node
        self._workers = workers
        self._codec = codec
        self._segments = [_Segment() for _ in range(segments)]

    def begin(self) -> list[Command]:
        """Return what this worker has to compute."""
        return [Compute((self._node,), (1.0,))]

    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        """Send the first chunk of this worker's gradient, and add chunks that arrived early."""
        state = self._segments[segment]
        if state.own is not None:
            return []
        state.own = partial
        if self._workers == 1:
            total = self._codec.unpack(self._codec.pack(partial))
            return [Finished(segment, total)]
        state.added.add(self._node)
        first = self._packed(state, self._node)
        commands: list[Command] = [self._send("part", segment, self._node, first)]
        for chunk, packed in state.early.items():
            commands += self._add(segment, chunk, packed)
        state.early.clear()
        return commands

    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        """Handle a partial sum or the total of a chunk, from the previous worker."""
        state = self._segments[tag.segment]
        if tag.kind == "sum":
            return self._gather(tag.segment, tag.chunk, payload)
        if tag.chunk in state.added or tag.chunk in state.early:
            return []
        if state.own is None:
            state.early[tag.chunk] = payload
            return []
        return self._add(tag.segment, tag.chunk, payload)

    def _add(self, segment: int, chunk: int, packed: Any) -> list[Command]:
        state = self._segments[segment]
        assert state.own is not None
        state.added.add(chunk)
        partial = self._codec.unpack(packed)
        mine = self._chunk(state.own.vector, chunk)
        mine += partial.vector
        if chunk == 0:
            state.own.loss += partial.loss
        packed = self._packed(state, chunk)
        if (chunk - self._node) % self._workers == 1:
            # All workers have added theirs: this worker applies the packed total and sends it on.
            return self._gather(segment, chunk, packed)
        return [self._send("part", segment, chunk, packed)]

    def _gather(self, segment: int, chunk: int, packed: Any) -> list[Command]:
        state = self._segments[segment]
        if chunk in state.final:
            return []
        state.final.add(chunk)
        assert state.own is not None
        total = self._codec.unpack(packed)
        mine = self._chunk(state.own.vector, chunk)
        if not np.may_share_memory(mine, total.vector):
            mine[...] = total.vector
        if chunk == 0:
            state.own.loss = total.loss
        commands: list[Command] = []
        # The worker before the one that made the total is the last to receive it.
        if (chunk - self._node) % self._workers != 2 % self._workers:
            commands.append(self._send("sum", segment, chunk, packed))
        if len(state.final) == self._workers:
            commands.append(Finished(segment, state.own.read_only()))
        return commands

    def _send(self, kind: str, segment: int, chunk: int, packed: Any) -> Send:
        return Send((self._node + 1) % self._workers, Tag(kind, segment, chunk), packed)

    def _packed(self, state: _Segment, chunk: int) -> Any:
        assert state.own is not None
        loss = state.own.loss if chunk == 0 else 0.0
        return self._codec.pack(Partial(self._chunk(state.own.vector, chunk), loss))

    def _chunk(self, vector: Any, chunk: int) -> Any:
        """Return a view of one chunk, cut as ``numpy.array_split`` does."""
        size, larger = divmod(len(vector), self._workers)
        start = chunk * size + min(chunk, larger)
        return vector[start : start + size + (chunk < larger)]
