"""Verified shares: right ones are accepted at every scale, flipped bits are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, RandomLinear, Repetition
from dask_coded.rounds import Geometry, StripeRange
from dask_coded.rounds.rebuilding import RoundingErrors
from dask_coded.rounds.scaling import exponents_of, restored, scaled
from dask_coded.rounds.verification import (
    Verification,
    Verifier,
    add_rows,
    empty_check,
    random_weights,
)


class Array:
    """A matrix as coded pieces with checks, without a cluster."""

    def __init__(self, code: Code, blocks: list[np.ndarray], stripes: int) -> None:
        self.code, self.blocks = code, blocks
        self.geometry = Geometry(tuple(map(len, blocks)), stripes, mixed=not code.exact)
        self.exponents = tuple(map(exponents_of, blocks))
        longest, columns = max(map(len, blocks)), blocks[0].shape[1]
        self.weights = random_weights("array", longest)
        parts = [scaled(*part) for part in zip(blocks, self.exponents, strict=True)]
        self.checks = [empty_check(stripes, columns, blocks[0].dtype) for _ in blocks]
        for j, (check, part) in enumerate(zip(self.checks, parts, strict=True)):
            half = len(part) // 2  # as if fetched in two slices
            for first, rows in ((0, part[:half]), (half, part[half:])):
                add_rows(check, self.weights, self.geometry.edges(j), first, rows)
        padded = [np.pad(p, [(0, longest - len(p)), (0, 0)]) for p in parts]
        self.pieces = [
            blocks[j] if j >= 0 else np.tensordot(row, padded, axes=1).astype(blocks[0].dtype)
            for j, row in zip(code.block_of.tolist(), code.G, strict=True)
        ]
        dtype = blocks[0].dtype
        self.verification = Verification(
            code, self.geometry, self.exponents, self.weights, self.checks, dtype
        )

    def verifier(self, x: np.ndarray, growth: float = 0.0) -> Verifier:
        return self.verification.verifier(x, [growth] * self.code.pieces)

    def share(self, part: StripeRange, x: np.ndarray) -> np.ndarray:
        edges = self.geometry.edges(int(self.code.group[part.piece]))
        return self.pieces[part.piece][edges[part.start] : edges[part.stop]] @ x


CODES = [MDS(6, 4), RandomLinear(6, 4), Repetition(4, 2)]


@given(st.data())
@settings(max_examples=60)
def test_right_shares_are_accepted_at_every_scale(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "f8", "c8", "c16"])))
    reach = 15 if np.finfo(dtype).bits == 32 else 150
    code = data.draw(st.sampled_from(CODES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    columns, stripes = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.integers(0, 12), min_size=4, max_size=4))
    rows[0] += 1
    kind = data.draw(st.sampled_from(["normal", "constant", "sparse", "huge column"]))

    def numbers(*shape: int) -> Any:
        if kind == "constant":
            out = np.full(shape, 0.1)
        else:
            out = rng.standard_normal(shape)
        if kind == "sparse":
            out *= rng.random(shape) < 0.1
        if kind == "huge column" and len(shape) == 2:
            out[:, :1] *= 1e6
        return out + 1j * out[::-1] if dtype.kind == "c" else out

    scale = data.draw(st.floats(-reach, reach))
    blocks = [
        (numbers(r, columns) * 10 ** (scale + rng.uniform(-3, 3, (r, 1)))).astype(dtype)
        for r in rows
    ]
    array = Array(code, blocks, stripes)
    shape = (columns, *data.draw(st.sampled_from([(), (3,), (0,)])))
    x = (numbers(*shape) * 10.0 ** data.draw(st.floats(-reach, reach))).astype(dtype)
    verifier = array.verifier(x)
    with np.errstate(all="ignore"):
        for piece in range(code.pieces):
            for a in range(stripes):
                part = StripeRange(piece, a, data.draw(st.integers(a + 1, stripes)))
                assert verifier.accepts(part, array.share(part, x))


@given(st.data())
@settings(max_examples=60)
def test_right_shares_are_accepted_with_columns_of_every_scale(data: st.DataObject) -> None:
    """Also where entries and their squares vanish, and where the operand touches only these."""
    dtype, operand = (np.dtype(data.draw(st.sampled_from(["f2", "f4", "f8", "c8"]))) for _ in "ab")
    reach = {2: 2, 4: 15, 8: 150}[np.finfo(dtype).bits // 8]
    code = data.draw(st.sampled_from(CODES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    columns, stripes = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 5))
    sizes = 10.0 ** rng.uniform(-2 * reach, reach, columns)
    numbers = rng.standard_normal((code.k, data.draw(st.integers(1, 40)), columns)) * sizes
    array = Array(code, list(numbers.astype(dtype)), stripes)
    touched = data.draw(st.sampled_from(["all", "alike", "some", "lightest"]))
    x = rng.standard_normal((columns, 2))
    x[:, 0] *= {
        "all": np.ones(columns),
        "alike": 1 / sizes,
        "some": rng.random(columns) < 0.5,
        "lightest": sizes == sizes.min(),
    }[touched]
    with np.errstate(all="ignore"):
        x = (x * 10.0 ** data.draw(st.floats(-reach, reach))).astype(operand)
        verifier = array.verifier(x, data.draw(st.sampled_from([0.0, 10.0])))
        for piece in range(code.pieces):
            for a in range(stripes):
                part = StripeRange(piece, a, data.draw(st.integers(a + 1, stripes)))
                assert verifier.accepts(part, array.share(part, x))


def flipped(rows: np.ndarray, row: int, bit: int) -> np.ndarray:
    wrong = rows.copy()
    flat = wrong.reshape(-1)[row : row + 1].view(f"u{rows.dtype.itemsize}")
    flat ^= flat.dtype.type(1 << bit)
    return wrong


@pytest.mark.parametrize("code", CODES, ids=repr)
@pytest.mark.parametrize("columns", [50, 1000])
def test_flipped_bits_are_found(code: Code, columns: int) -> None:
    """In double precision: the exponent, the sign and the upper half of the mantissa."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-12, 12, (4, 40, 1))  # errors in small rows are found as well
    array = Array(code, list(rng.standard_normal((4, 40, columns)) * sizes), stripes=4)
    x = rng.standard_normal(columns)
    verifier = array.verifier(x)
    with np.errstate(all="ignore"):
        for piece in range(code.pieces):
            part = StripeRange(piece, 1, 3)
            rows = array.share(part, x)
            typical = np.flatnonzero(np.abs(rows) > 0.1 * np.median(np.abs(rows)))
            for bit in range(26, 64):
                row = int(rng.choice(typical if piece >= 4 else len(rows)))
                if verifier.accepts(part, flipped(rows, row, bit)):
                    # Only next to nothing may pass: in a row whose terms cancel, a bit is less.
                    size = np.abs(array.pieces[piece][10 + row]) @ np.abs(x)
                    change = np.abs(flipped(rows, row, bit) - rows)[row]
                    assert change < 1e-9 * size, (piece, bit)


