"""Errors of pieces that are rebuilt from rebuilt pieces, beside those of arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, Repetition
from dask_coded.rounds.accuracy import lose_half
from dask_coded.rounds.rebuilding import RoundingErrors


class Pieces:
    """Pieces of a code that are lost and rebuilt again and again."""

    def __init__(self, code: Code, rows: int, columns: int, dtype: str, seed: int) -> None:
        self.code, self.errors = code, RoundingErrors(code, dtype)
        self.rng = np.random.default_rng(seed)
        blocks = self.rng.standard_normal((code.k, rows * columns))
        self.exact = code.G @ blocks
        self.data = self.exact.astype(dtype)

    def lose(self, most: int) -> None:
        """Lose some pieces, and rebuild each from the others."""
        pieces = self.code.pieces
        lost = self.rng.choice(pieces, self.rng.integers(1, most + 1), replace=False).tolist()
        held = [i for i in range(pieces) if i not in lost]
        for piece in lost:
            found = self.code.combination(piece, held).tolist()
            weights = {i: w for i, w in zip(held, found, strict=True) if w}
            self.data[piece] = sum(w * self.data[i].astype("f8") for i, w in weights.items())
            self.errors.made(piece, weights)

    def off(self) -> np.ndarray:
        """How far each piece is off, in halves of the last place of its blocks' usual entries."""
        return np.abs(self.data - self.exact).max(axis=1) / (np.finfo(self.data.dtype).eps / 2)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(6, 4), (12, 8), (30, 20), (50, 40)]),
    st.sampled_from(["f4", "f8"]),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
)
def test_errors_are_bounds_and_not_far_above_what_arithmetic_loses(shape, dtype, losses, seed):
    pieces = Pieces(MDS(*shape), 1, 200, dtype, seed)
    for _ in range(losses):
        pieces.lose(shape[0] - shape[1])
    found = np.array([pieces.errors.of(i) for i in range(shape[0])])
    # The largest of these entries is some four times as large as a usual one.
    assert (pieces.off() <= 4 * found + _stored(pieces.code)).all()
    assert found.max() <= 5000 * (pieces.off().max() + 1)


def _stored(code: Code) -> np.ndarray:
    """What pieces differ by when they are made at first: parity is rounded, too."""
    return 5 * np.abs(code.G).sum(axis=1)


@pytest.mark.parametrize("most", [1, 4])
def test_hundreds_of_losses_cost_a_few_digits(most):
    pieces = Pieces(MDS(12, 8), 1, 10, "f8", seed=0)
    for _ in range(400):
        pieces.lose(most)
    worst = max(pieces.errors.of_shares(pieces.code))
    assert pieces.off().max() < worst < 1e7
    assert not lose_half(worst * 2.0**-53, 2.0**-52)


def test_copies_are_exact():
    pieces = Pieces(Repetition(6, 3), 1, 10, "f8", seed=0)
    for _ in range(50):
        pieces.lose(2)
    assert not pieces.off().any()
    assert pieces.errors.of_shares(pieces.code) == (0.0,) * pieces.code.pieces


def test_pieces_from_a_store_and_new_pieces_count():
    code = MDS(6, 4)
    errors = RoundingErrors(code)
    errors.made(1, {}, growth=30.0)
    assert errors.of(1) == pytest.approx(30)
    errors.made(2, {1: 1.0, 0: -1.0})
    assert errors.of(2) == pytest.approx(np.hypot(30, 3 * 33**0.5))
    errors.made(1, {})  # from the data
    assert errors.of(1) == 0
    assert errors.of(2) == pytest.approx(np.hypot(30, 3 * 33**0.5))
    # What it was once, a check may still be.
    assert errors.of_shares(code)[:2] == pytest.approx((0, 30))
    errors.extend(MDS(8, 4))
    errors.made(7, {1: 1.0, 2: 0.0})
    assert errors.of(7) > 0 and errors.of(6) == 0


def test_what_is_only_asked_for_leaves_nothing():
    errors = RoundingErrors(MDS(6, 4))
    assert errors.combined(0, {1: 0.5, 2: 0.5, 3: 0.5}) == pytest.approx(3 * 13**0.5)
    assert errors.of_shares(MDS(6, 4)) == (0.0,) * 6


def test_parity_from_a_store_is_rounded_once():
    errors = RoundingErrors(MDS(6, 4))
    errors.made(1, {}, growth=30.0)
    before = errors.of(5)
    errors.made(5, {})
    assert errors.of(5) == before > 0


def test_sums_of_less_than_double_precision_are_exact():
    errors = RoundingErrors(MDS(6, 4), "f2")
    errors.made(0, {1: 8.0, 2: -8.0})
    assert errors.of(0) == pytest.approx(3)
