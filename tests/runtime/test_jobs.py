"""One worker's part of a round: assigned stripes are computed and sent in any thread order."""

from __future__ import annotations

import math
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from dask_coded.rounds import StripeRange
from dask_coded.runtime.messages import Failed, Share, StartRound
from dask_coded.runtime.worker import jobs
from dask_coded.runtime.worker.jobs import Held, Job, Place
from dask_coded.runtime.worker.output import Output
from dask_coded.transport.memory import Mappings, Memory
from dask_coded.transport.messages import Message


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


ROWS = 1 << 14


def large(start: int, stop: int, out: Any) -> Any:
    if out is None:
        return np.arange(start, stop, dtype=float)
    out[:] = np.arange(start, stop)
    return out


def prepared(
    answer: Callable[[Message], None],
    executor: Any,
    *kernels: Any,
    rows: int = 8,
    stripes: int = 8,
    largest: int = 1 << 20,
    entries: float = math.inf,
    threads: int = 1,
    crowded: bool = False,
    least: int = 1,
    lead: float = 0.0,
    **options: Any,
) -> Job:
    """Return a job with one piece for each kernel, whose operand is not here yet."""
    start = StartRound(
        "run",
        kernel="",
        ticket=(None, ()),
        shared=False,
        stripes=stripes,
        pieces=(),
        ranges=(),
        least_batch=least,
        interval=10,
        growth=1,
        lead=lead,
        series="",
    )
    place = Place(executor, threads, lambda: crowded, "on a worker")
    pieces = {
        i: Held(rows, rows, lambda x, kernel=kernel: kernel, largest, entries)
        for i, kernel in enumerate(kernels)
    }
    return Job(start, pieces, answer, place, **options)


def job(
    answer: Callable[[Message], None], executor: Any, kernel: Any = product, **options: Any
) -> Job:
    found = prepared(answer, executor, kernel, **options)
    found.begin(None)
    return found


def large_job(answer: Callable[[Message], None], executor: Any, **options: Any) -> Job:
    found = job(answer, executor, large, rows=ROWS, **options)
    found.assign([StripeRange(0, 0, 8)])
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


def test_several_threads_compute_one_range():
    executor = Executor()
    work = job(lambda m: None, executor, threads=4)
    work.assign([StripeRange(0, 0, 3)])
    assert len(executor.submitted) == 3
    work.assign([StripeRange(0, 3, 8)])
    assert len(executor.submitted) == 4


def test_free_threads_compute_what_comes_while_others_are_busy():
    executor = Executor()
    submitted: list[int] = []

    def kernel(start: int, stop: int, out: Any) -> Any:
        if start < stop <= 1:
            work.assign([StripeRange(0, 4, 5)])
            submitted.append(len(executor.submitted))
        return product(start, stop, out)

    work = job(lambda m: None, executor, kernel, threads=2)
    work.assign([StripeRange(0, 0, 1)])
    executor.submitted.pop(0)()
    assert submitted == [1]  # the second thread


def test_jobs_take_turns_after_each_batch():
    executor, order = Executor(), []

    def kernel(name: str) -> Any:
        def compute(start: int, stop: int, out: Any) -> Any:
            if stop > start:
                order.append(name)
            return product(start, stop, out)

        return compute

    messages: list[Message] = []
    for name in "ab":
        work = job(messages.append, executor, kernel(name), largest=1, crowded=True)
        work.assign([StripeRange(0, 0, 3)])
    executor.run()
    assert order == ["a", "b"] * 3
    assert sorted(sent(messages)) == [0, 0, 1, 1, 2, 2]