def test_a_wrong_kernel_is_found_in_single_precision() -> None:
    rng = np.random.default_rng(0)
    array = Array(MDS(6, 4), list(rng.random((4, 400, 100)).astype("f4")), stripes=4)
    x = rng.random((100, 3)).astype("f4")
    verifier = array.verifier(x)
    for piece in range(6):
        part = StripeRange(piece, 0, 4)
        rows = array.share(part, x)
        assert verifier.accepts(part, rows)
        assert not verifier.accepts(part, rows * np.float32(1.1))


def test_what_is_not_finite_is_accepted_only_where_it_can_be_right() -> None:
    rng = np.random.default_rng(0)
    blocks = list(rng.standard_normal((4, 10, 5)) * 1e200)
    blocks[1][3, 2] = np.nan
    array = Array(MDS(6, 4), blocks, stripes=2)
    part = StripeRange(1, 0, 2)
    x = rng.standard_normal(5)
    rows = array.share(part, x)
    assert np.isnan(rows[3])
    assert array.verifier(x).accepts(part, rows)
    rows[4] = np.inf
    assert not array.verifier(x).accepts(part, rows)
    with np.errstate(over="ignore", invalid="ignore"):
        large = array.share(part, x * 1e200)
    assert np.isinf(large).any()
    assert array.verifier(x * 1e200).accepts(part, large)
    assert array.verifier(x * np.nan).accepts(part, array.share(part, x * np.nan))


