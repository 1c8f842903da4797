"""PyTorch modules, and scikit-learn's conventions."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_coded import training
from dask_coded.training import SGD, GradientEstimator

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(3)
SAMPLES = RNG.normal(size=(60, 4)).astype(np.float32)
LABELS = (SAMPLES[:, 0] > SAMPLES[:, 1]).astype(np.int64)


def network(*more):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), *more, torch.nn.Tanh(), torch.nn.Linear(6, 2))


def model(*more):
    return training.TorchModule(network(*more), torch.nn.CrossEntropyLoss(reduction="sum"))


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


def test_dropout_depends_only_on_parameters_and_samples():
    one, other = model(torch.nn.Dropout(0.5)), model(torch.nn.Dropout(0.5))
    other.gradient(one.parameters, SAMPLES[7:], LABELS[7:])
    first = one.gradient(one.parameters, SAMPLES, LABELS)
    second = other.gradient(one.parameters, SAMPLES, LABELS)
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])


def test_modules_whose_gradients_are_not_sums_are_refused():
    with pytest.raises(ValueError, match='pass reduction="sum"'):
        training.TorchModule(network(), torch.nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="use GroupNorm or LayerNorm"):
        model(torch.nn.BatchNorm1d(6))
