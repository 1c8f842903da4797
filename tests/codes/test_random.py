"""Sparse random codes: the sets that theory predicts decode, and are reported exactly."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, DecodeError, RandomLinear, Repetition, _linear


@st.composite
def sparse_codes(draw: st.DrawFn) -> RandomLinear:
    k = draw(st.integers(1, 9))
    n = draw(st.integers(k, k + 5))
    code = RandomLinear(n, k, draw(st.sampled_from([0.1, 0.5, 0.8, 1.0])))
    more = draw(st.integers(0, 2))
    return code.extended(more) if more else code


@given(sparse_codes(), st.data())
@settings(max_examples=60)
def test_a_set_of_pieces_decodes_if_its_rank_is_k(code: RandomLinear, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, code.n))
    pieces = sorted(data.draw(st.permutations(range(code.n)))[:size])
    rank = np.linalg.matrix_rank(code.G[pieces]) if pieces else 0
    assert code.decodable(pieces) == (rank == code.k)
    assert code.survives(sorted(set(range(code.n)) - set(pieces))) == (rank == code.k)
    blocks = np.random.default_rng(0).standard_normal((code.k, 3))
    results = [piece for i, piece in enumerate(code.encode(list(blocks))) if i in pieces]
    if rank == code.k:
        np.testing.assert_allclose(code.decode(results, pieces), blocks, atol=1e-8)
    elif pieces:
        with pytest.raises(DecodeError, match="do not determine blocks"):
            code.decode(results, pieces)


codes = st.one_of(
    sparse_codes(),
    st.builds(lambda k, r: MDS(k + r, k), st.integers(1, 7), st.integers(0, 4)),
    st.builds(lambda n, r: Repetition(n, min(n, r)), st.integers(1, 6), st.integers(1, 3)),
    # With coefficients 0 and 1, many sets cancel.
    st.builds(
        lambda seed: Code(np.random.default_rng(seed).integers(0, 2, (9, 5))),
        st.integers(0, 1000),
    ),
)


@given(codes, st.data())
@settings(max_examples=60)
def test_span_against_the_rank_of_every_neighbouring_set(code: Code, data: st.DataObject) -> None:
    have = np.array(data.draw(st.lists(st.booleans(), min_size=code.pieces, max_size=code.pieces)))
    span = code.span(have)

    def rank(marked: np.ndarray) -> int:
        return int(np.linalg.matrix_rank(code.G[marked])) if marked.any() else 0

    assert span.rank == rank(have)
    for piece in range(code.pieces):
        other = have.copy()
        other[piece] = ~have[piece]
        if have[piece]:
            assert span.spare[piece] == (rank(other) == span.rank)
            assert not span.adds[piece]
        else:
            assert span.adds[piece] == (rank(other) > span.rank)
            assert not span.spare[piece]


@given(codes, st.data())
@settings(max_examples=60)
def test_a_piece_is_made_of_others_if_and_only_if_they_determine_it(
    code: Code, data: st.DataObject
) -> None:
    piece = data.draw(st.integers(0, code.pieces - 1))
    sources = [i for i in data.draw(st.permutations(range(code.pieces))) if i != piece]
    sources = sources[: data.draw(st.integers(0, code.pieces))]
    ranks = [
        np.linalg.matrix_rank(code.G[rows]) if rows else 0 for rows in (sources, [*sources, piece])
    ]
    if ranks[0] < ranks[1]:
        with pytest.raises(DecodeError, match=f"do not determine piece {piece}"):
            code.combination(piece, sources)
        return
    weights = code.combination(piece, sources)
    np.testing.assert_allclose(weights @ code.G[sources], code.G[piece], atol=1e-8)
    assert np.count_nonzero(weights) <= code.k


@given(st.integers(1, 8), st.integers(1, 5), st.sampled_from([0.2, 0.4, 0.5, 0.7]))
@settings(max_examples=30)
def test_tolerance_is_that_of_the_worst_loss(k: int, parity: int, density: float) -> None:
    code = RandomLinear(k + parity, k, density)
    assert code.tolerance == int(parity * density + 1e-9) or k * parity * density < parity
    # By definition: try all losses of one piece, then of two, ... until one does not decode.
    assert code.tolerance == Code.tolerance.fget(code)  # type: ignore[attr-defined]


@pytest.mark.parametrize("density", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(("n", "k"), [(10, 7), (12, 9), (20, 16), (60, 50)])
def test_masks_are_balanced(n: int, k: int, density: float) -> None:
    mask = RandomLinear(n, k, density).G[k:] != 0
    assert mask.sum() == round(density * k * (n - k))
    for axis in (0, 1):
        assert np.ptp(mask.sum(axis=axis)) <= 1


@pytest.mark.parametrize(("n", "k"), [(10, 7), (12, 9), (12, 10), (20, 16)])
def test_balanced_masks_decode_more_than_those_drawn_at_random(n: int, k: int) -> None:
    """The figures are for Gaussian coefficients on masks drawn at random."""
    drawn = {(10, 7): [0.917, 0.753, 0.465], (12, 9): [0.907, 0.749, 0.465]}
    drawn |= {(12, 10): [0.794, 0.462], (20, 16): [0.950, 0.871, 0.742, 0.513]}
    code = RandomLinear(n, k)
    for failures, published in enumerate(drawn[n, k], start=1):
        found = code.decode_probability(failures)
        assert found.probability > published
        assert found.error == 0 or found.error < 0.02
        if failures <= code.tolerance:
            assert found.probability == 1


def test_decode_probability_of_all_losses_and_of_a_sample() -> None:
    code = RandomLinear(10, 7)
    exact = code.decode_probability(3)
    survived = [code.survives(s) for s in itertools.combinations(range(10), 3)]
    assert exact == (np.mean(survived), 0)
    sampled = code.decode_probability(3, limit=100)
    assert 0 < sampled.error < 0.11
    assert abs(sampled.probability - exact.probability) < 2 * sampled.error
    # A sampled probability is never certain.
    assert RandomLinear(60, 50).decode_probability(4, limit=50).error > 0.01
    assert code.decode_probability(0) == MDS(10, 7).decode_probability(3) == (1, 0)
    assert code.decode_probability(10) == (0, 0)


def test_any_k_pieces_decode_at_density_1() -> None:
    code = RandomLinear(9, 5, density=1)
    assert code.tolerance == 4
    assert code.decode_probability(4) == (1, 0)
    assert code.worst_condition_number() < 1e3


def test_a_draw_is_repeatable() -> None:
    code = RandomLinear(12, 8)
    assert code == RandomLinear(12, 8) != RandomLinear(12, 8, seed=1)
    assert (
        repr(RandomLinear(12, 8, 0.25, seed=3)) == "RandomLinear(n=12, k=8, density=0.25, seed=3)"
    )
    assert code.decodable(range(8))
    copy = pickle.loads(pickle.dumps(code))
    assert copy == code and not copy._spans and copy.tolerance == code.tolerance


def test_code_for_a_redundancy() -> None:
    code = RandomLinear.with_redundancy(10, 2)
    assert (code.n, code.k) == (10, 6)
    assert code.tolerance == 2
    assert np.count_nonzero(code.G[6:]) == 2 * 6  # as much traffic as that of MDS(8, 6)


def test_new_pieces_leave_the_others_unchanged() -> None:
    code = RandomLinear(10, 7)
    larger = code.extended().extended(2)
    assert np.array_equal(larger.G[:10], code.G)
    assert (np.count_nonzero(larger.G[10:], axis=1) == 4).all()
    assert larger.tolerance == 3
    assert np.ptp(np.count_nonzero(larger.G[7:], axis=0)) <= 1
    assert larger == code.extended(3)


def test_a_lost_piece_is_rebuilt_from_blocks_if_they_are_available() -> None:
    code = RandomLinear(20, 16)
    for piece in range(16, 20):
        weights = code.combination(piece, [i for i in range(20) if i != piece])
        np.testing.assert_allclose(weights[:16], code.G[piece, :16])
        assert not weights[16:].any()
    for piece in range(16):
        weights = code.combination(piece, [i for i in range(20) if i != piece])
        # One parity piece, less the other blocks that it contains.
        assert np.count_nonzero(weights[15:]) == 1
        assert np.count_nonzero(weights) <= 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomLinear(3, 5), "'n' must be at least 'k', 3 is less than 5"),
        (lambda: RandomLinear(3, 0), "'k' must be a whole number of at least 1"),
        (lambda: RandomLinear(3, 2, 0), "'density' must be above 0 and at most 1, it is 0"),
        (lambda: RandomLinear(3, 2, 1.5), "'density' must be above 0 and at most 1, it is 1.5"),
        (
            lambda: RandomLinear(3, 2, seed=-1),
            "'seed' must be a whole number of at least 0, it is -1",
        ),
        (lambda: RandomLinear(3, 2.0), "'k' must be a whole number"),  # type: ignore[arg-type]
        (
            lambda: RandomLinear(3, 2).extended(0),
            "'count' must be a whole number of at least 1, it is 0",
        ),
        (lambda: RandomLinear.with_redundancy(4, 2), "from 0 to 1 with 4 workers, it is 2"),
        (lambda: RandomLinear(3, 2).decode_probability(4), "between 0 and 'n' = 3, it is 4"),
    ],
)
def test_wrong_arguments(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_sets_of_a_code_that_does_not_count_pieces_are_not_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each set costs a singular value decomposition, and the answer is known."""
    monkeypatch.setattr(_linear, "all_span", lambda *args: pytest.fail("sets are examined"))
    code = RandomLinear(8, 5)
    assert code.threshold is code.extended().threshold is False
