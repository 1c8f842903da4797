"""The default aggregation."""

from __future__ import annotations

from dask_coded.aggregation import AGGREGATIONS, Aggregation
from dask_coded.aggregation.timing import Costs, recommend
from dask_coded.arguments import check_positive

#: Machines in one room: a message and its handling take 1 ms, links carry 1 Gbit/s.
TYPICAL = Costs(latency=1e-3, bandwidth=125e6)


def choose_aggregation(
    workers: int, gradient_bytes: int, costs: Costs | None = None
) -> Aggregation:
    """Return the aggregation that is predicted to be the fastest when no worker is late.

    Large gradients go round a ring, in which no link carries more than two gradients, however many
    workers there are. Small gradients go straight to the root or up a tree, which costs a few
    latencies instead of ``2 (workers - 1)``.

    Parameters
    ----------
    workers : int
    gradient_bytes : int
    costs : Costs, optional
        Costs of this cluster, as returned by :func:`measure_costs`; by default those of machines
        in one room.

    Examples
    --------
    >>> choose_aggregation(workers=8, gradient_bytes=8_000_000)
    Ring(segments=1)
    >>> choose_aggregation(workers=8, gradient_bytes=40_000)
    Star(segments=1)
    """
    check_positive("gradient_bytes", gradient_bytes)
    # A code costs computation even when no worker is late, so it is never the default.
    shape = recommend(costs or TYPICAL, workers, gradient_bytes, stragglers=()).best.shape
    # Without the fan-in, which follows from the depth and may grow when workers join.
    options = {name: value for name, value in shape.parameters.items() if name != "fan_in"}
    return AGGREGATIONS[shape.kind](**options)
