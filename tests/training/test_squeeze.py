"""Squeezed trainings give the parameters of one process, to the bit, whoever computes what."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import dask
import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import poll_for

from dask_coded.aggregation import Ring, Squeeze
from dask_coded.compression import Quantization
from dask_coded.training import SGD, Adam, Checkpoint, Pipelined, Validation, train
from dask_coded.training.replica import Model
from tests.training.one_process import squeezed
from tests.training.slow import Held, Slow

X = np.random.default_rng(0).normal(size=(103, 5))
Y = X @ np.arange(1.0, 6.0) + np.sin(np.arange(103))
STEPS = 12


def squares(w, samples, targets):
    error = samples @ w - targets
    return error @ error / 2, samples.T @ error


@pytest.fixture(scope="module")
def five() -> Iterator[Client]:
    """A client of five workers in this process."""
    options = {"n_workers": 5, "threads_per_worker": 1, "processes": False}
    with Client(**options, dashboard_address=None, set_as_default=False) as client:
        yield client


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Have PyTorch use one thread for each gradient: threads of five workers hold each other up."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def addresses(client: Client) -> list[str]:
    return sorted(client.nthreads())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_any_number_of_workers_gives_the_parameters_of_one_process(five, workers, dtype):
    options = {"steps": STEPS, "batch_size": 40, "optimizer": SGD(0.3, momentum=0.5)}
    data, start = (X.astype(dtype), Y.astype(dtype)), np.zeros(5, dtype)
    found = train(
        squares,
        start,
        data,
        aggregation=Squeeze(copies=2, units=11),
        workers=addresses(five)[:workers],
        client=five,
        **options,
    )
    expected = squeezed(squares, start, data, units=11, **options)
    assert found.parameters.tobytes() == expected.tobytes()
    assert found.steps == len(found.history) == STEPS
    assert len(set(found.digests.values())) == 1
    for step in found.history:
        assert sum(step.units.values()) == 11
        assert len(step.units) <= workers
        assert step.loss > 0 and step.speeds


def jittered(samples, keys):
    """Add noise in place, which must change neither the data nor the keys of the next step."""
    keys ^= np.uint64(7)
    for sample, key in zip(samples, keys, strict=True):
        sample += np.random.default_rng(key).normal(size=sample.shape)
    return samples


@pytest.mark.parametrize("batch_size", [None, 40])
@pytest.mark.parametrize("workers", [2, 5])
def test_random_changes_of_samples_do_not_depend_on_the_workers(five, workers, batch_size):
    options = {"steps": STEPS, "batch_size": batch_size, "augment": jittered}
    found = train(
        squares,
        np.zeros(5),
        (X, Y),
        aggregation=Squeeze(units=11),
        workers=addresses(five)[:workers],
        client=five,
        **options,
    )
    expected = squeezed(squares, np.zeros(5), (X, Y), units=11, **options)
    assert found.parameters.tobytes() == expected.tobytes()


def test_a_training_that_is_resumed_changes_samples_as_it_would_have(five, tmp_path):
    options = {"aggregation": Squeeze(units=11), "batch_size": 40, "augment": jittered}
    options["checkpoint"] = Checkpoint(str(tmp_path / "checkpoint"), every=5)
    for steps in (5, STEPS):
        more = {"steps": steps, "resume": True, "client": five}
        found = train(squares, np.zeros(5), (X, Y), **options, **more)
    more = {"steps": STEPS, "batch_size": 40, "augment": jittered}
    expected = squeezed(squares, np.zeros(5), (X, Y), units=11, **more)
    assert found.parameters.tobytes() == expected.tobytes()
    del options["augment"]
    with pytest.raises(ValueError, match=r"with augment jittered, .*this one has augment None"):
        train(squares, np.zeros(5), (X, Y), resume=True, steps=STEPS, client=five, **options)


def test_rounding_to_the_grid_changes_little(five):
    found = train(squares, np.zeros(5), (X, Y), aggregation=Squeeze(), steps=STEPS, client=five)
    plain = train(squares, np.zeros(5), (X, Y), aggregation=Ring(), steps=STEPS, client=five)
    np.testing.assert_allclose(found.parameters, plain.parameters, rtol=1e-6)
    assert found.history[-1].loss == pytest.approx(plain.history[-1].loss)


def growing(w, samples, targets):
    """Return gradients that are a hundred times as large in every other step."""
    size = 100.0 if int(w[0]) % 2 else 1.0
    return np.full_like(w, -10.0 * len(samples) * size) + np.arange(len(w)) * samples[0, 0]


def test_a_step_that_overflows_is_done_again_on_the_grid_of_its_own_peaks(five):
    options = {"steps": 4, "optimizer": SGD(0.1)}
    found = train(
        growing, np.zeros(5), (X, Y), aggregation=Squeeze(units=8), client=five, **options
    )
    expected = squeezed(growing, np.zeros(5), (X, Y), units=8, **options)
    assert found.parameters.tobytes() == expected.tobytes()


def test_a_slow_worker_has_units_moved_away_from_it(five):
    with Slow(squares, more=13) as slow:
        found = train(
            slow,
            np.zeros(5),
            (X, Y),
            aggregation=Squeeze(units=16),
            workers=addresses(five)[:3],
            steps=STEPS,
            client=five,
        )
    expected = squeezed(squares, np.zeros(5), (X, Y), units=16, steps=STEPS)
    assert found.parameters.tobytes() == expected.tobytes()
    assert sum(step.moved for step in found.history) > 0
    units = {a: sum(s.units.get(a, 0) for s in found.history) for a in addresses(five)[:3]}
    least, *others = sorted(units.values())
    assert least < min(others) / 3


@pytest.mark.parametrize("held", [0, 2], ids=["leader", "other"])
def test_a_worker_that_cannot_keep_up_is_left_out_and_sums_do_not_wait_for_it(five, held):
    workers = addresses(five)[:3]
    enough, begun = Event(), Event()

    def follow(progress) -> bool:
        begun.set()
        return enough.is_set()

    def left_out(dask_worker) -> bool:
        trainers = dask_worker.extensions["dask-coded-training"].trainers.values()
        return all(trainer._stopped for trainer in trainers)

    def waiting(dask_worker) -> int:
        trainers = dask_worker.extensions["dask-coded-training"].trainers.values()
        return sum(len(trainer._totals) for trainer in trainers)

    Held.released.clear()
    with ThreadPoolExecutor(1) as thread, dask.config.set({"coded.train.backlog": "1kB"}):
        future = thread.submit(
            train,
            squares,
            np.zeros(5),
            (X, Y),
            aggregation=Squeeze(units=6),
            workers=workers,
            leader=workers[0],
            steps=10**6,
            client=five,
            callback=follow,
        )
        try:
            assert begun.wait(60)
            five.run(Held.hold, workers=[workers[held]])
            poll_for(lambda: five.run(left_out, workers=[workers[held]])[workers[held]], timeout=60)
            Held.released.set()
            poll_for(
                lambda: not five.run(waiting, workers=[workers[held]])[workers[held]], timeout=60
            )
        finally:
            Held.released.set()
            enough.set()
        found = future.result(timeout=60)
    expected = squeezed(squares, np.zeros(5), (X, Y), units=6, steps=found.steps)
    assert found.parameters.tobytes() == expected.tobytes()
    assert set(found.digests) <= {*workers} - {workers[held]}


def test_a_training_resumes_with_its_units(five, tmp_path):
    options = {"batch_size": 40, "optimizer": Adam(0.1)}
    path = str(tmp_path / "checkpoint")
    checkpoint = Checkpoint(path, every=3)
    train(
        squares,
        np.zeros(5),
        (X, Y),
        aggregation=Squeeze(units=7),
        steps=6,
        checkpoint=checkpoint,
        client=five,
        **options,
    )
    found = train(
        squares,
        np.zeros(5),
        (X, Y),
        aggregation=Squeeze(),
        steps=STEPS,
        resume=path,
        client=five,
        **options,
    )
    assert found.aggregation == Squeeze(units=7)
    expected = squeezed(squares, np.zeros(5), (X, Y), units=7, steps=STEPS, **options)
    assert found.parameters.tobytes() == expected.tobytes()
    with pytest.raises(ValueError, match=r"7 units, .* has 8: resume with as many"):
        other = {"aggregation": Squeeze(units=8), "resume": path}
        train(squares, np.zeros(5), (X, Y), client=five, **other, **options)

    with pytest.raises(ValueError, match=r"layers of 5 parameters, .* has 2, 3: resume with the"):
        other = {"aggregation": Squeeze(), "resume": path, "layers": [(2,), (3,)]}
        train(squares, np.zeros(5), (X, Y), client=five, **other, **options)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize <= 8, reason="needs a longer double")
def test_parameters_of_more_than_64_bits_are_refused(five):
    with pytest.raises(ValueError, match="parameters are of float128: pass them in float64"):
        train(squares, np.zeros(5, np.longdouble), (X, Y), aggregation=Squeeze(), client=five)


@pytest.mark.parametrize(
    ("samples", "batch_size", "units"), [(103, None, 16), (10, None, 10), (103, 4, 4)]
)
def test_the_number_of_units_follows_from_the_batch(five, samples, batch_size, units):
    found = train(
        squares,
        np.zeros(5),
        (X[:samples], Y[:samples]),
        aggregation=Squeeze(),
        batch_size=batch_size,
        steps=1,
        client=five,
    )
    assert found.aggregation == Squeeze(units=units)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": Quantization()}, "leave out the compression"),
        ({"schedule": Pipelined(2)}, "needs `schedule=Synchronous"),
    ],
)
def test_what_would_change_the_bits_is_refused(five, options, message):
    with pytest.raises(ValueError, match=message):
        train(squares, np.zeros(5), (X, Y), aggregation=Squeeze(), client=five, **options)


def test_a_gradient_that_is_not_finite_is_an_error(five):
    def diverging(w, samples, targets):
        return np.full_like(w, np.inf if w[0] else 1.0)

    with pytest.raises(FloatingPointError, match="gradient of step 1 contains NaN or infinity"):
        train(diverging, np.zeros(5), (X, Y), aggregation=Squeeze(), steps=3, client=five)


@pytest.mark.extras
def test_a_module_with_dropout_gives_the_parameters_of_one_process(five):
    torch = pytest.importorskip("torch")
    from dask_coded.training import TorchModule

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 40), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(40, 1)
    )
    model = TorchModule(net, torch.nn.MSELoss(reduction="sum"))
    start, layers = model.parameters.copy(), model.layers
    data = X.astype(np.float32), Y.astype(np.float32)[:, None]
    options = {"steps": 6, "batch_size": 60, "layers": layers}
    options["optimizer"] = model.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
    expected = squeezed(model.gradient, start, data, units=10, **options)
    for workers in (1, 5):
        found = train(
            model.gradient,
            start,
            data,
            aggregation=Squeeze(units=10),
            workers=addresses(five)[:workers],
            client=five,
            **options,
        )
        assert found.parameters.tobytes() == expected.tobytes()


@pytest.mark.extras
def test_batch_normalisation_gives_the_parameters_of_one_process(five):
    """Running averages among them, also for a function of one's own."""
    torch = pytest.importorskip("torch")
    from dask_coded.training import TorchModule

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 40), torch.nn.BatchNorm1d(40, momentum=0.3), torch.nn.Linear(40, 1)
    )
    model = TorchModule(net, torch.nn.MSELoss(reduction="sum"))
    data = X.astype(np.float32), Y.astype(np.float32)[:, None]
    options = {"steps": 6, "batch_size": 60, "layers": model.layers, "optimizer": Adam(0.01)}
    start = model.parameters.copy()
    averages = model.averages
    expected = squeezed(model.gradient, start, data, units=10, averages=averages, **options)
    options |= {"aggregation": Squeeze(units=10), "client": five}

    def own(w, samples, targets):
        return model.gradient(w, samples, targets)

    cases = [
        (model.gradient, addresses(five)[:1], {}),
        (model.gradient, addresses(five), {}),
        (own, addresses(five)[:3], {"averages": averages}),
    ]
    for gradient, workers, given in cases:
        found = train(gradient, start, data, workers=workers, **options, **given)
        assert found.parameters.tobytes() == expected.tobytes()


