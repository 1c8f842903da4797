"""What one run of a round does: the spec of its array, the plan of the scheduler, and its own id.

What participants send for another run counts for nothing, because its id is another.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, field

from dask_coded.rounds import POLICIES, Layout, Pace, Policy, RoundOptions, StripeRange, least_batch
from dask_coded.runtime.answers import RoundPlan
from dask_coded.runtime.messages import StartRound
from dask_coded.runtime.operand import Ticket
from dask_coded.runtime.spec import CodedSpec
from dask_coded.transport.messages import Attempt


@dataclass(frozen=True, eq=False)
class RunSpec:
    """What one run of a round does.

    Parameters
    ----------
    spec : CodedSpec
    plan : RoundPlan
    layout : Layout
        Of the plan.
    columns : tuple of int
        Shape of a row of a share.
    options : RoundOptions
    pace : Pace
    series : str
        Rounds of the array that run one after another, this one among them.
    attempt : Attempt or None
        The run of the coordinator's task.

    Attributes
    ----------
    run_id : str
    """

    spec: CodedSpec
    plan: RoundPlan
    layout: Layout
    columns: tuple[int, ...]
    options: RoundOptions
    pace: Pace
    series: str
    attempt: Attempt | None
    run_id: str = field(init=False, default_factory=lambda: uuid.uuid4().hex)

    @property
    def policy(self) -> Policy:
        """The policy of the options."""
        return POLICIES[self.options.policy].from_options(self.options)

    @property
    def holders(self) -> list[str]:
        """Address of the worker that holds each piece, empty where none does."""
        return [self.plan.addresses[w] if w >= 0 else "" for w in self.plan.host]

    @property
    def least_batch(self) -> int:
        """Stripes of one product, at least."""
        if self.spec.sparse_type is not None:
            return 1
        geometry = self.spec.geometry
        return least_batch(max(geometry.rows) / geometry.stripes, math.prod(self.columns))

    def start(
        self, worker: int, ranges: tuple[StripeRange, ...], ticket: Ticket, shared: bool
    ) -> StartRound:
        """Return the first message to a worker.

        ``shared`` says whether it may leave large shares in its memory.
        """
        spec = self.spec
        return StartRound(
            self.run_id,
            kernel=spec.kernel,
            ticket=ticket,
            shared=shared,
            stripes=spec.geometry.stripes,
            pieces=tuple(
                (p, spec.keys[p], int(spec.geometry.edges(int(spec.code.group[p]))[-1]))
                for p in self.layout.pieces_of[worker]
            ),
            ranges=ranges,
            least_batch=self.least_batch,
            interval=self.pace.reporting.interval,
            growth=self.pace.reporting.growth,
            lead=self.pace.lead,
            series=self.series,
            attempt=self.attempt,
        )
