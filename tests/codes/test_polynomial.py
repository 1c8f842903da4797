"""Polynomial codes compared with NumPy: any ``a * b`` products decode accurately."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.codes import CODES, DecodeError, Polynomial


@st.composite
def codes(draw: st.DrawFn) -> Polynomial:
    a, b = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Polynomial(a * b + draw(st.integers(0, 4)), a, b)


def worst(generator: np.ndarray, k: int) -> float:
    """Return the worst condition number over all ``k``-subsets of rows."""
    subsets = np.array(list(itertools.combinations(range(len(generator)), k)))
    values = np.concatenate(
        [
            np.linalg.svd(generator[part], compute_uv=False)
            for part in np.array_split(subsets, -(-len(subsets) // 1000))
        ]
    )
    return float((values[:, 0] / values[:, -1]).max())


def roots_of_unity(n: int, k: int) -> np.ndarray:
    return np.exp(2j * np.pi / n * np.outer(np.arange(n), np.arange(k)))


@pytest.mark.parametrize("n", [4, 12, 24, 40, 49, 60, 64, 85, 100, 109])
def test_neighbours_that_may_be_lost_by_default_cost_at_most_four_digits(n: int) -> None:
    code, other = (
        build(n, n // 4, (1000, 1000))
        for build in (Polynomial.accurate, Polynomial.with_redundancy)
    )
    assert code.k < code.n <= n
    assert code.condition_number(range(code.k)) <= 1e4
    assert 1 / code.a + 1 / code.b <= 1.3 * (1 / other.a + 1 / other.b)


@given(codes(), st.data())
def test_any_k_products_decode(code: Polynomial, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    A, B = rng.standard_normal((5, 2 * code.a)), rng.standard_normal((5, 3 * code.b))
    d = rng.standard_normal((5, 1)) if data.draw(st.booleans()) else np.ones((5, 1))
    left = code.left.encode(np.split(A, code.a, axis=1))
    right = code.right.encode(np.split(B, code.b, axis=1))
    subset = sorted(data.draw(st.permutations(range(code.n)))[: code.k])
    decoded = code.decode([left[i].T @ (d * right[i]) for i in subset], subset)
    blocks = decoded.reshape(code.a, code.b, 2, 3)
    np.testing.assert_allclose(
        np.block([list(row) for row in blocks]),
        A.T @ (d * B),
        atol=1e-12 * code.condition_number(subset) * code.k,
    )


@given(codes(), st.data())
def test_factors_are_rebuilt_from_any_k_pieces(code: Polynomial, data: st.DataObject) -> None:
    piece, *others = data.draw(st.permutations(range(code.n)))
    sources = others[: code.k]
    for factor in (code.left, code.right) if code.tolerance else ():
        weights = factor.combination(piece, sources)
        np.testing.assert_allclose(weights @ factor.G[sources], factor.G[piece], atol=1e-9)


@given(codes())
def test_condition_number_is_that_of_roots_of_unity(code: Polynomial) -> None:
    ours, theirs = worst(code.G, code.k), worst(roots_of_unity(code.n, code.k), code.k)
    assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "a", "b", "published"), [(31, 4, 7, 404.3), (18, 5, 3, 102.7), (12, 3, 3, 36.55)]
)
def test_published_condition_numbers_of_the_rotation_embedding(
    n: int, a: int, b: int, published: float
) -> None:
    assert worst(Polynomial(n, a, b).G, a * b) == pytest.approx(published, rel=1e-3)


def test_circle_points_are_the_best_conditioned() -> None:
    numbers = {
        points: Polynomial(12, 3, 3, points).worst_condition_number()
        for points in ("circle", "chebyshev", "integers")
    }
    assert 5 * numbers["circle"] < numbers["chebyshev"] < 1e-3 * numbers["integers"]


def test_without_redundancy_decoding_is_orthogonal() -> None:
    assert Polynomial(9, 3, 3).worst_condition_number() == pytest.approx(1)


def test_equal_combinations_do_not_determine_a_gram_matrix() -> None:
    # This is why a Gram matrix, too, needs two different combinations.
    left = Polynomial(9, 2, 2).left.G
    assert np.linalg.matrix_rank((left[:, :, None] * left[:, None, :]).reshape(9, 4)) == 3


def test_too_few_products() -> None:
    code = Polynomial(6, 2, 2)
    with pytest.raises(DecodeError, match="do not determine"):
        code.decode([np.ones(2)] * 3, [0, 1, 2])


@given(st.integers(1, 20), st.data())
def test_with_redundancy_stores_the_least(n: int, data: st.DataObject) -> None:
    redundancy = data.draw(st.integers(0, n - 1))
    shape = data.draw(st.tuples(st.integers(1, 1000), st.integers(1, 1000)))
    code = Polynomial.with_redundancy(n, redundancy, shape)
    assert code.n == n
    assert code.tolerance >= redundancy

    def stored(a: int, b: int) -> float:
        return shape[0] / a + shape[1] / b

    assert stored(code.a, code.b) == min(
        stored(a, b) for a in range(1, n + 1) for b in range(1, n + 1) if a * b <= n - redundancy
    )


def test_equal_codes_and_pickling() -> None:
    code = Polynomial(6, 2, 2)
    assert pickle.loads(pickle.dumps(code)) == code == Polynomial(6, 2, 2)
    assert code != Polynomial(6, 2, 2, "chebyshev")
    assert repr(code) == "Polynomial(n=6, a=2, b=2)"
    assert repr(Polynomial(6, 2, 2, "integers")) == "Polynomial(n=6, a=2, b=2, points='integers')"


def test_not_among_the_codes_for_one_matrix() -> None:
    assert Polynomial not in CODES.values()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((8, 3, 3), ValueError, r"'n' must be at least 'a' times 'b', 8 is less than 9\."),
        ((8, 0, 3), ValueError, r"'a' must be at least 1, it is 0\."),
        ((8, 2, -1), ValueError, r"'b' must be at least 1, it is -1\."),
        ((8, 2.0, 2), ValueError, r"'a' must be a whole number, it is 2\.0\."),
        ((8, 2, 2, "square"), ValueError, r"'points' must be one of .*, it is 'square'\."),
    ],
)
def test_wrong_arguments(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Polynomial(*arguments)


@pytest.mark.parametrize("redundancy", [-1, 4])
def test_impossible_redundancy(redundancy: int) -> None:
    with pytest.raises(ValueError, match="'redundancy' must be a whole number from 0 to 3"):
        Polynomial.with_redundancy(4, redundancy)