def test_threads_that_end_together_send_one_report():
    messages: list[Message] = []
    threads = []

    class Threads:
        def submit(self, function: Callable[[], None]) -> None:
            threads.append(threading.Thread(target=function))

    both = threading.Barrier(2)

    def kernel(start: int, stop: int, out: Any) -> Any:
        if stop > start:
            both.wait(timeout=60)
        return product(start, stop, out)

    # No report because it is nearly dry.
    work = job(messages.append, Threads(), kernel, threads=2, lead=1e6, largest=1)
    work.assign([StripeRange(0, 0, 2)])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sent(messages)) == [0, 1]
    assert len(messages) == 1


def test_products_are_not_smaller_than_the_least_batch():
    products = []

    def kernel(start: int, stop: int, out: Any) -> Any:
        if start < stop:  # a job learns the type of its rows from an empty product
            products.append(stop - start)
        return product(start, stop, out)

    messages: list[Message] = []
    executor = Executor()
    work = job(messages.append, executor, kernel, least=3)
    work.assign([StripeRange(0, 0, 8)])
    executor.run()
    assert products[0] == 3  # later ones are larger if stripes take no time
    assert sorted(sent(messages)) == [*range(8)]


@pytest.mark.parametrize(
    "entries, inline", [(99.0, True), (100.0, False), (math.inf, False)], ids=str
)
def test_a_small_job_needs_no_thread(entries, inline, monkeypatch):
    monkeypatch.setattr(jobs, "_INLINE", 100)
    messages: list[Message] = []
    executor = Executor()
    work = job(messages.append, executor, entries=entries)
    work.assign([StripeRange(0, 0, 3), StripeRange(0, 5, 8)])
    assert bool(executor.submitted) != inline
    assert sorted(sent(messages)) == ([0, 1, 2, 5, 6, 7] if inline else [])
    executor.run()
    assert sorted(sent(messages)) == [0, 1, 2, 5, 6, 7]


def test_a_job_with_many_columns_is_not_small(monkeypatch):
    monkeypatch.setattr(jobs, "_INLINE", 100)

    def wide(start: int, stop: int, out: Any) -> Any:
        return np.zeros((stop - start, 10))

    executor = Executor()
    work = job(Mock(), executor, wide, entries=16.0)
    work.assign([StripeRange(0, 0, 3)])
    assert executor.submitted


