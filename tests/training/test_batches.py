"""Which samples a step uses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.training.batches import Batches
from dask_coded.training.optimizers import SGD
from dask_coded.training.replica import Model
from dask_coded.training.schedules import Pipelined, Synchronous

sizes = {
    "samples": st.integers(1, 200),
    "parts": st.integers(1, 12),
    "batch_size": st.integers(1, 250),
    "seed": st.integers(0, 3),
}


def drawn(batches, part, step):
    start, stop = batches.part(part)
    return np.arange(start, stop)[batches.rows(part, step)]


@given(**sizes, epoch=st.integers(0, 2))
def test_every_sample_once_per_epoch(samples, parts, batch_size, seed, epoch):
    batches = Batches(samples, parts, batch_size, seed)
    steps = range(epoch * batches.steps, (epoch + 1) * batches.steps)
    used = [row for step in steps for part in range(parts) for row in drawn(batches, part, step)]
    assert sorted(used) == list(range(samples))


@given(**sizes, step=st.integers(0, 500))
def test_all_holders_of_a_part_draw_the_same(samples, parts, batch_size, seed, step):
    one, other = (Batches(samples, parts, batch_size, seed) for _ in range(2))
    other.rows(0, step + 1)
    count = 0
    for part in range(parts):
        np.testing.assert_array_equal(drawn(one, part, step), drawn(other, part, step))
        count += len(drawn(one, part, step))
    assert one.count(step) == count


@given(**sizes, step=st.integers(0, 500))
def test_batches_are_as_large_as_asked_for(samples, parts, batch_size, seed, step):
    batches = Batches(samples, parts, batch_size, seed)
    assert batches.count(step) <= min(batch_size, samples) + parts
    if samples % parts == 0:
        assert batches.count(step) <= batch_size


@given(
    samples=st.integers(1, 200),
    cells=st.integers(1, 40),
    batch_size=st.one_of(st.none(), st.integers(1, 250)),
    step=st.integers(0, 500),
    data=st.data(),
)
def test_units_have_the_same_samples_for_any_number_of_workers(
    samples, cells, batch_size, step, data
):
    alone = Batches(samples, cells, batch_size, seed=1)
    units = [drawn(alone, cell, step) for cell in range(cells)]
    workers = data.draw(st.integers(1, cells))
    batches = Batches(samples, workers, batch_size, seed=1, cells=cells)
    assert [cell for part in range(workers) for cell in batches.cells(part)] == [*range(cells)]
    assert batches.count(step) == alone.count(step)
    for part in range(workers):
        expected = np.concatenate([units[cell] for cell in batches.cells(part)])
        np.testing.assert_array_equal(drawn(batches, part, step), expected)


def test_fewer_cells_than_parts_are_refused():
    with pytest.raises(ValueError, match="at least the number of parts, 5, it is 4"):
        Batches(100, 5, 10, seed=0, cells=4)


def test_gradients_of_units_add_up_to_those_of_the_parts():
    samples = np.arange(60.0)
    model = Model(
        gradient=lambda parameters, x, y: np.array([x.sum(), len(x)]),
        parameters=np.zeros(2),
        optimizer=SGD(0.1),
        samples=60,
        batch_size=21,
        seed=3,
        compression=None,
        layers=[(2,)],
        cells=7,
    )

    def summed(parts: int) -> np.ndarray:
        replica = model.replica(parts, 1)
        rows = [samples[slice(*replica.part(part))] for part in range(parts)]
        return sum(replica.gradient(4, part, own, own)[0] for part, own in enumerate(rows))

    np.testing.assert_array_equal(summed(7), summed(2))
    np.testing.assert_array_equal(summed(7), summed(3))


def test_epochs_and_seeds_differ():
    first = Batches(100, 2, 10, seed=0)
    assert (drawn(first, 0, 0) != drawn(first, 0, 10)).any()
    assert (drawn(first, 0, 0) != drawn(Batches(100, 2, 10, seed=1), 0, 0)).any()


def test_permutations_of_earlier_epochs_are_not_kept():
    batches, other = Batches(100, 50, 10, seed=0), Batches(100, 50, 10, seed=0)
    for step in range(100):
        batches.rows(7, step)
    assert sum(map(len, batches._permutations.values())) <= 2
    np.testing.assert_array_equal(batches.rows(7, 3), other.rows(7, 3))


def test_without_a_batch_size_all_samples_are_used_in_order():
    batches = Batches(10, 3, None, seed=0)
    assert batches.rows(1, 7) == slice(None)
    assert batches.count(7) == 10


@given(width=st.integers(2, 5), warmup=st.integers(0, 6))
def test_a_pipeline_is_never_staler_than_its_width(width, warmup):
    versions = [Pipelined(width, warmup).version(step) for step in range(20)]
    assert versions == sorted(versions)
    assert all(step - version < width for step, version in enumerate(versions))
    assert versions[:warmup] == [Synchronous().version(step) for step in range(warmup)]
    assert [19 - versions[19], 18 - versions[18]] == [width - 1] * 2
