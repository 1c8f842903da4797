"""Which is quicker: a round of all workers, or the whole product by the coordinator alone.

A round of a few workers takes milliseconds, even if nothing is to be computed. One core multiplies
a matrix of a few megabytes in that time.
"""

from __future__ import annotations

import math
from collections import deque

# Of each way the best of the last times counts, because any one may have been disturbed: the first
# round of a loop, for example, connects its workers.
_TIMES = 3
# Alone must take this fraction of a round's time, at most. Near 1 the two would take turns.
_LESS = 0.9
# The other way is tried again once this one has taken as long as this many tries: that costs 2 %.
_TRIES = 50


class Quicker:
    """Decides for one loop whether its next product is a round, from the times of earlier ones.

    Examples
    --------
    Three rounds of 5 ms each. From what the coordinator has computed of them it follows that it
    would take 1 ms to compute everything:

    >>> quicker = Quicker()
    >>> for _ in range(3):
    ...     quicker.took_round(0.005, alone=0.001)
    >>> quicker.is_alone
    True

    It takes longer than that, again and again:

    >>> for _ in range(3):
    ...     quicker.took_alone(0.006)
    >>> quicker.is_alone
    False
    """

    def __init__(self) -> None:
        self._rounds: deque[float] = deque(maxlen=_TIMES)
        self._alone: deque[float] = deque(maxlen=_TIMES)
        self._expected = math.inf
        # Seconds of each way since the other was last tried.
        self._in_rounds = self._in_alone = 0.0

    @property
    def gain(self) -> float:
        """Seconds that each product is expected to take less if it is computed alone; or 0."""
        if not self._rounds:
            return 0.0
        return max(min(self._rounds) - self._best_alone, 0.0)

    @property
    def is_alone(self) -> bool:
        """Whether the next product is better computed alone."""
        if len(self._rounds) < _TIMES:
            return False
        best = min(self._rounds)
        if self._best_alone < _LESS * best:
            return self._in_alone < _TRIES * self._rounds[-1]
        if not self._alone:
            return False
        # Other work on this machine may have made it slow when it was tried.
        return self._expected < _LESS * best and self._in_rounds >= _TRIES * self._alone[-1]

    def took_round(self, seconds: float, alone: float = math.inf) -> None:
        """Record a round.

        Parameters
        ----------
        seconds : float
        alone : float
            Seconds that the coordinator is expected to need for the whole product, according to
            what it has computed in this round; infinity if it has computed nothing.
        """
        self._rounds.append(seconds)
        self._expected = alone
        self._in_rounds += seconds
        self._in_alone = 0.0

    def took_alone(self, seconds: float) -> None:
        """Record a product that the coordinator has computed alone."""
        self._alone.append(seconds)
        self._in_alone += seconds
        self._in_rounds = 0.0

    @property
    def _best_alone(self) -> float:
        return min(self._alone) if self._alone else self._expected
