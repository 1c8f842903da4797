"""Which aggregation is taken when none is asked for."""

from __future__ import annotations

from dask_coded import aggregation
from dask_coded.aggregation import Aggregation
from dask_coded.planning.timing import Costs, recommend

#: Of machines in one room: a millisecond to a message and its handling, links of 1 Gbit/s.
TYPICAL = Costs(latency=1e-3, bandwidth=125e6)


def choose_aggregation(
    workers: int, gradient_bytes: int, costs: Costs | None = None
) -> Aggregation:
    """The aggregation that is predicted to be the fastest when nobody is late.

    Large gradients go round a ring, in which no link carries more than two of them however many
    workers there are. Small ones go straight to the root, or up a tree, which costs a few latencies
    instead of ``2 (workers - 1)``.

    Parameters
    ----------
    workers : int
    gradient_bytes : int
    costs : Costs, optional
        Of this cluster, as :func:`measure_costs` finds them; by default those of machines in one
        room.

    Examples
    --------
    >>> choose_aggregation(workers=8, gradient_bytes=8_000_000)
    Ring(segments=1)
    >>> choose_aggregation(workers=8, gradient_bytes=40_000)
    Star(segments=1)
    """
    # A code costs computation whether anybody is late or not: it is for who asks.
    shape = recommend(costs or TYPICAL, workers, gradient_bytes, stragglers=()).best.shape
    found: Aggregation = getattr(aggregation, shape.kind)(**shape.parameters)
    return found
