"""Which worker gets which place of a code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dask_coded.codes import Code
from dask_coded.typing import Floats


@dataclass(frozen=True)
class WorkerInfo:
    """A worker that pieces can be put on, and how many it has already."""

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
        Those that can be used.
    speeds : ndarray, shape (workers,)
        Predicted; the fast ones are taken where there are more than are needed.
    holders : iterable of (int, str or None)
        The place that each source block is wanted at, and the worker that holds it already, if any:
        it stays there.
    oversubscribe : bool
        Allow several places on one worker when there are fewer workers than places.

    Returns
    -------
    list of str
        The address for each place.

    Raises
    ------
    ValueError
        If there are fewer workers than places.
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
    # One of each host in turn, so that a host takes as few places with it as possible.
    turns = [a for i in range(len(workers)) for h in by_host.values() for a in h[i : i + 1]]
    rounds = -(-code.n // len(turns))
    free = (turns * rounds)[: code.n]
    places: list[str | None] = [None] * code.n
    for where, holder in holders:
        if holder in free and places[where] is None:
            places[where] = holder
            free.remove(holder)
    return [address or free.pop(0) for address in places]


def relief(homes: Sequence[str], due: int, newcomer: str) -> int | None:
    """Choose a piece that a new worker takes over from one that holds more than its due.

    Parameters
    ----------
    homes : sequence of str
        The worker of each piece.
    due : int
        Pieces that a worker holds if there are enough workers.
    newcomer : str

    Returns
    -------
    int or None
        The last piece of the worker that holds the most; None if nothing is to be taken over.

    Examples
    --------
    >>> relief(["a", "b", "a", "c"], due=1, newcomer="d")
    2
    >>> relief(["a", "b", "d", "c"], due=1, newcomer="d") is None
    True
    """
    fullest = max(homes, key=homes.count)
    if homes.count(newcomer) >= due or homes.count(fullest) <= due:
        return None
    return max(i for i, home in enumerate(homes) if home == fullest)
