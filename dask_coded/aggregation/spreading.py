"""Clusters of workers with a code each, and who works in which of them in the next step.

A step ends when *every* cluster has enough. If straggling has a memory, those that were late will
be late again, and should be spread over the clusters as evenly as can be. For that each worker
stores the data of several *candidate* clusters, in any of which it can take any place [1]_.

A *crew* is a set of workers of which too many may not be late: a cluster with a cyclic code, a
group of fractional repetition. To spread the late ones, the sum over crews of the squares of their
numbers is made as small as the candidates allow: a late worker costs 1 as the first of a crew, 3 as
the second, 5 as the third.

References
----------
.. [1] Buyukates, Ozfatura, Ulukus and Gündüz, "Gradient coding with dynamic clustering for
   straggler-tolerant distributed learning", arXiv 2103.01206. The authors' rules of placement were
   not at hand; of two readings of the abstract this is the one that gains with two candidates.
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
    """How much being late in one step says about the next: the correlation of the two.

    Parameters
    ----------
    history : array_like of bool, shape (steps, workers)
        Who was late, step by step.

    Returns
    -------
    float
        From -1 to 1, over all workers together, so that one who is always late counts as memory; 0
        where nothing varies.

    Examples
    --------
    >>> memory([[1, 0, 0], [1, 0, 0], [1, 0, 0]]), memory([[0, 0], [0, 0]])
    (1.0, 0.0)
    """
    found = lag_one_correlation(history)
    return 0.0 if np.isnan(found) else found


def has_memory(history: npt.ArrayLike, least: float = 0.1) -> bool:
    """Whether :func:`memory` is more than ``least`` by three standard errors.

    Without a memory the correlation of ``m`` pairs is about 0 with a standard error of
    ``1 / sqrt(m)``.
    """
    flags = np.asarray(history)
    pairs = max(len(flags) - 1, 0) * flags.shape[-1]
    return bool(memory(flags) > least + 3 / np.sqrt(max(pairs, 1)))


def candidates(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """The clusters whose data each worker stores, its home first.

    Neighbours at home have different other clusters, so that any two clusters can exchange workers.

    Parameters
    ----------
    sizes : sequence of int
        How many workers are at home in each cluster.
    count : int
        Candidates of each worker, at most ``len(sizes)``.

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
    """The best crews for a step.

    Parameters
    ----------
    late : ndarray of bool, shape (workers,)
        Who is expected to be late.
    room : sequence of int
        How many workers each crew has; together as many as there are.
    allowed : ndarray of bool, shape (workers, crews)
        Which crews each worker may work in.

    Returns
    -------
    ndarray of int, shape (workers,)
        The crew of each worker.

    Examples
    --------
    >>> everywhere = np.ones((4, 2), dtype=bool)
    >>> crews = spread(np.array([True, True, False, False]), [2, 2], everywhere)
    >>> sorted(crews[:2].tolist())
    [0, 1]
    """
    crew = np.repeat(np.arange(len(room)), room)
    rank = np.arange(len(crew)) - (np.cumsum(room) - room)[crew]
    cost = np.where(late[:, None], 2 * rank + 1, 0).astype(np.float64)
    cost[~allowed[:, crew]] = 2 * len(crew) ** 2  # more than all places together may cost
    return np.asarray(crew[linear_sum_assignment(cost)[1]])


def spread_greedily(late: Bools, room: Sequence[int], allowed: Bools) -> Ints:
    """Good crews for a step, one worker after the other.

    The late ones choose first, each the crew with the fewest of them. The others take what is
    left; where a worker finds all its candidates full, others move on along the shortest chain.

    Parameters and what is returned are those of :func:`spread`.
    """
    crew = np.full(len(late), -1)
    free = np.array(room)
    for worker in np.argsort(~late, kind="stable").tolist():
        open_to = np.flatnonzero(allowed[worker] & (free > 0))
        if len(open_to):
            tardy = np.bincount(crew[late & (crew >= 0)], minlength=len(free))
            chosen = int(open_to[np.lexsort((-free[open_to], tardy[open_to]))[0]])
            crew[worker] = chosen
        else:
            chosen = _make_room(worker, crew, free, allowed, late)
        free[chosen] -= 1
    return np.asarray(crew)


def _make_room(worker: int, crew: Ints, free: Ints, allowed: Bools, late: Bools) -> int:
    """Seat a worker by moving others on; returns the crew that has one member more."""
    # The worker that would enter each crew, found breadth first.
    enters = {int(c): worker for c in np.flatnonzero(allowed[worker])}
    queue = list(enters)
    for full in queue:
        if free[full]:
            end = here = full
            while True:
                mover = enters[here]
                here, crew[mover] = int(crew[mover]), here
                if mover == worker:
                    return end
        members = np.flatnonzero(crew == full)
        for member in members[np.argsort(late[members], kind="stable")].tolist():
            for onward in np.flatnonzero(allowed[member]).tolist():
                if onward not in enters:
                    enters[onward] = member
                    queue.append(onward)
    raise ValueError("The crews cannot be filled by the workers that are allowed in them.")
