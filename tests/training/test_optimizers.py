"""Optimizers against PyTorch's, and schedules of the learning rate."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.compression import Partial
from dask_coded.training import SGD, Adam, CosineDecay, Pipelined, StepDecay
from dask_coded.training.replica import Model
from dask_coded.training.runtime.norms import norm_of, same_norm


@pytest.mark.extras
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (SGD(0.1), "SGD", {"lr": 0.1}),
        (SGD(0.1, momentum=0.9), "SGD", {"lr": 0.1, "momentum": 0.9}),
        (
            SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            "SGD",
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        ),
        (Adam(0.05), "Adam", {"lr": 0.05}),
        (
            Adam(0.05, betas=(0.8, 0.99), epsilon=1e-6, weight_decay=0.1),
            "Adam",
            {"lr": 0.05, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        ),
    ],
    ids=str,
)
def test_steps_match_pytorch(ours, theirs, options):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x = rng.normal(size=20)
    parameter = torch.tensor(x, requires_grad=True)
    optimizer = getattr(torch.optim, theirs)([parameter], **options)
    state = ours.start(x)
    for step in range(10):
        gradient = rng.normal(size=20)
        before = gradient.copy()
        ours.update(x, gradient, state, step)
        np.testing.assert_array_equal(gradient, before)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    np.testing.assert_allclose(x, parameter.detach().numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.5, weight_decay=0.1), Adam(0.1)])
def test_single_precision_stays_single(optimizer):
    x = np.ones(3, dtype=np.float32)
    state = optimizer.start(x)
    optimizer.update(x, x.copy(), state, 0)
    assert {x.dtype, *(a.dtype for a in state.values())} == {np.dtype(np.float32)}


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.5, weight_decay=0.1), Adam(0.1)])
def test_half_precision_differs_from_single_by_the_rounding_of_the_parameters(optimizer):
    """Squares of these gradients are 0 or infinite in float16."""
    gradient = np.array([1.0, 1e-4, 0.0, 300.0])
    found = []
    for dtype in (np.float16, np.float32):
        x = np.ones(4, dtype=dtype)
        state = optimizer.start(x)
        for step in range(5):
            optimizer.update(x, gradient.astype(dtype), state, step)
        assert x.dtype == dtype
        found.append(x)
    np.testing.assert_allclose(*found, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_the_learning_rate_follows_any_function_of_the_step(optimizer):
    halved, plain = np.ones(2), np.ones(2)
    scheduled = optimizer(0.2, decay=lambda step: np.float64(0.5))
    scheduled.update(halved, np.ones(2), scheduled.start(halved), 0)
    optimizer(0.1).update(plain, np.ones(2), optimizer(0.1).start(plain), 0)
    np.testing.assert_allclose(halved, plain)


def test_a_cosine_rises_and_falls_to_its_floor():
    decay = CosineDecay(steps=10, warmup=3, floor=0.1)
    factors = [decay(step) for step in range(12)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:10] == sorted(factors[4:10], reverse=True)
    np.testing.assert_allclose(factors[10:], 0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(0), "'learning_rate' must be a positive number, it is 0"),
        (lambda: SGD(0.1, momentum=1), "'momentum' must be from 0 to below 1"),
        (lambda: SGD(0.1, nesterov=True), "'nesterov' needs a positive momentum"),
        (lambda: Adam(0.1, betas=(1.0, 0.9)), "'betas' must be two numbers from 0"),
        (lambda: Adam(0.1, betas=(0.9,)), "'betas' must be two numbers from 0"),
        (lambda: SGD("0.1"), "'learning_rate' must be a positive number, it is '0.1'"),
        (lambda: StepDecay(every=0), "'every' must be a whole number of at least 1, it is 0"),
        (lambda: CosineDecay(5, warmup=5), "'warmup' must be less than 'steps'"),
        (lambda: CosineDecay(5, floor=2), "'floor' must be between 0 and 1"),
        (lambda: Pipelined(1), "'width' must be a whole number of at least 2, it is 1"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_decay_is_a_function(make):
    with pytest.raises(TypeError, match="'decay' must be a function of the step"):
        make(0.1, decay=0.99)


@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        (np.full(4, 300.0, dtype=np.float16), 600.0),
        (np.full(4, 1e-30, dtype=np.float32), 2e-30),
        (np.full(4, 1e200), 2e200),
        (np.ones(0), 0.0),
    ],
)
def test_norms_whose_squares_cannot_be_represented(vector, expected):
    assert norm_of(np.array_split(vector, 3)) == pytest.approx(expected)


@pytest.mark.parametrize("size", [1, 1000, 5000])
@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_the_norm_that_is_the_same_everywhere(scale, size):
    vector = scale * np.random.default_rng(0).standard_normal(size)
    assert same_norm(vector) == pytest.approx(scale * np.linalg.norm(vector / scale), rel=1e-12)
    assert same_norm(0 * vector) == 0


def test_the_norm_of_half_precision_has_no_overflow():
    assert same_norm(np.full(10_000, 300.0, np.float16)) == 30_000.0


def test_a_norm_without_running_averages():
    segments = np.array_split(np.array([3.0, 4.0, 7.0, 7.0, 7.0]), 4)
    assert norm_of(segments, averages=3) == 5.0


def test_means_of_half_precision_are_clipped_before_they_are_rounded():
    def large(w, samples, targets):
        return np.array([1e5, 1.0], dtype=np.float32) * len(samples)

    def small(w, samples, targets):
        return np.array([1e-8, 2e-8], dtype=np.float32) * len(samples)

    start = np.zeros(2, dtype=np.float16)
    for gradient, options, expected in (
        (large, {"clip_norm": 1.0, "optimizer": SGD(1.0)}, [-1.0, 0.0]),
        (small, {"optimizer": Adam(0.5, epsilon=1e-12)}, [-0.5, -0.5]),
    ):
        rule = options.pop("optimizer")
        replica = Model(gradient, start, rule, 4, None, 0, None, [(2,)], **options).replica(1, 1)
        replica.apply([Partial(*replica.gradient(0, 0, np.ones((4, 1)), np.ones(4)))])
        np.testing.assert_allclose(replica.state()["parameters"], expected, atol=1e-3)
