"""Sums of rounded units: the same bits in any order and grouping, and how far they are off."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.aggregation.grid import (
    NO_ENTRY,
    NOT_FINITE,
    STEPS,
    Grid,
    GridBlocks,
    PeakHistory,
    peaks_of,
)

LAYERS = [(140, 66), (5,), (0, 4), (), (8192,), (4097,)]


@st.composite
def cases(draw, layers=LAYERS):
    """Draw units whose blocks have very different magnitudes, and some zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    blocks = GridBlocks(layers)
    units = draw(st.integers(1, 20))
    largest = 30 if dtype == np.float32 else 300
    scale = 10.0 ** rng.integers(-largest, largest - 5, len(blocks))
    scale *= rng.random(len(blocks)) < 0.9
    values = rng.standard_normal((units, blocks.entries)) * np.repeat(scale, blocks.lengths)
    values *= rng.random(values.shape) < draw(st.sampled_from([1.0, 0.5, 0.0]))
    return blocks, values.astype(dtype)


def grid_of(blocks: GridBlocks, units: np.ndarray) -> Grid:
    peaks = np.maximum.reduce([peaks_of(blocks, unit) for unit in units])
    return Grid(blocks, peaks, len(units), units.dtype)


def test_blocks_stay_within_layers() -> None:
    blocks = GridBlocks(LAYERS)
    assert blocks.lengths.tolist() == [4096, 4096, 1048, 5, 1, 4096, 4096, 4096, 1]
    assert blocks.entries == sum(math.prod(layer) for layer in LAYERS) == blocks.lengths.sum()
    assert len(GridBlocks([])) == 0


@given(cases(), st.data())
def test_any_grouping_has_the_same_bits(case, data) -> None:
    blocks, units = case
    expected, peaks = grid_of(blocks, units).zeros(), []
    for unit in units:
        peaks.append(grid_of(blocks, units).fold(unit, expected))
    workers = data.draw(st.integers(1, len(units)))
    holders = data.draw(
        st.lists(st.integers(0, workers - 1), min_size=len(units), max_size=len(units))
    )
    order = data.draw(st.permutations(range(len(units))))
    grids = [grid_of(blocks, units) for _ in range(workers)]
    sums = [grid.zeros() for grid in grids]
    combined = np.full(len(blocks), NO_ENTRY)
    for unit in order:
        found = grids[holders[unit]].fold(units[unit], sums[holders[unit]])
        np.maximum(combined, found, out=combined)
    total = grids[0].zeros()
    for worker in data.draw(st.permutations(range(workers))):
        total += sums[worker]
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(combined, np.maximum.reduce(peaks))
    assert grids[0].fits(combined)
    assert grids[0].restored(total).tobytes() == grid_of(blocks, units).restored(expected).tobytes()


@given(cases())
def test_a_unit_is_off_by_half_a_grid_at_most(case) -> None:
    blocks, units = case
    grid = grid_of(blocks, units)
    total = grid.zeros()
    for unit in units:
        grid.fold(unit, total)
    exact = np.array([math.fsum(column) for column in units.T.astype(np.float64)])
    step = np.ldexp(1.0, grid.exponents.astype(int)).repeat(blocks.lengths)
    found = total * step
    # The exact sum is itself rounded to a double.
    assert (np.abs(found - exact) <= (len(units) / 2 + 1e-6) * step).all()
    np.testing.assert_allclose(grid.restored(total), found, rtol=1e-7, atol=0)


@given(cases(), st.integers(0, 10), st.data())
def test_overflow_is_known_from_the_peaks(case, bits, data) -> None:
    """Units grow by a power of two over what was predicted: up to three bits still fit."""
    blocks, units = case
    peaks = np.maximum.reduce([peaks_of(blocks, unit) for unit in units])
    grown = data.draw(st.integers(0, len(units) - 1))
    more = units.copy()
    more[grown] = np.ldexp(units[grown], bits)
    grid = Grid(blocks, peaks, len(units), units.dtype)
    found = [grid.fold(unit, grid.zeros()) for unit in more]
    fits = [grid.fits(own) for own in found]
    assert grid.fits(np.maximum.reduce(found)) == all(fits)
    if bits <= 3:
        assert all(fits)
    if bits > 4 and (peaks_of(blocks, units[grown]) == peaks)[peaks > NO_ENTRY].any():
        assert not all(fits)
    again = grid_of(blocks, more)
    total = again.zeros()
    assert all(again.fits(again.fold(unit, total)) for unit in more)


