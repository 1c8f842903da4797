"""What each worker owes and has done in a round, and how long it is expected to need.

A coordinator of thousands of workers hears from one of them at a time, and has tens of microseconds
to react. So nothing is computed again for all workers: what follows from one worker's account is
kept up to date with that account, and :meth:`Workers.estimate` adds what follows from the time.

Without that, an event at 1,000 workers takes 1.2 ms: half of it for some 40 array operations and
two medians over all workers, the other half for searches over all pairs of workers and stripes, for
stripes without enough copies and for donors that have nothing to give.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from dask_coded.rounds.batches import BATCH_SHARE
from dask_coded.rounds.reporting import Reporting
from dask_coded.typing import Bools, Floats

# A worker is late once it has been silent for this many times as long as expected. The margin is
# for a report that is just due, and for the batch in hand, which the worker has to finish first.
_LATE = 2
# Before the first report of a round no duration is known, because predicted speeds may be in any
# unit. A stripe is then expected to take this many report intervals.
_INTERVALS_OF_A_STRIPE = 10
# A predicted speed counts as much as one measured for this many lags. On a host with more workers
# than cores, or under CPU quotas, a worker computes in bursts, and its first reports are off by a
# factor of 2 either way. On processes with 0.15 of a core, in rounds of 0.2 s and with lags of
# 25 ms, 8 % of the work was wasted when only measured speeds counted. With two lags, 4 % is wasted,
# and rounds take 0.87 to 0.93 of the time. With one lag and with six, the results are the same.
_TRUST_LAGS = 2
# A worker is overdue once it should have run dry this many lags ago and has not said so. In
# simulated rounds of traces, 1 and 2 lags were the same, and on processes, 2 were better.
_OVERDUE_LAGS = 2
# The smallest float: x / 0 is infinite for x > 0, and 0 / 0 is 0.
_TINY = 5e-324


class Forecast(NamedTuple):
    """What is predicted of workers before a training step.

    Attributes
    ----------
    speeds : ndarray, shape (workers,)
        Units per second.
    lags : ndarray, shape (workers,), optional
        Expected lags in seconds, see :class:`~dask_coded.rounds.Round`.
    doubt : float
        Expected relative error of the speeds. With 0 they are trusted to the point of closing the
        step together with the first deal.
    """

    speeds: Floats
    lags: Floats | None = None
    doubt: float = 0.0


class Estimate(NamedTuple):
    """The expected state of all workers, each field of shape (workers,).

    It holds until the next assignment, withdrawal or report.

    Attributes
    ----------
    speed : ndarray
        Work per second from now on.
    backlog : ndarray
        Work owed, minus the work believed to be done since the last report.
    latest, eta : ndarray
        Seconds until the worker runs dry, according to its reports (``latest``) and to the estimate
        (``eta``). Infinite for a worker that owes work and makes no progress.
    overdue : ndarray of bool
        Workers that should have run dry two lags ago and have not said so.
    """

    speed: Floats
    backlog: Floats
    latest: Floats
    eta: Floats
    overdue: Bools


class Median:
    """The median of numbers that come and go.

    Examples
    --------
    >>> median = Median()
    >>> for number in (3.0, 1.0, 2.0, 9.0):
    ...     median.add(number)
    >>> median.value()
    2.5
    >>> median.discard(9.0)
    >>> median.value()
    2.0
    """

    def __init__(self) -> None:
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, number: float) -> None:
        insort(self._ordered, number)

    def discard(self, number: float) -> None:
        """Take away a number that was added before."""
        del self._ordered[bisect_left(self._ordered, number)]

    def value(self) -> float:
        """Return the median of the numbers, of which there must be one at least."""
        half, odd = divmod(len(self._ordered), 2)
        if odd:
            return self._ordered[half]
        return (self._ordered[half - 1] + self._ordered[half]) / 2


class Workers:
    """The accounts of all workers, and what is expected of each.

    Parameters
    ----------
    prior : ndarray, shape (workers,)
        Predicted speeds, in any common unit.
    expected_lags : ndarray, shape (workers,)
        Seconds that each worker is expected to need to start on new work and to report it. If all
        are zero, the unit of the predicted speeds is unknown, and they do not count beside measured
        ones.
    reporting : Reporting
    stripe : float
        The mean work of a stripe.
    least_batch : int
        Stripes that workers compute at least by one product.

    Attributes
    ----------
    todo, done : ndarray, shape (workers,)
        Work owed, and work that has come back in this round.
    busy : ndarray, shape (workers,)
        Seconds for which the work that has come back was computed.
    began, heard : ndarray, shape (workers,)
        When each worker was first assigned work, and when it last reported; NaN before.
    """

    def __init__(
        self,
        prior: Floats,
        expected_lags: Floats,
        reporting: Reporting,
        stripe: float,
        least_batch: int = 1,
    ) -> None:
        count = len(prior)
        self.prior = np.array(prior, dtype=np.float64)
        self.todo: Floats = np.zeros(count)
        self.done: Floats = np.zeros(count)
        self.busy: Floats = np.zeros(count)
        self.began: Floats = np.full(count, np.nan)
        self.heard: Floats = np.full(count, np.nan)
        # Since when a worker has owed a report; NaN if it owes none. A withdrawal does not reset
        # it, because a stopped worker would then look healthy after each one.
        self._asked: Floats = np.full(count, np.nan)
        # From an assignment to the first report, minus the computing: messages, queues, stalls.
        self.measured_lag: Floats = np.full(count, np.nan)
        self._reporting = reporting
        self._stripe = stripe
        self._least_work = least_batch * stripe
        self._measured_lags = Median()
        self._typical_lag = float(np.median(expected_lags))
        # The seconds for which each worker counts as having run at its predicted speed.
        self._trust = _TRUST_LAGS * self._typical_lag
        # Workers without a measured or an expected lag are expected to have the typical one.
        self._typical = expected_lags <= 0
        self._lags: Floats = np.where(self._typical, self._typical_lag, expected_lags)
        # Speeds of this round over predicted ones.
        self._ratio: Floats = np.full(count, np.nan)
        self._ratios = Median()
        # What follows from the accounts: the speed, the seconds until a worker runs dry, the
        # seconds for which it may be silent, and those before it starts to compute. For workers
        # that have not reported, these also follow from the typical ratio and the typical lag.
        self._unknown: Bools = np.ones(count, dtype=bool)
        self._speed: Floats = np.zeros(count)
        self._latest: Floats = np.zeros(count)
        self._normal: Floats = np.zeros(count)
        self._start: Floats = np.zeros(count)
        self._stale = True

    # -- events --------------------------------------------------------------------------------

    def expect(self, worker: int, speed: float) -> None:
        """Change the predicted speed of a worker."""
        self.prior[worker] = speed
        self._renew(worker)

    def owe(self, worker: int, todo: float) -> None:
        """Record what a worker owes after a withdrawal or a loss."""
        self.todo[worker] = todo
        self._renew(worker)

    def leave(self, worker: int) -> None:
        """Record that a worker has left: it owes no report until it is back and has work again."""
        self._asked[worker] = np.nan

    def assign(self, worker: int, todo: float, now: float) -> None:
        """Record what a worker owes after an assignment."""
        if np.isnan(self._asked[worker]):
            self._asked[worker] = now
            if np.isnan(self.measured_lag[worker]):
                # It begins now, also if it was away and had not reported before.
                self.began[worker] = self.heard[worker] = now
        self.owe(worker, todo)

    def report(self, worker: int, done: float, seconds: float, todo: float, now: float) -> None:
        """Record a report: all that has come back so far, its last ``seconds``, what is owed."""
        if np.isnan(self.measured_lag[worker]) and not np.isnan(self._asked[worker]):
            lag = max(float(now - self._asked[worker]) - seconds, 0.0)
            self.measured_lag[worker] = self._lags[worker] = lag
            self._measured_lags.add(lag)
            self._typical[worker] = False
            self._stale = True
        self.heard[worker] = now
        self.busy[worker] += seconds
        self.done[worker] = done
        self._asked[worker] = now if todo > 0 else np.nan
        self.owe(worker, todo)

    # -- what is expected ----------------------------------------------------------------------

    @property
    def lag(self) -> float:
        """Seconds that a worker typically needs to start on new work and to report it."""
        return self._measured_lags.value() if len(self._measured_lags) else self._typical_lag

    @property
    def lags(self) -> Floats:
        """The lag of each worker, shape (workers,): measured, else expected, else typical."""
        self._refresh()
        return self._lags

    @property
    def unheard(self) -> Bools:
        """Workers that were assigned work and have not reported yet, shape (workers,)."""
        return np.isnan(self.measured_lag) & ~np.isnan(self.began)

    def estimate(self, now: float) -> Estimate:
        """Estimate the state of all workers.

        The speed of a worker is a mean of the predicted one and of the one measured in this round,
        which counts more with each report. Before its first report it is the predicted one, scaled
        by what other workers have reported. A worker is believed to go on at that speed until its
        next report is due. A worker that stays silent for longer is believed to slow down more and
        more. This distinguishes a stopped worker from a busy one.
        """
        self._refresh()
        speed, todo, latest = self._speed, self.todo, self._latest
        quiet = np.fmax(now - self._asked, 0.0)
        overdue = quiet > latest + _OVERDUE_LAGS * self._lags
        if len(self._ratios):
            backlog = todo - speed * (quiet - self._start)
            np.maximum(backlog, 0.0, out=backlog)
            np.minimum(backlog, todo, out=backlog)
        else:
            backlog = todo.copy()
        behind = quiet - self._normal
        late = (behind > 0).nonzero()[0]
        if len(late):
            owed, silent, normal = todo[late], behind[late], self._normal[late]
            speed, latest = speed.copy(), latest.copy()
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                # A worker that is late already is expected to be late by as much again.
                slower = np.where(
                    owed > 0,
                    owed / (owed / speed[late] + silent),
                    speed[late] * normal / (normal + silent),
                )
                latest[late] = owed / np.maximum(slower, _TINY)
            speed[late] = slower
            backlog[late] = owed
        with np.errstate(over="ignore"):
            eta = backlog / np.maximum(speed, _TINY)
        return Estimate(speed, backlog, latest, eta, overdue)

    def _renew(self, worker: int) -> None:
        """Derive what follows from the account of one worker; plain floats are fastest."""
        done, busy = float(self.done[worker]), float(self.busy[worker])
        if not (done > 0 and busy > 0):
            self._stale = True
            return
        todo, prior = float(self.todo[worker]), float(self.prior[worker])
        trust = self._trust if prior > 0 else 0.0
        speed = (done + trust * prior) / (busy + trust)
        if self._unknown[worker]:
            self._unknown[worker] = False
            self._start[worker] = 0.0
        if prior > 0 and (ratio := speed / prior) != (old := float(self._ratio[worker])):
            if old == old:
                self._ratios.discard(old)
            self._ratio[worker] = ratio
            self._ratios.add(ratio)
            self._stale = True
        elapsed = float(self.heard[worker] - self.began[worker])
        left = todo / speed
        self._speed[worker] = speed
        self._latest[worker] = left
        gap = self._reporting.gap(elapsed, left)
        least = max(min(self._least_work, todo), self._stripe)
        in_hand = max((left - gap) * BATCH_SHARE, least / speed)
        self._normal[worker] = _LATE * (gap + in_hand)

    def _refresh(self) -> None:
        """Derive what follows from the typical ratio and lag, for all workers at once."""
        if not self._stale:
            return
        self._stale = False
        some = self._unknown.nonzero()[0]
        if not len(some):
            return
        if len(self._measured_lags):
            self._lags[self._typical] = self.lag
        todo = self.todo[some]
        self._start[some] = self._lags[some]
        self._speed[some] = speed = self.prior[some]
        interval = self._reporting.interval
        # Without any report, no duration is known.
        normal = np.full(len(some), _LATE * _INTERVALS_OF_A_STRIPE * interval)
        if len(self._ratios):
            self._speed[some] = speed = speed * self._ratios.value()
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            self._latest[some] = todo / np.maximum(speed, _TINY)
            if len(self._ratios):
                # The first report comes after one interval, or at the end of the list.
                gap = np.minimum(interval, todo / speed)
                least = np.maximum(np.minimum(self._least_work, todo), self._stripe)
                normal = _LATE * (gap + least / speed)
        self._normal[some] = normal
