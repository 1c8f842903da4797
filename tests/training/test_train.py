"""Training on a small cluster gives the same result as a NumPy loop in one process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
import warnings
from functools import partial
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from dask import delayed
from distributed import futures_of
from distributed.utils_test import captured_logger, poll_for
from scipy.sparse.linalg import ArpackNoConvergence

from dask_coded import submission
from dask_coded.aggregation import (
    CodedReduce,
    DynamicClusters,
    GradientCoding,
    Ring,
    Squeeze,
    Star,
    StaticClusters,
    Tree,
)
from dask_coded.compression import GradiVeQ, Quantization, Truncation
from dask_coded.loop import Progress
from dask_coded.training import (
    SGD,
    Adam,
    Checkpoint,
    Pipelined,
    Step,
    StepDecay,
    Synchronous,
    TrainingResult,
    Validation,
    WorkerReport,
    checkpoints,
    loaders,
    train,
)
from dask_coded.training._train import _LargeTasks, _Watch
from dask_coded.training.batches import Batches
from dask_coded.training.data import load
from dask_coded.training.runtime import group, leader
from dask_coded.training.runtime.link import Link
from tests.clocks import set_timeouts

STEPS = 30
X = np.random.default_rng(0).normal(size=(103, 5))
Y = X @ np.arange(1.0, 6.0) + np.sin(np.arange(103))


def squares(w, samples, targets):
    error = samples @ w - targets
    return error @ error / 2, samples.T @ error


def in_one_process(optimizer=SGD(0.1), schedule=Synchronous(), steps=STEPS):  # noqa: B008
    """Train on full batches; each step uses the parameters that the schedule prescribes."""
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
def test_parameters_match_one_process(client, aggregation, schedule, monkeypatch):
    # On a busy machine a worker may answer late, and would be left out.
    set_timeouts(monkeypatch, 300.0, group, leader)
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
    ],
    ids=repr,
)
def test_every_aggregation_gives_the_same_parameters(client, aggregation):
    found = train(
        squares, np.zeros(5), blocks(), steps=STEPS, aggregation=aggregation, client=client
    )
    np.testing.assert_allclose(found.parameters, in_one_process(), rtol=1e-10)
    assert len(set(found.digests.values())) == 1


@pytest.mark.parametrize("compression", [Truncation(), Quantization(), GradiVeQ(8, 4)], ids=repr)
@pytest.mark.parametrize("aggregation", [Ring(), GradientCoding(1)], ids=repr)
def test_compressed_replicas_are_identical(client, aggregation, compression):
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


def test_all_holders_of_a_part_draw_the_same_mini_batches(client):
    options = {"optimizer": Adam(0.05), "steps": STEPS, "batch_size": 20, "client": client}
    one = train(squares, np.zeros(5), blocks(), aggregation=Star(), **options)
    # The same number of parts, each on two workers.
    other = train(squares, np.zeros(5), blocks(), aggregation=Star(), **options)
    np.testing.assert_allclose(one.parameters, other.parameters, rtol=1e-10)
    different = train(squares, np.zeros(5), blocks(), aggregation=Star(), seed=1, **options)
    assert np.abs(one.parameters - different.parameters).max() > 1e-3


def test_the_scheduler_knows_which_data_a_training_waits_for(client, monkeypatch):
    data = client.persist([da.from_array(array, chunks=(40, *array.shape[1:])) for array in (X, Y)])
    parts = client.map(lambda array: array[:3], [X, Y])
    train(squares, np.zeros(5), tuple(data), steps=1, client=client)
    awaited, handlers = [], client.cluster.scheduler.stream_handlers
    monkeypatch.setitem(handlers, "coded-awaited", lambda keys, client: awaited.extend(keys))
    train(squares, np.zeros(5), tuple(data), steps=1, client=client)
    train(squares, np.zeros(5), ([parts[0]], [parts[1]]), steps=1, client=client)
    assert {future.key for future in [*futures_of(data), *parts]} <= set(awaited)


def test_a_training_that_has_failed_holds_nothing(client):
    data = tuple(client.persist(list(blocks())))

    def fail(w, X, y):
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        train(fail, np.zeros(5), data, steps=STEPS, client=client)
    del data

    def nothing_is_left():
        gc.collect()
        return not client.futures

    poll_for(nothing_is_left, timeout=60)


def test_data_may_come_in_any_form(client):
    partitions = ([delayed(X[:50]), delayed(X[50:])], client.scatter([Y[:9], Y[9:]]))
    formats = [(scipy.sparse.csr_array(X).asformat(f), Y) for f in ("csr", "coo", "bsr")]
    for data in [(X, Y), partitions, *formats, iter([(X, Y)])]:
        found = train(squares, np.zeros(5), data, steps=STEPS, client=client)
        np.testing.assert_allclose(found.parameters, in_one_process(), rtol=1e-10)


@pytest.mark.parametrize("kind", ["arrays", "delayed"])
def test_samples_and_targets_of_one_source_are_made_once(client, kind, tmp_path):
    def make(first, last):
        with (tmp_path / str(first)).open("a") as file:
            file.write("x")
        return np.column_stack([X, Y])[first:last]

    sources = [delayed(make)(first, first + 40) for first in (0, 40)]
    if kind == "arrays":
        both = da.concatenate([da.from_delayed(s, (40, 6), X.dtype) for s in sources])
        data = both[:, :5], both[:, 5]
    else:
        data = [s[:, :5] for s in sources], [s[:, 5] for s in sources]
    train(squares, np.zeros(5), data, steps=1, client=client)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "x", "40": "x"}


def test_blocks_of_several_kinds_are_in_their_order(client):
    samples = [delayed(X[:20]), da.from_array(X[20:40]), delayed(X[40:60]), da.from_array(X[60:])]
    targets = [delayed(Y[:20]), da.from_array(Y[20:40]), delayed(Y[40:60]), da.from_array(Y[60:])]
    for data in [(samples, targets), (tuple(samples), targets[::1])]:
        found = train(squares, np.zeros(5), data, steps=STEPS, client=client)
        np.testing.assert_allclose(found.parameters, in_one_process(), rtol=1e-10)


def test_a_block_without_rows_may_be_of_any_kind(client):
    samples = [delayed(np.array([])), delayed(X[:50]), delayed(X[50:])]
    found = train(squares, np.zeros(5), (samples, Y), steps=STEPS, client=client)
    np.testing.assert_allclose(found.parameters, in_one_process(), rtol=1e-10)


@pytest.mark.parametrize("schedule", [Synchronous(), Pipelined(2)], ids=str)
@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
def test_samples_may_be_changed_at_random(client, kind, schedule):
    """Each step draws new changes, and the stored data stay unchanged."""

    def scaled(samples, keys):
        factors = 1 + (keys % np.uint64(2)).astype(float)
        return (
            samples.multiply(factors[:, None]).tocsr()
            if kind is not np.asarray
            else (samples * factors[:, None])
        )

    def summed(w, samples, targets):
        return 0.0, np.asarray(samples.sum(axis=0)).ravel() / len(X)

    options = {"optimizer": SGD(1.0), "steps": STEPS, "schedule": schedule, "client": client}
    found = train(summed, np.zeros(5), (kind(X), Y), augment=scaled, **options)
    batches = Batches(len(X), 1, None, seed=0)
    expected = sum(
        (X * (1 + (batches.keys(0, step) % np.uint64(2)).astype(float))[:, None]).sum(axis=0)
        for step in range(STEPS)
    )
    np.testing.assert_allclose(found.parameters, -expected / len(X) ** 2, rtol=1e-9)


def test_samples_whose_entries_are_repeated_are_added_up_as_by_scipy(client):
    """In the type of the product: 200 and 100 do not fit into their own."""
    where = ([0, 0, 1], [0, 0, 1])
    samples = scipy.sparse.coo_array(([200, 100, 3], where), shape=(2, 2), dtype=np.uint8)

    def gradient(w, samples, targets):
        return 0.0, samples.T @ -np.ones(samples.shape[0])

    for data in (samples, [delayed(samples)]):
        options = {"optimizer": SGD(2.0), "steps": 1, "client": client}
        found = train(gradient, np.zeros(2), (data, np.zeros(2)), **options)
        assert found.parameters.tolist() == [300.0, 3.0]


def batches(count=6):
    """Yield batches of 20 samples, and in the end what is left."""
    return ((X[i : i + 20], Y[i : i + 20]) for i in range(0, 20 * count, 20))


@pytest.mark.parametrize("length", [{"steps": STEPS}, {"epochs": 5}], ids=str)
def test_steps_use_as_many_samples_as_a_batch(client, length):
    expected = train(squares, np.zeros(5), (X, Y), steps=STEPS, batch_size=20, client=client)
    found = train(squares, np.zeros(5), batches(), client=client, **length)
    np.testing.assert_allclose(found.parameters, expected.parameters, rtol=1e-10)
    whole = train(squares, np.zeros(5), batches(), batch_size=len(X), steps=STEPS, client=client)
    np.testing.assert_allclose(whole.parameters, in_one_process(), rtol=1e-10)


@pytest.mark.parametrize(("batch_size", "read"), [(None, 5), (20, 5), (50, 13), (1, 1)])
def test_batches_that_never_end_are_read_until_the_steps_have_theirs(client, batch_size, read):
    given = []

    def endless():
        while True:
            given.append(1)
            yield X[:20], Y[:20]

    found = train(squares, np.zeros(5), endless(), steps=5, batch_size=batch_size, client=client)
    assert found.steps == 5
    assert len(given) == read


@pytest.mark.parametrize("options", [{"epochs": 1}, {"steps": 10**9}], ids=str)
def test_batches_that_never_end_do_not_fill_the_memory(client, options, monkeypatch):
    monkeypatch.setattr(loaders, "MEMORY_LIMIT", 2**20)
    with pytest.raises(MemoryError, match=r"yielded batches of .* has 1.00 MiB: pass `from_loader"):
        train(squares, np.zeros(5), itertools.repeat((X, Y)), client=client, **options)


def test_batches_may_come_in_the_same_memory(client):
    def reused():
        samples, targets = np.empty((20, 5)), np.empty(20)
        for given, wanted in batches():
            rows = slice(len(given))
            samples[rows], targets[rows] = given, wanted
            yield samples[rows], targets[rows]

    expected = train(squares, np.zeros(5), batches(), steps=3, client=client)
    found = train(squares, np.zeros(5), reused(), steps=3, client=client)
    np.testing.assert_allclose(found.parameters, expected.parameters, rtol=1e-12)


def test_a_step_has_a_sample_however_small_a_batch_is(client):
    found = train(squares, np.zeros(5), (X, Y), steps=103, batch_size=1, client=client)
    losses = [step.loss for step in found.history]
    assert min(losses) > 0


def test_iterators_of_layers_and_leaders_are_read_once(client):
    first = next(iter(client.nthreads()))
    found = train(
        squares,
        np.zeros(5),
        blocks(),
        steps=3,
        layers=iter([(4,), (1,)]),
        leader=iter([first]),
        compression=GradiVeQ(2, 1, exact_steps=1, period=2, residual=False),
        client=client,
    )
    assert found.steps == 3
    with pytest.raises(ValueError, match="'leader' must contain the address"):
        train(squares, np.zeros(5), blocks(), leader=iter(["tcp://nowhere:1"]), client=client)


def test_scattered_data_do_not_change_with_the_arrays_of_the_caller(client, monkeypatch):
    # What the client knows may at any time be an answer without workers, for which it asks itself.
    monkeypatch.setattr(client, "scheduler_info", lambda n_workers: {"workers": {}})
    samples, targets = X.copy(), Y.copy()
    *_, held = load(client, (samples, targets))
    samples[:], targets[:] = 0, 0
    found = client.gather(held)
    np.testing.assert_array_equal(np.concatenate([a for a in found if a.ndim == 2]), X)
    np.testing.assert_array_equal(np.concatenate([a for a in found if a.ndim == 1]), Y)


@pytest.mark.parametrize("aggregation", [Squeeze(), Star()], ids=repr)
def test_a_gradient_with_a_large_norm_is_scaled_down(client, aggregation):
    options = {"optimizer": SGD(1.0), "steps": 1, "aggregation": aggregation, "client": client}
    free = train(squares, np.zeros(X.shape[1]), (X, Y), **options).parameters
    clipped = train(squares, np.zeros(X.shape[1]), (X, Y), clip_norm=0.01, **options).parameters
    np.testing.assert_allclose(clipped, free * (0.01 / np.linalg.norm(free)))


def test_epochs_are_passes_over_the_data(client):
    found = train(squares, np.zeros(5), blocks(), epochs=3, batch_size=20, client=client)
    assert found.steps == 3 * 6
    assert train(squares, np.zeros(5), blocks(), epochs=3, client=client).steps == 3


def test_a_training_resumes_from_its_checkpoint(client, tmp_path):
    optimizer = Adam(0.1, decay=StepDecay(every=10))
    path = tmp_path / "state"
    # A ring always sums in the same order, whichever worker is first.
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
    with pytest.raises(ValueError, match="does not hold the state of SGD"):
        train(squares, np.zeros(5), blocks(), resume=path, **options | {"optimizer": SGD(0.1)})


def test_a_training_goes_on_without_its_checkpoints(client, tmp_path, monkeypatch):
    def slow_down(*args):
        raise OSError("SlowDown")

    monkeypatch.setattr("dask_coded.training.runtime.storage.write_file", slow_down)
    options = {"batch_size": 30, "aggregation": Ring(), "client": client, "steps": 20}
    whole = train(squares, np.zeros(5), blocks(), **options)
    with (
        warnings.catch_warnings(record=True) as seen,
        captured_logger("distributed.dask_coded") as log,
    ):
        warnings.simplefilter("always")
        checkpoint = Checkpoint(tmp_path / "state", every=1)
        found = train(squares, np.zeros(5), blocks(), checkpoint=checkpoint, **options)
    np.testing.assert_array_equal(found.parameters, whole.parameters)
    assert f"The checkpoint {tmp_path / 'state'} of a training is not written" in log.getvalue()
    texts = [str(warning.message) for warning in seen]
    last = "The last state of a training is not in its checkpoint"
    assert [text.startswith(last) for text in texts if "of a training" in text] == [False, True]


@pytest.mark.parametrize("place", ["file", "memory://checkpoint"])
def test_the_same_call_starts_a_training_and_goes_on_with_it(place, client, tmp_path):
    path = place if "://" in place else tmp_path / place
    options = {"aggregation": Ring(), "batch_size": 30, "client": client}
    durable = options | {"checkpoint": Checkpoint(path, every=7), "resume": True}
    whole = train(squares, np.zeros(5), blocks(), steps=20, **options)
    train(squares, np.zeros(5), blocks(), steps=13, **durable)
    resumed = train(squares, np.zeros(5), blocks(), steps=20, **durable)
    np.testing.assert_array_equal(resumed.parameters, whole.parameters)
    assert [math.isnan(step.seconds) for step in resumed.history] == [True] * 13 + [False] * 7
    # Once it has ended, the same call returns its result.
    again = train(squares, np.zeros(5), blocks(), steps=20, **durable)
    np.testing.assert_array_equal(again.parameters, whole.parameters)
    with pytest.raises(TypeError, match="pass `checkpoint` as well"):
        train(squares, np.zeros(5), blocks(), resume=True, **options)


def test_another_call_does_not_go_on_with_a_training(client, tmp_path, monkeypatch):
    path = tmp_path / "file"
    options = {"aggregation": Ring(), "batch_size": 30, "steps": 4, "client": client}
    options |= {"checkpoint": Checkpoint(path), "resume": True}
    train(squares, np.zeros(5), blocks(), **options)
    others = {
        r"batch_size 30, this one has batch_size 60": {"batch_size": 60},
        r"learning_rate=0\.1.*learning_rate=0\.5": {"optimizer": SGD(0.5)},
        r"seed 0, this one has seed 1": {"seed": 1},
        r"has seen 4 updates, this training ends after 3": {"steps": 3},
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            train(squares, np.zeros(5), blocks(), **options | other)

    def scaled(factor):
        return lambda w, X, y: tuple(factor * part for part in squares(w, X, y))

    for i, (function, optimizer) in enumerate(
        [(partial(scaled(1)), None), (scaled(1), None), (squares, SGD(0.1, decay=lambda step: 0.1))]
    ):
        options["checkpoint"] = Checkpoint(tmp_path / f"of functions {i}")
        options["optimizer"] = optimizer
        for _ in range(2):
            train(function, np.zeros(5), blocks(), **options)
        other = {"optimizer": SGD(0.1, decay=lambda step: 0.2)} if optimizer else {}
        with pytest.raises(ValueError, match=r"of a training with .*values in functions"):
            train(squares if optimizer else scaled(2), np.zeros(5), blocks(), **options | other)
    options |= {"checkpoint": Checkpoint(path), "optimizer": None}
    # Whoever names the file means it.
    found = train(squares, np.zeros(5), blocks(), **options | {"seed": 1, "resume": path})
    assert found.steps == 4
    # The workers see the file, this process does not.
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "read_file", lambda path: (tmp_path / "elsewhere").read_bytes())
        with pytest.raises(FileExistsError, match="share the folder with this process"):
            train(squares, np.zeros(5), blocks(), **options)
    assert train(squares, np.zeros(5), blocks(), **options | {"resume": path}).steps == 4


def test_a_training_does_not_resume_from_other_files(client, tmp_path):
    file = tmp_path / "file"
    options = {"client": client, "resume": file}
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match="must have been written by a `Checkpoint`"):
        train(squares, np.zeros(5), (X, Y), **options)
    train(squares, np.zeros(5), (X, Y), steps=1, client=client, checkpoint=Checkpoint(file))
    with pytest.raises(ValueError, match="holds 5 parameters"):
        train(squares, np.zeros(6), (X, Y), **options)
    whole = file.read_bytes()
    file.write_bytes(whole[:9] + bytes([whole[9] ^ 4]) + whole[10:])
    with pytest.raises(ValueError, match=r"cannot be read as one: StoreError: .* differs"):
        train(squares, np.zeros(5), (X, Y), **options)
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=r"does not hold the state of Adam\("):
        train(squares, np.zeros(5), (X, Y), optimizer=Adam(), **options)
    with pytest.raises(ValueError, match="to other layers or segments"):
        train(squares, np.zeros(5), (X, Y), compression=GradiVeQ(2, 1), **options)


def test_a_single_worker_may_be_given_without_a_list(client):
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
    assert heard[-1].round == found.steps
    np.testing.assert_allclose(found.parameters, in_one_process(steps=found.steps), rtol=1e-10)


@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_a_training_is_asked_to_end_until_it_has_ended(kind):
    asked = []
    scheduler = SimpleNamespace(coded_enough=lambda training: asked.append(training))
    loop = SimpleNamespace(add_callback=lambda function, **options: function(**options))
    client = SimpleNamespace(loop=loop, scheduler=scheduler)
    watch = _Watch(client, "training", lambda progress: kind(progress.round == 2), None)
    for i in range(4):
        watch(Progress(i, residual=1.0))
    assert asked == ["training"] * 2


@pytest.mark.parametrize("answer", [None, False, np.False_, 1, "yes", np.ones(2)])
def test_no_other_answer_of_a_callback_ends_a_training(answer):
    watch = _Watch(None, "training", lambda progress: answer, None)
    watch(Progress(0, residual=1.0))


def test_a_cancelled_training_leaves_nothing_behind(client, monkeypatch):
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
    poll_for(lambda: not left_over(client), timeout=60)


def test_a_training_cancelled_before_it_asks_for_workers_leaves_nothing_behind(client, monkeypatch):
    there, cancelled = threading.Event(), threading.Event()
    submit, invite = submission.submit, Link._invite

    async def late(link, step):
        there.set()
        await asyncio.to_thread(cancelled.wait)
        return await invite(link, step)

    class Interrupted:
        def __init__(self, future):
            self._future = future

        def result(self):
            there.wait()
            raise KeyboardInterrupt

        def cancel(self):
            self._future.cancel()
            poll_for(lambda: any(client.run(is_cancelled, self._future.key).values()), timeout=60)
            cancelled.set()

    monkeypatch.setattr(Link, "_invite", late)
    monkeypatch.setattr(submission, "submit", lambda *a, **k: Interrupted(submit(*a, **k)))
    with pytest.raises(KeyboardInterrupt):
        train(squares, np.zeros(5), blocks(), steps=10**9, client=client)
    poll_for(lambda: not left_over(client), timeout=60)


def is_cancelled(key, dask_worker):
    ts = dask_worker.state.tasks.get(key)
    return ts is not None and ts.state == "cancelled"


def left_over(client):
    """Count trainers and leaders on the workers, and training threads."""

    def count(dask_worker):
        plugin = dask_worker.extensions["dask-coded-training"]
        return len(plugin.trainers) + len(plugin.leaders)

    threads = sum(t.name.startswith("Coded-train") for t in threading.enumerate())
    return threads + sum(client.run(count).values())


def test_an_error_in_the_gradient_names_the_worker(client):
    def faulty(w, samples, targets):
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        train(faulty, np.zeros(5), blocks(), client=client)
    assert "Raised in the training on worker inproc://" in caught.value.__notes__[0]
    poll_for(lambda: not left_over(client), timeout=60)


class OfTheUser(Exception):
    def __init__(self, *, code, held):
        super().__init__(f"code {code}")
        self.code, self.held = code, held


def test_an_exception_of_the_gradient_is_raised_as_itself_whatever_it_holds(client):
    def of_the_user(w, samples, targets):
        raise OfTheUser(code=5, held=threading.Lock())

    with pytest.raises(OfTheUser, match="code 5") as caught:
        train(of_the_user, np.zeros(5), blocks(), client=client)
    assert caught.value.code == 5
    assert caught.traceback[-1].name == "of_the_user"

    def of_scipy(w, samples, targets):
        raise ArpackNoConvergence("no convergence", w, np.outer(w, w))

    with pytest.raises(ArpackNoConvergence, match="no convergence") as caught:
        train(of_scipy, np.arange(5.0), blocks(), client=client)
    np.testing.assert_array_equal(caught.value.eigenvalues, np.arange(5.0))


def test_a_gradient_that_ends_its_process_is_an_error(client):
    def leave(w, samples, targets):
        raise SystemExit("number 5")

    with pytest.raises(RuntimeError, match="SystemExit: number 5"):
        train(leave, np.zeros(5), blocks(), client=client)


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (
            lambda w, X, y: np.zeros(4),
            ValueError,
            "flat array of 5 elements, or a pair .*; its shape is",
        ),
        (lambda w, X, y: np.zeros(5, int), TypeError, "real floating-point numbers"),
        (lambda w, X, y: np.full(5, np.nan), FloatingPointError, "lower the learning rate"),
        (lambda w, X, y: np.full(5, np.inf, "f2"), FloatingPointError, "float16 ends at 65504"),
        (lambda w, X, y: None, TypeError, r"a pair \(loss, flat array\), it returned None"),
        (lambda w, X, y: (0.0, w, w), TypeError, "it returned a tuple of 3"),
        (lambda w, X, y: (np.ones(3), w), TypeError, r"loss must be a number.* of shape \(3,\)"),
        (lambda w, X, y: (None, w), TypeError, "loss must be a number.* of type NoneType"),
        (lambda w, X, y: w.sort(), ValueError, "read-only"),
    ],
)
def test_wrong_gradients(client, gradient, error, message):
    with pytest.raises(error, match=message):
        train(gradient, np.zeros(5), blocks(), client=client)


def test_gradients_beyond_the_range_of_the_parameters_are_not_finite(client):
    start = np.zeros(5, dtype=np.float32)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        train(lambda w, X, y: np.full(5, 1e39), start, blocks(), steps=1, client=client)


@pytest.mark.parametrize("steps", [1, 9])
def test_parameters_that_overflow_in_a_step_are_an_error_in_the_last_one_too(client, steps):
    def steep(w, X, y):
        return np.full(5, 1e100 * len(X))

    with pytest.raises(FloatingPointError, match="after step 0: lower the learning rate"):
        train(steep, np.zeros(5), blocks(), steps=steps, optimizer=SGD(1e250), client=client)


def twice(rows):
    """Return a dask array whose blocks have twice as many rows as its chunks say."""
    blocks = da.from_array(rows, chunks=(40, *rows.shape[1:]))
    return blocks.map_blocks(lambda block: np.concatenate([block, block]), dtype=float)


class Frame:
    """Looks like a data frame."""

    shape = X.shape
    iloc = None

    def to_numpy(self):
        return X


class DataSet:
    """Looks like one of PyTorch."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], Y[i]


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (X, {}, TypeError, "'data' must be a pair, samples and targets, its type is ndarray"),
        (
            (X, Y, Y),
            {},
            TypeError,
            "'data' must be a pair, samples and targets, its type is tuple of 3",
        ),
        (DataSet(), {}, TypeError, r"its type is DataSet: pass a `DataLoader` of it\."),
        (
            (X, Y),
            {"validation": Validation(squares, zip([X], [Y], strict=True))},
            TypeError,
            "The validation's 'data' must be .* its type is zip: pass whole arrays",
        ),
        ((X, Y[1:]), {}, ValueError, "103 samples and 102 targets"),
        ((X, "y"), {}, TypeError, "The targets must be a dask array"),
        ((Frame(), Y), {}, TypeError, r"not a Frame: pass the result of its `to_numpy\(\)`"),
        (([delayed(Frame())], Y), {}, TypeError, "partitions of the samples must be NumPy"),
        (
            ([delayed(X[:50]), delayed(X[50:].astype(np.float32))], Y),
            {},
            ValueError,
            r"samples must .* rows of dtype float32 and shape \(5,\) and others of dtype float64",
        ),
        (
            ([delayed(X[:50]), delayed(scipy.sparse.csr_array(X[50:]))], Y),
            {},
            ValueError,
            r"of dtype float64 and shape \(5,\) and others of .*, a sparse array: convert them",
        ),
        ((da.ones(()), Y), {}, ValueError, "an array of rows, not a single number"),
        ((da.from_array(X)[da.from_array(Y) > 0], Y), {}, ValueError, "compute_chunk_sizes"),
        ((X, Y), {"optimizer": "adam"}, TypeError, r"such as Adam\(\) or .*, it is 'adam'"),
        ((X, Y), {"aggregation": Ring}, TypeError, "an instance of Aggregation, such as Ring"),
        ((X, Y), {"compression": Truncation}, TypeError, "an instance of Compression"),
        ((X, Y), {"schedule": Pipelined}, TypeError, "an instance of Schedule"),
        ((X, Y), {"checkpoint": "file"}, TypeError, "an instance of Checkpoint"),
        ((X, Y), {"validation": (X, Y)}, TypeError, "an instance of Validation"),
        (
            (X, Y),
            {"aggregation": Squeeze(), "schedule": Pipelined(2)},
            ValueError,
            r"Squeeze\(.*\) needs `schedule=Synchronous\(\)`, it is Pipelined\(width=2",
        ),
        (
            (X, Y),
            {"aggregation": DynamicClusters(2, 2), "compression": GradiVeQ()},
            ValueError,
            r"DynamicClusters\(.*\) cannot be used with GradiVeQ\(.*\), which keeps a residual",
        ),
        ((X, Y), {"callback": 5}, TypeError, "'callback' must be a function, it is 5"),
        ((X, Y), {"augment": "flip"}, TypeError, "'augment' must be a function, it is 'flip'"),
        (
            (X, Y),
            {"augment": lambda samples, keys: samples[1:]},
            ValueError,
            "'augment' must return an array of as many samples as it got, ",
        ),
        ((X, Y), {"augment": lambda samples, keys: None}, ValueError, "it returned NoneType"),
        ((X, Y), {"workers": "tcp://nowhere:1"}, ValueError, "'workers' must contain the address"),
        ((X, Y), {"leader": "tcp://nowhere:1"}, ValueError, "'leader' must contain the address"),
        (
            (twice(X), twice(Y)),
            {},
            ValueError,
            r"A chunk of the samples has shape \(80, 5\), its dask array declares \(40, 5\): call",
        ),
        (
            (X, Y),
            {"checkpoint": Checkpoint("no/such/folder/file")},
            FileNotFoundError,
            "folder '.*folder' must exist on the workers",
        ),
        (iter([X, Y]), {}, TypeError, "Each batch must be a pair of arrays or tensors"),
        (
            iter([(X, Y), (X[:, 1:], Y)]),
            {},
            ValueError,
            r"samples of all batches must have the same shape, some are of shape \(4,\) and",
        ),
        (iter([]), {}, ValueError, "must yield at least one batch"),
        ((X, Y), {"epochs": 0}, ValueError, "'epochs' must be a whole number of at least 1"),
        ((X, Y), {"epochs": 2, "steps": 2}, TypeError, "either 'steps' or 'epochs', not both"),
        ((X, Y), {"clip_norm": 0}, ValueError, "'clip_norm' must be"),
        ((X, Y), {"seed": None}, ValueError, "'seed' must be a whole number of at least 0"),
        (
            (X, Y),
            {"compression": GradiVeQ(4, 2, exact_steps=2), "schedule": Pipelined(2)},
            ValueError,
            "'exact_steps' must be at least 3 for a schedule of width 2",
        ),
        ((X, Y), {"steps": 0}, ValueError, "'steps' must be a whole number of at least 1"),
        ((X, Y), {"workers": ["b"]}, ValueError, "'workers' must contain the address of a worker"),
        ((X, Y), {"layers": [5]}, TypeError, r"'layers' must be a sequence of shapes.*is \[5\]"),
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
def test_wrong_arguments(client, data, options, error, message):
    with pytest.raises(error, match=message):
        train(squares, np.zeros(5), data, client=client, **options)


