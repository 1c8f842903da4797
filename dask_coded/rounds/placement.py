"""Placement: which worker holds which place of a code, and what a new worker takes over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dask_coded.codes import Code
from dask_coded.typing import Floats

# A worker is slow below this fraction of the median speed, or above that multiple of a median
# delay. Delays are noisier.
_SPEED, _DELAY = 0.8, 2.0


@dataclass(frozen=True)
class WorkerInfo:
    """A worker that can hold pieces, and the number of pieces that it already holds."""

    address: str
    host: str
    pieces: int


def place(
    code: Code,
    workers: Sequence[WorkerInfo],
    speeds: Floats,
    holders: Iterable[tuple[int, str | None]],
    *,
    oversubscribe: bool = False,
) -> list[str]:
    """Spread the places of a code over distinct workers, and over hosts.

    Parameters
    ----------
    code : Code
    workers : sequence of WorkerInfo
        Workers that can be used.
    speeds : ndarray, shape (workers,)
        Predicted speeds. If not all workers are needed, those with fewer pieces are preferred, then
        the faster ones.
    holders : iterable of (int, str or None)
        The place of each source block, and the worker that already holds the block, if any. That
        worker gets the place if possible, so that the block stays where it is.
    oversubscribe : bool
        Allow several places on one worker when there are fewer workers than places.

    Returns
    -------
    list of str
        The address for each place.

    Raises
    ------
    ValueError
        If there are no workers, or fewer than places without ``oversubscribe``.
    """
    if not workers or (len(workers) < code.n and not oversubscribe):
        raise ValueError(
            f"Code {code!r} needs {code.n} workers, the cluster has {len(workers)}: pass a smaller "
            f"code, scale the cluster, or encode with `oversubscribe=True`."
        )
    by_host = defaultdict(list)
    ranked = sorted(zip(workers, speeds, strict=True), key=lambda w: (w[0].pieces, -w[1]))
    for worker, _ in ranked:
        by_host[worker.host].append(worker.address)
    # Take one worker of each host in turn, so that losing a host loses as few places as possible.
    turns = [a for i in range(len(workers)) for h in by_host.values() for a in h[i : i + 1]]
    rounds = -(-code.n // len(turns))
    free = (turns * rounds)[: code.n]
    places: list[str | None] = [None] * code.n
    for where, holder in holders:
        if holder in free and places[where] is None:
            places[where] = holder
            free.remove(holder)
    return [address or free.pop(0) for address in places]


def spare(code: Code, homes: Sequence[str], speeds: Mapping[str, float], piece: int | None) -> str:
    """Choose the worker on which a lost piece is rebuilt.

    It is the fastest of the workers that hold the fewest pieces. A worker without a copy of the
    same block comes first, so that the loss of one worker loses no more copies than before. If the
    code could not survive its loss, it is the next one, up to the eighth. If none of these will do,
    it is the first one after all.

    Parameters
    ----------
    code : Code
    homes : sequence of str
        The worker of each piece.
    speeds : mapping of str to float
        The predicted speed of each worker that there is.
    piece : int or None
        The lost piece; None for other data of the array, with which any worker will do.

    Returns
    -------
    str
        An address, or an empty string if there is no worker.

    Examples
    --------
    >>> from dask_coded.codes import Repetition
    >>> code = Repetition(2, 2)  # pieces 1 and 2 are copies of one block
    >>> spare(code, ["d", "b", "a", "c"], {"a": 2.0, "c": 1.0, "d": 0.5}, piece=1)
    'c'
    """
    pieces = Counter(homes)
    copies: Counter[str] = Counter()
    if piece is not None:
        same = code.group == code.group[piece]
        copies.update(homes[i] for i in same.nonzero()[0].tolist() if i != piece)
    ranked = sorted(speeds, key=lambda a: (copies[a], pieces[a], -speeds[a]))
    if piece is not None:
        # This takes the rank of a matrix for some codes, so it is not asked of all workers.
        for address in ranked[:8]:
            if code.decodable([i for i, h in enumerate(homes) if h != address and i != piece]):
                return address
    return ranked[0] if ranked else ""


def relief(
    code: Code,
    homes: Sequence[str],
    newcomer: str,
    slow: Sequence[str] = (),
    fixed: Container[int] = (),
) -> int | None:
    """Choose a piece for a new worker to take over from a worker that holds too much, or is slow.

    Too much is more pieces than a place of the code has, or more pieces of one group: two copies of
    a block, say, which would be lost together.

    Parameters
    ----------
    code : Code
    homes : sequence of str
        The worker of each piece.
    newcomer : str
    slow : sequence of str
        Workers for which any piece is too much, the slowest first.
    fixed : container of int
        Pieces that the new worker cannot take.

    Returns
    -------
    int or None
        The last piece of the worker that holds the most, but rather one of two copies, and of a
        slow worker. None if no worker holds too much, or if the new worker already has as many
        pieces as a place.

    Examples
    --------
    >>> from dask_coded.codes import MDS, Repetition
    >>> relief(MDS(4, 3), ["a", "b", "a", "c"], newcomer="d")
    2
    >>> relief(MDS(4, 3), ["a", "b", "d", "c"], newcomer="d") is None
    True
    >>> relief(MDS(4, 3), ["a", "b", "d", "c"], newcomer="e", slow=["b"])
    1
    >>> code = Repetition(3, 2)  # pieces 1 and 2 are copies of one block, as are 3 and 4, 5 and 0
    >>> relief(code, ["a", "b", "b", "c", "a", "c"], newcomer="d")
    2
    """
    due = code.pieces // code.n
    groups = code.group.tolist()
    usual = max(Counter(zip(code.place.tolist(), groups, strict=True)).values())
    pieces, copies = Counter(homes), Counter(zip(homes, groups, strict=True))
    if pieces[newcomer] >= due:
        return None

    ranks = {home: len(slow) - i for i, home in enumerate(slow) if home != newcomer}

    def excess(piece: int) -> tuple[bool, int, int, int]:
        home, group = homes[piece], groups[piece]
        return copies[home, group] > usual, pieces[home], ranks.get(home, 0), piece

    given = [
        i
        for i, home in enumerate(homes)
        if copies[newcomer, groups[i]] < usual
        and i not in fixed
        and (excess(i)[0] or pieces[home] > due or home in ranks)
    ]
    return max(given, key=excess, default=None)


def not_slow(speeds: Floats, *delays: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell which workers may run a coordinator, on which all others wait.

    Parameters
    ----------
    speeds : ndarray, shape (workers,)
        Predicted speeds; 0 for a worker that does not answer.
    *delays : ndarray, shape (workers,)
        Seconds that the same thing takes on each worker; NaN where that is not known.

    Returns
    -------
    ndarray of bool, shape (workers,)
        True for workers that are slow by none of these measures, compared with the median. If that
        leaves none, only the speeds count.

    Examples
    --------
    >>> not_slow(np.array([1.0, 0.1, 1.0, 1.0]), np.array([0.02, 0.02, 0.05, np.nan])).tolist()
    [True, False, False, True]
    """
    fast = (speeds > 0) & (speeds >= _SPEED * np.median(speeds)) if len(speeds) else speeds > 0
    prompt = fast.copy()
    for delay in delays:
        known = delay[~np.isnan(delay)]
        if len(known):
            prompt &= ~(delay > _DELAY * np.median(known))
    return prompt if prompt.any() else fast