def test_a_first_batch_does_not_show_that_the_list_is_about_to_end(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(jobs, "perf_counter", lambda: 0.001 * next(now))
    messages: list[Message] = []
    executor = Executor()
    work = job(messages.append, executor, lead=1)
    work.assign([StripeRange(0, 0, 8)])
    executor.run()
    assert [len(message.ranges) for message in messages] == [1]
    assert sorted(sent(messages)) == list(range(8))


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


@pytest.mark.parametrize(
    "threads, most, expected",
    [(1, 40, [1, 3, 3, 2, 2, 2]), (1, 2, [1, 2, 1, 2, 2, 2, 2, 2]), (2, 40, [1, 1, 1, 1])],
    ids=["alone", "with little memory", "with another thread"],
)
def test_batches_become_smaller_towards_the_end_of_the_list(threads, most, expected, monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(jobs, "perf_counter", lambda: 0.01 * next(now))
    sizes: list[int] = []

    def counted(start: int, stop: int, out: Any) -> Any:
        if stop > start:
            sizes.append(stop - start)
        return np.zeros(stop - start)

    executor, sizes_of = Executor(), {"rows": 40, "stripes": 40, "largest": most}
    work = job(Mock(), executor, counted, threads=threads, **sizes_of)
    # No batch crosses the end of a range, because its rows would not be neighbours.
    work.assign([StripeRange(0, 30, 34), StripeRange(0, 0, 24)])
    executor.run()
    assert sizes == expected + [1] * (28 - sum(expected))


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
    (message,) = messages
    assert isinstance(message, Failed) and message.pieces == (0,)
    error = pickle.loads(message.error)
    assert repr(error) == "MemoryError('no room')"
    assert error.__notes__ == ["Raised on a worker"]
    assert "in fail" in "".join(traceback.format_exception(error))


def test_a_piece_that_fails_does_not_keep_a_worker_from_its_others():
    def fail(a: int, b: int, out: Any) -> Any:
        if b > 2:
            raise MemoryError("no room")
        return product(a, b, out)

    messages: list[Message] = []
    executor = Executor()
    work = prepared(messages.append, executor, fail, product)
    work.assign([StripeRange(0, 0, 8), StripeRange(1, 2, 5)])
    work.begin(None)
    executor.run()
    work.assign([StripeRange(0, 5, 6), StripeRange(1, 5, 6)])
    executor.run()
    failed = [message for message in messages if isinstance(message, Failed)]
    assert [message.pieces for message in failed] == [(0,)]
    shares = [message for message in messages if isinstance(message, Share)]
    found = {(p, s) for m in shares for p, start, stop in m.ranges for s in range(start, stop)}
    assert (0, 5) not in found
    assert {part for part in found if part[0]} == {(1, 2), (1, 3), (1, 4), (1, 5)}


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


@pytest.mark.parametrize("memory", [None, Memory()], ids=["in messages", "shared"])
def test_the_memory_of_rows_is_used_again_in_the_next_round(memory):
    executor, output, places = Executor(), None, set()
    mappings = Mappings(most=1)
    for _ in range(3):
        messages: list[Message] = []
        work = large_job(messages.append, executor, memory=memory, previous=output)
        executor.run()
        assert isinstance(messages[-1], Share)
        for (_, start, stop), rows in zip(messages[-1].ranges, messages[-1].rows, strict=True):
            if memory is not None:
                places.add(rows.nonce)
                rows = mappings.view(rows)
            else:
                places.add(rows.ctypes.data)
            np.testing.assert_array_equal(rows, np.arange(start * ROWS // 8, stop * ROWS // 8))
        output = work.stop()
        assert output is not None
    assert len(places) == 1


def test_the_memory_of_other_rows_is_not_used_again():
    executor = Executor()
    work = large_job(lambda message: None, executor)
    executor.run()
    output = work.stop()
    none = np.zeros((0,), np.float32)
    for lengths, row, memory in (
        ({0: ROWS}, none, None),
        ({0: ROWS + 1}, np.zeros(0), None),
        ({1: ROWS}, np.zeros(0), None),
        ({0: ROWS}, np.zeros((0, 2)), None),
        ({0: ROWS}, np.zeros(0), Memory()),
    ):
        found = Output.of(lengths, row, memory, output)
        assert found is not None and found is not output
    assert Output.of({0: ROWS}, np.zeros(0), None, output) is output


def test_memory_that_a_thread_still_writes_to_is_not_used_again():
    stopped: list[Any] = []

    def kernel(start: int, stop: int, out: Any) -> Any:
        if stop > start:
            stopped.append(work.stop())
        return large(start, stop, out)

    executor = Executor()
    work = job(lambda message: None, executor, kernel, rows=ROWS)
    work.assign([StripeRange(0, 0, 8)])
    executor.run()
    assert stopped == [None]


def test_rows_of_python_objects_have_no_memory_of_their_own():
    assert Output.of({0: ROWS}, np.zeros(0, object), None, None) is None


def test_the_event_loop_does_not_wait_for_the_first_product():
    """It may convert half of a piece."""
    messages: list[Message] = []
    begun, go = threading.Event(), threading.Event()

    def kernel(start: int, stop: int, out: Any) -> Any:
        begun.set()
        go.wait()
        return large(start, stop, out)

    with ThreadPoolExecutor(1) as executor:
        work = job(messages.append, executor, kernel, rows=ROWS)
        work.assign([StripeRange(0, 0, 4)])
        begun.wait()
        assigning = threading.Thread(target=work.assign, args=([StripeRange(0, 4, 8)],))
        assigning.start()
        assigning.join(30)
        waits = assigning.is_alive()
        go.set()
        assigning.join()
    assert not waits
    assert sent(messages) == list(range(8))
