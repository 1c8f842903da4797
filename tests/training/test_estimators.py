"""PyTorch modules, and scikit-learn's conventions."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import dask.array as da
import numpy as np
import pytest
from distributed.protocol.pickle import dumps, loads

import dask_coded as coded
from dask_coded import training
from dask_coded.aggregation import Ring, Squeeze
from dask_coded.compression import Quantization
from dask_coded.sameness import hash_of
from dask_coded.training import SGD, GradientEstimator, loaders

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.extras
parametrizations = pytest.importorskip("torch.nn.utils.parametrizations")
pytorch = pytest.importorskip("dask_coded.training.pytorch")
torch_optimizer = pytest.importorskip("dask_coded.training.torch_optimizer")

RNG = np.random.default_rng(3)
SAMPLES = RNG.normal(size=(60, 4)).astype(np.float32)
LABELS = (SAMPLES[:, 0] > SAMPLES[:, 1]).astype(np.int64)


def network(*more):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), *more, torch.nn.Tanh(), torch.nn.Linear(6, 2))


def model(*more):
    return training.TorchModule(network(*more), torch.nn.CrossEntropyLoss(reduction="sum"))


class InPlace(torch.nn.Module):
    """Scales its input, in the memory of the input or not."""

    def __init__(self, within):
        super().__init__()
        self.within = within

    def forward(self, x):
        return x.mul_(0.5) if self.within else x * 0.5


@pytest.mark.parametrize("aggregation", [Squeeze(units=4), Ring()], ids=repr)
def test_a_module_that_works_in_place_does_not_change_the_data(client, aggregation):
    found = []
    for within in (True, False):
        net = torch.nn.Sequential(InPlace(within), network())
        flat = training.TorchModule(net, torch.nn.CrossEntropyLoss(reduction="sum"))
        score = training.Validation(
            lambda w, X, y, flat=flat: flat.prediction(w, X).sum(), (SAMPLES, LABELS), every=2
        )
        options = {"steps": 4, "layers": flat.layers, "validation": score, "client": client}
        data = SAMPLES.copy(), LABELS
        options |= {"aggregation": aggregation}
        result = training.train(flat.gradient, flat.parameters, data, **options)
        flat.prediction(result.parameters, data[0])
        np.testing.assert_array_equal(data[0], SAMPLES)
        found.append(result)
    np.testing.assert_array_equal(found[0].parameters, found[1].parameters)
    assert found[0].scores == found[1].scores


def test_a_gradient_cannot_change_the_data(client):
    def careless(w, samples, targets):
        samples -= samples.mean(axis=0)
        return samples.T @ (samples @ w - targets)

    with pytest.raises(ValueError, match="read-only"):
        training.train(careless, np.zeros(4, np.float32), (SAMPLES, LABELS), client=client, steps=2)


def test_a_module_with_other_frozen_numbers_is_another_training(client, tmp_path):
    def frozen(seed, trained=False):
        torch.manual_seed(seed)
        first = torch.nn.Linear(4, 6).requires_grad_(trained)
        torch.manual_seed(0)
        net = torch.nn.Sequential(first, torch.nn.Linear(6, 2))
        return training.TorchModule(net, torch.nn.CrossEntropyLoss(reduction="sum"))

    options = {"checkpoint": training.Checkpoint(tmp_path / "weights", every=1), "resume": True}

    def trained(flat, steps):
        data = SAMPLES, LABELS
        options["layers"] = flat.layers
        return training.train(
            flat.gradient, flat.parameters, data, steps=steps, client=client, **options
        )

    trained(frozen(1), 2)
    assert trained(frozen(1), 4).steps == 4
    with pytest.raises(ValueError, match=r"of a training with .*frozen parameters and buffers"):
        trained(frozen(2), 4)
    other = frozen(1)
    other._loss = torch.nn.MultiMarginLoss(reduction="sum")
    with pytest.raises(ValueError, match="of a training with values in functions"):
        trained(other, 4)
    # What is trained does not count: it is in the checkpoint.
    assert hash_of(frozen(1, True), trained=True) == hash_of(frozen(2, True), trained=True)
    assert frozen(1, trained=True).constants() == frozen(2, trained=True).constants()
    other = frozen(1)
    other.module.eval()
    with pytest.raises(ValueError, match=r"with layers in training mode 3, this one has .* 0"):
        trained(other, 4)


def test_what_a_training_changes_tells_no_functions_apart():
    def gradient_with(value):
        return lambda w, X, y: value

    def normed(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))

    moved = normed(1)
    moved(torch.ones(3, 4))
    same = [normed(1), normed(2), moved, normed(1).eval()]
    assert len({hash_of(gradient_with(net), trained=True) for net in same}) == 1
    assert hash_of(same[0]) != hash_of(same[1])
    weighted = [torch.nn.CrossEntropyLoss(torch.tensor([1.0, w])) for w in (1.0, 2.0)]
    others = [torch.nn.Linear(4, 3), *weighted, torch.nn.Linear(4, 2).requires_grad_(False)]
    assert len({hash_of(net, trained=True) for net in (same[0], *others)}) == 5
    draws = [gradient_with(np.random.default_rng(i)) for i in (1, 2)]
    assert hash_of(draws[0], trained=True) == hash_of(draws[1], trained=True)


def test_gradients_of_parts_add_up():
    flat = model()
    whole_loss, whole = flat.gradient(flat.parameters, SAMPLES, LABELS)
    parts = [flat.gradient(flat.parameters, SAMPLES[i::3], LABELS[i::3]) for i in range(3)]
    np.testing.assert_allclose(sum(g for _, g in parts), whole, rtol=1e-4, atol=1e-4)
    assert sum(loss for loss, _ in parts) == pytest.approx(whole_loss, rel=1e-5)
    assert sum(int(np.prod(shape)) for shape in flat.layers) == whole.size == 4 * 6 + 6 + 12 + 2


def test_training_a_module_matches_pytorch(client):
    flat = model()
    estimator = GradientEstimator(
        flat.gradient,
        flat.prediction,
        flat.parameters,
        optimizer=SGD(0.5, momentum=0.5),
        steps=20,
        layers=flat.layers,
    )
    found = estimator.fit(SAMPLES, LABELS, client=client)
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    loss = torch.nn.CrossEntropyLoss()
    for _ in range(20):
        optimizer.zero_grad()
        loss(module(torch.tensor(SAMPLES)), torch.tensor(LABELS)).backward()
        optimizer.step()
    expected = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    np.testing.assert_allclose(found.parameters_, expected, rtol=1e-3, atol=1e-4)
    loaded = flat.load(found.parameters_)
    np.testing.assert_allclose(
        estimator.predict(SAMPLES), loaded(torch.tensor(SAMPLES)).detach(), rtol=1e-6
    )
    lazy = estimator.predict(da.from_array(SAMPLES, chunks=(25, 2)))
    assert lazy.shape == (60, 2)
    np.testing.assert_allclose(
        lazy.compute(scheduler="sync"), estimator.predict(SAMPLES), rtol=1e-5
    )


class Complex(torch.nn.Module):
    """Has a complex parameter behind a real one of odd length."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(1))
        self.weight = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, samples):
        return (samples.to(self.weight.dtype) @ self.weight).abs() + self.bias


