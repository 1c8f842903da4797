"""When to ask participants of a round whether they run."""

from __future__ import annotations

import math

# A worker is called once it has owed an answer for this share of the time after which it counts as
# silent. That is after 0.6 s for most. In most rounds of 2 s, the first share comes earlier.
_OWED = 0.6
# A call costs a participant two messages. It comes after this many lags without a word, so calls
# take a worker 1 or 2 % of its time, unless its lags are longer than 50 ms. On processes with a
# twelfth of a core, where rounds of 2 s had lags of 20 ms, calls every 0.5 s were more than half of
# all messages.
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
    >>> [calls.due(0, None, heard=1.0, lag=0.02, patience=1.0, now=now) for now in (2.0, 3.0)]
    [False, True]
    >>> [calls.due(0, 1.0, heard=1.0, lag=0.02, patience=1.0, now=now) for now in (1.5, 1.75)]
    [False, True]
    >>> calls.record(0, now=1.75)
    >>> calls.due(0, 1.0, heard=1.0, lag=0.02, patience=1.0, now=9.0)
    False
    """

    def __init__(self) -> None:
        self._called: dict[int, float] = {}

    def due(
        self,
        worker: int,
        asked: float | None,
        heard: float,
        lag: float,
        patience: float,
        now: float,
    ) -> bool:
        """Whether to call a participant that owes stripes.

        Parameters
        ----------
        worker : int
        asked : float or None
            Since when it has owed an answer; None if it owes none.
        heard : float
            When it was assigned its first stripes, or sent its last share.
        lag : float
            Seconds that it needs to start on new work and to report it, or to answer a call.
        patience : float
            Seconds for which it may owe an answer before it counts as silent.
        now : float
        """
        called = self._called.get(worker, -math.inf)
        if asked is None:
            return now - max(heard, called) >= min(max(_LAGS * lag, _LEAST), _MOST)
        return now - asked >= _OWED * patience and called < asked

    def record(self, worker: int, now: float) -> None:
        """Record that a participant was called; it owes an answer since then, or for longer."""
        self._called[worker] = now