@pytest.mark.extras
def test_a_residual_network_learns_as_in_one_process(five, one_thread):
    """Images of two classes, convolutions with batch normalisation, and a score on other images."""
    torch = pytest.importorskip("torch")
    from dask_coded.training import TorchModule

    class Block(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.second = torch.nn.BatchNorm2d(width, momentum=0.3)

        def forward(self, images):
            return torch.relu(images + self.second(self.first(images)))

    torch.manual_seed(0)
    stem = (
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8, momentum=0.3),
        torch.nn.ReLU(),
    )
    top = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    net = torch.nn.Sequential(*stem, Block(8), Block(8), *top)
    model = TorchModule(net, torch.nn.CrossEntropyLoss(reduction="sum"))
    rng = np.random.default_rng(0)
    images = rng.standard_normal((160, 3, 8, 8)).astype(np.float32)
    kinds = np.arange(160) % 2
    images[kinds == 1, :, 2:5, 2:5] += 1.5
    data, others = (images[:96], kinds[:96]), (images[96:], kinds[96:])

    def right(parameters, samples, targets):
        return (model.prediction(parameters, samples).argmax(axis=1) == targets).sum()

    options = {"steps": 10, "batch_size": 48, "layers": model.layers, "optimizer": Adam(0.02)}
    start = model.parameters.copy()
    expected = squeezed(model.gradient, start, data, units=8, averages=model.averages, **options)
    found = train(
        model.gradient,
        start,
        data,
        aggregation=Squeeze(units=8),
        validation=Validation(right, others),
        workers=addresses(five)[:2],
        client=five,
        **options,
    )
    assert found.parameters.tobytes() == expected.tobytes()
    assert found.scores[10] == right(expected, *others) / 64 > 0.9


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("entry", [3.0, 5.0, 1e20])
def test_a_layer_whose_gradient_was_zero_until_now(dtype, entry):
    """As behind a layer that starts at zero: the predicted grid is far too fine."""
    second = 0.0

    def gradient(w, samples, targets):
        return 0.0, np.array([1.0, second])

    data = np.ones((1, 1))
    layers = [(1,), (1,)]
    model = Model(gradient, np.zeros(2, dtype), SGD(1.0), 2, None, 0, None, layers, dealt=True)
    replica = model.replica(2, 1)

    def step(number, grid=None):
        one, other = (replica.unit(number, unit, data, data, grid) for unit in (0, 1))
        return one.plus(other)

    for number, second in enumerate([0.0, entry]):
        total = step(number)
        if total.integers is None:
            grid = total.peaks
            total = step(number, grid)
            total.grid = grid
        found = replica.apply([total])
        np.testing.assert_allclose(found, [2.0, 2 * second], rtol=1e-6)