class Tied(torch.nn.Module):
    """Uses one parameter twice, one that lies in columns, and one without any number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.columns = torch.nn.Parameter(torch.randn(3, 4).t())
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("factor", torch.full((3,), 2.0))

    def forward(self, samples):
        hidden = self.second(self.first(samples)) @ self.columns
        return hidden * self.factor + self.nothing.sum()


def frozen():
    net = network()
    net[0].requires_grad_(False)
    return net


def convolution():
    layers = (torch.nn.Unflatten(1, (2, 2, 1)), torch.nn.Conv2d(2, 3, (2, 1)), torch.nn.Flatten())
    return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)


def embedding():
    return torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Flatten())


IDS = RNG.integers(0, 5, size=(60, 4))


@pytest.mark.parametrize(
    ("make", "samples"),
    [
        (convolution, SAMPLES),
        (embedding, IDS),
        (frozen, SAMPLES),
        (Tied, SAMPLES),
        (Complex, SAMPLES),
        (lambda: network().double(), SAMPLES.astype(np.float64)),
        (lambda: network().bfloat16(), SAMPLES),
        (lambda: network().half(), SAMPLES.astype(np.float16)),
    ],
)
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, partial(torch.optim.Adam, eps=1e-3)], ids=["SGD", "Adam"]
)
def test_parameters_of_any_kind_are_trained_as_by_pytorch(client, kind, make, samples):
    """In single precision, where theirs are in bfloat16."""
    torch.manual_seed(1)
    net = make()
    module = copy.deepcopy(net)
    flat = training.TorchModule(net, lambda found, targets: (found - targets).square().sum())
    assert flat.parameters.size == sum(int(np.prod(shape)) for shape in flat.layers)
    before = flat.prediction(flat.parameters, samples)
    targets = np.ones((60, *before.shape[1:]), dtype=before.dtype)
    found = training.train(
        flat.gradient,
        flat.parameters,
        (samples, targets),
        optimizer=flat.optimizer(kind(net.parameters(), lr=0.01)),
        layers=flat.layers,
        steps=3,
        client=client,
    )
    inputs = torch.tensor(samples)
    first = next(module.parameters()).dtype
    inputs = inputs.to(first) if inputs.is_floating_point() else inputs
    wanted = [p for p in module.parameters() if p.requires_grad]
    optimizer = kind(wanted, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        ((module(inputs) - torch.tensor(targets)).square().sum() / 60).backward()
        for parameter in wanted:
            parameter.grad = parameter.grad.to_dense()
        optimizer.step()
    coarse = first.itemsize == 2
    expected = training.TorchModule(module, torch.nn.MSELoss(reduction="sum"))
    np.testing.assert_allclose(
        found.parameters, expected.parameters, rtol=0, atol=2e-2 if coarse else 1e-4
    )
    after = flat.prediction(found.parameters, samples)
    np.testing.assert_allclose(
        after, expected.prediction(expected.parameters, samples), atol=0.1 if coarse else 1e-3
    )
    assert np.square(after - targets).sum() < np.square(before - targets).sum()


def test_modules_of_bfloat16_are_summed_in_single_precision():
    """Steps that bfloat16 would round away add up."""
    module = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    flat = training.TorchModule(module, torch.nn.MSELoss(reduction="sum"))
    assert flat.parameters.dtype == np.float32
    ones = np.ones((1, 1), dtype=np.float32)
    parameters = np.ones(1, dtype=np.float32)
    optimizer = flat.optimizer(torch.optim.SGD(module.parameters(), lr=2.0**-12))
    state = optimizer.start(parameters)
    for step in range(64):
        gradient = flat.gradient(parameters, ones, 0 * ones)[1]
        optimizer.update(parameters, gradient, state, step)
    assert 0.95 < parameters[0] < 0.975
    assert flat.prediction(parameters, ones).dtype == np.float32
    assert flat.prediction(parameters, torch.ones(1, 1).bfloat16()).dtype == torch.bfloat16


def test_tensors_of_bfloat16_are_data_and_parameters(client):
    samples, start = torch.tensor(SAMPLES).bfloat16(), torch.zeros(SAMPLES.shape[1]).bfloat16()

    def gradient(w, samples, targets):
        assert w.dtype == samples.dtype == targets.dtype == np.float32
        return 0.0, samples.sum(axis=0)

    data, optimizer = (samples, samples[:, 0]), SGD(0.5)
    found = training.train(gradient, start, data, optimizer=optimizer, steps=1, client=client)
    wide = samples.float().numpy()
    np.testing.assert_allclose(found.parameters, -0.5 * wide.mean(axis=0), rtol=1e-5)


def test_an_optimizer_that_has_been_used_in_bfloat16_continues():
    net = network().bfloat16()
    used = torch.optim.Adam(net.parameters(), lr=0.05)
    net(torch.tensor(SAMPLES).bfloat16()).sum().backward()
    used.step()
    flat = training.TorchModule(net, torch.nn.CrossEntropyLoss(reduction="sum"))
    optimizer = flat.optimizer(used)
    parameters, state = updated(flat, optimizer, 2)
    assert {value.dtype for value in state.values()} == {np.dtype(np.float32)}
    assert parameters.dtype == np.float32


def test_a_module_of_half_precision_has_sums_beyond_its_range():
    module = torch.nn.Linear(1, 1, bias=False, dtype=torch.float16)
    flat = training.TorchModule(module, lambda found, targets: found.sum())
    samples = np.full((400, 1), 300.0, dtype=np.float16)
    _, gradient = flat.gradient(flat.parameters, samples, samples)
    np.testing.assert_allclose(gradient, [400 * 300.0], rtol=1e-3)


def test_a_loss_beyond_the_range_of_half_precision_is_a_number():
    module = torch.nn.Linear(1, 1, bias=False, dtype=torch.float16)
    flat = training.TorchModule(module, torch.nn.MSELoss(reduction="sum"))
    samples = np.ones((4000, 1), dtype=np.float16)
    loss, _ = flat.gradient(np.float16([2.0]), samples, -8 * samples)
    assert loss == 4000 * 100.0


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.nn.LazyLinear(2), "parameter 'weight' has no numbers yet: call a lazy module"),
        (torch.nn.Linear(4, 2, device="meta"), "parameter 'weight' has no numbers yet"),
        (torch.nn.Linear(4, 2).requires_grad_(False), "must have a parameter that requires a"),
        (torch.nn.Identity(), "must have a parameter that requires a gradient"),
        (
            torch.nn.Sequential(parametrizations.weight_norm(torch.nn.Linear(4, 2))),
            "The module has parametrizations, in 0, with which PyTorch cannot send it to workers",
        ),
    ],
    ids=str,
)
def test_modules_that_cannot_be_trained_are_refused(module, message):
    with pytest.raises(ValueError, match=message):
        training.TorchModule(module, torch.nn.MSELoss(reduction="sum"))


class TwoHeads(torch.nn.Module):
    """The second one is for samples whose first entry is positive."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, samples):
        found = self.one(samples)
        return found + self.other(samples) if (samples[:, 0] > 0).any() else found


