"""kill -9 of the scheduler: who waits is told at once, and what is in files goes on."""

from __future__ import annotations

import json
import random
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from operator import itemgetter

import numpy as np
import pytest
from distributed.comm import CommClosedError
from distributed.utils_test import poll_for

import dask_coded as coded
from dask_coded.aggregation import Ring
from dask_coded.storage import read_file
from dask_coded.storage.files import is_sealed
from dask_coded.training import Checkpoint, train
from dask_coded.training.runtime.storage import opened
from tests.processes import Processes

GONE = r"no connection to the scheduler at tcp://.* what was being computed is lost"


def killed_meanwhile(cluster: Processes, call, begun, within: float = 60) -> Exception:
    """Kill the scheduler once a call has begun, and return its error; no worker stays.

    ``within`` says after how many seconds it is a failure that the caller still waits.
    """
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(call)
        poll_for(lambda: future.done() or begun(), timeout=60)
        if future.done():
            future.result()  # an error of the call
        cluster.kill_scheduler()
        error = future.exception(timeout=within)
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

    # Its largest eigenvalues differ in their signs, so that no power iteration converges.
    C = coded.encode(np.diag([1.0, -1.0, 1.0, -1.0]), coded.MDS(3, 2), client)
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


def test_scheduler_killed_in_a_training_and_started_again(processes, tmp_path):
    """At the same address, to which the client connects again."""
    X = np.random.default_rng(2).standard_normal((60, 4))
    path = tmp_path / "weights"

    def trained(client, steps, **options):
        options |= {"aggregation": Ring(), "batch_size": 20, "client": client}
        return train(squares(), np.zeros(4), (X, X @ np.arange(4.0)), steps=steps, **options)

    client = processes.client
    processes.add(3)
    durable = {"checkpoint": Checkpoint(path, every=5), "resume": True}
    error = killed_meanwhile(processes, lambda: trained(client, 10**6, **durable), path.exists)
    assert isinstance(error, ConnectionError)
    processes.restart_scheduler()
    processes.add(3)
    # How far the file is: a training of fewer steps has ended already.
    reached = trained(client, 1, checkpoint=None, resume=path).steps
    assert reached >= 5
    resumed = trained(client, reached + 7, **durable)
    assert resumed.steps == reached + 7
    whole = trained(client, reached + 7)
    np.testing.assert_array_equal(resumed.parameters, whole.parameters)


# -- twenty schedulers, one after the other ----------------------------------------------------

KILLS = 20
# In these seconds the client must have its error.
TOLD = 10
MATRIX = np.random.default_rng(5).standard_normal((40, 40)) / 6
CODE = coded.Repetition(4, 2)


def walk():
    """Return an algorithm; nested, because workers cannot import this module."""

    def walk(operator, over, log, loop):
        """Run rounds until the file ``over`` says how many; note in a file where it begins."""
        first, x = loop.resume((1, np.ones(40)))
        with open(log, "a") as file:
            file.write(f"begins at {first}\n")
        i = first
        while True:
            with suppress(FileNotFoundError), open(over) as file:
                if i > int(file.read()):
                    return i - 1, x
            x = operator @ x
            x /= np.abs(x).max()
            with open(log, "a") as file:
                file.write(f"{i}\n")
            loop.report(coded.Progress(i, residual=0.0), state=(i + 1, x))
            i += 1

    return walk


def last_kept(folder) -> int:
    """Return the round of the latest state that is whole, zero if there is none."""
    whole = [data for file in folder.glob("*") if is_sealed(data := file.read_bytes())]
    heads = [json.loads(data.split(b"\n", 2)[1]) for data in whole]
    return max(heads, key=itemgetter("sequence"))["round"] if heads else 0


def lines(path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_schedulers_killed_in_one_loop(clusters, tmp_path):
    """Each cluster begins where the files say; the result is that of a loop without faults."""
    log, over, state = tmp_path / "log", tmp_path / "over", tmp_path / "state"
    rng, begins, kept = random.Random(1), [], 0
    for _ in range(KILLS):
        cluster = clusters()
        cluster.add(4)
        C = coded.encode(MATRIX, CODE, cluster.client)
        goal = len(lines(log)) + rng.randrange(2, 60)

        def call(C=C, client=cluster.client):
            loop = coded.Loop(storage=state)
            return coded.submit(walk(), C, str(over), str(log), loop, client=client).result()

        error = killed_meanwhile(cluster, call, lambda goal=goal: len(lines(log)) >= goal, TOLD)
        assert isinstance(error, CancelledError)
        begins.append(int([line for line in lines(log) if "begins" in line][-1].split()[-1]))
        assert begins[-1] == kept + 1
        kept = last_kept(state)
        cluster.close()
    assert begins[-1] > KILLS / 2
    over.write_text(str(kept + 20))
    cluster = clusters()
    cluster.add(4)
    client = cluster.client
    C = coded.encode(MATRIX, CODE, client)
    results = [
        coded.submit(walk(), C, str(over), str(log), loop, client=client).result(timeout=60)
        for loop in (coded.Loop(storage=state), coded.Loop())
    ]
    assert results[0][0] == results[1][0] == kept + 20
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_schedulers_killed_in_one_training(clusters, tmp_path):
    X, path, rng = MATRIX[:, :4], tmp_path / "weights", random.Random(2)
    data = X, X @ np.arange(4.0)
    reached, seen = [0], [0]

    def trained(client, **options):
        options |= {"aggregation": Ring(), "batch_size": 20, "client": client}
        return train(squares(), np.zeros(4), data, **options)

    durable = {"checkpoint": Checkpoint(path, every=5), "resume": True}
    for _ in range(KILLS):
        cluster = clusters()
        cluster.add(3)
        seen[0] = 0
        goal = reached[-1] + rng.randrange(6, 200)

        def call(client=cluster.client):
            def note(progress):
                seen[0] = progress.round

            return trained(client, steps=10**7, callback=note, **durable)

        error = killed_meanwhile(cluster, call, lambda goal=goal: seen[0] >= goal, TOLD)
        assert isinstance(error, ConnectionError)
        reached.append(read_version(path) if path.exists() else 0)
        assert reached[-1] >= reached[-2]
        cluster.close()
    assert reached[-1] > KILLS
    cluster = clusters()
    cluster.add(3)
    steps = reached[-1] + 20
    resumed = trained(cluster.client, steps=steps, **durable)
    whole = trained(cluster.client, steps=steps)
    assert resumed.steps == whole.steps == steps
    np.testing.assert_array_equal(resumed.parameters, whole.parameters)


def read_version(path) -> int:
    version: int = opened(read_file(str(path)))["version"]
    return version


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_schedulers_killed_during_products(clusters, tmp_path):
    rng, expected = random.Random(3), MATRIX @ np.ones(40)
    for i in range(KILLS):
        done = tmp_path / f"done-{i}"
        cluster = clusters()
        cluster.add(4)
        client = cluster.client
        C = coded.encode(MATRIX, CODE, client)

        def call(C=C, client=client, done=done):
            while True:
                found = client.compute(C @ np.ones(40)).result()
                np.testing.assert_allclose(found, expected, atol=1e-12)
                with done.open("a") as file:
                    file.write("one\n")

        goal = rng.randrange(1, 40)
        error = killed_meanwhile(
            cluster, call, lambda goal=goal, done=done: len(lines(done)) >= goal, TOLD
        )
        # Dask's client raises the last one if the connection breaks while it gathers a result.
        assert isinstance(error, CancelledError | ConnectionError | CommClosedError)
        cluster.close()