@pytest.mark.extras
@pytest.mark.parametrize("limit", [None, 0.1], ids=["plain", "changes its parameters"])
def test_a_module_takes_the_parameters_once_a_step_unless_it_changes_them(limit):
    torch = pytest.importorskip("torch")
    from dask_coded.training import TorchModule

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Embedding(4, 3, max_norm=limit), torch.nn.Flatten(), torch.nn.Linear(6, 1)
    )
    module = TorchModule(net, torch.nn.MSELoss(reduction="sum"))
    samples, targets = np.array([[0, 1], [2, 3], [1, 1], [3, 0]]), np.ones((4, 1), np.float32)
    loads, load = [], module.load
    module.load = lambda parameters: loads.append(1) or load(parameters)
    options = {"optimizer": SGD(0.1), "samples": 4, "batch_size": None, "seed": 0}
    model = Model(
        module.gradient, module.parameters, compression=None, layers=module.layers, **options
    )
    replica = model.replica(4, 1)
    own = lambda unit: (samples[unit : unit + 1], targets[unit : unit + 1])  # noqa: E731
    first = [replica.gradient(0, unit, *own(unit)) for unit in range(4)]
    again = [replica.gradient(0, unit, *own(unit)) for unit in reversed(range(4))]
    for (one, loss), (other, same) in zip(first, reversed(again), strict=True):
        np.testing.assert_array_equal(one, other)
        assert loss == same
    assert len(loads) == (1 if limit is None else 8)
    replica._update(sum(vector for vector, _ in first), 0.0, beside=False)
    after, _ = replica.gradient(1, 0, *own(0))
    assert not np.array_equal(after, first[0][0])
    assert len(loads) == (2 if limit is None else 9)
