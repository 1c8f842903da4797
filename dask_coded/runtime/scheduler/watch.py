"""Which workers owe a sign of life: a record without a clock and without messages."""

from __future__ import annotations

from collections.abc import Collection


class Watch:
    """Which workers owe a sign of life, and for how many ticks of a clock.

    Ticks are counted instead of seconds, so that workers are not blamed when the clock itself
    stands still for a while. A worker that owes an answer is not asked again.

    Examples
    --------
    >>> watch = Watch()
    >>> watch.tick(["a", "b"])
    ['a', 'b']
    >>> watch.heard("a")
    >>> watch.tick(["a", "b"])
    ['a']
    >>> watch.silent(1)
    [('b', 1)]
    """

    def __init__(self) -> None:
        self._owed: dict[str, int] = {}

    def tick(self, workers: Collection[str]) -> list[str]:
        """Begin a tick; return which of the workers that are watched now are to be asked."""
        self._owed = {a: ticks + 1 for a, ticks in self._owed.items() if a in workers}
        asked = [address for address in workers if address not in self._owed]
        self._owed.update(dict.fromkeys(asked, 0))
        return asked

    def owes(self, worker: str) -> bool:
        """Return whether a worker has yet to answer."""
        return worker in self._owed

    def heard(self, worker: str) -> None:
        """Record a sign of life."""
        self._owed.pop(worker, None)

    def silent(self, ticks: int) -> list[tuple[str, int]]:
        """Return the workers that have owed an answer for that long or longer."""
        return [(address, owed) for address, owed in self._owed.items() if owed >= ticks]
