"""Which worker is slow, as users see it."""

from __future__ import annotations

import math
import re
import threading

import numpy as np
import pytest
from distributed import get_worker, wait
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.rounds import Assign, Layout, Round, RoundOptions, StripeRange
from dask_coded.rounds.policies import POLICIES
from dask_coded.runtime.coordinator.report import RoundReport, StripeCount
from dask_coded.runtime.scheduler.plugin import CodedSchedulerPlugin

A = np.random.default_rng(0).standard_normal((64, 6))
FOUR = [("127.0.0.1", 1)] * 4


def finished_round(in_seconds: bool = True) -> RoundReport:
    """A round of an (3, 2) code in which worker 0 takes over what worker 2 should have done."""
    layout = Layout.of(coded.MDS(3, 2), [0, 1, 2], np.ones((3, 6)))
    policy = POLICIES["static"].from_options(RoundOptions("static"))
    round_ = Round(layout, policy, np.array([4.0, 2.0, 2.0]), now=0.0)
    tally = StripeCount(layout)
    tally.begin([Assign(0, (StripeRange(0, 0, 3),)), Assign(1, (StripeRange(1, 0, 6),))])
    tally.begin([Assign(2, (StripeRange(2, 3, 6),))])
    round_.start([[StripeRange(0, 0, 3)], [StripeRange(1, 0, 6)], [StripeRange(2, 3, 6)]])
    report = RoundReport(seconds=3.0, coordinator="tcp://a")
    for worker, part, seconds in [
        (1, StripeRange(1, 0, 6), 3.0),
        (2, StripeRange(2, 3, 4), 1.0),
        (0, StripeRange(0, 0, 6), 1.5),
    ]:
        tally.share([part], round_.state.open)
        round_.share(worker, [part], seconds, 3.0)
        report.add("abc"[worker], [part], seconds, 3.0)
    report.close(("a", "b", "c"), tally.stripes, round_.state, in_seconds)
    return report


def test_a_report_counts_what_each_worker_has_done():
    report = finished_round()
    computed = {part.address: part[3:] for part in report.parts}
    assert computed == {"a": (6, 3, 1), "b": (6, 0, 0), "c": (1, 0, 0)}
    assert [part.measured for part in report.parts] == [4.0, 2.0, 1.0]
    assert [part.predicted for part in report.parts] == [4.0, 2.0, 2.0]
    # 12 stripes at 4 + 2 + 1 stripes per second, and no worker has more than its piece.
    assert report.bound == pytest.approx(2.0)


def test_predictions_without_a_unit_are_scaled_to_the_typical_worker():
    report = finished_round(in_seconds=False)
    assert [part.predicted for part in report.parts] == [4.0, 2.0, 2.0]


def test_a_report_is_readable():
    report = finished_round()
    assert "bound=2" in repr(report) and "timeline" not in repr(report)
    page = report._repr_html_()
    assert page.count("<rect") == 3 and page.count("<tr>") >= 4
    assert RoundReport().parts == [] and math.isnan(RoundReport().bound)


@gen_cluster(client=True, nthreads=FOUR, timeout=120)
async def test_a_report_tells_who_computed_and_who_has_left(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 2), c)
    await wait(C.encoded.futures)
    before = await coded.report(C, c)
    assert before.rounds == 0 and {w.standing for w in before.workers} == {"alive"}
    np.testing.assert_allclose(await c.compute(C @ np.ones(6)), A @ np.ones(6))
    after = await coded.report(C, c)
    assert after.rounds == 1 and after.seconds >= after.last_seconds > 0
    assert after.coordinator in s.workers and after.bound > 0
    stripes = C.encoded.spec.geometry.stripes
    assert sum(w.computed - w.wasted for w in after.workers) == 2 * stripes
    assert sum(w.pieces for w in after.workers) == 4
    assert any(w.measured > 0 for w in after.workers)
    everything = await coded.report(client=c)
    assert everything.rounds == 1 and everything.events["register"] == 1

    computed = {w.address for w in after.workers if w.computed} - {after.coordinator}
    worker = next(w for w in workers if w.address in computed)
    await worker.close()
    await async_poll_for(lambda: worker.address not in s.workers)
    for _ in range(2):
        left = await coded.report(C, c)
        [gone] = [w for w in left.workers if w.standing == "gone"]
        assert (gone.name, gone.address) == (str(worker.name), worker.address)
    assert left.events["lost"] == 1 and left.rounds == 1

    # What the coordinator has counted stays when it leaves, too.
    await next(w for w in workers if w.address == after.coordinator).close()
    assert (await coded.report(C, c)).rounds == 1
    plugin = s.extensions["dask-coded"]
    assert plugin.observer.totals()["rounds"] == 1

    text = repr(left)
    assert re.match(r"1 round, the last took .* ms", text)
    assert len(text.splitlines()) == 2 + len(left.workers)
    assert left._repr_html_().count("<tr>") == 1 + len(left.workers)
    del C
    await async_poll_for(lambda: not plugin.arrays)
    assert (await coded.report(client=c)).rounds == 0
    assert plugin.observer.totals()["rounds"] == 1


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=120)
async def test_a_report_of_an_array_that_is_gone_says_so(c, s, worker):
    C = await coded.encode(A, coded.MDS(1, 1), c)
    C.encoded.release()
    await async_poll_for(lambda: not s.extensions["dask-coded"].arrays)
    with pytest.raises(coded.CodedDataLostError, match="released"):
        await coded.report(C, c)


