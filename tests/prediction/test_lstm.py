"""The LSTM predictor: the shipped weights, and inference compared with PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.prediction.predictors import _lstm
from dask_coded.prediction.predictors._lstm import NAMES, forward, loudness, lstm, normalised


def histories(workers: int = 200, rounds: int = 64) -> np.ndarray:
    """Speeds of all kinds: quiet, restless, drifting, with a spike."""
    rng = np.random.default_rng(0)
    spread = 10.0 ** rng.uniform(-3, -0.5, size=(workers, 1))
    speeds = np.exp(spread * rng.standard_normal((workers, rounds)))
    speeds[::4] *= np.linspace(0.5, 1.5, rounds)
    speeds[1::4, -5] *= 0.1
    return speeds * rng.lognormal(size=(workers, 1))


@pytest.mark.extras
def test_inference_agrees_with_pytorch() -> None:
    torch = pytest.importorskip("torch")
    weights = _lstm.shipped()
    inputs, recurrent, bias, head, line = (torch.from_numpy(weights[name]) for name in NAMES)
    width = inputs.shape[1] - 1
    cell = torch.nn.LSTM(width + 1, recurrent.shape[1], batch_first=True).double()
    cell.load_state_dict(
        {
            "weight_ih_l0": inputs,
            "weight_hh_l0": recurrent,
            "bias_ih_l0": bias,
            "bias_hh_l0": torch.zeros_like(bias),
        }
    )
    _, spread, u = normalised(histories(), len(line))
    steps = torch.from_numpy(u).reshape(len(u), -1, width)
    loud = torch.from_numpy(loudness(spread))[:, None, None].expand(-1, steps.shape[1], 1)
    with torch.no_grad():
        hidden = cell(torch.cat([steps, loud], dim=2))[0][:, -1]
        expected = (hidden @ head + torch.from_numpy(u) @ line).numpy()
    np.testing.assert_allclose(forward(u, spread, weights), expected, atol=1e-6)


@pytest.mark.extras
def test_training_and_inference_agree() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import lstm as training

    late = histories()
    late[::3, :40] = np.nan
    ours, theirs = normalised(late, 64), training.normalised(torch.from_numpy(late))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.numpy(), atol=1e-9)
    net = training.Net(hidden=5, width=4, line=torch.linspace(-1, 1, 64)).double()
    torch.nn.init.ones_(net.head)
    with torch.no_grad():
        expected = net(*(torch.from_numpy(x) for x in (ours[2], ours[1]))).numpy()
    np.testing.assert_allclose(forward(ours[2], ours[1], net.weights()), expected, atol=1e-6)


def test_single_precision_is_enough() -> None:
    speeds = histories()
    mean, spread, u = normalised(speeds, 64)
    double = mean * np.maximum(1 + spread * forward(u, spread, _lstm.shipped()), 0)
    np.testing.assert_allclose(lstm(speeds), double, rtol=1e-5)


def test_the_training_record_is_stored_with_the_weights() -> None:
    record = _lstm.record()
    assert {"data", "split", "settings", "losses", "versions"} <= set(record)
    losses = record["losses"]
    assert set(losses["validation"]) == {"mean", *record["data"]}
    assert losses["validation"]["mean"] < losses["validation of the line before training"]["mean"]
    weights = _lstm.shipped()
    hidden, width = record["settings"]["hidden"], record["settings"]["width"]
    assert weights["weight_hh"].shape == (4 * hidden, hidden)
    assert weights["weight_ih"].shape == (4 * hidden, width + 1)
    for array in weights.values():
        assert array.dtype == np.float64
        assert np.isfinite(array).all()
        assert array.any()


def test_twice_the_speed_is_twice_the_prediction() -> None:
    speeds = histories()
    np.testing.assert_allclose(lstm(1000 * speeds), 1000 * lstm(speeds), rtol=1e-5)


def test_workers_do_not_influence_each_other() -> None:
    speeds = histories(workers=6)
    alone = np.concatenate([lstm(row[None]) for row in speeds])
    np.testing.assert_allclose(lstm(speeds), alone, rtol=1e-5)


def test_rounds_before_a_worker_joined_do_not_count() -> None:
    """Such rounds may be absent from the table, or NaN in it."""
    short = histories(rounds=10)
    padded = np.pad(short, ((0, 0), (54, 0)), constant_values=np.nan)
    np.testing.assert_allclose(lstm(padded), lstm(short), rtol=1e-5)


def test_only_the_last_rounds_count() -> None:
    speeds = histories()
    longer = np.concatenate([np.full((len(speeds), 30), 7.0), speeds], axis=1)
    np.testing.assert_allclose(lstm(longer), lstm(speeds), rtol=1e-5)


def test_a_change_of_level_is_followed() -> None:
    history = np.concatenate([np.full(44, 1.0), np.full(20, 0.2)])
    history += 0.01 * np.random.default_rng(0).standard_normal(64)
    assert lstm(history[None])[0] == pytest.approx(0.2, abs=0.1)