def test_parameters_that_the_loss_does_not_depend_on():
    """AdamW would shrink them, which PyTorch's own loop does not."""
    samples, targets = -np.ones((3, 4), dtype=np.float32), np.zeros((3, 1), dtype=np.float32)
    loss = torch.nn.MSELoss(reduction="sum")
    model = training.TorchModule(TwoHeads(), loss)
    with pytest.raises(ValueError, match=r"parameters \['other.weight', 'other.bias'\]"):
        model.gradient(model.parameters, samples, targets)
    model.gradient(model.parameters, -samples, targets)
    model = training.TorchModule(TwoHeads(), loss, find_unused_parameters=True)
    _, gradient = model.gradient(model.parameters, samples, targets)
    assert gradient[:5].any() and not gradient[5:].any()


def test_dropout_depends_only_on_parameters_and_samples():
    one, other = model(torch.nn.Dropout(0.5)), model(torch.nn.Dropout(0.5))
    other.gradient(one.parameters, SAMPLES[7:], LABELS[7:])
    first = one.gradient(one.parameters, SAMPLES, LABELS)
    second = other.gradient(one.parameters, SAMPLES, LABELS)
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])


def test_dropout_changes_with_any_parameter_that_changes():
    """An optimizer may have only some of them, such as those of the last layer."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 600), torch.nn.Dropout(0.5))
    flat = training.TorchModule(module, torch.nn.MSELoss(reduction="sum"))
    targets = np.zeros((len(SAMPLES), 600), dtype=np.float32)
    parameters = flat.parameters
    masks = []
    for _ in range(2):
        masks.append(flat.gradient(parameters, SAMPLES[:1], targets[:1])[1][-600:] == 0)
        parameters[-1] += 1
    assert (masks[0] != masks[1]).any()


class Counting(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, replaced):
        super().__init__()
        self.layer = network()
        self.replaced = replaced
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, samples):
        if self.replaced:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return self.layer(samples)


@pytest.mark.parametrize("replaced", [False, True])
def test_modules_that_change_their_buffers_are_refused(replaced):
    flat = training.TorchModule(Counting(replaced), torch.nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(ValueError, match="it has changed 'calls'"):
        flat.gradient(flat.parameters, SAMPLES, LABELS)


class Alone(torch.nn.Module):
    """Checks that no other thread may seed PyTorch's random numbers while it draws some."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, samples):
        assert not pytorch._RANDOM.acquire(blocking=False)
        return torch.nn.functional.dropout(samples @ self.weight, 0.5)


