"""A replay in this process equals the training of the cluster, bit by bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from distributed import Client

from benchmarks.replay import replay
from dask_coded.aggregation import Ring, Star
from dask_coded.compression import Compression, GradiVeQ, Quantization, Truncation
from dask_coded.training import SGD, Pipelined, Schedule, Synchronous, train

rng = np.random.default_rng(0)
X = rng.standard_normal((90, 64)).astype(np.float32)
Y = np.tanh(X @ rng.standard_normal((64, 16))).astype(np.float32)

SETTINGS = {
    "optimizer": SGD(0.01, momentum=0.9),
    "batch_size": 32,
    "seed": 3,
    "layers": [(16, 64)],
}


def gradient(parameters: np.ndarray, samples: np.ndarray, targets: np.ndarray):
    """Return loss and gradient of least squares.

    BLAS is avoided, because its last bits may depend on where the samples are in memory.
    """
    weights = parameters.reshape(16, 64)
    errors = (samples[:, None, :] * weights).sum(axis=2) - targets
    return (errors**2).sum() / 2, (errors[:, :, None] * samples[:, None, :]).sum(axis=0).ravel()


@pytest.mark.parametrize("schedule", [Synchronous(), Pipelined(2)], ids=repr)
@pytest.mark.parametrize(
    "compression",
    [None, Truncation(), Quantization(), GradiVeQ(64, 8, exact_steps=4, period=9)],
    ids=repr,
)
def test_replay_equals_the_training_of_the_cluster(
    client: Client, compression: Compression | None, schedule: Schedule
) -> None:
    chosen = {**SETTINGS, "compression": compression, "schedule": schedule}
    chosen["aggregation"] = Ring(segments=2)
    parameters = np.zeros(16 * 64, dtype=np.float32)
    steps = 20
    found = train(gradient, parameters, (X, Y), steps=steps, client=client, **chosen)
    replayed = replay(gradient, parameters, (X, Y), workers=4, **chosen)
    *_, expected = itertools.islice(replayed, steps)
    assert len(set(found.digests.values())) == 1
    np.testing.assert_array_equal(found.parameters, expected)


def test_trees_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="replay a Ring"):
        next(replay(gradient, np.zeros(4), (X, Y), workers=2, aggregation=Star(), optimizer=SGD(1)))