def test_a_worker_that_is_often_late_shows_in_the_result():
    steps = [Step(i, 0.0, 1.0, ("b",) if i % 4 < 2 else (), {"a": 1.0}) for i in range(100)]
    for step in steps:
        if not step.late:
            step.computing["b"] = 1.5
    found = TrainingResult(np.zeros(1), 100, steps, {}, Star())
    assert found.workers == {"a": WorkerReport(100, 0.0, 1.0), "b": WorkerReport(100, 0.5, 1.5)}
    assert -0.1 < found.straggling_correlation < 0.4


@pytest.mark.parametrize(
    ("seconds", "advised"),
    [
        ({"a": 0.1, "b": 0.1, "c": 0.5}, True),
        ({"a": 0.1, "b": 0.1, "c": 0.14}, False),
        ({"a": 0.001, "b": 0.001, "c": 0.005}, False),  # not worth the messages
        ({"a": 0.1}, False),
    ],
)
def test_the_result_says_if_steps_waited_for_a_slow_worker(seconds, advised):
    steps = [Step(i, 0.0, 1.0, (), seconds) for i in range(10)]
    found = TrainingResult(np.zeros(1), 10, steps, {}, Ring())
    assert bool(found.advice) == advised
    if advised:
        assert "worker c, which computed 500 ms in each" in found.advice
        assert "takes 136 ms" in found.advice
    # Of a long training, only recent steps say what each worker has done.
    long = [Step(i, 0.0, 1.0) for i in range(90)] + steps
    assert TrainingResult(np.zeros(1), 100, long, {}, Ring()).advice == found.advice
    other = TrainingResult(np.zeros(1), 10, steps, {}, GradientCoding(1))
    assert other.advice is None
    assert TrainingResult(np.zeros(1), 10, steps, {}, Ring(), can_squeeze=False).advice is None


