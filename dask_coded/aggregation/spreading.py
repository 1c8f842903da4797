"""Placement of late workers: spread them over the clusters, so that no cluster has too many.

A step ends when *every* cluster can be decoded. If straggling has a memory, workers that were late
will be late again and should be spread over the clusters as evenly as possible. For this purpose
each worker stores the data of several *candidate* clusters and can take any place in them [1]_.

A *group* is a set of workers of which only a limited number may be late: a cluster with a cyclic
code, or a group of a fractional repetition code. The placement minimizes the sum, over groups, of
the squared number of late workers, as far as the candidates allow. A late worker therefore costs 1
as the first of its group, 3 as the second, 5 as the third.

References
----------
.. [1] Buyukates, Ozfatura, Ulukus and Gündüz, "Gradient coding with dynamic clustering for
   straggler-tolerant distributed learning", arXiv 2103.01206. The authors' placement rules were
   not available. The abstract can be read in two ways; this one gains with two candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from dask_coded.typing import Bools, Ints


def lag_one_correlation(history: npt.ArrayLike) -> float:
    """Return the correlation of flags with those one step later, over all workers together.

    Parameters
    ----------
    history : array_like, shape (steps, workers)
        One flag per step and worker; NaN where a worker took no part.

    Returns
    -------
    float
        From -1 to 1; NaN where nothing varies.

    Examples
    --------
    >>> round(lag_one_correlation([[0, 1], [0, 1], [0, 1], [1, 0], [1, 0]]), 6)
    0.5
    """
    flags = np.asarray(history, dtype=np.float64)
    before, after = flags[:-1].ravel(), flags[1:].ravel()
    known = ~(np.isnan(before) | np.isnan(after))
    before, after = before[known], after[known]
    if not before.size or not before.std() or not after.std():
        return float("nan")
    # Rounded, because a correlation of one is not always exactly one.
    return round(float(np.corrcoef(before, after)[0, 1]), 12)


def memory(history: npt.ArrayLike) -> float:
    """Return the correlation between being late in one step and being late in the next.

    Parameters
    ----------
    history : array_like of bool, shape (steps, workers)
        True where a worker was late in a step.

    Returns
    -------
    float
        From -1 to 1, over all workers together, so that a worker that is always late counts as
        memory; 0 if nothing varies.

    Examples
    --------
    >>> memory([[1, 0, 0], [1, 0, 0], [1, 0, 0]]), memory([[0, 0], [0, 0]])
    (1.0, 0.0)
    """
    found = lag_one_correlation(history)
    return 0.0 if np.isnan(found) else found


def has_memory(history: npt.ArrayLike, least: float = 0.1) -> bool:
    """Return whether :func:`memory` exceeds ``least`` by more than three standard errors.

    Without memory, the correlation of ``m`` pairs is about 0, with a standard error of
    ``1 / sqrt(m)``.
    """
    flags = np.asarray(history)
    pairs = max(len(flags) - 1, 0) * flags.shape[-1]
    return bool(memory(flags) > least + 3 / np.sqrt(max(pairs, 1)))


def candidates(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the clusters whose data each worker stores, its home cluster first.

    Neighbours with the same home have different other candidates, so that any two clusters can
    exchange workers.

    Parameters
    ----------
    sizes : sequence of int
        Number of workers whose home is each cluster.
    count : int
        Number of candidates of each worker, at most ``len(sizes)``.

    Examples
    --------
    >>> candidates([2, 2, 2], 2)
    ((0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1))
    """
    clusters = len(sizes)
    return tuple(
        (
            home,
            *(
                (home + 1 + (turn * (count - 1) + other) % (clusters - 1)) % clusters
                for other in range(count - 1)
            ),
        )
        for home, size in enumerate(sizes)
        for turn in range(size)
    )


def spread(late: Bools, room: Sequence[int], allowed: Bools) -> Ints:
    """Return the best placement of the workers in groups for a step.

    Parameters
    ----------
    late : ndarray of bool, shape (workers,)
        True for workers that are expected to be late.
    room : sequence of int
        Number of places in each group; their sum is the number of workers.
    allowed : ndarray of bool, shape (workers, groups)
        Whether each worker may work in each group.

    Returns
    -------
    ndarray of int, shape (workers,)
        The group of each worker.

    Examples
    --------
    >>> everywhere = np.ones((4, 2), dtype=bool)
    >>> group = spread(np.array([True, True, False, False]), [2, 2], everywhere)
    >>> sorted(group[:2].tolist())
    [0, 1]
    """
    group = np.repeat(np.arange(len(room)), room)
    rank = np.arange(len(group)) - (np.cumsum(room) - room)[group]
    cost = np.where(late[:, None], 2 * rank + 1, 0).astype(np.float64)
    cost[~allowed[:, group]] = 2 * len(group) ** 2  # above the cost of any allowed placement
    return np.asarray(group[linear_sum_assignment(cost)[1]])


def spread_greedily(late: Bools, room: Sequence[int], allowed: Bools) -> Ints:
    """Return a good placement for a step, found by placing one worker after another.

    Late workers come first. Each takes the allowed group that has the fewest late workers. The
    other workers take the remaining places. If all candidates of a worker are full, other workers
    move along the shortest chain of groups to make room for it.

    Parameters and return value are those of :func:`spread`.
    """
    group = np.full(len(late), -1)
    free = np.array(room)
    for worker in np.argsort(~late, kind="stable").tolist():
        open_to = np.flatnonzero(allowed[worker] & (free > 0))
        if len(open_to):
            late_in = np.bincount(group[late & (group >= 0)], minlength=len(free))
            chosen = int(open_to[np.lexsort((-free[open_to], late_in[open_to]))[0]])
            group[worker] = chosen
        else:
            chosen = _make_room(worker, group, free, allowed, late)
        free[chosen] -= 1
    return np.asarray(group)


def _make_room(worker: int, group: Ints, free: Ints, allowed: Bools, late: Bools) -> int:
    """Place a worker by moving others, and return the group that has gained a member."""
    # The worker that would move into each group, found breadth first.
    enters = {int(g): worker for g in np.flatnonzero(allowed[worker])}
    queue = list(enters)
    for full in queue:
        if free[full]:
            end = here = full
            while True:
                mover = enters[here]
                here, group[mover] = int(group[mover]), here
                if mover == worker:
                    return end
        members = np.flatnonzero(group == full)
        for member in members[np.argsort(late[members], kind="stable")].tolist():
            for onward in np.flatnonzero(allowed[member]).tolist():
                if onward not in enters:
                    enters[onward] = member
                    queue.append(onward)
    raise ValueError("No placement fills every group with workers that are allowed in it.")
