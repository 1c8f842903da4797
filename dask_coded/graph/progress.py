"""How a loop that runs in the cluster tells the client how far it is.

The loop is a task on a worker and calls a :class:`Reporter` every round; the client, inside
:func:`watch`, hears of at most ten rounds a second and of the last one. Between them is a topic of
the scheduler's event log: no function travels, and a client that went away disturbs nobody.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from distributed import default_client, get_worker


@dataclass(frozen=True)
class Progress:
    """One round of a loop.

    Parameters
    ----------
    round : int
        Its number, from 1.
    residual : float
        What the loop wants to become small.
    seconds : float or None
        How long the product took; None where the operator does not say.
    workers : int or None
        How many workers' shares were used; None where the operator does not say.
    """

    round: int
    residual: float
    seconds: float | None = None
    workers: int | None = None


def _log_on_worker(topic: str, message: dict[str, Any]) -> None:
    get_worker().log_event(topic, message)


class Reporter:
    """Log rounds under a topic of the cluster, not all of them but always the last.

    Parameters
    ----------
    topic : str
        Where to log.
    interval : float
        Seconds between two reports, at least.
    clock, log : callable
        Where time comes from and events go to; tests pass their own.

    Examples
    --------
    >>> times, rounds = iter([0.0, 0.04, 0.08, 0.12]), []
    >>> def log(topic, event):
    ...     rounds.append(event["round"])
    >>> report = Reporter("a-loop", clock=lambda: next(times), log=log)
    >>> for i in range(1, 5):
    ...     report(Progress(i, residual=0.5**i), last=(i == 4))
    >>> rounds
    [1, 4]
    """

    def __init__(
        self,
        topic: str,
        interval: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[str, dict[str, Any]], object] = _log_on_worker,
    ) -> None:
        self.topic = topic
        self.interval = interval
        self._clock = clock
        self._log = log
        self._next = float("-inf")

    def __call__(self, progress: Progress, last: bool) -> None:
        now = self._clock()
        if last or now >= self._next:
            self._next = now + self.interval
            self._log(self.topic, asdict(progress))


@contextmanager
def watch(callback: Callable[[Progress], object] | None, client: Any) -> Iterator[Reporter | None]:
    """Call ``callback`` with the rounds of the loop that is given the yielded reporter.

    Parameters
    ----------
    callback : callable or None
        Called in the client's event loop: it should return soon. None: nothing is reported.
    client : distributed.Client or None
        None for the current one.

    Yields
    ------
    Reporter or None
        To be passed to the loop in the cluster.
    """
    if callback is None:
        yield None
        return
    client = client or default_client()
    reporter = Reporter(f"coded-progress-{uuid.uuid4().hex}")
    # The scheduler adds to the message who sent it.
    names = [field.name for field in fields(Progress)]
    client.subscribe_topic(
        reporter.topic, lambda event: callback(Progress(*(event[1][name] for name in names)))
    )
    try:
        yield reporter
    finally:
        client.unsubscribe_topic(reporter.topic)
