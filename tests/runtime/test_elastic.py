"""Workers come and go by themselves: at the end of their lifetime, and by adaptive scaling."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import poll_for

import dask_coded as coded
import dask_coded.training
from dask_coded.membership import Timeouts
from tests.processes import start_server
from tests.runtime.test_faults import WHOLE, Log, Loop, check, source

# Longer than the longest of its waits, which end a test by themselves.
pytestmark = pytest.mark.timeout(900)

N = 4
CODE = coded.MDS(N, 3)


def places(client, C) -> list[str]:
    """Return the workers that hold pieces, one for each piece that is on any."""
    return [address for held in client.who_has(C.encoded.futures).values() for address in held]


def spread(client, C) -> bool:
    """Return whether each piece is on a worker of its own, so that the code's tolerance holds."""
    return len(places(client, C)) == len(set(places(client, C))) == N


def actions(client) -> list[str]:
    return [event["action"] for _, event in client.get_events("dask-coded")]


def test_worker_reaches_the_end_of_its_lifetime_during_a_loop(processes, tmp_path):
    def end_lifetime(dask_worker):
        # As its timer does, which would run while the cluster is still starting.
        dask_worker.loop.add_callback(
            dask_worker.close_gracefully, reason="worker-lifetime-reached"
        )

    coordinator, *_, leaving = processes.add(4)
    client = processes.client
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), CODE, client)
    blocks = len(made)
    assert spread(client, C) and leaving in places(client, C)
    loop = Loop(client, C, tmp_path, workers=coordinator)
    loop.progress(5)
    client.run(end_lifetime, workers=[leaving])
    poll_for(lambda: leaving not in client.ncores(), timeout=120)
    # Its piece has moved to a worker that holds another one.
    loop.progress(20)
    assert len(places(client, C)) == N
    check(client, C)
    processes.add(1)
    poll_for(lambda: spread(client, C), timeout=60)
    loop.progress(5)
    loop.finish()
    assert loop.runs() == 1
    assert len(made) == blocks
    assert "repair" not in actions(client)


@pytest.fixture
def adaptive():
    """A cluster of processes that scales by itself as far as its limits allow."""
    start_server()
    config = {"distributed.worker.http.routes": []}
    options = {"threads_per_worker": 1, "dashboard_address": None, "worker_dashboard_address": None}
    with (
        dask.config.set(config),
        LocalCluster(n_workers=N, processes=True, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield cluster, client


def test_adaptive_scaling_during_lazy_rounds_and_a_loop(adaptive, tmp_path):
    cluster, client = adaptive
    client.wait_for_workers(N, timeout=120)
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), CODE, client)
    loop = Loop(client, C, tmp_path)
    loop.progress(5)
    scaling = cluster.adapt(minimum=N + 2, maximum=N + 2, interval="100 ms", wait_count=1)

    def workers() -> int:
        check(client, C)  # a lazy round
        return len(client.ncores())

    poll_for(lambda: workers() == N + 2, timeout=120)
    loop.progress(5)
    # No worker of the loop's array is chosen as long as the loop runs.
    held = set(places(client, C))
    scaling.minimum = scaling.maximum = 1
    poll_for(lambda: workers() == N, timeout=120)
    assert set(client.ncores()) == held
    loop.progress(5)
    loop.finish()
    poll_for(lambda: workers() <= 2, timeout=120)
    scaling.minimum = scaling.maximum = N
    poll_for(lambda: workers() == N and spread(client, C), timeout=120)
    np.testing.assert_allclose(client.compute(C).result(), WHOLE, atol=1e-10)
    scaling.stop()


def test_a_cluster_grows_to_what_an_array_can_use_and_shrinks_when_it_is_not_used(
    adaptive, tmp_path, monkeypatch
):
    cluster, client = adaptive
    cluster.scale(2)
    poll_for(lambda: len(client.ncores()) == 2, timeout=120)
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), CODE, client, oversubscribe=True)
    scaling = cluster.adapt(
        Adaptive=coded.Adaptive, minimum=2, maximum=9, interval="100 ms", wait_count=3
    )
    loop = Loop(client, C, tmp_path)  # a single task
    poll_for(lambda: len(client.ncores()) == N and spread(client, C), timeout=120)
    loop.progress(5)
    # One worker without the loop is far slower than the others, for long.
    (leader,) = (address for address, keys in client.processing().items() if keys)
    slow = next(address for address in places(client, C) if address != leader)

    def slow_down(dask_scheduler):
        plugin = dask_scheduler.extensions["dask-coded"]
        plugin.speeds.lasting = lambda workers: np.array([1 - 0.9 * (w == slow) for w in workers])

    monkeypatch.setattr(Timeouts, "PLANS", 0.0)  # rounds of this test are short
    client.run_on_scheduler(slow_down)
    poll_for(lambda: slow not in places(client, C) and spread(client, C), timeout=120)
    loop.finish()

    def forget(dask_scheduler):
        for state in dask_scheduler.extensions["dask-coded"].arrays.values():
            state.used = 0.0

    client.run_on_scheduler(forget)
    poll_for(lambda: len(client.ncores()) == 2, timeout=120)
    scaling.stop()
    check(client, C)


def test_adaptive_scaling_during_a_training(adaptive):
    cluster, client = adaptive
    client.wait_for_workers(N, timeout=120)
    targets = []

    class Watched(coded.Adaptive):
        async def recommendations(self, target):
            targets.append(target)
            return await super().recommendations(target)

    def squares(w, samples, targets):  # workers cannot import this module
        return samples.T @ (samples @ w - targets)

    X, enough = np.eye(8), Event()
    training = ThreadPoolExecutor(1).submit(
        coded.training.train, squares, np.zeros(8), (X, X[0]), steps=10**6, client=client,
        callback=lambda progress: enough.is_set(),
    )  # fmt: skip
    plugin = "dask-coded-training"

    def members(dask_scheduler):
        found = dask_scheduler.extensions.get(plugin)
        return 0 if found is None else sum(map(len, found._involved.values()))

    try:
        poll_for(lambda: client.run_on_scheduler(members) == N, timeout=120)
        scaling = cluster.adapt(
            Adaptive=Watched, minimum=1, maximum=N, interval="20 ms", wait_count=1
        )
        poll_for(lambda: len(targets) > 10, timeout=120)
        assert set(targets) == {N}
        assert len(client.ncores()) == N
    finally:
        enough.set()
    assert training.result(timeout=120).steps < 10**6
    poll_for(lambda: len(client.ncores()) == 1, timeout=120)
    scaling.stop()


def test_a_cluster_without_arrays_scales_as_by_dask(adaptive):
    cluster, client = adaptive
    cluster.scale(0)
    poll_for(lambda: not client.ncores(), timeout=120)
    scaling = cluster.adapt(
        Adaptive=coded.Adaptive, minimum=0, maximum=2, interval="100 ms", wait_count=1
    )
    assert client.submit(sum, [1, 2]).result() == 3
    scaling.stop()
