"""How many stripes a worker computes by one product."""

from __future__ import annotations

#: A worker takes this share of its list at once. Each product costs 0.1 to 0.3 ms for itself: the
#: code around it, and the copy of the operand that NumPy makes if it has many columns. With 0.1 of
#: a core, 28 of 40 stripes for each worker and 40 columns, rounds took 0.95 to 0.98 of the time
#: that they took with one stripe at a time. Shares of 1/4 to 1/10 gave the same; with 1/16 of 70
#: stripes, or 1/6 of 42, nothing was gained. The larger a batch, the more is stuck when a worker
#: becomes slow: the one round in which that happens takes up to 5 % longer in simulation.
BATCH_SHARE = 1 / 8


def batch_size(left: int, threads: int = 1) -> int:
    """Return how many stripes a worker computes by one product.

    Many at first, so that products are few, and single ones at the end of the list, so that workers
    end together and the list can still be changed. The coordinator uses the same rule to know what
    a worker has in hand. It is guided self-scheduling (Polychronopoulos and Kuck, IEEE Trans.
    Computers C-36, 1987), applied to the list of one worker.

    Parameters
    ----------
    left : int
        Stripes in the list of the worker.
    threads : int
        Threads of the worker that share the list.

    Examples
    --------
    >>> [batch_size(left) for left in (28, 25, 16, 8, 1)]
    [3, 3, 2, 1, 1]
    """
    return max(int(left * BATCH_SHARE / threads), 1)