def test_threads_of_a_process_do_not_share_seeded_random_numbers():
    flat = training.TorchModule(Alone(), torch.nn.MSELoss(reduction="sum"))
    flat.gradient(flat.parameters, SAMPLES, SAMPLES[:, 0])
    assert not pytorch._RANDOM.locked()


class Waiting(torch.nn.Module):
    """Tells in which mode it predicts, after others may have changed that."""

    begun = threading.Semaphore(0)
    go_on = (threading.Event(), threading.Event())

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, samples):
        self.begun.release()
        self.go_on[int(samples[0])].wait()
        return torch.tensor([self.training])


def test_predictions_in_several_threads_do_not_change_each_others_mode():
    model = training.TorchModule(Waiting(), torch.nn.MSELoss(reduction="sum"))
    predict = partial(model.prediction, np.zeros(1, dtype=np.float32))
    with ThreadPoolExecutor(2) as pool:
        futures = []
        for number in range(2):
            futures.append(pool.submit(predict, np.array([number])))
            Waiting.begun.acquire()
        trains = []
        for future, event in zip(futures, Waiting.go_on, strict=True):
            event.set()
            trains += future.result().tolist()
    assert trains == [False, False]
    assert model.module.training


def updated(flat, optimizer, steps, state=None, first=0, parameters=None):
    """Update parameters some times, as a replica does."""
    parameters = flat.parameters if parameters is None else parameters
    state = optimizer.start(parameters) if state is None else state
    for step in range(first, first + steps):
        gradient = flat.gradient(parameters, SAMPLES, LABELS)[1] / len(SAMPLES)
        optimizer.update(parameters, gradient, state, step)
    return parameters, state


