"""Training on a small cluster gives what a loop of NumPy in one process gives."""

from __future__ import annotations

import asyncio
import threading

import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from dask import delayed
from distributed.utils_test import poll_for

from dask_coded import submission
from dask_coded.aggregation import (
    CodedReduce,
    DynamicClusters,
    GradientCoding,
    Ring,
    Speculation,
    Star,
    StaticClusters,
    Tree,
)
from dask_coded.compression import GradiVeQ, Quantization, Truncation
from dask_coded.runtime.training import Leader
from dask_coded.training import (
    SGD,
    Adam,
    Checkpoint,
    Pipelined,
    Step,
    StepDecay,
    Synchronous,
    TrainingResult,
    WorkerReport,
    train,
)

STEPS = 30
X = np.random.default_rng(0).normal(size=(103, 5))
Y = X @ np.arange(1.0, 6.0) + np.sin(np.arange(103))


def squares(w, samples, targets):
    error = samples @ w - targets
    return error @ error / 2, samples.T @ error


def in_one_process(optimizer=SGD(0.1), schedule=Synchronous(), steps=STEPS):  # noqa: B008
    """Full batches; each step with the parameters that the schedule says."""
    versions = [np.zeros(5)]
    state = optimizer.start(versions[0])
    for step in range(steps):
        gradient = squares(versions[schedule.version(step)], X, Y)[1] / len(X)
        versions.append(versions[-1].copy())
        optimizer.update(versions[-1], gradient, state, step)
    return versions[-1]


def blocks():
    return da.from_array(X, chunks=(17, 3)), da.from_array(Y, chunks=40)


@pytest.mark.parametrize(
    "schedule", [Synchronous(), Pipelined(2), Pipelined(3, warmup=4)], ids=repr
)
@pytest.mark.parametrize(
    "aggregation", [Star(), Ring(), Star(segments=2), Ring(segments=3)], ids=repr
)
def test_parameters_are_those_of_one_process(client, aggregation, schedule):
    optimizer = SGD(0.1, momentum=0.5)
    found = train(
        squares,
        np.zeros(5),
        blocks(),
        optimizer=optimizer,
        steps=STEPS,
        aggregation=aggregation,
        schedule=schedule,
        client=client,
    )
    np.testing.assert_allclose(found.parameters, in_one_process(optimizer, schedule), rtol=1e-10)
    assert found.steps == len(found.history) == STEPS
    assert len(found.digests) == 4
    assert len(set(found.digests.values())) == 1


@pytest.mark.parametrize(
    "aggregation",
    [
        Tree(fan_in=3, depth=None),
        GradientCoding(stragglers=1),
        GradientCoding(stragglers=2, code="cyclic"),
        StaticClusters(size=2, load=2),
        DynamicClusters(size=2, load=2, memory=-np.inf),
        CodedReduce(fan_in=4, depth=1, stragglers=1),
        Speculation(share=0.5),
    ],
    ids=repr,
)
def test_every_aggregation_gives_the_same(client, aggregation):
    found = train(
        squares, np.zeros(5), blocks(), steps=STEPS, aggregation=aggregation, client=client
    )
    np.testing.assert_allclose(found.parameters, in_one_process(), rtol=1e-10)
    assert len(set(found.digests.values())) == 1


@pytest.mark.parametrize("compression", [Truncation(), Quantization(), GradiVeQ(8, 4)], ids=repr)
@pytest.mark.parametrize("aggregation", [Ring(), GradientCoding(1)], ids=repr)
def test_compressed_replicas_are_the_same(client, aggregation, compression):
    found = train(
        squares,
        np.zeros(5, dtype=np.float32),
        blocks(),
        steps=STEPS,
        aggregation=aggregation,
        compression=compression,
        schedule=Pipelined(2),
        client=client,
    )
    assert len(set(found.digests.values())) == 1
    np.testing.assert_allclose(found.parameters, in_one_process(schedule=Pipelined(2)), rtol=0.2)


def test_mini_batches_are_drawn_alike_by_all_holders(client):
    options = {"optimizer": Adam(0.05), "steps": STEPS, "batch_size": 20, "client": client}
    one = train(squares, np.zeros(5), blocks(), aggregation=Star(), **options)
    # As many parts, each on two workers.
    other = train(squares, np.zeros(5), blocks(), aggregation=Speculation(), **options)
    np.testing.assert_allclose(one.parameters, other.parameters, rtol=1e-10)
    different = train(squares, np.zeros(5), blocks(), aggregation=Star(), seed=1, **options)
    assert np.abs(one.parameters - different.parameters).max() > 1e-3


def test_data_may_come_in_any_form(client):
    partitions = ([delayed(X[:50]), delayed(X[50:])], client.scatter([Y[:9], Y[9:]]))
    for data in [(X, Y), partitions, (scipy.sparse.csr_array(X), Y)]:
        found = train(squares, np.zeros(5), data, steps=STEPS, client=client)
        np.testing.assert_allclose(found.parameters, in_one_process(), rtol=1e-10)


