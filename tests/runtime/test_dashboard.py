"""What the scheduler shows: its page of coded rounds, and its metrics."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import types
from urllib.request import urlopen

import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import async_poll_for, gen_cluster, poll_for
from tornado.httpclient import AsyncHTTPClient

import dask_coded as coded
from dask_coded.runtime.scheduler import showing
from dask_coded.runtime.scheduler.observer import _sum
from dask_coded.runtime.worker.metrics import WorkerMetrics

pytestmark = pytest.mark.versions

A = np.random.default_rng(0).standard_normal((64, 6))
FOUR = [("127.0.0.1", 1)] * 4


async def fetched(s, path: str) -> str:
    address = f"http://127.0.0.1:{s.http_server.port}{path}"
    return (await AsyncHTTPClient().fetch(address)).body.decode()


def test_the_page_shows_rounds_and_workers():
    pytest.importorskip("bokeh")
    from bokeh.client import pull_session

    options = {"n_workers": 4, "threads_per_worker": 1, "processes": False}
    with LocalCluster(**options, dashboard_address="127.0.0.1:0") as cluster, Client(
        cluster, set_as_default=False
    ) as client:  # fmt: skip
        s = cluster.scheduler
        address = f"http://127.0.0.1:{s.http_server.port}"
        C = coded.encode(A, coded.MDS(4, 2), client)
        observer = s.extensions["dask-coded"].observer
        client.compute(C @ np.ones(6)).result()
        assert not observer.asked  # nobody looks
        with urlopen(f"{address}/status") as answer:
            assert 'href="coded"' in answer.read().decode()  # the menu
        with urlopen(f"{address}/coded") as answer:
            assert "render_items" in answer.read().decode()
        poll_for(lambda: observer.totals()["rounds"] == 1)
        leaving = C.encoded.workers[0]
        s.close_worker(leaving)
        poll_for(lambda: leaving not in s.workers)
        with pull_session(url=f"{address}/coded") as session:
            names = "workers", "lanes", "heading"
            table, lanes, heading = map(session.document.get_model_by_name, names)
            assert "1 rounds" in heading.text
            cells = re.findall(r"<td [^>]*>(.*?)</td>", table.text)
            rows = [cells[i : i + 10] for i in range(0, len(cells), 10)]
            assert all(row[9].endswith("B") for row in rows)
            assert sum(row[1].startswith("alive") for row in rows) == 3
            assert len(lanes.data["worker"]) == len(rows)
            useful = sum(int(row[5]) - int(row[7]) for row in rows)
            assert useful == 2 * C.encoded.spec.geometry.stripes
            assert any(speed > 0 for speed in lanes.data["measured"])


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (0, "0): step 3, 500 ms, of which the 2 workers that were done computed 75%"),
        (8, "3, 500 ms, of which the 2 workers that were done computed 75%, 2 of 8 units moved"),
    ],
)
def test_a_training_has_a_line(units, expected):
    dashboard = pytest.importorskip("dask_coded.runtime.scheduler.dashboard")
    found = {"task": ("t", 0), "step": 3, "seconds": 0.5, "workers": {"a": 0.25, "b": 0.5}}
    assert dashboard._training({**found, "units": units, "moved": 2}).endswith(expected)


@gen_cluster(client=True, nthreads=FOUR, timeout=120)
async def test_without_a_dashboard_there_is_no_page_and_no_error(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 2), c)
    np.testing.assert_allclose(await c.compute(C @ np.ones(6)), A @ np.ones(6))
    assert all(not hasattr(app, "app_paths") for app in s.http_application.applications)


@gen_cluster(client=True, nthreads=FOUR, timeout=120)
async def test_metrics_are_what_reports_say(c, s, *workers):
    pytest.importorskip("prometheus_client")
    C = await coded.encode(A, coded.MDS(4, 2), c)
    await c.compute(C @ np.ones(6))
    found = await coded.report(C, c)
    text = await fetched(s, "/metrics")
    numbers = dict(re.findall(r"^(dask_coded_\S+) (\S+)$", text, re.M))
    assert float(numbers["dask_coded_rounds_total"]) == 1
    assert float(numbers["dask_coded_products_alone_total"]) == 0
    assert float(numbers['dask_coded_bytes_total{kind="operand"}']) == 6 * 8
    assert float(numbers['dask_coded_bytes_total{kind="share"}']) >= 64 * 8
    computed = sum(worker.computed for worker in found.workers)
    assert float(numbers['dask_coded_stripes_total{kind="computed"}']) == computed
    assert float(numbers['dask_coded_workers{state="alive"}']) == 4
    assert float(numbers['dask_coded_events_total{action="register"}']) == 1
    stored = [float(numbers[f'dask_coded_worker_pieces_bytes{{worker="{a}"}}']) for a in s.workers]
    assert stored == [worker.nbytes for address in s.workers for worker in found.workers
                      if worker.address == address]  # fmt: skip
    assert sum(stored) == 2 * A.nbytes


@gen_cluster(client=True, nthreads=FOUR, timeout=120)
async def test_metrics_of_workers_are_what_reports_say(c, s, *workers):
    pytest.importorskip("prometheus_client")

    async def numbers() -> dict[str, float]:
        address = f"http://127.0.0.1:{workers[0].http_server.port}/metrics"
        text = (await AsyncHTTPClient().fetch(address)).body.decode()
        return {name: float(n) for name, n in re.findall(r"^(dask_coded\S+) (\S+)$", text, re.M)}

    computed = 'dask_coded_worker_stripes_total{kind="computed"}'
    C = await coded.encode(A, coded.MDS(4, 2), c)
    # Earlier workers of this process have left their numbers.
    before = (await numbers())[computed]
    await c.compute(C @ np.ones(6))
    found = await coded.report(C, c)
    least = sum(worker.computed for worker in found.workers)

    # When workers hear that the round is over.
    while (after := await numbers())[computed] < before + least:
        pass
    assert after["dask_coded_worker_stored_bytes"] > 0
    assert after['dask_coded_worker_stripes_total{kind="moved"}'] >= 0


def test_counts_of_a_worker_stay_when_it_is_gone():
    metrics = pytest.importorskip("prometheus_client")

    def computed() -> float:
        name = "dask_coded_worker_stripes_total"
        return metrics.REGISTRY.get_sample_value(name, {"kind": "computed"})

    state = types.SimpleNamespace(tasks={})
    worker, other = (WorkerMetrics(types.SimpleNamespace(state=state)) for _ in range(2))
    worker.show()
    other.show()
    worker.count(computed=3)
    before = computed()
    del worker
    gc.collect()
    assert computed() == before >= 3


def test_without_prometheus_there_are_no_metrics(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(showing._Metrics, "only", None)
    showing._Metrics.read(types.SimpleNamespace())
    assert showing._Metrics.only is None


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_metrics_that_another_thread_reads_are_asked_for_on_the_event_loop(c, s, *workers):
    await coded.encode(np.eye(40), coded.MDS(2, 1), c)
    observer = s.extensions["dask-coded"].observer
    before = observer.asked
    await asyncio.to_thread(observer.want)
    await async_poll_for(lambda: observer.asked > before, timeout=60)


@gen_cluster(client=True, nthreads=FOUR)
async def test_coordinators_that_have_left_are_summed_up(c, s, *workers):
    """On clusters whose workers come and go, what each has told was kept as long as the array."""
    C = await coded.encode(A, coded.MDS(4, 2), c)
    np.testing.assert_allclose(await c.compute(C @ np.ones(6)), A.sum(axis=1))
    observer = s.extensions["dask-coded"].observer
    before = await observer.report()
    (told,) = [each for each in observer._told.values() if each["arrays"]]
    (array,) = told["arrays"]
    there = workers[0].address
    for i in range(40):
        each = told["arrays"][array]
        left = {"tcp://10.0.0.1:1": [5, 1, 0, 1.0, 2.0, 0.5], there: [3, 1, 0, 1.0, 2.0, 0.5]}
        observer._told[f"tcp://10.0.1.{i}:1"] = {
            "arrays": {array: {**each, "rounds": 1, "workers": left}},
            "trainings": {},
        }
        await observer.refresh()
    assert len([a for a in observer._told if a not in s.workers]) <= 17
    found = observer.overview()
    assert found["rounds"] == before["rounds"] + 40
    rows = {row["address"]: row for row in found["workers"]}
    was = {row["address"]: row for row in before["workers"]}
    assert rows[there]["computed"] == was[there]["computed"] + 40 * 3
    assert rows["tcp://10.0.0.1:1"]["standing"] == "gone"


def test_of_two_coordinators_the_one_with_the_last_round_counts_as_the_later_one():
    nan = float("nan")
    counts = {"seconds": 1.0, "alone": 0, "alone_seconds": 0.0, "coordinator": "a", "bound": 1.0}
    last = {**counts, "rounds": 5, "at": 20.0, "last_seconds": 0.5}
    alone = {**counts, "rounds": 0, "at": 30.0, "last_seconds": nan}
    last["workers"] = {"w": (3, 1, 0, 1.0, 7.0, 0.5)}
    alone["workers"] = {"w": (1, 0, 0, nan, nan, nan)}
    for pair in ((last, alone), (alone, last)):
        found = _sum(*pair)
        assert (found["rounds"], found["last_seconds"]) == (5, 0.5)
        assert found["workers"] == {"w": (4, 1, 0, 1.0, 7.0, 0.5)}
