"""Whether the sum of a training step comes about: who has it, and who may have stopped.

Once all units are computed, the workers that computed them add up and pass on the chunks that they
own. All others wait for them. If that takes longer than a unit, the ledger asks these owners
whether they are there, and again after twice the time. A worker answers in the thread that adds up,
so one whose thread is stuck does not, though its event loop goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf


class Summing:
    """Which workers have the sum, when to ask those that owe it, and who is to fetch it from whom.

    Attributes
    ----------
    has : set of int
        Workers that have the sum.
    due : float
        When to ask the owners of chunks, infinity if there is nothing to ask for.

    Examples
    --------
    >>> summing = Summing()
    >>> summing.expect(now=1.0, until=1.5)
    >>> summing.due
    1.5
    >>> summing.has.add(2)
    >>> [*summing.to_fetch([0, 2])], [*summing.to_fetch([0, 1])]
    ([(0, 2)], [(1, 2)])
    """

    def __init__(self) -> None:
        self.has: set[int] = set()
        self.due = inf
        self._wait = 0.0
        # By worker, the one that it was told to fetch the sum from.
        self._sources: dict[int, int] = {}

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
        self._sources.pop(worker, None)

    def to_fetch(self, workers: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield which of some workers fetch the sum from which, each once while the source lives.

        A sum is as large as the parameters, so a worker that fetches it twice is late for longer.
        """
        sources = sorted(self.has)
        for worker in workers:
            if worker not in self.has and self._sources.get(worker) not in self.has:
                source = self._sources[worker] = sources[worker % len(sources)]
                yield worker, source
