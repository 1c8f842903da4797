"""State machines that sum gradients up a tree and pass the total down the tree.

Every node decodes the messages of the first children that suffice, adds its own gradients, and
sends the packed result to its parent. The root packs the total once. All nodes forward those bits
and apply what they unpack to, including the root, so that all replicas get the same total to the
last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_coded.aggregation._machine import (
    ROOT,
    Command,
    Compute,
    Finished,
    Machine,
    Plan,
    Send,
    Tag,
)
from dask_coded.aggregation._sum import Sum
from dask_coded.aggregation.trees import Allocation
from dask_coded.codes import GradientCode
from dask_coded.compression import EXACT, Codec, Partial

if TYPE_CHECKING:
    from dask_coded.codes._gradient import Deliveries


class TreePlan(Plan):
    """The plan of an aggregation along a tree, such as a star.

    Parameters
    ----------
    allocation : Allocation
    segments : int
        Number of segments of the gradient: while one is on its way up, the next is made.
    """

    rooted = True

    def __init__(self, allocation: Allocation, segments: int = 1) -> None:
        self.allocation = allocation
        self.segments = segments
        self.workers = len(allocation.parents)
        self.parts = allocation.parts
        self.stored = tuple(tuple(part for part, _ in work) for work in allocation.work)
        self.plain = all(code.plain for code in allocation.codes.values())

    @property
    def load(self) -> float:
        """The largest fraction of the data that a worker computes in a step."""
        return self.allocation.load

    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        """Return a node's machine for one step.

        Raises
        ------
        ValueError
            If the codec loses digits and a code of this plan would amplify the error.
        """
        tree = self.allocation
        self.check(codec)
        children = tree.children.get(node, ())
        return TreeMachine(
            Place(
                node=node,
                parent=None if node == ROOT else tree.parents[node],
                rows={child: row for row, child in enumerate(children)},
                code=tree.codes.get(node),
                work=None if node == ROOT else compute(tree.work[node]),
                segments=self.segments,
            ),
            codec,
        )

    def check(self, codec: Codec) -> None:
        """Raise a ValueError if a code of this plan would amplify the error of a codec."""
        for code in self.allocation.codes.values():
            if codec.lossy and not code.plain:
                raise ValueError(
                    f"{type(codec).__name__} loses digits, and {code!r} would multiply the error "
                    f"when it decodes: use the fractional code, whose weights are 0 and 1, or a "
                    f"compression that is linear."
                )


def compute(work: Sequence[tuple[int, float]]) -> Compute:
    """Return the command to compute some work."""
    return Compute(tuple(part for part, _ in work), tuple(factor for _, factor in work))


@dataclass(frozen=True, eq=False)
class Place:
    """One node's place in a tree.

    Parameters
    ----------
    node : int
    parent : int or None
        None for the root.
    rows : dict of int to int
        The row of ``code`` for each child.
    code : GradientCode or None
        None for a leaf.
    work : Compute or None
        None for the root.
    segments : int
    """

    node: int
    parent: int | None
    rows: dict[int, int]
    code: GradientCode | None
    work: Compute | None
    segments: int


@dataclass
class _Segment:
    """State of one segment at one node."""

    #: Whether this node's own gradients are in the sum.
    own: bool
    #: Rows of the children that count; None if there are none, or their sum is not needed.
    deliveries: Deliveries | None = None
    #: What they delivered, if the weights are known only when enough have delivered.
    kept: list[Partial] = field(default_factory=list)
    sum: Sum = field(default_factory=Sum)
    decoded: bool = False
    delivered: bool = False
    finished: bool = False


class TreeMachine(Machine):
    """State machine of one node of a tree in one step."""

    def __init__(self, place: Place, codec: Codec) -> None:
        self._place = place
        self._codec = codec
        self._segments = [
            _Segment(
                own=place.work is None,
                deliveries=None if place.code is None else place.code.deliveries(),
                decoded=place.code is None,
            )
            for _ in range(place.segments)
        ]

    def begin(self) -> list[Command]:
        """Return what this worker has to compute."""
        return [] if self._place.work is None else [self._place.work]

    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        """Add this worker's own gradients, and deliver the sum if it is complete."""
        state = self._segments[segment]
        if state.own or state.delivered or state.finished:
            return []
        state.own = True
        state.sum.add(partial, owned=True)
        return self._deliver(segment)

    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        """Handle what a child delivers, or the total from the parent."""
        state = self._segments[tag.segment]
        if tag.kind == "sum":
            return self._pass_on(tag.segment, payload) if sender == self._place.parent else []
        code, row = self._place.code, self._place.rows.get(sender)
        rows = state.deliveries
        if code is None or rows is None or row is None or state.decoded or state.finished:
            return []
        if not rows.add(row):
            return []
        partial = self._codec.unpack(payload)
        if code.plain:
            state.sum.add(partial)
        else:
            state.kept.append(partial)
        if rows.complete:
            state.decoded = True
            if state.kept:
                state.sum.add(_combined(code.weights(rows.have), state.kept), owned=True)
                state.kept.clear()
        return self._deliver(tag.segment)

    def _deliver(self, segment: int) -> list[Command]:
        state = self._segments[segment]
        if state.delivered or not (state.own and state.decoded):
            return []
        state.delivered = True
        packed = self._codec.pack(state.sum.take())
        if self._place.parent is None:
            return self._pass_on(segment, packed)
        return [Send(self._place.parent, Tag("part", segment), packed)]

    def _pass_on(self, segment: int, packed: Any) -> list[Command]:
        if self._segments[segment].finished:
            return []
        # If the total arrived first, this node's own sum is not needed any more.
        self._segments[segment] = _Segment(own=True, decoded=True, delivered=True, finished=True)
        tag = Tag("sum", segment)
        return [
            *(Send(child, tag, packed) for child in self._place.rows),
            Finished(segment, self._codec.unpack(packed)),
        ]


def _combined(weights: Any, partials: Sequence[Partial]) -> Partial:
    """Return a weighted sum, in double precision because weights of both signs cancel digits."""
    dtype = partials[0].vector.dtype
    vector = np.zeros(partials[0].vector.shape, dtype=np.result_type(dtype, np.float64))
    for weight, partial in zip(weights.tolist(), partials, strict=True):
        vector += weight * partial.vector
    loss = sum(w * p.loss for w, p in zip(weights.tolist(), partials, strict=True))
    return Partial(vector.astype(dtype, copy=False), float(loss))
