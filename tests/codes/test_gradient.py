"""Gradient codes: the sum is exact for every admissible set of stragglers, at the least load."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.codes import (
    Clustered,
    CyclicMDS,
    DecodeError,
    FractionalRepetition,
    GradientCode,
)


def straggler_sets(n: int, s: int, most: int = 300) -> list[tuple[int, ...]]:
    """Return all sets if there are few, else all runs of neighbours and a random sample.

    Runs of neighbours are the worst sets for cyclic codes.
    """
    if math.comb(n, s) <= most:
        return list(itertools.combinations(range(n), s))
    rng = np.random.default_rng(0)
    runs = [tuple((first + np.arange(s)) % n) for first in range(n)]
    return runs + [tuple(rng.permutation(n)[:s]) for _ in range(most - n)]


def check(code: GradientCode, rtol: float = 1e-10) -> None:
    gradients = np.random.default_rng(1).standard_normal((code.blocks, 5))
    delivered = code.B @ gradients
    for late in straggler_sets(code.n, code.stragglers):
        have = [worker for worker in range(code.n) if worker not in late]
        assert code.decodable(have)
        total = code.weights(have) @ delivered[have]
        scale = np.abs(gradients).sum(axis=0).max()
        np.testing.assert_allclose(total, gradients.sum(axis=0), rtol=0, atol=rtol * scale)


@given(st.integers(1, 9), st.data())
def test_fractional_repetition_is_exact(n: int, data: st.DataObject) -> None:
    s = data.draw(st.integers(0, n - 1))
    code = FractionalRepetition(n, s)
    assert code.stragglers >= s and code.plain
    check(code, rtol=1e-14)
    assert code.load == 1 / (n // (s + 1))


@given(st.integers(1, 12), st.data())
def test_only_the_first_worker_of_every_group_has_a_weight(n: int, data: st.DataObject) -> None:
    code = FractionalRepetition(n, data.draw(st.integers(0, n - 1)))
    order = data.draw(st.permutations(range(n)))
    have: list[int] = []
    for worker in order:
        if code.decodable(have):
            break
        adds = code.adds(have, worker)
        have.append(worker)
        if adds and code.decodable(have):
            # Exactly the workers that contributed something have a weight.
            weights = code.weights(have)
            first = [code.adds(have[:i], w) for i, w in enumerate(have)]
            assert weights.tolist() == [float(f) for f in first]
    assert code.decodable(have)


@pytest.mark.parametrize(
    "code",
    [
        FractionalRepetition(7, 1),
        FractionalRepetition.of([1, 0, 1, 2, 2, 2]),
        CyclicMDS(6, 2),
        GradientCode(CyclicMDS(5, 2).B, 2),
        Clustered([FractionalRepetition(4, 1), CyclicMDS(3, 1)]),
    ],
    ids=repr,
)
@given(data=st.data())
def test_a_record_of_deliveries_says_what_the_code_says(code, data: st.DataObject) -> None:
    deliveries, have = code.deliveries(), []
    for worker in data.draw(st.lists(st.integers(0, code.n - 1), max_size=2 * code.n)):
        counts = code.adds(have, worker)
        assert deliveries.add(worker) == counts
        have += [worker] * counts
        assert deliveries.have == have
        assert deliveries.complete == code.decodable(have)


@pytest.mark.parametrize("n", range(1, 25))
def test_a_cyclic_code_is_exact_at_the_least_load(n: int) -> None:
    for s in range(n) if n <= 8 else (1, n // 4, n // 3, n // 2, n - 2):
        code = CyclicMDS(n, s)
        assert code.load == (s + 1) / n
        assert code.amplification < 4e5
        check(code)


@pytest.mark.parametrize(
    ("n", "s", "error"), [(6, 1, 3e-8), (12, 2, 6e-8), (20, 9, 5e-5), (24, 7, 9e-5), (24, 12, 4e-4)]
)
def test_single_precision_keeps_some_digits(n: int, s: int, error: float) -> None:
    code = CyclicMDS(n, s)
    gradients = np.random.default_rng(0).standard_normal((n, 1000))
    delivered = (code.B @ gradients).astype(np.float32).astype(np.float64)
    total = gradients.sum(axis=0)
    for first in range(n):
        have = [(first + i) % n for i in range(n - s)]
        wrong = code.weights(have) @ delivered[have] - total
        assert np.linalg.norm(wrong) < 1.5 * error * np.linalg.norm(total)


def test_cyclic_code_is_the_published_circulant_for_odd_n_minus_s() -> None:
    n, s = 12, 3
    roots = np.exp(2j * np.pi / n * np.arange((n - s + 1) // 2, (n + s) // 2 + 1))
    row = np.poly(roots).real
    row /= np.abs(row).max()
    for i, mine in enumerate(CyclicMDS(n, s).B):
        np.testing.assert_allclose(np.roll(mine, -i)[: s + 1], row, atol=1e-12)


def test_a_code_that_would_lose_too_many_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="more than six digits in decoding: use Fractional"):
        CyclicMDS(84, 21)


def test_clustered_code_needs_every_cluster() -> None:
    code = Clustered([CyclicMDS(4, 1), CyclicMDS(3, 1)])
    check(code)
    for late in itertools.product(range(4), range(4, 7)):
        have = [worker for worker in range(7) if worker not in late]
        np.testing.assert_allclose(code.weights(have) @ code.B[have], 1, atol=1e-12)
    assert not code.decodable([0, 1, 2, 3, 4])
    assert not code.adds([0, 1, 2], 3) and code.adds([0, 1, 2], 4)
    with pytest.raises(DecodeError, match="any 6 of its workers do"):
        GradientCode(code.B, 1).weights([0, 1, 2, 3, 4])


@given(st.integers(2, 8), st.data())
def test_any_matrix_is_a_code(n: int, data: st.DataObject) -> None:
    s = data.draw(st.integers(0, n - 1))
    code = GradientCode(CyclicMDS(n, s).B, s)
    check(code)
    if s < n - 1:
        assert not code.decodable(range(n - s - 1))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"less than the number of workers \(3\), it is 3"):
        FractionalRepetition(3, 3)
    with pytest.raises(ValueError, match="at least 0"):
        CyclicMDS(3, -1)
    with pytest.raises(ValueError, match="group 1 has none"):
        FractionalRepetition.of([0, 2, 2])
    with pytest.raises(ValueError, match="must be a matrix"):
        GradientCode([1, 2], 0)
    with pytest.raises(DecodeError, match=r"The workers \[0, 1\] of FractionalRepetition"):
        FractionalRepetition(4, 1).weights([1, 0])
