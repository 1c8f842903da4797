"""Real processes die, stop and come back while a model is trained."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import dask.array as da
import numpy as np
import pytest
from distributed import futures_of
from distributed.utils_test import poll_for

from dask_coded.aggregation import CodedReduce, GradientCoding, Ring, Squeeze, Star
from dask_coded.training import Checkpoint, train
from tests.training.one_process import squeezed

# Longer than the longest of its waits, which end a test by themselves.
pytestmark = pytest.mark.timeout(900)

ROWS = 120
RATE = 0.1  # of SGD, by default
LONG_STAR = pytest.param(Star(), marks=pytest.mark.long)
# A group works five times as long as it took to form it before it takes others in. On a busy
# machine it may take ten seconds to form one.
JOINING = 200


def data():
    """Return data that workers compute, so that lost chunks can be computed again."""

    # Nested functions are pickled by value, because workers cannot import this module.
    def rows(block_id=None):
        first = 10 * block_id[0]
        return np.cos(np.add.outer(7.0 * np.arange(first, first + 10), np.arange(4) ** 2))

    X = da.map_blocks(rows, chunks=((10,) * 12, (4,)), dtype=float, meta=np.empty((0, 0)))
    return X, X @ np.arange(1.0, 5.0)


def squares(w, samples, targets):
    error = samples @ w - targets
    return error @ error / 2, samples.T @ error


class Ongoing:
    """A training run that goes on until the test calls :meth:`finish`."""

    def __init__(self, client, aggregation, **options) -> None:
        def squares(w, samples, targets):
            error = samples @ w - targets
            return error @ error / 2, samples.T @ error

        self._client = client
        self._at = 0
        self.workers = 0
        self._enough = Event()
        self._thread = ThreadPoolExecutor(1)
        self._future = self._thread.submit(
            train,
            squares,
            np.zeros(4),
            data(),
            steps=10**6,
            aggregation=aggregation,
            client=client,
            callback=self._record,
            **options,
        )

    def _record(self, progress) -> bool:
        self._at = progress.round
        self.workers = progress.workers
        return self._enough.is_set()

    def progress(self) -> None:
        """Wait for five more steps."""
        goal = self._at + 5

        def there() -> bool:
            if self._future.done():
                self._future.result()
            return self._at >= goal

        poll_for(there, timeout=60)

    def finish(self, replicas: int):
        """Run a few more steps; check that all workers have the same, right parameters."""
        poll_for(lambda: sum(taking_part(self._client).values()) == replicas, timeout=JOINING)
        self.progress()
        self._enough.set()
        found = self._future.result(timeout=60)
        self._thread.shutdown()
        X, y = (part.compute(scheduler="sync") for part in data())
        w = np.zeros(4)
        if isinstance(found.aggregation, Squeeze):
            units = found.aggregation.units
            w = squeezed(squares, w, (X, y), units=units, steps=found.steps)
            assert found.parameters.tobytes() == w.tobytes()
        else:
            for _ in range(found.steps):
                w = w - RATE * X.T @ (X @ w - y) / ROWS
            np.testing.assert_allclose(found.parameters, w, rtol=1e-10)
        assert [step.step for step in found.history] == list(range(found.steps))
        # Workers that are not close behind at the end send no digests.
        assert len(found.digests) <= replicas
        assert len(set(found.digests.values())) == 1
        poll_for(lambda: not any(trainers(self._client).values()), timeout=60)
        return found


def usable(client) -> list[str]:
    """Return the workers that have told the scheduler that they are ready for trainings."""
    return client.run_on_scheduler(
        lambda dask_scheduler: list(dask_scheduler.extensions["dask-coded"].versions)
    )


def set_aside(client) -> list[str]:
    """Return the workers that the scheduler knows to be silent."""
    return client.run_on_scheduler(
        lambda dask_scheduler: list(dask_scheduler.extensions["dask-coded"].standings.suspects)
    )


def taking_part(client) -> dict[str, bool]:
    """Return which workers have a part in a training that has not been stopped."""

    def takes_part(dask_worker):
        found = dask_worker.extensions["dask-coded-training"].trainers.values()
        return not all(trainer._stopped for trainer in found)

    return client.run(takes_part)


def trainers(client) -> dict[str, int]:
    """Count the trainers and their threads on each worker."""

    def count(dask_worker):
        import threading

        alive = sum(t.name.startswith("Coded-train") for t in threading.enumerate())
        return len(dask_worker.extensions["dask-coded-training"].trainers) + alive

    return client.run(count)


@pytest.mark.parametrize(
    ("aggregation", "count"),
    [
        pytest.param(GradientCoding(stragglers=1), 4, marks=pytest.mark.long),
        (CodedReduce(fan_in=2, depth=2, stragglers=1), 6),
    ],
    ids=repr,
)
def test_worker_stopped_in_a_step_comes_back_and_another_is_killed(processes, aggregation, count):
    leader, *_, stopped, killed = processes.add(count)
    run = Ongoing(processes.client, aggregation, leader=leader)
    run.progress()
    with processes.stopped(stopped):
        run.progress()
        run.progress()
    run.progress()
    processes.kill(killed)
    run.progress()
    found = run.finish(replicas=count - 1)
    assert stopped in found.workers
    assert found.workers[stopped].late > 0


def test_workers_of_a_squeezed_training_are_stopped_killed_and_join(processes):
    leader, *_, stopped, killed = processes.add(4)
    run = Ongoing(processes.client, Squeeze(units=12), leader=leader)
    run.progress()
    with processes.stopped(stopped):
        run.progress()
        run.progress()
    run.progress()
    processes.kill(killed)
    run.progress()
    (joined,) = processes.add(1)
    poll_for(lambda: taking_part(processes.client).get(joined), timeout=JOINING)
    found = run.finish(replicas=4)
    # Steps of which no worker could report are not seen.
    assert {sum(step.units.values()) for step in found.history} <= {0, 12}


def test_worker_killed_of_a_group_that_no_other_could_replace(processes):
    leader, killed = processes.add(2)
    run = Ongoing(processes.client, GradientCoding(stragglers=1), leader=leader)
    run.progress()
    processes.kill(killed)
    run.progress()
    run.progress()
    run.finish(replicas=1)


def test_worker_of_a_ring_stopped_and_another_killed_in_a_step(processes):
    leader, _, stopped, killed = processes.add(4)
    run = Ongoing(processes.client, Ring(), leader=leader)
    run.progress()
    with processes.stopped(stopped):
        # The other workers wait, so no step ends until this worker continues.
        pass
    run.progress()
    processes.kill(killed)
    run.progress()
    run.finish(replicas=3)


@pytest.mark.parametrize("aggregation", [LONG_STAR, Ring()], ids=repr)
def test_worker_stopped_that_the_sums_need_is_left_out_until_it_comes_back(processes, aggregation):
    leader, *_, stopped = processes.add(4)
    run = Ongoing(processes.client, aggregation, leader=leader)
    run.progress()
    with processes.stopped(stopped):
        run.progress()
        run.progress()
        poll_for(lambda: run.workers == 3, timeout=JOINING)
    poll_for(lambda: run.workers == 4, timeout=JOINING)
    run.finish(replicas=4)


def test_worker_stopped_for_so_long_that_others_go_on_without_it(processes, monkeypatch):
    monkeypatch.setenv("DASK_CODED__TRAIN__BACKLOG", "100")
    leader, *_, stopped = processes.add(4)
    run = Ongoing(processes.client, GradientCoding(stragglers=1), leader=leader)
    run.progress()
    with processes.stopped(stopped):
        for _ in range(5):
            run.progress()
        poll_for(lambda: stopped in set_aside(processes.client), timeout=60)
    # It is back.
    found = run.finish(replicas=4)
    assert stopped in found.workers


def test_the_worker_that_holds_the_data_is_stopped_before_the_training(processes):
    """Dask alone waits until it is back: the count of rows fetches its blocks."""
    holder, *_ = processes.add(4)
    client, pair = processes.client, []
    for array in data():
        pair.append(client.persist(array, workers=[holder], allow_other_workers=True))
    poll_for(lambda: all(future.done() for future in futures_of(pair)), timeout=60)

    def squares(w, samples, targets):
        error = samples @ w - targets
        return error @ error / 2, samples.T @ error

    # Tasks of which it is not known how long they take are not computed again.
    train(squares, np.zeros(4), tuple(pair), steps=1, client=client)
    with processes.stopped(holder):
        found = train(squares, np.zeros(4), tuple(pair), steps=3, client=client)
    assert holder not in found.workers


@pytest.mark.parametrize("aggregation", [LONG_STAR, Ring()], ids=repr)
def test_leader_killed_in_a_step(processes, aggregation):
    first, second, *_ = processes.add(4)
    run = Ongoing(processes.client, aggregation, leader=[first, second])
    run.progress()
    tasks = processes.client.processing()
    leader = next(a for a in (first, second) if any("coded-lead" in key for key in tasks[a]))
    processes.kill(leader)
    run.progress()
    run.finish(replicas=3)


@pytest.mark.parametrize(
    "aggregation",
    [GradientCoding(stragglers=1), pytest.param(Ring(), marks=pytest.mark.long)],
    ids=repr,
)
def test_leader_stopped_in_a_step(aggregation, processes, tmp_path, monkeypatch):
    # On a busy machine the next leader may be silent for more than a second, too.
    monkeypatch.setenv("DASK_CODED__COORDINATOR__TIMEOUT", "5s")
    processes.add(4)
    client = processes.client
    checkpoint = Checkpoint(str(tmp_path / "checkpoint"), every=3)
    run = Ongoing(client, aggregation, checkpoint=checkpoint)
    run.progress()
    leader = leader_of(client)
    with processes.stopped(leader):
        poll_for(lambda: leader_of(client) != leader, timeout=60)
        run.progress()
        run.progress()
    # The old leader is back. It neither forms a group nor writes a checkpoint.
    run.progress()
    assert leader_of(client) != leader
    run.finish(replicas=4)


def leader_of(client) -> str | None:
    tasks = client.processing().items()
    return next((a for a, keys in tasks if any("coded-lead" in key for key in keys)), None)


@pytest.mark.long  # the same with a loss comes next
def test_worker_that_joins_takes_part(processes):
    leader, _ = processes.add(2)
    run = Ongoing(processes.client, Star(), leader=leader)
    run.progress()
    processes.add(1)
    poll_for(lambda: run.workers == 3, timeout=JOINING)
    run.finish(replicas=3)


def test_worker_whose_channel_breaks_comes_back(processes):
    def break_channel(address, dask_worker):
        dask_worker.extensions["coded-exchange"].channel(address).abort()

    def group(dask_worker):
        (trainer,) = dask_worker.extensions["dask-coded-training"].trainers.values()
        return trainer.group.run_id

    leader, _, other = processes.add(3)
    run = Ongoing(processes.client, Star(), leader=leader)
    run.progress()
    client = processes.client
    poll_for(lambda: sum(taking_part(client).values()) == 3, timeout=JOINING)
    before = client.run(group, workers=[other])
    client.run(break_channel, other, workers=[leader])
    poll_for(lambda: client.run(group, workers=[other]) != before, timeout=JOINING)
    run.finish(replicas=3)


def test_worker_that_joins_takes_part_when_another_is_killed(processes):
    leader, killed = processes.add(2)
    run = Ongoing(processes.client, Star(), leader=leader)
    run.progress()
    (joined,) = processes.add(1)
    poll_for(lambda: joined in usable(processes.client), timeout=60)
    processes.kill(killed)
    run.progress()
    found = run.finish(replicas=2)
    assert set(found.digests) <= {leader, joined}
