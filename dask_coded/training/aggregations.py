"""Which aggregation is taken when none is asked for."""

from __future__ import annotations

from dask_coded.aggregation import Aggregation, Ring, Star

# From so many bytes on a gradient's way takes longer than its messages' latencies.
_LARGE = 2**18


def choose_aggregation(workers: int, gradient_bytes: int) -> Aggregation:
    """The aggregation that is expected to be fast.

    Large gradients go round a ring, in which no link carries more than two of them however many
    workers there are. Small ones go straight to the root, which costs two latencies instead of
    ``2 (workers - 1)``.

    Parameters
    ----------
    workers : int
    gradient_bytes : int

    Examples
    --------
    >>> choose_aggregation(workers=8, gradient_bytes=8_000_000)
    Ring(segments=1)
    >>> choose_aggregation(workers=8, gradient_bytes=40_000)
    Star(segments=1)
    """
    return Ring() if workers > 2 and gradient_bytes >= _LARGE else Star()
