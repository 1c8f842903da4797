"""Training on a small cluster gives what a loop of NumPy in one process gives."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_coded.aggregation import Ring, Star
from dask_coded.training import SGD, Pipelined, Synchronous, train

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