def test_sums_of_the_largest_units_do_not_overflow() -> None:
    blocks = GridBlocks([(4,)])
    units = 16
    grid = Grid(blocks, np.int16([0]), units, np.float64)
    most = np.ldexp(1.0, 31 - 4) * np.ldexp(1.0, int(grid.exponents[0]))
    total = grid.zeros()
    below = most * (1 - 0.75 * 2.0**-27)  # rounds to one less than the bound
    unit = np.array([below, -below, below, -below])
    for _ in range(units):
        assert grid.fits(grid.fold(unit, total))
    assert total.tolist() == [2**31 - 16, 16 - 2**31] * 2
    # Just below the bound, but rounded up to it: as many of these would overflow.
    assert not grid.fits(grid.fold(np.array([most * (1 - 2.0**-40), 0, 0, 0]), grid.zeros()))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_marks_the_step_for_all(odd: float) -> None:
    blocks = GridBlocks([(3,), (8000,)])
    units = np.ones((3, 8003), np.float32)
    units[1, 6000] = odd
    grid = Grid(blocks, np.ones(len(blocks), np.int16), 3, np.float32)
    peaks = [grid.fold(unit, grid.zeros()) for unit in units]
    assert [grid.fits(own) for own in peaks] == [True, False, True]
    together = np.maximum.reduce(peaks)
    assert together.tolist() == [1, 1, NOT_FINITE]
    np.testing.assert_array_equal(together[2:], peaks_of(blocks, units[1])[2:])
    with pytest.raises(FloatingPointError, match="step 7 contains NaN or infinity"):
        PeakHistory(blocks).record(together, step=7)


def test_the_grid_follows_the_largest_of_the_last_steps() -> None:
    blocks = GridBlocks([(1,)])
    history = PeakHistory(blocks)
    history.record(np.int16([9]), 0)
    for step in range(1, STEPS):
        history.record(np.int16([step % 3]), step)
    assert history.predicted().tolist() == [9]
    joined = PeakHistory(blocks)
    joined.restore(history.state())
    for one in (history, joined):
        one.record(np.int16([0]), STEPS)
        assert one.predicted().tolist() == [2]
    np.testing.assert_array_equal(history.state(), joined.state())
    joined.restore(np.zeros((3, 5), np.int16))  # of a version with smaller blocks
    assert joined.predicted() is None


def test_a_block_without_entries_is_as_coarse_as_its_layer() -> None:
    blocks = GridBlocks([(3, 4096), (7,), (7,)])
    history = PeakHistory(blocks)
    history.record(np.int16([-3, NO_ENTRY, -5, NO_ENTRY, 4]), 0)
    assert history.predicted().tolist() == [-3, -3, -5, NO_ENTRY, 4]
    grid = Grid(blocks, history.predicted(), 4, np.float32)
    gradient = np.zeros(blocks.entries, np.float32)
    assert grid.fits(grid.fold(gradient, grid.zeros()))
    gradient[4100] = 1e-3
    assert grid.fits(grid.fold(gradient, grid.zeros()))
    gradient[3 * 4096 + 3] = 1e-3  # a layer that had none
    assert not grid.fits(grid.fold(gradient, grid.zeros()))


def test_half_precision_is_widened() -> None:
    blocks = GridBlocks([(2,)])
    units = np.float16([[60_000, 1], [60_000, 2]])
    grid = grid_of(blocks, units)
    total = grid.zeros()
    for unit in units:
        assert grid.fits(grid.fold(unit, total))
    assert grid.restored(total).tolist() == [120_000, 3]
    assert grid.restored(total).dtype == np.float32


def test_too_many_units_are_refused() -> None:
    blocks = GridBlocks([(2,)])
    Grid(blocks, np.int16([0]), 1 << 26, np.float32)
    with pytest.raises(ValueError, match="make units larger"):
        Grid(blocks, np.int16([0]), (1 << 26) + 1, np.float32)
