"""When to ask participants of a round whether they run."""

from __future__ import annotations

import math

# A worker counts as silent once it has owed an answer for 1 s, so it is called some time before. In
# most rounds of 2 s, the first share comes earlier.
_OWED = 0.6
# A call costs a participant two messages. It comes after this many lags without a word, so calls
# take a worker 1 or 2 % of its time, unless its lags are longer than 50 ms. On processes with a
# twelfth of a core, where rounds of 2 s had lags of 20 ms, calls every 0.5 s were more than half of
# all messages. A worker with a hundredth of a core first reports after seconds; until then the time
# of its last answer stands for its lag.
_LAGS = 100
# The limits of that, in seconds. A lag may be longer than a worker is slow: it includes the way of
# the operand, and the time for which the worker was stopped.
_LEAST, _MOST = 0.5, 5.0


class Calls:
    """Decides which participants are called.

    A worker may stop after its first answer, and then owes none. A healthy worker may need long for
    its next share, and must not count as silent meanwhile.

    Examples
    --------
    >>> calls = Calls()
    >>> [calls.due(0, None, heard=1.0, lag=0.02, now=now) for now in (2.0, 3.0)]
    [False, True]
    >>> [calls.due(0, asked=1.0, heard=1.0, lag=0.02, now=now) for now in (1.5, 1.75)]
    [False, True]
    >>> calls.record(0, now=1.75)
    >>> calls.due(0, asked=1.0, heard=1.0, lag=0.02, now=9.0)
    False
    >>> calls.answered(0, now=1.8)
    >>> [calls.due(0, None, heard=1.0, lag=0.0, now=now) for now in (6.5, 7.0)]
    [False, True]
    """

    def __init__(self) -> None:
        self._called: dict[int, float] = {}
        # Seconds that each participant took for its last answer.
        self._took: dict[int, float] = {}

    def due(self, worker: int, asked: float | None, heard: float, lag: float, now: float) -> bool:
        """Whether to call a participant that owes stripes.

        Parameters
        ----------
        worker : int
        asked : float or None
            Since when it has owed an answer; None if it owes none.
        heard : float
            When it was assigned its first stripes, or sent its last share.
        lag : float
            Seconds that it has needed to start on new work and to report it; 0 before it has
            reported in this round. Until then the time of its last answer counts instead.
        now : float
        """
        called = self._called.get(worker, -math.inf)
        if asked is None:
            lag = lag or self._took.get(worker, 0.0)
            return now - max(heard, called) >= min(max(_LAGS * lag, _LEAST), _MOST)
        return now - asked >= _OWED and called < asked

    def record(self, worker: int, now: float) -> None:
        """Record that a participant was called; it owes an answer since then, or for longer."""
        self._called[worker] = now

    def answered(self, worker: int, now: float) -> None:
        """Record that a participant has answered a call."""
        self._took[worker] = now - self._called[worker]