def theirs(module, optimizer, steps):
    """Train as PyTorch's tutorials do, and return the parameters."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.CrossEntropyLoss()(module(torch.tensor(SAMPLES)), torch.tensor(LABELS))
        loss.backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()


OPTIMIZERS = [
    lambda net: torch.optim.SGD(net.parameters(), lr=0.3),
    lambda net: torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, nesterov=True),
    lambda net: torch.optim.AdamW(net.parameters(), lr=0.05, amsgrad=True),
    lambda net: torch.optim.Rprop(net.parameters()),
    # Whole rows matter to this one, so it would differ on a flat array.
    lambda net: torch.optim.Adafactor(net.parameters(), lr=0.1),
    # Groups in another order than the module's.
    lambda net: torch.optim.RMSprop(
        [{"params": net[2].parameters(), "lr": 0.1}, {"params": net[0].parameters()}], lr=0.01
    ),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_of_pytorch_do_the_same_on_a_flat_array(make):
    net = network()
    flat = training.TorchModule(net, torch.nn.CrossEntropyLoss(reduction="sum"))
    optimizer = pickle.loads(pickle.dumps(flat.optimizer(make(net))))
    parameters, state = updated(flat, optimizer, 5)
    # A worker that joins gets copies of parameters and state.
    state = {name: np.array(value) for name, value in state.items()}
    assert state.keys() == optimizer.start(parameters).keys()
    parameters, _ = updated(flat, optimizer, 5, state, 5, parameters.copy())
    module = network()
    np.testing.assert_allclose(parameters, theirs(module, make(module), 10), rtol=1e-3, atol=1e-4)


SCHEDULERS = torch.optim.lr_scheduler


MAKE_SCHEDULERS = {
    "step": lambda rule: SCHEDULERS.StepLR(rule, 3),
    "function": lambda rule: SCHEDULERS.LambdaLR(rule, lambda step: 1 / (1 + step)),
    "from zero": lambda rule: SCHEDULERS.LambdaLR(rule, lambda step: min(step / 4, 1.0)),
    "cycle": lambda rule: SCHEDULERS.OneCycleLR(rule, 0.5, total_steps=20),
    "cyclic": lambda rule: SCHEDULERS.CyclicLR(rule, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "sequence": lambda rule: SCHEDULERS.SequentialLR(
        rule,
        [SCHEDULERS.LinearLR(rule, 0.1, total_iters=4), SCHEDULERS.CosineAnnealingLR(rule, 8)],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("make", MAKE_SCHEDULERS.values(), ids=MAKE_SCHEDULERS.keys())
def test_schedulers_of_pytorch(make):
    """They change learning rates, and that of cycles the momentum, too."""
    net = torch.nn.Linear(3, 2)
    flat = training.TorchModule(net, torch.nn.MSELoss(reduction="sum"))
    rule = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8)
    scheduler = make(rule)
    ours = loads(dumps(flat.optimizer(rule, scheduler)))
    x = flat.parameters.copy()
    state = ours.start(x)
    rng = np.random.default_rng(0)
    for step in range(12):
        gradient = rng.standard_normal(x.size).astype(x.dtype)
        ours.update(x, gradient, state, step)
        for parameter, part in zip(net.parameters(), np.split(gradient, [6]), strict=True):
            parameter.grad = torch.from_numpy(part).reshape(parameter.shape)
        rule.step()
        scheduler.step()
        np.testing.assert_allclose(x, flat.parameters, rtol=1e-5)
    rates = [group["lr"] for group in ours._options(0)]  # another replica begins
    assert rates == [group["lr"] for group in loads(dumps(ours))._options(0)]


@pytest.mark.parametrize("make", MAKE_SCHEDULERS.values(), ids=MAKE_SCHEDULERS.keys())
def test_another_group_does_not_make_all_steps_of_a_scheduler_again(make, monkeypatch):
    monkeypatch.setattr(torch_optimizer, "_snapshots", torch_optimizer._Snapshots())
    monkeypatch.setattr(torch_optimizer._Snapshots, "EVERY", 4)
    net = torch.nn.Linear(3, 2)
    rule = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8)
    packed = dumps(torch_optimizer.Scheduled(make(rule), rule))
    one = loads(packed)
    expected = [one.options(step) for step in range(12)]
    steps, step = [], type(one._scheduler).step

    def counted(scheduler, *args):
        steps.append(scheduler)
        step(scheduler, *args)

    monkeypatch.setattr(type(one._scheduler), "step", counted)
    for first, made in ((11, 3), (8, 0), (7, 7)):  # the last snapshot is after 8 steps
        other = loads(packed)
        steps.clear()
        assert other.options(first) == expected[first]
        assert steps.count(other._scheduler) == made
        for later in range(first, 12):
            assert other.options(later) == expected[later]


def test_schedulers_that_workers_cannot_follow_are_refused():
    net = torch.nn.Linear(3, 2)
    flat = training.TorchModule(net, torch.nn.MSELoss(reduction="sum"))
    rule, other = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(TypeError, match="ReduceLROnPlateau needs a metric in each step"):
        flat.optimizer(rule, SCHEDULERS.ReduceLROnPlateau(rule))
    with pytest.raises(ValueError, match="StepLR must be of the optimizer that is passed with it"):
        flat.optimizer(rule, SCHEDULERS.StepLR(other, 3))


def test_an_optimizer_of_pytorch_continues_from_its_state():
    module, net = network(), network()
    optimizer, used = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (module, net))
    theirs(net, used, 5)
    flat = training.TorchModule(net, torch.nn.CrossEntropyLoss(reduction="sum"))
    found, _ = updated(flat, flat.optimizer(used), 5)
    np.testing.assert_allclose(found, theirs(module, optimizer, 10), rtol=1e-3, atol=1e-4)


def test_tensors_batches_epochs_and_an_optimizer_of_pytorch(client):
    net = network()
    flat = training.TorchModule(net, torch.nn.CrossEntropyLoss(reduction="sum"))
    dataset = torch.utils.data.TensorDataset(torch.tensor(SAMPLES), torch.tensor(LABELS))
    loader = torch.utils.data.DataLoader(dataset, batch_size=25, shuffle=True)
    initial = torch.from_numpy(flat.parameters)
    found = training.train(
        flat.gradient,
        initial,
        loader,
        epochs=4,
        optimizer=flat.optimizer(torch.optim.Adam(net.parameters(), lr=0.05)),
        client=client,
    )
    assert found.steps == 4 * 3
    assert found.history[-1].loss < 0.7 * found.history[0].loss
    predicted = flat.prediction(torch.from_numpy(found.parameters), dataset.tensors[0])
    assert isinstance(predicted, torch.Tensor)
    assert (predicted.argmax(1) == dataset.tensors[1]).float().mean() > 0.8
    whole = training.train(flat.gradient, initial, dataset.tensors, steps=2, client=client)
    assert whole.steps == 2


def test_a_loader_that_shuffles_is_read_in_order_as_its_user_wants():
    dataset = torch.utils.data.TensorDataset(torch.tensor(SAMPLES), torch.tensor(LABELS))
    options = {
        "num_workers": 2,
        "timeout": 3.0,
        "worker_init_fn": print,
        "multiprocessing_context": "spawn",
        "generator": torch.Generator(),
    }
    loader = torch.utils.data.DataLoader(dataset, 25, shuffle=True, **options)
    found = loaders._in_order(loader)
    assert isinstance(found.sampler, torch.utils.data.SequentialSampler)
    for name in options:
        assert getattr(found, name) == getattr(loader, name)


def test_a_loader_that_shuffles_and_drops_the_last_samples_drops_none_for_good():
    dataset = torch.utils.data.TensorDataset(torch.tensor(SAMPLES), torch.tensor(LABELS))
    loader = torch.utils.data.DataLoader(dataset, 25, shuffle=True, drop_last=True)
    (samples, _), size = loaders.joined(loader, 10, None)
    np.testing.assert_array_equal(samples, SAMPLES)
    assert size == 25
    in_order = torch.utils.data.DataLoader(dataset, 25, drop_last=True)
    assert len(loaders.joined(in_order, 10, None)[0][0]) == 50


class OneThread(torch.utils.data.Dataset):
    """A data set that has opened a file when it is first used, which has one position."""

    def __init__(self):
        self._file = None

    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, i):
        if self._file is None:
            self._file = threading.local(), threading.get_ident()  # the first cannot be pickled
        assert self._file[1] == threading.get_ident()
        return SAMPLES[i], LABELS[i]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [*range(60), 3]}], ids=str)
@pytest.mark.parametrize("blocks", [2, 256])
def test_workers_read_a_loader(client, options, blocks, monkeypatch):
    monkeypatch.setattr(loaders, "_BLOCKS", blocks)
    dataset = OneThread()
    loader = torch.utils.data.DataLoader(dataset, 25, **options)
    data = training.from_loader(loader)
    rows = options.get("sampler", slice(None))
    for found, expected in zip(data, (SAMPLES, LABELS), strict=True):
        assert len(found) <= blocks
        whole = np.concatenate([block.compute() for block in found])
        np.testing.assert_array_equal(whole, expected[rows], strict=True)
    flat = model()
    settings = {"aggregation": Squeeze(units=4), "steps": 4, "batch_size": 20, "client": client}
    found, joined = (
        training.train(flat.gradient, flat.parameters, each, **settings) for each in (data, loader)
    )
    assert found.parameters.tobytes() == joined.parameters.tobytes()


def test_what_workers_cannot_read_as_a_loader_is_refused():
    dataset = torch.utils.data.TensorDataset(torch.tensor(SAMPLES), torch.tensor(LABELS))
    for wrong in (
        SAMPLES,
        torch.utils.data.DataLoader(Endless(), batch_size=20),
        torch.utils.data.DataLoader(dataset, batch_size=None),
        torch.utils.data.DataLoader(dataset, 8, sampler=itertools.count()),
    ):
        with pytest.raises(TypeError, match="must be a DataLoader of PyTorch with a batch size"):
            training.from_loader(wrong)
    with pytest.raises(ValueError, match="must yield at least one batch"):
        training.from_loader(torch.utils.data.DataLoader(dataset, 25, sampler=[]))


class Endless(torch.utils.data.IterableDataset):
    """Yields samples for ever."""

    def __iter__(self):
        while True:
            yield from zip(SAMPLES, LABELS, strict=True)


def test_a_loader_that_never_ends_is_read_until_the_steps_have_their_batches(client):
    flat = model()
    loader = torch.utils.data.DataLoader(Endless(), batch_size=20)
    found = training.train(flat.gradient, flat.parameters, loader, steps=3, client=client)
    data = (SAMPLES, LABELS)  # which three batches hold
    once = training.train(
        flat.gradient, flat.parameters, data, batch_size=20, steps=3, client=client
    )
    np.testing.assert_allclose(found.parameters, once.parameters, rtol=1e-3, atol=1e-5)


def test_wrong_optimizers_of_pytorch(client):
    net, flat = network(), model()
    with pytest.raises(ValueError, match="must be over parameters of this module"):
        flat.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="one gradient per step"):
        flat.optimizer(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(TypeError, match=r"TorchModule.optimizer\(...\)"):
        training.train(
            flat.gradient,
            flat.parameters,
            (SAMPLES, LABELS),
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            client=client,
        )


def test_products_take_tensors(client):
    C = coded.encode(
        torch.arange(12.0, dtype=torch.float64).reshape(6, 2), None, client, transpose=True
    )
    x, y = torch.tensor([1.0, 10.0]), torch.arange(6.0)
    A = np.arange(12.0).reshape(6, 2)
    np.testing.assert_allclose(client.compute(C @ x).result(), A @ x.numpy())
    np.testing.assert_allclose(client.compute(y @ C).result(), y.numpy() @ A)
    with pytest.raises(RuntimeError, match="requires grad"):
        C @ x.requires_grad_()

    def both(operator, x, y):
        return operator @ x, y @ operator

    right, left = coded.submit(both, C, x.detach(), y, client=client).result()
    assert isinstance(right, torch.Tensor) and isinstance(left, torch.Tensor)
    np.testing.assert_allclose(right, A @ x.detach().numpy())
    np.testing.assert_allclose(left, y.numpy() @ A)


def summed(found, targets):
    return torch.nn.functional.cross_entropy(found, targets, reduction="sum")


@pytest.mark.parametrize(
    "loss",
    [
        torch.nn.functional.cross_entropy,
        lambda found, targets: torch.nn.functional.cross_entropy(found, targets),
        lambda found, targets: summed(found, targets) + 1,
    ],
)
def test_functions_that_are_not_sums_over_samples_are_refused(loss):
    flat = training.TorchModule(network(), loss)
    flat.gradient(flat.parameters, SAMPLES[:1], LABELS[:1])  # of one sample nothing can be told
    with pytest.raises(ValueError, match=r"sum over samples. It is .* for 60 samples, but .* and"):
        flat.gradient(flat.parameters, SAMPLES, LABELS)


def test_functions_that_are_sums_over_samples_are_told_once():
    calls = []

    def loss(found, targets):
        calls.append(len(targets))
        return summed(found, targets)

    flat = training.TorchModule(network(), loss)
    for _ in range(2):
        flat.gradient(flat.parameters, SAMPLES, LABELS)
    assert calls == [60, 60, 30, 30, 60]


@pytest.mark.parametrize("rows", ["flat", "columns"])
def test_rows_of_predictions_need_not_be_samples(rows):
    class Module(torch.nn.Linear):
        def forward(self, samples):
            found = super().forward(samples)
            return found.reshape(-1) if rows == "flat" else found.T

    def loss(found, targets):
        same = found.reshape(targets.shape) if rows == "flat" else found.T
        return (same - targets).square().sum()

    flat = training.TorchModule(Module(4, 4), loss)
    targets = np.ones((4, 4), dtype=np.float32)
    assert flat.gradient(flat.parameters, SAMPLES[:4], targets)[0] > 0


def test_modules_whose_gradients_are_not_sums_are_refused():
    with pytest.raises(ValueError, match='pass reduction="sum"'):
        training.TorchModule(network(), torch.nn.CrossEntropyLoss())


def normed(**options):
    """A network with batch normalisation, whose numbers are the same at each call."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6, **options), torch.nn.Linear(6, 3)
    return torch.nn.Sequential(*layers)


