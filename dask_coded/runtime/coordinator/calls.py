"""When to ask participants of a round whether they run."""

from __future__ import annotations

import math

#: Seconds between two looks at whether the round waits only for workers that are silent.
LOOK_SECONDS = 0.25
# A worker counts as silent once it has owed an answer for 1 s; it is called before that. Earlier
# calls would come before the first share of most rounds of 2 s.
_OWED = 0.75
# Seconds between two calls, at least.
_PAUSE = 0.5
# A call costs a participant two messages. With this many lags from one to the next, that is a
# hundredth or two of its time, however slow it is. On processes with a twelfth of a core, where
# rounds of 2 s had lags of 20 ms, calls every 0.5 s were more than half of all messages.
_LAGS = 100
# A worker that was stopped when the round began has a lag that says nothing of its speed.
_LONGEST = 10.0


class Calls:
    """Decides which participants are called.

    A worker may stop after its first answer, and then owes none. A healthy worker may need long for
    its next share, and must not count as silent meanwhile.

    Examples
    --------
    >>> calls = Calls()
    >>> [calls.due(0, None, heard=1.0, lag=0.02, now=now) for now in (2.0, 3.0, 4.0, 5.0)]
    [False, True, False, True]
    >>> [calls.due(1, asked=1.0, heard=1.0, lag=0.02, now=now) for now in (1.5, 1.8, 9.0)]
    [False, True, False]
    """

    def __init__(self) -> None:
        self._called: dict[int, float] = {}

    def due(self, worker: int, asked: float | None, heard: float, lag: float, now: float) -> bool:
        """Whether to call a participant that owes stripes; it counts as called if so.

        Parameters
        ----------
        worker : int
        asked : float or None
            Since when it has owed an answer; None if it owes none.
        heard : float
            When it was assigned its first stripes, or sent its last share.
        lag : float
            Seconds that it needs to start on new work and to report it.
        now : float
        """
        called = self._called.get(worker, -math.inf)
        if asked is None:
            pause = min(max(_LAGS * lag, _PAUSE), _LONGEST)
            due = now - max(heard, called) >= pause
        else:
            due = now - asked >= _OWED and called < asked
        if due:
            self._called[worker] = now
        return due
