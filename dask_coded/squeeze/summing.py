"""Whether the sum of a training step comes about: who has it, and who may have stopped.

Once all units are computed, the workers that computed them add up and pass on the chunks that they
own. All others wait for them. If that takes longer than a unit, the ledger asks these owners
whether they are there, and again after twice the time. A worker answers in the thread that adds up,
so one whose thread is stuck does not, though its event loop goes on.

If an owner is lost or stuck, the others fetch the sum from a worker that has it. That one may be
stuck as well, so a worker that has no sum for long is told to fetch it from the next one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass
class _Fetching:
    """Where a worker was told to fetch the sum, and when to name another worker."""

    source: int
    due: float
    wait: float


class Summing:
    """Which workers have the sum, when to ask those that owe it, and who is to fetch it from whom.

    Attributes
    ----------
    has : set of int
        Workers that have the sum.
    due : float
        When to ask the owners of chunks, infinity if there is nothing to ask for.
    overdue : float
        When a worker that was told to fetch the sum should have it, infinity if none was.

    Examples
    --------
    >>> summing = Summing()
    >>> summing.expect(now=1.0, until=1.5)
    >>> summing.due
    1.5
    >>> summing.has.add(2)
    >>> summing.to_fetch([0, 2], now=1.5, wait=0.5), summing.to_fetch([0, 1], now=1.6, wait=0.6)
    ([(0, 2)], [(1, 2)])
    >>> summing.has.add(1)
    >>> summing.to_fetch([0, 1, 2], now=summing.overdue, wait=1.0)
    [(0, 1)]
    """

    def __init__(self) -> None:
        self.has: set[int] = set()
        self.due = self.overdue = inf
        self._wait = 0.0
        self._fetching: dict[int, _Fetching] = {}

    def expect(self, now: float, until: float) -> None:
        """Wait for the sum, which has just begun."""
        self.due, self._wait = until, until - now

    def ask_again(self, now: float) -> None:
        """Record that the owners were asked."""
        self._wait *= 2
        self.due = now + self._wait

    def stop(self) -> None:
        """Wait no more: every worker has the sum, or some unit is missing again."""
        self.due = inf

    def lose(self, worker: int) -> None:
        """Record that a worker is lost."""
        self.has.discard(worker)
        self._fetching.pop(worker, None)

    def to_fetch(self, workers: Sequence[int], now: float, wait: float) -> list[tuple[int, int]]:
        """Return which of some workers fetch the sum from which, if they were not told yet.

        A sum is as large as the parameters, so a worker that fetches it twice is late for longer.
        It is told again if its source is lost, or if it has waited for ``wait`` seconds and another
        worker has the sum, too; then after twice the time.
        """
        sources = sorted(self.has)
        found: list[tuple[int, int]] = []
        waiting = [worker for worker in workers if sources and worker not in self.has]
        for worker in waiting:
            told = self._fetching.get(worker)
            if told is None or told.source not in self.has:
                source = sources[worker % len(sources)]
                told = self._fetching[worker] = _Fetching(source, now + wait, wait)
                found.append((worker, source))
            elif told.due <= now:
                told.wait = max(2 * told.wait, wait)
                told.due = now + told.wait
                source = sources[bisect_right(sources, told.source) % len(sources)]
                if source != told.source:
                    told.source = source
                    found.append((worker, source))
        self.overdue = min((self._fetching[worker].due for worker in waiting), default=inf)
        return found