def test_a_training_goes_on_from_its_file(client, tmp_path):
    optimizer = Adam(0.1, decay=StepDecay(every=10))
    path = tmp_path / "state"
    # A ring adds up in the same order whoever comes first.
    options = {"optimizer": optimizer, "batch_size": 30, "aggregation": Ring(), "client": client}
    checkpoint = Checkpoint(path, every=7)
    whole = train(squares, np.zeros(5), blocks(), steps=20, **options)
    train(squares, np.zeros(5), blocks(), steps=13, checkpoint=checkpoint, **options)
    resumed = train(squares, np.zeros(5), blocks(), steps=20, resume=path, **options)
    np.testing.assert_array_equal(resumed.parameters, whole.parameters)
    assert [s.loss for s in resumed.history] == pytest.approx([s.loss for s in whole.history])
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    with pytest.raises(ValueError, match="holds 5 parameters of dtype float64"):
        train(squares, np.zeros(4), blocks(), resume=path, **options)
    with pytest.raises(ValueError, match="of another optimizer than SGD"):
        train(squares, np.zeros(5), blocks(), resume=path, **options | {"optimizer": SGD(0.1)})


def test_a_training_does_not_go_on_from_any_file(client, tmp_path):
    file = tmp_path / "file"
    options = {"client": client, "resume": file}
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match="must be one that a `Checkpoint` wrote"):
        train(squares, np.zeros(5), (X, Y), **options)
    train(squares, np.zeros(5), (X, Y), steps=1, client=client, checkpoint=Checkpoint(file))
    with pytest.raises(ValueError, match="holds 5 parameters"):
        train(squares, np.zeros(6), (X, Y), **options)
    with pytest.raises(ValueError, match=r"of another optimizer than Adam\("):
        train(squares, np.zeros(5), (X, Y), optimizer=Adam(), **options)
    with pytest.raises(ValueError, match="of other layers or segments"):
        train(squares, np.zeros(5), (X, Y), compression=GradiVeQ(2, 1), **options)


def test_a_worker_may_be_named_by_itself(client):
    first = next(iter(client.nthreads()))
    found = train(squares, np.zeros(5), (X, Y), steps=1, client=client, workers=first)
    assert set(found.digests) == {first}
    assert repr(found).count("\n") < 3  # no history of hundreds of steps


def test_a_callback_ends_the_training(client):
    heard = []

    def enough(progress):
        heard.append(progress)
        return True

    found = train(squares, np.zeros(5), blocks(), steps=10**6, callback=enough, client=client)
    assert 0 < found.steps < 10**6
    assert len(found.history) == found.steps
    assert heard[0].objective == pytest.approx(squares(np.zeros(5), X, Y)[0] / len(X))
    np.testing.assert_allclose(found.parameters, in_one_process(steps=found.steps), rtol=1e-10)


def test_nothing_is_left_over_of_a_training_that_is_cancelled(client, monkeypatch):
    begun = threading.Event()
    submit = submission.submit

    class Interrupted:
        def __init__(self, future):
            self._future = future

        def result(self):
            begun.wait()
            raise KeyboardInterrupt

        def cancel(self):
            self._future.cancel()

    monkeypatch.setattr(submission, "submit", lambda *a, **k: Interrupted(submit(*a, **k)))
    with pytest.raises(KeyboardInterrupt):
        train(
            squares,
            np.zeros(5),
            blocks(),
            steps=10**9,
            callback=lambda progress: begun.set(),
            client=client,
        )
    poll_for(lambda: not left_over(client), timeout=30)


def test_nothing_is_left_over_of_a_training_that_is_cancelled_before_it_asks_for_workers(
    client, monkeypatch
):
    there, cancelled = threading.Event(), threading.Event()
    submit, invite = submission.submit, Leader._invite

    async def late(leader):
        there.set()
        await asyncio.to_thread(cancelled.wait)
        return await invite(leader)

    class Interrupted:
        def __init__(self, future):
            self._future = future

        def result(self):
            there.wait()
            raise KeyboardInterrupt

        def cancel(self):
            self._future.cancel()
            poll_for(lambda: any(client.run(is_cancelled, self._future.key).values()), timeout=30)
            cancelled.set()

    monkeypatch.setattr(Leader, "_invite", late)
    monkeypatch.setattr(submission, "submit", lambda *a, **k: Interrupted(submit(*a, **k)))
    with pytest.raises(KeyboardInterrupt):
        train(squares, np.zeros(5), blocks(), steps=10**9, client=client)
    poll_for(lambda: not left_over(client), timeout=30)


def is_cancelled(key, dask_worker):
    return dask_worker.extensions["coded"].is_cancelled(key)


def left_over(client):
    """Trainers and leaders that workers have, and threads."""

    def count(dask_worker):
        memberships = dask_worker.extensions["coded"].memberships
        return len(memberships.trainers) + len(memberships.leaders)

    threads = sum(t.name.startswith("Coded-train") for t in threading.enumerate())
    return threads + sum(client.run(count).values())


