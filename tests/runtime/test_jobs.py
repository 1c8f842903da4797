"""One worker's part of a round: assigned stripes are computed and sent in any thread order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dask_coded.rounds import Reporting, StripeRange
from dask_coded.runtime.jobs import Job
from dask_coded.transport.messages import Message, Share, ShareFailed


class Executor:
    """Keeps submitted functions until the test runs them."""

    def __init__(self) -> None:
        self.submitted: list[Callable[[], None]] = []

    def submit(self, function: Callable[[], None]) -> None:
        self.submitted.append(function)

    def run(self) -> None:
        while self.submitted:
            self.submitted.pop(0)()


class Lock:
    """A lock that calls a function after each release, when the event loop could run."""

    def __init__(self, released: Callable[[], None]) -> None:
        self._released = released

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._released()


PIECE = np.arange(16.0).reshape(8, 2)


def product(start: int, stop: int, out: Any) -> Any:
    return np.matmul(PIECE[start:stop], np.ones(2), out=out)


def job(answer: Callable[[Message], None], executor: Any, kernel: Any = product) -> Job:
    edges = {0: np.arange(9)}
    found = Job("run", edges, {0: 8}, answer, executor, 1, Reporting(10, 1), lead=0.0)
    found.begin({0: kernel})
    return found


def sent(messages: list[Message]) -> list[int]:
    shares = [message for message in messages if isinstance(message, Share)]
    assert shares == messages
    return [s for m in shares for _, start, stop in m.ranges for s in range(start, stop)]


def test_every_stripe_is_sent_once():
    messages: list[Message] = []
    executor = Executor()
    work = job(messages.append, executor)
    work.assign([StripeRange(0, 0, 3)])
    work.assign([StripeRange(0, 5, 8)])
    executor.run()
    assert sorted(sent(messages)) == [0, 1, 2, 5, 6, 7]
    for message in messages:
        for (_, start, stop), rows in zip(message.ranges, message.rows, strict=True):
            np.testing.assert_allclose(rows, 4.0 * np.arange(start, stop) + 1)


def test_work_that_arrives_while_the_thread_ends_is_computed():
    for moment in range(12):
        messages: list[Message] = []
        executor = Executor()
        releases = iter(range(1000))
        work = job(messages.append, executor)

        def released(moment: int = moment, work: Job = work, releases: Any = releases) -> None:
            if next(releases) == moment:
                work.assign([StripeRange(0, 6, 8)])

        work._lock = Lock(released)  # type: ignore[assignment]
        work.assign([StripeRange(0, 0, 1)])
        executor.run()
        came = next(releases) > moment
        assert sorted(sent(messages)) == ([0, 6, 7] if came else [0])


def test_stripes_withdrawn_in_time_are_not_computed():
    messages: list[Message] = []
    executor = Executor()
    work = job(messages.append, executor)
    work.assign([StripeRange(0, 0, 8)])
    work.withdraw([StripeRange(0, 4, 8)])
    work.assign([StripeRange(0, 7, 8)])
    executor.run()
    assert sorted(sent(messages)) == [0, 1, 2, 3, 7]


def test_a_failure_is_reported():
    messages: list[Message] = []
    executor = Executor()

    def fail(a: int, b: int, out: Any) -> None:
        raise MemoryError("no room")

    work = job(messages.append, executor, fail)
    work.assign([StripeRange(0, 0, 1)])
    executor.run()
    assert messages == [ShareFailed("run", "MemoryError: no room")]


def test_a_stripe_that_was_sent_is_not_computed_again():
    """The coordinator may be reading it in shared memory when it is assigned again."""
    computed: list[int] = []

    def counted(start: int, stop: int, out: Any) -> Any:
        computed.extend(range(start, stop))
        return product(start, stop, out)

    messages: list[Message] = []
    executor = Executor()
    work = job(messages.append, executor, counted)
    work.assign([StripeRange(0, 2, 4)])
    executor.run()
    work._stripe = 1e-9  # batches of many stripes from now on
    for part in (StripeRange(0, 3, 6), StripeRange(0, 0, 8)):
        work.assign([part])
        executor.run()
    assert sorted(computed) == list(range(8))
    assert sorted(sent(messages)) == list(range(8))
