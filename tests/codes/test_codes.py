"""Codes compared with NumPy: every admissible loss decodes, and conditioning is as documented."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import CODES, MDS, Code, DecodeError, Repetition
from dask_coded.rounds.layout import Layout


@st.composite
def mds_codes(draw: st.DrawFn) -> MDS:
    k = draw(st.integers(1, 12))
    return MDS(draw(st.integers(k, k + 6)), k)


@given(mds_codes(), st.data())
@settings(deadline=None)
def test_any_k_pieces_decode(code: MDS, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    blocks = rng.standard_normal((code.k, 5, 2))
    pieces = code.encode(list(blocks))
    subset = sorted(data.draw(st.permutations(range(code.n)))[: code.k])
    decoded = code.decode([pieces[i] for i in subset], subset)
    np.testing.assert_allclose(decoded, blocks, atol=1e-11 * code.condition_number(subset))


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_dtype_survives(dtype: str) -> None:
    code = MDS(6, 4)
    rng = np.random.default_rng(0)
    blocks = [rng.standard_normal(7).astype(dtype) for _ in range(4)]
    pieces = [np.asarray(p).astype(dtype) for p in code.encode(blocks)]
    decoded = code.decode([pieces[i] for i in (1, 3, 4, 5)], [1, 3, 4, 5])
    assert decoded.dtype == np.dtype(dtype)
    np.testing.assert_allclose(decoded, blocks, rtol=1e-4 if dtype in ("f4", "c8") else 1e-12)


def test_systematic_blocks_are_copied_not_computed() -> None:
    code = MDS(5, 3)
    blocks = [np.array([0.1, np.pi]), np.array([1e300, -1.0]), np.array([5e-324, 0.0])]
    decoded = code.decode(blocks, [0, 1, 2])
    assert (decoded == np.array(blocks)).all()


@pytest.mark.parametrize(("n", "k"), [(12, 10), (12, 6), (24, 20), (50, 40), (100, 90)])
def test_products_agree_with_numpy_for_every_single_and_sampled_multiple_losses(
    n: int, k: int
) -> None:
    code = MDS(n, k)
    rng = np.random.default_rng(n)
    A, x = rng.standard_normal((3 * k, 40)), rng.standard_normal(40)
    y = A @ x
    results = [p @ x for p in code.encode(np.split(A, k))]
    losses = [(i,) for i in range(n)]
    losses += [
        tuple(rng.choice(n, size=rng.integers(2, n - k + 1), replace=False)) for _ in range(200)
    ]
    for lost in losses:
        left = [i for i in range(n) if i not in lost]
        decoded = code.decode([results[i] for i in left], left).ravel()
        assert np.linalg.norm(decoded - y) <= 1e-10 * np.linalg.norm(y)


@pytest.mark.parametrize(("n", "k"), [(3, 2), (10, 7), (12, 10), (12, 4)])
def test_worst_condition_number_is_the_largest(n: int, k: int) -> None:
    code = MDS(n, k)
    numbers = [code.condition_number(s) for s in itertools.combinations(range(n), k)]
    assert code.worst_condition_number() == max(numbers)
    assert math.isfinite(max(numbers))


def test_well_conditioned() -> None:
    # The paper publishes 5.1e2, 2.5e3 and 8.3e3 for its own codes.
    assert MDS(12, 10).worst_condition_number() < 25
    assert MDS(10, 7).worst_condition_number() < 40
    assert MDS(12, 9).worst_condition_number() < 65


@pytest.mark.parametrize("parity", [1, 2, 3])
def test_little_parity_has_no_bad_subset(parity: int) -> None:
    # With the best of 24 random parities: 11, 19 and 112 with one, 46, 1600 and 41000 with three.
    for n in (8, 16, 40):
        code = MDS(n, n - parity)
        assert code.worst_condition_number() < n**parity / (1, 4, 20)[parity - 1]


@pytest.mark.parametrize(("n", "k"), [(20, 17), (20, 16), (40, 37)])
def test_losses_of_neighbours_decode_well(n: int, k: int) -> None:
    code = MDS(n, k)
    numbers = [
        code.condition_number(np.delete(range(n), range(i, i + n - k))) for i in range(k + 1)
    ]
    assert max(numbers) < 2 * n


def test_much_parity_is_orthonormal() -> None:
    parity = MDS(20, 10).G[10:]
    np.testing.assert_allclose(parity @ parity.T, np.eye(10), atol=1e-12)


@given(st.integers(1, 12), st.data())
def test_mds_codes_are_deterministic_and_rows_have_norm_one(k: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(k, 12))
    code = MDS(n, k)
    norms = np.linalg.norm(code.G, axis=1)
    if n - k <= max(3, k):
        np.testing.assert_allclose(norms, 1)
    assert code.decode_probability(n - k).probability == 1
    code._factors[(0,)] = ([], np.zeros((0, 1)))
    assert code == pickle.loads(pickle.dumps(code))
    assert not pickle.loads(pickle.dumps(code))._factors


@given(st.integers(1, 9), st.data())
def test_repetition_survives_any_r_minus_1_places(n: int, data: st.DataObject) -> None:
    r = data.draw(st.integers(1, n))
    code = Repetition(n, r)
    blocks = [np.array([j, -j], dtype=np.int8) for j in range(n)]
    pieces = code.encode(blocks)
    lost = data.draw(st.permutations(range(n)))[: code.tolerance]
    left = [i for i in range(code.pieces) if code.place[i] not in lost]
    decoded = code.decode([pieces[i] for i in left], left)
    assert decoded.dtype == np.int8
    assert (decoded == np.array(blocks)).all()


@given(st.integers(1, 4), st.data())
def test_tolerance_counts_places_that_hold_several_pieces(k: int, data: st.DataObject) -> None:
    pieces = data.draw(st.integers(k, 7))
    place = data.draw(st.lists(st.integers(0, 3), min_size=pieces, max_size=pieces))
    place = np.unique(place, return_inverse=True)[1]
    code = Code(MDS(pieces, k).G, place=place)
    lost = itertools.combinations(range(code.n), code.tolerance + 1)
    assert not all(map(code.survives, lost))
    assert all(map(code.survives, itertools.combinations(range(code.n), code.tolerance)))
    assert Layout.of(code, place, [[1.0]]).sufficient == code.n - code.tolerance


def test_pieces_that_are_blocks_are_found_once_and_not_pickled() -> None:
    code = Code([[1, 1], [0, 1], [0, 1], [1, 0]])
    pickled = pickle.dumps(code)
    assert code.systematic_pieces == (3, 1)
    assert code.systematic_pieces is code.systematic_pieces
    assert pickle.dumps(code) == pickled
    with pytest.raises(ValueError, match="is not systematic"):
        _ = Code([[1, 1], [0, 1]]).systematic_pieces


def test_repetition_keeps_sparse_blocks() -> None:
    blocks = [scipy.sparse.eye_array(3, format="csr") * j for j in range(4)]
    pieces = Repetition(4, 2).encode(blocks)
    assert all(p is blocks[b] for p, b in zip(pieces, Repetition(4, 2).group, strict=True))


def test_custom_code() -> None:
    @CODES.register("single-parity")
    class Single(Code):
        def __init__(self, k: int) -> None:
            super().__init__(np.vstack([np.eye(k), np.ones(k)]))

    try:
        code = CODES["single-parity"](3)  # type: ignore[arg-type, call-arg]
        assert (code.n, code.k, code.tolerance) == (4, 3, 1)
        assert code.decode([np.ones(1), np.ones(1), np.array([5.0])], [0, 2, 3])[1] == 3
    finally:
        del CODES["single-parity"]
    with pytest.raises(TypeError, match="pass an instance"):
        Single.with_redundancy(4, 1)


@pytest.mark.parametrize("need", [[1, 2], [2, 1], [2, 4], [0, 2], [2, -1]])
def test_a_custom_code_of_groups_of_which_some_sets_do_not_decode_is_refused(need: list) -> None:
    parity = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    groups = {"group": [0, 0, 1, 1, 0, 1]}
    assert Code(np.vstack([np.eye(4), parity]), **groups, need=[2, 2]).tolerance == 1
    with pytest.raises(ValueError, match=r"pieces of group \d must suffice to make its other"):
        Code(np.vstack([np.eye(4), parity]), **groups, need=need)


def test_a_custom_code_of_groups_that_lack_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="must determine all 2 blocks, 'G' has rank 1: add pieces"):
        Code([[1, 0], [2, 0]], group=[0, 1], need=[1, 1])


@given(st.integers(1, 4), st.integers(-1, 6))
def test_one_group_needs_as_many_pieces_as_there_are_blocks(k: int, need: int) -> None:
    """With fewer a code would promise to survive losses after which nothing decodes."""
    G = np.vstack([np.eye(k), np.ones(k)])
    if need == k:
        assert Code(G, need=[need]).tolerance == 1
    else:
        with pytest.raises(ValueError, match=rf"must be \[{k}\].*, it is \[{need}\]: leave it out"):
            Code(G, need=[need])


@given(st.integers(1, 3), st.data())
@settings(deadline=None)
def test_custom_codes_of_which_some_sets_do_not_decode(k: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(-1, 2), min_size=k, max_size=k)
    parity = data.draw(st.lists(row, max_size=4))
    code = Code([*np.eye(k), *parity])
    sets = list(itertools.combinations(range(code.n), k))
    assert code.threshold == all(code.decodable(pieces) for pieces in sets)
    lost = itertools.combinations(range(code.n), code.tolerance + 1)
    assert not all(map(code.survives, lost))
    assert all(map(code.survives, itertools.combinations(range(code.n), code.tolerance)))
    # A round that has one of these sets needs more pieces if and only if it does not decode.
    layout = Layout.of(code, range(code.n), [[1.0]])
    for pieces in sets:
        have = np.isin(np.arange(code.n), pieces)[:, np.newaxis]
        assert (layout.lacking(have).sum() == 0) == code.decodable(pieces)


def test_a_lost_piece_is_a_combination_of_any_k_others() -> None:
    code = MDS(7, 4)
    rng = np.random.default_rng(0)
    pieces = code.encode(list(rng.standard_normal((4, 6))))
    for piece in range(7):
        sources = [i for i in range(7) if i != piece][1:5]
        weights = code.combination(piece, sources)
        made = sum(w * pieces[i] for w, i in zip(weights, sources, strict=True))
        np.testing.assert_allclose(made, pieces[piece], atol=1e-12)
    assert Repetition(4, 2).combination(1, [0, 2, 5]).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MDS(3, 5), "'n' must be at least 'k', 3 is less than 5"),
        (lambda: MDS(3, 0), "'k' must be a whole number of at least 1"),
        (lambda: MDS(3.0, 2), "'n' must be a whole number"),  # type: ignore[arg-type]
        (lambda: Repetition(3, 4), "'r' must be between 1 and 'n' = 3, it is 4"),
        (lambda: Code([[1, 0]]), "at least as many rows as columns, 1 is less than 2"),
        (lambda: Code([[np.nan]]), "must be finite"),
        (lambda: Code([1, 2]), "must be a matrix"),
        (lambda: Code([[1]], place=[0, 1]), "one non-negative integer per piece"),
        (lambda: Code([[1]], need=[1, 1]), "one entry per group"),
        (lambda: MDS(3, 2).encode([np.ones(2)]), "encodes 2 blocks, 1 were given"),
        (lambda: MDS(3, 2).encode([np.ones(2), np.ones(3)]), "must have the same shape"),
        (lambda: MDS(3, 2).decode([np.ones(2)], [0, 1]), "one result, 1 were given for 2"),
    ],
)
def test_wrong_arguments(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_too_few_pieces() -> None:
    with pytest.raises(DecodeError, match=r"do not determine blocks \[0\]"):
        MDS(4, 3).decode([np.ones(1), np.ones(1)], [1, 2])
    with pytest.raises(DecodeError, match="do not determine piece 0"):
        MDS(4, 3).combination(0, [1, 2])


@pytest.mark.parametrize("order", [[0, 2], [2, 0]])
def test_solved_integers_are_not_truncated(order: list[int]) -> None:
    code = MDS(3, 2)
    blocks = [np.array([[7, 20]]), np.array([[3, -19]])]
    pieces = code.encode(blocks)
    found = code.decode([pieces[i] for i in order], order)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, blocks, rtol=1e-12)
    assert code.decode(pieces[:2], [0, 1]).dtype == blocks[0].dtype  # nothing to solve for


def test_results_of_several_dtypes_are_decoded_in_their_common_one() -> None:
    found = MDS(3, 2).decode([np.ones((1, 2)), np.array([[1j, 2j]])], [0, 1])
    np.testing.assert_array_equal(found, [[[1, 1]], [[1j, 2j]]])


def test_pieces_of_codes_with_large_entries_can_be_made_again() -> None:
    parity = 1e10 * np.random.default_rng(0).standard_normal((4, 3))
    code = Code(np.vstack([np.eye(3), parity]))
    for piece in range(3, code.n):
        others = [i for i in range(3, code.n) if i != piece]
        weights = code.combination(piece, others)
        np.testing.assert_allclose(weights @ code.G[others], code.G[piece], rtol=1e-9)


def test_the_tolerance_of_a_large_code_is_found_in_bounded_time() -> None:
    """All losses were tried, of 24 pieces for minutes."""
    rng = np.random.default_rng(0)
    parity = rng.standard_normal((12, 12)) * (rng.random((12, 12)) < 0.8)
    code = Code(np.vstack([np.eye(12), parity]))
    assert not code.threshold
    assert code.tolerance == 3  # more than 3,000 losses of 4 pieces would have to be tried
    assert pickle.loads(pickle.dumps(code)).tolerance == 3


def test_a_piece_that_its_sources_do_not_determine_is_not_made_from_them() -> None:
    code = Code([[1, 0], [0, 1], [1e-10, 1e-10], [1e-10, -1e-10]])
    for sources in ([1], []):
        with pytest.raises(DecodeError):
            code.combination(2, sources)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_what_a_set_determines_does_not_depend_on_the_scale_of_a_piece(scale: float) -> None:
    code = Code([[1, 0], [0, 1], [scale, scale], [scale, 2 * scale], [1, 1]])
    assert not code.threshold
    assert code.decodable([2, 3]) and code.decodable([3, 4]) and not code.decodable([2, 4])


def test_codes_that_need_other_numbers_of_pieces_differ() -> None:
    G, group = np.vstack([np.eye(2), np.eye(2)]), [0, 1, 0, 1]
    assert Code(G, group=group, need=[1, 1]) == Code(G, group=group, need=[1, 1])
    assert Code(G, group=group, need=[1, 1]) != Code(G, group=group, need=[2, 2])


def test_wrong_pieces_and_losses_are_named() -> None:
    with pytest.raises(DecodeError, match="do not determine blocks"):
        MDS(3, 2).decode([], [])
    with pytest.raises(ValueError, match=r"numbered from 0 to 2, not \[-1, 7\]"):
        MDS(3, 2).decode([np.ones(1)] * 3, [0, -1, 7])
    with pytest.raises(ValueError, match="'limit' must be a whole number of at least 1"):
        MDS(3, 2).decode_probability(1, limit=0)
    with pytest.raises(ValueError, match="'failures' must be a whole number"):
        MDS(3, 2).decode_probability(1.5)
    with pytest.raises(TypeError, match="'G' must be real"):
        Code([[1, 0], [0, 1j]])