def test_a_default_that_waits_for_a_slow_worker_is_followed_by_a_warning(client, monkeypatch):
    def waited(result):
        assert set(result.workers) == set(client.scheduler_info(n_workers=-1)["workers"])
        return "pass another"

    monkeypatch.setattr(TrainingResult, "advice", property(waited))
    with captured_logger("distributed.dask_coded") as log:
        train(squares, np.zeros(5), (X, Y), steps=3, client=client, aggregation=Star())
        assert not log.getvalue()
        train(squares, np.zeros(5), (X, Y), steps=3, client=client)
    assert "A training has waited for a slow worker: pass another" in log.getvalue()


def test_overlapping_trainings_leave_the_configuration_as_it_was():
    name = "distributed.admin.large-graph-warning-threshold"
    before, quiet = dask.config.get(name), _LargeTasks()
    quiet.__enter__()
    with quiet:
        quiet.__exit__()
        assert dask.config.get(name) == "1TiB"
    assert dask.config.get(name) == before


def test_masked_data_are_refused(client):
    masked = np.ma.masked_less(X, 0.0)
    for samples in (masked, da.from_array(masked)):
        with pytest.raises(TypeError, match="samples must not be masked"):
            train(squares, np.zeros(5), (samples, Y), client=client)
    with pytest.raises(TypeError, match="Argument 'parameters' must not be masked"):
        train(squares, masked[0], (X, Y), client=client)
    with pytest.raises(TypeError, match="The gradient must not be masked"):
        train(lambda w, *data: np.ma.masked_less(w, 1), np.zeros(5), (X, Y), client=client)


@pytest.mark.parametrize(
    "aggregation",
    [
        Star(),
        Star(segments=2),
        Ring(),
        Tree(fan_in=2, depth=None),
        GradientCoding(stragglers=1),
        GradientCoding(stragglers=1, code="cyclic"),
        StaticClusters(size=2, load=2),
        DynamicClusters(size=2, load=2),
        CodedReduce(fan_in=4, depth=1, stragglers=1),
    ],
    ids=repr,
)
def test_gradients_of_half_precision_are_summed_in_single_precision(client, aggregation):
    """Their mean is small, but the sum over all samples is beyond the range of float16."""

    def gradient(w, samples, targets):
        return np.float32([len(samples) * 1000.0, -len(samples)] * 3)

    found = train(
        gradient,
        np.zeros(6, dtype=np.float16),
        (np.zeros((800, 1)), np.zeros(800)),
        optimizer=SGD(0.001),
        steps=2,
        aggregation=aggregation,
        client=client,
    )
    np.testing.assert_allclose(found.parameters, [-2.0, 0.002] * 3, rtol=1e-3)
    assert found.parameters.dtype == np.float16
    assert len(set(found.digests.values())) == 1
