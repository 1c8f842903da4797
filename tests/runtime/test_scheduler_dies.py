"""kill -9 of the scheduler: who waits is told at once, and what is in files goes on."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
from distributed.utils_test import poll_for

import dask_coded as coded
from dask_coded.aggregation import Ring
from dask_coded.training import Checkpoint, train
from tests.processes import Processes

GONE = r"no connection to the scheduler at tcp://.* what was being computed is lost"


def killed_meanwhile(cluster: Processes, call, begun) -> Exception:
    """Kill the scheduler once a call has begun, and return its error; no worker stays."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(call)
        poll_for(lambda: future.done() or begun(), timeout=60)
        assert not future.done()
        cluster.kill_scheduler()
        error = future.exception(timeout=60)
    for process in cluster.workers.values():
        process.join(60)
        assert process.exitcode is not None
    return error


@pytest.mark.parametrize("waiting", ["submit", "algorithm", "product"])
def test_scheduler_killed_while_a_client_waits(waiting, processes, tmp_path):
    processes.add(3)
    client, begun = processes.client, tmp_path / "begun"
    path = str(begun)

    def endless(operator, loop):
        while True:
            operator @ np.ones(4)
            open(path, "a").close()

    C = coded.encode(np.eye(4), coded.MDS(3, 2), client)
    calls = {
        "submit": lambda: coded.submit(endless, C, coded.Loop(), client=client).result(),
        "algorithm": lambda: coded.linalg.power_iteration(
            C, tol=0.0, max_iter=10**9, callback=lambda progress: begun.touch()
        ),
        "product": lambda: products(client, C, begun),
    }
    error = killed_meanwhile(processes, calls[waiting], begun.exists)
    if waiting == "algorithm":
        assert isinstance(error, ConnectionError)
        assert error.args[0].count(". ") == 1
    else:
        # Dask's own futures, whose error is Dask's own as well.
        assert isinstance(error, CancelledError | ConnectionError)
    # While the client tries to reach the scheduler, nothing new is begun in vain.
    for call in (
        lambda: coded.linalg.power_iteration(C),
        lambda: coded.submit(np.linalg.norm, C),
        lambda: coded.encode(np.eye(4), client=client),
        lambda: train(lambda w, X, y: X, np.zeros(3), (np.eye(3), np.ones(3)), client=client),
    ):
        with pytest.raises(ConnectionError, match=GONE):
            call()


def products(client, C, begun) -> None:
    while True:
        client.compute(C @ np.ones(4)).result()
        begun.touch()


def squares():
    """Return a loss with its gradient; nested, because workers cannot import this module."""

    def squares(w, samples, targets):
        error = samples @ w - targets
        return error @ error / 2, samples.T @ error

    return squares


def test_scheduler_and_all_workers_killed_in_a_training(clusters, tmp_path):
    X = np.random.default_rng(2).standard_normal((60, 4))
    path = tmp_path / "weights"

    def trained(client, steps, **options):
        options |= {"aggregation": Ring(), "batch_size": 20, "client": client}
        return train(squares(), np.zeros(4), (X, X @ np.arange(4.0)), steps=steps, **options)

    cluster: Processes = clusters()
    cluster.add(3)
    durable = {"checkpoint": Checkpoint(path, every=5), "resume": True}
    error = killed_meanwhile(
        cluster, lambda: trained(cluster.client, 10**6, **durable), path.exists
    )
    assert isinstance(error, ConnectionError)

    cluster = clusters()
    cluster.add(3)
    client = cluster.client
    # A number of steps that the first training may have had no time for.
    reached = trained(client, 1, checkpoint=None, resume=path).steps
    assert reached >= 5
    resumed = trained(client, reached + 7, **durable)
    assert resumed.steps == reached + 7
    whole = trained(client, reached + 7)
    np.testing.assert_array_equal(resumed.parameters, whole.parameters)
