"""How often workers report within a round, and what one round teaches the next one of its loop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reporting:
    """When workers report.

    A worker reports every ``interval`` seconds at first. Later it waits longer: for the share
    ``growth`` of the time elapsed in the round, but at most until halfway from its last report to
    the end of its list. Towards the end its position matters most, because other workers may take
    over the rest. In simulation, with speeds that vary by 15 %, the halfway rule halves the work
    that is done twice, for a few more messages.

    Parameters
    ----------
    interval : float
        Seconds.
    growth : float
        Share of the elapsed time.
    """

    interval: float = 0.02
    growth: float = 1.0

    def gap(self, elapsed: float, left: float) -> float:
        """Return the seconds to the next report.

        Parameters
        ----------
        elapsed : float
            Seconds from the start of the round to the worker's last report.
        left : float
            Seconds from that report to the end of the worker's list.
        """
        # The first report comes after one interval: `growth` is a share of the elapsed time, 0.
        wait = left / 2 if elapsed > 0 else 0.0
        if self.growth < 1:
            wait = min(wait, self.growth / (1 - self.growth) * elapsed)
        # At the end of its list a worker reports in any case.
        return min(max(self.interval, wait), left)


class Pace:
    """How early to feed workers and how often they report, in the next round of a loop.

    A report costs a worker time, and where predictions hold, it says nothing new. So the number of
    reports follows from how far recent predictions were off, and from the length of a round in
    lags: a worker that is slow to react is also slow to write a report. More than :attr:`MOST`
    would show noise rather than progress.

    In simulation, ten workers with a (10, 7) code replay the speeds of cloud machines in rounds of
    0.3 s, with noise of 20 % on top. If each message costs a worker 10 ms, and a lag is 10 ms,
    rounds take 1.26 of the fluid bound with 5 messages for each worker. They take 1.36 with 8
    messages, which is the number for lags of 1 ms. If a message costs 0.3 ms, and a lag is 1 ms,
    rounds take 1.07 with this number of reports and 1.09 with half of it. On processes with 0.1 of
    a core, in rounds of 1.3 s whose speeds change all the time, twice and four times as many
    reports take 0.99 to 1.01 of the time.

    Even where predictions hold, each worker reports once in the middle of a round. Without that, 3
    messages a worker would do instead of 4, but the one round in which workers become five times
    slower would take longer: 1.16 of the bound instead of 1.09 with one of ten such workers, and
    1.71 instead of 1.23 with three of twelve and a (12, 10) code.

    Parameters
    ----------
    lead : float
        The least number of seconds before running dry at which a worker is fed.
    reporting : Reporting
        That of the first round; in later rounds workers report no more often.

    Attributes
    ----------
    lead, reporting
        Those of the next round.
    slowed : bool
        Whether the last round took unusually long, so that its plan should not be used again.
    """

    #: Reports in a round, at least: one, when a quarter of the round is left.
    LEAST = 4 / 3
    #: Reports in a round, at most.
    MOST = 7
    #: Reports in a round as long as one lag, for each unit of relative error of the predictions.
    FOR_ERRORS = 1.25
    #: The shortest lag to count with, in seconds: reports cost a worker time without any lag, too.
    LEAST_LAG = 0.001
    #: Seconds that a report costs the coordinator, which handles those of all workers in turn.
    HANDLED = 2.5e-5
    #: Relative error to expect where recent rounds have shown none.
    UNSEEN = 0.075
    #: A round is unusually long if it takes this many times as long as the shortest recent one.
    SLOWED = 2.0
    #: Rounds to look back on, so that reports do not become too rare after one unusual round.
    ROUNDS = 3

    def __init__(self, lead: float, reporting: Reporting) -> None:
        self.lead = self._least = lead
        self.reporting = self._finest = reporting
        self.slowed = False
        self._seconds: deque[float] = deque(maxlen=self.ROUNDS)
        self._errors: deque[float] = deque(maxlen=self.ROUNDS)

    def record(self, seconds: float, lag: float, error: float, workers: int = 1) -> None:
        """Record a round.

        Parameters
        ----------
        seconds : float
            Its duration.
        lag : float
            The typical lag of its workers, in seconds.
        error : float
            The mean relative error of the predicted speeds.
        workers : int
            How many there are.
        """
        self.slowed = seconds > self.SLOWED * min(self._seconds, default=seconds)
        self._seconds.append(seconds)
        self._errors.append(error)
        self.lead = max(self._least, lag)
        length = min(self._seconds)
        # The cost of n reports grows as n * lag / length, and what is noticed too late shrinks as
        # 1 / n.
        lags = length / max(lag, self.LEAST_LAG, workers * self.HANDLED)
        wanted = self.FOR_ERRORS * (max(self._errors) + self.UNSEEN) * lags**0.5
        reports = min(max(wanted, self.LEAST), self.MOST)
        interval = max(self._finest.interval, length / reports)
        self.reporting = replace(self._finest, interval=interval)