@gen_cluster(client=True, nthreads=FOUR, timeout=120)
async def test_a_coordinator_that_could_not_answer_is_asked_again(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 2), c)
    await c.compute(C @ np.ones(6))
    kept = [worker.handlers["coded_activity"] for worker in workers]

    def late():
        raise TimeoutError

    for worker in workers:
        worker.handlers["coded_activity"] = late
    assert (await coded.report(C, c)).rounds == 0
    for worker, handler in zip(workers, kept, strict=True):
        worker.handlers["coded_activity"] = handler
    assert (await coded.report(C, c)).rounds == 1
    observer = s.extensions["dask-coded"].observer
    before = dict(observer._told)
    assert (await coded.report(C, c)).rounds == 1
    assert observer._told == before  # it has ended, so there is nothing to ask


@gen_cluster(client=True, nthreads=FOUR, timeout=120)
async def test_a_worker_that_is_retired_is_not_lost(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 2), c)
    await c.retire_workers([workers[0].address])
    await workers[1].close_gracefully()
    await async_poll_for(lambda: len(s.workers) == 2)
    assert "lost" not in (await coded.report(C, c)).events
    await workers[2].close()
    await async_poll_for(lambda: len(s.workers) == 1)
    assert (await coded.report(client=c)).events["lost"] == 1


@gen_cluster(client=True, nthreads=FOUR[:2], timeout=120)
async def test_events_of_users_may_have_any_fields(c, s, *workers):
    C = await coded.encode(A, coded.MDS(2, 1), c)
    for topic in ("dask-coded", "all", "mine"):
        for event in (
            {},
            {"action": ["a", "list"]},
            {"action": "scatter"},
            {"action": "remove-worker"},
            {"action": "worker-status-change"},
        ):
            s.extensions["dask-coded"].log_event(topic, event)
    assert (await coded.report(C, c)).rounds == 0


GO_ON = threading.Event()


def until_told():
    GO_ON.wait()


def one_step(key):
    activity = get_worker().extensions["dask-coded"].activity
    activity.stepped(key, 3, 0.5, {"somewhere": 0.25}, 8, 2)
    GO_ON.wait()


@gen_cluster(client=True, nthreads=FOUR[:2], timeout=120)
async def test_trainings_of_tasks_with_any_key_are_reported(c, s, *workers):
    await coded.encode(A, coded.MDS(2, 1), c)
    GO_ON.clear()
    key = "training", 0
    future = c.submit(one_step, key, key=key)
    observer, found = s.extensions["dask-coded"].observer, []
    try:
        await async_poll_for(lambda: key in s.tasks and s.tasks[key].processing_on)
        observer.coordinates(key)
        while not found:
            await observer.refresh()
            found = observer.overview()["trainings"]
    finally:
        GO_ON.set()
    step = {"step": 3, "seconds": 0.5, "workers": {"somewhere": 0.25}, "units": 8, "moved": 2}
    assert found == [{"task": "('training', 0)", **step}]
    await future


@gen_cluster(client=True, nthreads=FOUR[:2], timeout=120)
async def test_a_report_names_the_keepers_of_loops(c, s, a, b):
    C = await coded.encode(A, coded.MDS(2, 1), c)
    GO_ON.clear()
    future = c.submit(until_told, workers=[a.address])
    try:
        await async_poll_for(lambda: future.key in s.tasks)
        run = s.tasks[future.key].run_id
        s.extensions["dask-coded"].loops.keepers(future.key, run, a.address, copies=1)
        found = await coded.report(C, c)
        assert [w.address for w in found.workers if w.keeps] == [b.address]
        assert "keeps a state" in repr(found)
    finally:
        GO_ON.set()
    await future


@gen_cluster(client=True, nthreads=FOUR[:2], timeout=120)
async def test_the_page_is_added_once_although_the_first_attempt_fails(c, s, *workers, monkeypatch):
    give, shown, given = CodedSchedulerPlugin.give, [], []

    async def fail_once(self, *args):
        given.append(1)
        if len(given) == 1:
            raise OSError("No worker can be reached.")
        await give(self, *args)

    monkeypatch.setattr(CodedSchedulerPlugin, "give", fail_once)
    monkeypatch.setattr("dask_coded.runtime.scheduler.plugin.show", lambda *args: shown.append(1))
    with pytest.raises(OSError, match="reached"):
        await coded.report(client=c)
    await coded.report(client=c)
    assert len(given) == 2 and len(shown) == 1
