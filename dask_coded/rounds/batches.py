"""How many stripes a worker computes by one product."""

from __future__ import annotations

import math

#: Rows that a dense product with several columns should have at least. For each product, BLAS
#: copies the right factor, which takes as long as 6 rows of the product, and longer if many workers
#: share a memory. Products of single stripes of 4 rows took 2.4 times as long for each row. On
#: processes with 0.15 of a core, rounds with pieces of 143 rows took 0.58 of the time with 32 rows
#: at least, and 0.53 with 64. With stripes of 37 rows they took 0.94 with 64, and 0.98 with 128.
PRODUCT_ROWS = 64
#: The share of its list that a worker takes at once. Every product has a cost of its own, 0.1 to
#: 0.3 ms of CPU: the code around it, and the packing of an operand with many columns. On processes
#: with 0.1 of a core, with 28 of 40 stripes for each worker and 40 columns, rounds took 0.95 to
#: 0.98 of the time with this share, and the same with 1/4 and 1/10. Pieces of 60 or 100 stripes
#: gained nothing more. The larger a batch, the more is stuck when a worker becomes slow.
BATCH_SHARE = 1 / 8
# A batch takes at least this many seconds if there are stripes for it, so that the code between two
# of them is negligible.
_LEAST = 0.0005
# A batch of several stripes takes at most this many seconds: longer ones gain nothing, and a worker
# that is told that the round is over still has to finish its batch.
_MOST = 0.2


def least_batch(rows: float, columns: int) -> int:
    """Return how many stripes a worker computes at least by one product with a dense piece.

    Parameters
    ----------
    rows : float
        Of a stripe.
    columns : int
        Of the product.

    Examples
    --------
    >>> least_batch(3.5, columns=1), least_batch(3.5, columns=32), least_batch(200, columns=32)
    (1, 19, 1)
    """
    return 1 if columns <= 1 else math.ceil(PRODUCT_ROWS / max(rows, 1.0))


def batch_size(left: int, seconds: float, threads: int = 1, least: int = 1) -> int:
    """Return how many stripes a worker computes by one product.

    Many at first, so that products are few, and single ones at the end of the list, so that workers
    end together and the list can still be changed. This is guided self-scheduling (Polychronopoulos
    and Kuck, IEEE Trans. Computers C-36, 1987), applied to the list of one worker.

    Parameters
    ----------
    left : int
        Stripes in the list of the worker.
    seconds : float
        Seconds that a stripe took last. If that is not known, which is 0, a batch is one stripe.
    threads : int
        Threads of the worker that share the list.
    least : int
        Stripes that one product should have at least, if as many are left for each thread.

    Examples
    --------
    >>> [batch_size(left, 0.01) for left in (28, 25, 16, 8, 1)]
    [3, 3, 2, 1, 1]
    >>> batch_size(28, 0.0), batch_size(28, 0.1), batch_size(28, 0.0001)
    (1, 2, 5)

    With a least size, a list is divided into equal batches of about that size.

    >>> [batch_size(left, 0.01, least=18) for left in (28, 14)]
    [14, 14]
    """
    size = 1
    if seconds:
        size = min(int(left * BATCH_SHARE / threads), int(_MOST / seconds))
        size = max(size, int(_LEAST / seconds))
    batches = max(round(left / min(least, math.ceil(left / threads))), 1)
    return max(size, math.ceil(left / batches))
