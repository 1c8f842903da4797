"""Footprints of sparse blocks."""

from __future__ import annotations

import pickle

import numpy as np
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.rounds.footprint import Footprints, footprint_of, indices_of


def block(columns: set[int], width: int) -> scipy.sparse.csr_array:
    chosen = sorted(columns)
    entries = (np.ones(len(chosen)), (np.zeros(len(chosen), int), chosen))
    return scipy.sparse.csr_array(entries, shape=(1, width))


WIDTH = 21
COLUMNS = st.sets(st.integers(0, WIDTH - 1))


@given(columns=COLUMNS)
def test_a_footprint_names_the_columns_of_a_block(columns):
    packed, touched = footprint_of(block(columns, WIDTH))
    assert touched == len(columns)
    assert indices_of(packed).tolist() == sorted(columns)


@given(blocks=st.lists(COLUMNS, min_size=1, max_size=5), seed=st.integers(0, 99), data=st.data())
def test_entries_in_columns_that_no_block_touches_are_dropped(blocks, seed, data):
    footprints = Footprints(footprint_of(block(each, WIDTH)).packed for each in blocks)
    footprints = pickle.loads(pickle.dumps(footprints))
    some = data.draw(st.sets(st.sampled_from(range(len(blocks))), min_size=1))
    touched = set().union(*(blocks[j] for j in some))
    rows = scipy.sparse.random_array((4, WIDTH), density=0.3, format="csr", rng=seed)
    kept = footprints.within(rows, some)
    expected = np.where(np.isin(np.arange(WIDTH), sorted(touched)), rows.toarray(), 0)
    np.testing.assert_array_equal(kept.toarray(), expected)
    assert set(kept.indices) <= touched


def test_rows_without_such_entries_are_not_copied():
    rows = block({1, 4}, WIDTH)
    assert Footprints([footprint_of(rows).packed]).within(rows, [0]) is rows