def test_a_rebuilt_piece_may_differ_by_the_roundings_of_rebuilding() -> None:
    rng = np.random.default_rng(0)
    array = Array(MDS(6, 4), list(rng.standard_normal((4, 20, 30))), stripes=2)
    x = rng.standard_normal(30)
    part = StripeRange(5, 0, 2)
    array.pieces[5] = array.pieces[5] * (1 + 1e-11)
    assert not array.verifier(x).accepts(part, array.share(part, x))
    assert array.verifier(x, growth=1e5).accepts(part, array.share(part, x))


@pytest.mark.parametrize("columns", [1, 2])
def test_right_shares_of_tall_matrices_are_accepted(columns: int) -> None:
    """The rounding errors of the check itself stay below the limit."""
    rng = np.random.default_rng(0)
    array = Array(MDS(3, 2), list(rng.standard_normal((2, 1_000_000, columns))), stripes=2)
    x = rng.standard_normal(columns)
    verifier = array.verifier(x)
    for piece in range(3):
        part = StripeRange(piece, 0, 2)
        rows = array.share(part, x)
        assert verifier.accepts(part, rows)
        rows[0] += 1e-9
        assert not verifier.accepts(part, rows)


def test_rows_at_the_end_of_the_range_of_numbers_may_overflow() -> None:
    array = Array(Repetition(3, 2), [np.full((4, 2), 1e308) for _ in range(3)], stripes=2)
    part, x = StripeRange(1, 0, 2), np.ones(2)
    with np.errstate(all="ignore"):
        rows = array.share(part, x)
        assert np.isinf(rows).all()
        assert array.verifier(x).accepts(part, rows)


def test_the_weighted_sum_of_large_products_may_overflow() -> None:
    """The rows cancel, so that the check does not overflow."""
    signs = np.sign(random_weights("array", 200)) * np.repeat([0.7, -0.7], 100)
    array = Array(Repetition(3, 2), [signs[:, None] for _ in range(3)], stripes=1)
    part, x = StripeRange(1, 0, 1), np.array([2e307])
    assert np.isfinite(array.verification.checks @ x).all()
    verifier, rows = array.verifier(x), array.share(part, x)
    assert verifier.accepts(part, rows)
    assert not array.verifier(x / 1e10).accepts(part, rows * np.inf)


def test_a_column_that_is_not_a_number_next_to_one_that_overflows() -> None:
    rng = np.random.default_rng(0)
    array = Array(MDS(6, 4), list(rng.random((4, 10, 5)) * 1e300), stripes=2)
    x = np.stack([np.full(5, 1e300), np.full(5, np.nan), np.ones(5)], axis=1)
    part = StripeRange(1, 0, 2)
    with np.errstate(all="ignore"):
        rows = array.share(part, x)
        verifier = array.verifier(x)
        assert np.isinf(rows[:, 0]).all()
        assert verifier.accepts(part, rows)
        rows[3, 2] = np.inf  # the last column can neither overflow nor be NaN
        assert not verifier.accepts(part, rows)


HEAVY = [MDS(4, 3), MDS(12, 10), RandomLinear(6, 4), Repetition(4, 2)]