def test_an_error_in_the_gradient_says_where(client):
    def faulty(w, samples, targets):
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        train(faulty, np.zeros(5), blocks(), client=client)
    assert "Raised in the training on worker inproc://" in caught.value.__notes__[0]
    poll_for(lambda: not left_over(client), timeout=30)


class OfTheUser(Exception):
    def __init__(self, number, text):
        super().__init__(f"{text} {number}")


@pytest.mark.parametrize("error", [OfTheUser(5, "number"), SystemExit("number 5")], ids=repr)
def test_errors_that_cannot_travel_are_told_of(client, error):
    def faulty(w, samples, targets):
        raise OfTheUser(5, "number") if exits is None else SystemExit(exits)

    exits = error.code if isinstance(error, SystemExit) else None
    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: number 5"):
        train(faulty, np.zeros(5), blocks(), client=client)


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (lambda w, X, y: np.zeros(4), ValueError, "flat array of 5 elements; its shape is"),
        (lambda w, X, y: np.zeros(5, int), TypeError, "real floating-point numbers"),
        (lambda w, X, y: np.full(5, np.nan), FloatingPointError, "lower the learning rate"),
        (lambda w, X, y: None, TypeError, "a pair of the loss and that; it is None"),
        (lambda w, X, y: (0.0, w, w), TypeError, "it is a tuple of 3"),
        (lambda w, X, y: (np.ones(3), w), TypeError, r"loss must be a number.* shape is \(3,\)"),
        (lambda w, X, y: w.sort(), ValueError, "read-only"),
    ],
)
def test_gradients_that_are_wrong(client, gradient, error, message):
    with pytest.raises(error, match=message):
        train(gradient, np.zeros(5), blocks(), client=client)


class Frame:
    """Looks like a data frame."""

    shape = X.shape
    iloc = None

    def to_numpy(self):
        return X


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (X, {}, TypeError, "'data' must be a pair"),
        ((X, Y[1:]), {}, ValueError, "103 samples and 102 targets"),
        ((X, "y"), {}, TypeError, "The targets must be a dask array"),
        ((Frame(), Y), {}, TypeError, r"they are a Frame: pass what its `to_numpy\(\)` gives"),
        (([delayed(Frame())], Y), {}, TypeError, "partitions of the samples must be NumPy"),
        ((da.ones(()), Y), {}, ValueError, "an array of rows, they are a single number"),
        ((da.from_array(X)[da.from_array(Y) > 0], Y), {}, ValueError, "compute_chunk_sizes"),
        ((X, Y), {"optimizer": "adam"}, TypeError, r"such as Adam\(\), it is 'adam'"),
        ((X, Y), {"aggregation": Ring}, TypeError, "an instance of Aggregation, such as Ring"),
        ((X, Y), {"compression": Truncation}, TypeError, "an instance of Compression"),
        ((X, Y), {"schedule": Pipelined}, TypeError, "an instance of Schedule"),
        ((X, Y), {"checkpoint": "file"}, TypeError, "an instance of Checkpoint"),
        ((X, Y), {"callback": 5}, TypeError, "'callback' must be a function, it is 5"),
        ((X, Y), {"workers": "tcp://nowhere:1"}, ValueError, "'workers' must hold addresses"),
        (
            (X, Y),
            {"checkpoint": Checkpoint("no/such/folder/file")},
            FileNotFoundError,
            "folder '.*folder' must be there on the workers",
        ),
        ((X, Y), {"steps": 0}, ValueError, "'steps' must be a whole number from 1"),
        ((X, Y), {"workers": ["b"]}, ValueError, "'workers' must hold addresses of workers"),
        ((X, Y), {"layers": [(2, 2)]}, ValueError, "as many elements as the parameters, 5; it"),
        ((X, Y), {"aggregation": GradientCoding(4)}, ValueError, "at least 5 workers"),
        (
            (X, Y),
            {"aggregation": GradientCoding(2, "cyclic"), "compression": GradiVeQ(8, 4)},
            ValueError,
            "does not cancel in a code that subtracts",
        ),
        (
            (X, Y),
            {"aggregation": GradientCoding(2, "cyclic"), "compression": Quantization()},
            ValueError,
            "loses digits",
        ),
    ],
)
def test_arguments_that_are_wrong(client, data, options, error, message):
    with pytest.raises(error, match=message):
        train(squares, np.zeros(5), data, client=client, **options)


def test_a_worker_that_is_late_again_and_again_shows_in_the_result():
    steps = [Step(i, 0.0, 1.0, ("b",) if i % 4 < 2 else (), {"a": 1.0}) for i in range(100)]
    for step in steps:
        if not step.late:
            step.computing["b"] = 1.5
    found = TrainingResult(np.zeros(1), 100, steps, {}, Star())
    assert found.workers == {"a": WorkerReport(100, 0.0, 1.0), "b": WorkerReport(100, 0.5, 1.5)}
    assert -0.1 < found.straggling_correlation < 0.4