def test_statistics_of_batch_normalisation_are_summed_like_gradients():
    flat = training.TorchModule(normed(), torch.nn.CrossEntropyLoss(reduction="sum"))
    assert flat.averages.tolist() == [0.1] * 12
    assert flat.layers[-2:] == ((6,), (6,))
    start = flat.parameters
    loss, found = flat.gradient(start, SAMPLES, LABELS)
    np.testing.assert_array_equal(flat.parameters, start)  # the averages are back

    net = normed()
    rows = net[0](torch.from_numpy(SAMPLES)).detach().numpy()
    n = len(SAMPLES)
    np.testing.assert_allclose(found[-12:-6], n * rows.mean(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[-6:], n * rows.var(axis=0, ddof=1), rtol=1e-5)
    expected = torch.nn.functional.cross_entropy(
        net(torch.from_numpy(SAMPLES)), torch.from_numpy(LABELS), reduction="sum"
    )
    expected.backward()
    assert loss == pytest.approx(expected.item())
    grads = np.concatenate([p.grad.numpy().ravel() for p in net.parameters()])
    np.testing.assert_array_equal(found[:-12], grads)


def test_batch_normalisation_that_is_computed_again_in_the_backward_pass():
    """As with checkpoints of activations."""

    class Again(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = normed()

        def forward(self, samples):
            return torch.utils.checkpoint.checkpoint(self.inner, samples, use_reentrant=False)

    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    once, twice = (training.TorchModule(module, loss) for module in (normed(), Again()))
    expected = once.gradient(once.parameters, SAMPLES, LABELS)[1]
    np.testing.assert_array_equal(twice.gradient(once.parameters, SAMPLES, LABELS)[1], expected)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("aggregation", [Ring(), Squeeze(units=1)], ids=repr)
def test_a_training_with_batch_normalisation_is_that_of_pytorch(client, aggregation, clip):
    flat = training.TorchModule(normed(), torch.nn.CrossEntropyLoss(reduction="sum"))
    net = normed()
    rule, same = (
        torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9) for module in (net, flat.module)
    )
    found = training.train(
        flat.gradient,
        flat.parameters,
        (SAMPLES, LABELS),
        optimizer=flat.optimizer(same),
        steps=8,
        aggregation=aggregation,
        clip_norm=clip,
        workers=[next(iter(client.nthreads()))],
        client=client,
    )
    for _ in range(8):
        rule.zero_grad()
        out = net(torch.from_numpy(SAMPLES))
        torch.nn.functional.cross_entropy(out, torch.from_numpy(LABELS)).backward()
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(net.parameters(), clip) > clip
        rule.step()
    state = flat.load(found.parameters).state_dict()
    for name, value in net.state_dict().items():
        if name != "1.num_batches_tracked":
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    new = np.float32([[0.1, -2.0, 3.0, 0.5]])
    np.testing.assert_allclose(
        flat.prediction(found.parameters, new),
        net.eval()(torch.from_numpy(new)).detach().numpy(),
        rtol=1e-4,
        atol=1e-5,
    )


def test_batch_normalisation_that_is_frozen_is_a_constant():
    net = normed()
    net[1].eval()
    flat = training.TorchModule(net, torch.nn.CrossEntropyLoss(reduction="sum"))
    assert not flat.averages.size
    whole = flat.gradient(flat.parameters, SAMPLES, LABELS)[1]
    parts = [flat.gradient(flat.parameters, SAMPLES[i::2], LABELS[i::2])[1] for i in range(2)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-4, atol=1e-5)


def test_batch_normalisation_that_cannot_be_averaged_is_refused(client):
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(ValueError, match=r"without a momentum.*give it one, such as 0\.1"):
        training.TorchModule(normed(momentum=None), loss)
    flat = training.TorchModule(normed(), loss)
    with pytest.raises(ValueError, match="at least 2 samples at a time, there is 1"):
        flat.gradient(flat.parameters, SAMPLES[:1], LABELS[:1])
    shared = torch.nn.BatchNorm1d(4)
    twice = training.TorchModule(torch.nn.Sequential(shared, shared), loss)
    with pytest.raises(ValueError, match=r"must use BatchNorm1d.* at most once"):
        twice.gradient(twice.parameters, SAMPLES, LABELS)
    wrong = flat.parameters
    wrong[-1] = -0.1
    with pytest.raises(ValueError, match=r"pass `averages=model\.averages` to `train`"):
        flat.load(wrong)
    data = SAMPLES, LABELS
    with pytest.raises(ValueError, match="cannot be compressed by Quantization"):
        training.train(
            flat.gradient, flat.parameters, data, compression=Quantization(), client=client
        )
    with pytest.raises(ValueError, match="must be a flat array of momenta from 0 to 1"):
        training.train(flat.gradient, flat.parameters, data, averages=[2.0], client=client)
