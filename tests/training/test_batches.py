"""Which samples a step uses."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.training.batches import Batches
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
    steps = max(-(-samples // batch_size), 1)
    assert samples // steps <= batches.count(step) <= -(-samples // steps) <= batch_size
    for part in range(parts):
        first, end = batches.part(part)
        assert len(drawn(batches, part, step)) - (end - first) // steps in (0, 1)


@given(**sizes, step=st.integers(0, 500))
def test_keys_of_samples_do_not_depend_on_the_parts(samples, parts, batch_size, seed, step):
    one, whole = (Batches(samples, n, batch_size, seed) for n in (parts, 1))
    everything = Batches(samples, 1, None, seed).keys(0, step // whole.steps)
    for part in range(parts):
        np.testing.assert_array_equal(one.keys(part, step), everything[drawn(one, part, step)])
    assert len({*everything.tolist()}) == samples
    assert not {*everything.tolist()} & {*whole.keys(0, step + whole.steps).tolist()}


def test_epochs_and_seeds_differ():
    first = Batches(100, 2, 10, seed=0)
    assert (drawn(first, 0, 0) != drawn(first, 0, 10)).any()
    assert (drawn(first, 0, 0) != drawn(Batches(100, 2, 10, seed=1), 0, 0)).any()


def test_permutations_of_earlier_epochs_are_not_kept():
    batches, other = Batches(100, 50, 10, seed=0), Batches(100, 50, 10, seed=0)
    for step in range(100):
        batches.rows(7, step)
        batches.keys(7, step)
    for kept in (batches._permutations, batches._keys):
        assert sum(map(len, kept.values())) <= 2
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