def uneven(kind: str, rng: np.random.Generator, k: int, dtype: str) -> tuple[list[Any], Any]:
    """Return blocks with heavy columns, and an operand that is small or zero where they are."""
    columns = 20
    if kind == "one column":
        sizes = np.where(np.arange(columns) == 0, 1e8, 1.0)
    else:
        sigma = float(kind)
        sizes = np.minimum(rng.lognormal(0, sigma, columns), 1e30)
    blocks = list((rng.standard_normal((k, 60, columns)) * sizes).astype(dtype))
    x = rng.standard_normal(columns) / sizes
    if kind == "one column":
        x[0] = 0
    return blocks, x.astype(dtype)


@pytest.mark.parametrize("kind", ["one column", "4", "6", "8"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("code", HEAVY, ids=repr)
def test_wrong_shares_are_found_beside_columns_that_the_operand_does_not_touch(
    code: Code, dtype: str, kind: str
) -> None:
    rng = np.random.default_rng(1)
    blocks, x = uneven(kind, rng, code.k, dtype)
    array = Array(code, blocks, stripes=3)
    verifier = array.verifier(x)
    for piece in range(code.pieces):
        for part in (StripeRange(piece, 0, 3), StripeRange(piece, 1, 2)):
            rows = array.share(part, x)
            assert verifier.accepts(part, rows)
            row = rng.integers(len(rows))
            if np.dtype(dtype).itemsize == 8 << (dtype[0] == "c"):
                assert not verifier.accepts(part, rows * 1.001)
            assert not verifier.accepts(part, rows * np.float32(1.1))
            rows[row] -= np.copysign(np.abs(rows).max(), rows[row].real)
            assert not verifier.accepts(part, rows)


@pytest.mark.parametrize("m", [1, 3])
def test_each_column_of_the_operand_has_its_own_limit(m: int) -> None:
    rng = np.random.default_rng(0)
    blocks = list(rng.standard_normal((4, 60, 20)) * np.where(np.arange(20) == 0, 1e12, 1.0))
    array = Array(MDS(6, 4), blocks, stripes=3)
    x = rng.standard_normal((20, m))
    x[0, -1] = 0  # only the last column does not touch what is heavy
    verifier = array.verifier(x)
    for piece in range(6):
        part = StripeRange(piece, 0, 3)
        rows = array.share(part, x)
        assert verifier.accepts(part, rows)
        rows[5, -1] *= 1.001
        assert not verifier.accepts(part, rows)


@pytest.mark.parametrize("wrong", [1e-3, 1e-6])
def test_wrong_shares_are_found_after_hundreds_of_losses(wrong: float) -> None:
    """With bounds that add up, a share that was wrong by 1/1000 passed after about 25 losses."""
    rng, code = np.random.default_rng(0), MDS(12, 8)
    errors = RoundingErrors(code)
    array = Array(code, list(rng.standard_normal((code.k, 40, 30))), 8)
    plain = dict(enumerate(array.exponents))  # only blocks are scaled
    for _ in range(200):
        lost = rng.choice(code.pieces, 4, replace=False).tolist()
        held = [i for i in range(code.pieces) if i not in lost]
        for piece in lost:
            weights = dict(zip(held, code.combination(piece, held).tolist(), strict=True))
            weights = {i: w for i, w in weights.items() if w}
            parts = (
                scaled(array.pieces[i], plain[i], w) if i in plain else w * array.pieces[i]
                for i, w in weights.items()
            )
            total = sum(parts)
            array.pieces[piece] = restored(total, plain[piece]) if piece in plain else total
            errors.made(piece, weights)
    x = rng.standard_normal(30)
    verifier = array.verification.verifier(x, errors.of_shares(code))
    for piece in range(code.pieces):
        part = StripeRange(piece, 0, 8)
        share = array.share(part, x)
        assert verifier.accepts(part, share)
        assert not verifier.accepts(part, share * (1 + wrong))
