"""Algorithms sent to the cluster: their reports to the client, and interrupts."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import UserDict
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from distributed import Client, Event
from distributed.utils_test import poll_for

import dask_coded as coded
from dask_coded import submission
from dask_coded.loop import QUIET, TOPIC, Progress


@pytest.fixture(scope="module")
def client():
    options = {"n_workers": 3, "threads_per_worker": 2, "processes": False}
    with Client(**options, dashboard_address=None, set_as_default=False) as client:
        coded.encode(np.eye(4), coded.MDS(3, 2), client=client)  # installs the plugins
        yield client


def count(rounds, loop=QUIET):
    first = loop.resume(1)
    for i in range(first, rounds + 1):
        loop.report(Progress(i, residual=1 / i, objective=2.0), state=i + 1, last=i == rounds)
    return first


def test_a_coded_array_is_used_in_its_own_cluster(client):
    C = coded.encode(np.diag([1.0, 2.0, 3.0, 4.0]), coded.MDS(3, 2), client=client, transpose=True)
    y = np.arange(4.0)
    # There is no current client.
    found = coded.submit(lambda operators: operators[0] @ np.ones(4), [C]).result()
    assert found[3] == pytest.approx(4)
    assert coded.linalg.power_iteration(C).value == pytest.approx(4)
    assert coded.linalg.randomized_svd(C, 1, seed=0)[1] == pytest.approx(4)
    model = coded.linear_model.LinearRegression(fit_intercept=False).fit(C, y)
    np.testing.assert_allclose(model.coef_, y / [1, 2, 3, 4], atol=1e-3)


def test_arguments_of_a_partial_are_arguments_like_others(client):
    def times(operator, factor, x):
        return type(operator).__name__, factor * (operator @ x)

    C = coded.encode(np.diag([1.0, 2.0, 3.0, 4.0]), coded.MDS(3, 2), client=client)
    function = partial(partial(times, C), 2)
    kind, product = coded.submit(function, np.ones(4)).result()  # on the cluster of C
    assert kind == "Operator"
    assert product[3] == pytest.approx(8)


def test_options_of_dasks_submit_are_not_passed_on_silently(client):
    def any_keywords(**kwargs):
        return kwargs

    def with_a_key(key, **kwargs):
        return key

    with pytest.raises(TypeError, match="would pass 'priority', 'retries' to the function"):
        coded.submit(any_keywords, retries=3, priority=1, client=client)
    assert coded.submit(with_a_key, key=3, client=client).result() == 3


class Pair(NamedTuple):
    first: object
    second: object = 0


@dataclass
class Held:
    array: object


@pytest.mark.parametrize("hidden", [Pair, Held, lambda C: UserDict(array=C)])
def test_a_coded_array_in_a_container_that_is_not_searched_is_refused(hidden, client):
    C = coded.encode(np.eye(4), coded.MDS(3, 2), client=client)
    with pytest.raises(TypeError, match=f"not in one of type {type(hidden(C)).__name__}"):
        coded.submit(lambda held: held, hidden(C), client=client)
    assert coded.submit(lambda held: held, Pair(3), client=client).result() == Pair(3)


def test_the_client_receives_the_last_round(client):
    heard = []
    assert submission.run(count, 1000, client=client, callback=heard.append) == 1
    assert heard[-1] == Progress(1000, residual=1e-3, objective=2.0)
    assert len(heard) < 1000


def test_callbacks_run_in_the_context_of_the_caller(client):
    cell = ContextVar("cell")
    cell.set("the third")
    heard = []
    submission.run(count, 1, client=client, callback=lambda _: heard.append(cell.get(None)))
    assert heard == ["the third"]


def test_nothing_is_kept_of_the_reports_of_a_loop_that_is_over(client):
    heard = []
    # As a worker sends it that learns too late that its loop is over.
    client.log_event(f"{TOPIC}before", {"round": 9})
    for _ in range(3):
        submission.run(count, 3, client=client, callback=heard.append)
    assert heard
    broker = client.cluster.scheduler._broker
    for kept in (broker._topics, client._event_handlers):
        poll_for(lambda kept=kept: not [topic for topic in kept if TOPIC in topic], timeout=60)


def test_the_client_lets_go_of_a_callback_that_is_over(client):
    class Heard:
        def __call__(self, progress):
            pass

    heard = Heard()
    submission.run(count, 3, client=client, callback=heard)
    kept = weakref.ref(heard)
    del heard
    gc.collect()
    assert kept() is None


def test_without_a_callback_no_progress_is_reported(client):
    before = client.get_events()
    assert submission.run(count, 3, client=client) == 1
    assert not [topic for topic in set(client.get_events()) - set(before) if "progress" in topic]


def test_an_interrupt_cancels_the_algorithm(client, monkeypatch):
    futures = []

    class Interrupted:
        def __init__(self, future):
            self.future = future

        def result(self):
            raise KeyboardInterrupt

        def cancel(self):
            futures.append(self.future)
            self.future.cancel()

    submit = submission.submit
    monkeypatch.setattr(submission, "submit", lambda *a, **k: Interrupted(submit(*a, **k)))
    with pytest.raises(KeyboardInterrupt):
        submission.run(lambda name, loop: Event(name).wait(), "never", client=client)
    assert futures[0].cancelled()
    Event("never", client=client).set()


def test_a_plain_loop_among_the_arguments_becomes_a_kept_loop(client):
    C = coded.encode(np.eye(4), coded.MDS(3, 2), client=client)

    def kind(operator, loop):
        return type(loop).__name__, loop._copies, loop._topic

    assert coded.submit(kind, C, coded.Loop(), client=client).result() == ("KeptLoop", 2, None)


def test_arrays_derived_from_coded_ones_say_that_they_are_not_coded(client):
    C = coded.encode(np.eye(4), coded.MDS(3, 2), client=client)
    for derived in (2 * C, C.T):
        with pytest.warns(coded.UncodedWarning, match="all on one worker") as record:
            future = coded.submit(np.shape, derived, client=client)
        assert [warning.filename for warning in record] == [__file__]
        assert future.result() == (4, 4)
    with pytest.warns(coded.UncodedWarning, match="encoded again") as record:
        again = submission.as_coded(2 * C, coded.MDS(3, 2), client)
    assert isinstance(again, coded.CodedArray)
    assert submission.as_coded(C, None, client) is C


def test_what_cannot_be_called_is_refused(client):
    C = coded.encode(np.eye(4), coded.MDS(3, 2), client=client)
    with pytest.raises(TypeError, match=r"'function' must be callable, it is coded\.CodedArray"):
        coded.submit(C, client=client)


def test_arguments_in_lists_and_dicts_become_operators(client):
    A = np.arange(12.0).reshape(4, 3)
    C = coded.encode(A, coded.MDS(3, 2), client=client)
    x = client.scatter(np.ones(3))

    def products(arrays, named):
        return [arrays[0] @ named["x"][0], named["x"][1]]

    future = coded.submit(products, [C, None], named={"x": (x, "as it is")}, client=client)
    product, other = future.result()
    np.testing.assert_allclose(product, A.sum(axis=1))
    assert other == "as it is"


def test_what_a_callback_raises_ends_the_algorithm(client):
    def endless(loop=QUIET):
        for i in itertools.count(1):
            loop.report(Progress(i, residual=1 / i), state=i)

    def fail(progress):
        raise ZeroDivisionError("of the test")

    with pytest.raises(ZeroDivisionError, match="of the test"):
        submission.run(endless, client=client, callback=fail)
    poll_for(lambda: not any(client.processing().values()), timeout=60)
    with pytest.raises(ZeroDivisionError, match="of the test"):
        submission.run(count, 1, client=client, callback=fail)  # of its last report


def test_a_loop_alone_installs_what_keeps_its_state():
    def count(loop):
        return loop.resume(0) + 1

    with Client(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
    ) as client:
        assert coded.submit(count, loop=coded.Loop(), client=client).result() == 1
