"""Laplacians and graph filters: over plain operators against LAPACK and SciPy, and on a cluster."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, expm_multiply

import dask_coded as coded
from benchmarks.accuracy_graphs import FILTERED, signal_graph
from dask_coded.codes import MDS
from dask_coded.graph import Graph, Heat, Hops, PolynomialKernel, as_graph, filter, laplacian
from dask_coded.graph.filters import chebyshev_rounds, polynomial_rounds
from dask_coded.graph.kernels import chebyshev_coefficients
from dask_coded.graph.laplacian import check_laplacian, greatest_eigenvalue_rounds

KERNELS = {
    "heat": Heat(0.7),
    "low pass": lambda x: 1 / (1 + 5 * x),
    "wavelet": lambda x: x * np.exp(-x),
    "constant": np.ones_like,
    "whole numbers": lambda x: np.ones(x.shape, dtype=int),
}


KEYWORDS = {chebyshev_rounds: {"lmax": 2.0}, polynomial_rounds: {}}


@st.composite
def undirected(draw):
    n = draw(st.integers(1, 12))
    node = st.integers(0, n - 1)
    graph = nx.empty_graph(n)
    weight = st.sampled_from([0.25, 1.0, 3.0])
    graph.add_weighted_edges_from(draw(st.lists(st.tuples(node, node, weight), max_size=40)))
    return graph


class Argument(LinearOperator):
    """The identity, which returns its argument."""

    def _matvec(self, x):
        return x


@pytest.mark.parametrize("rounds", [chebyshev_rounds, polynomial_rounds])
def test_operators_of_any_kind_keep_the_signal(rounds):
    magnetic = np.array([[1.0, -1j, 0], [1j, 2, -1], [0, -1, 1]])
    signal = np.array([1.0, 2.0, 4.0])
    for operator in (magnetic, magnetic.real.astype(int), Argument(float, (3, 3))):
        before = signal.copy()
        found = rounds(operator, signal, [1.0, 0.5, 0.25], **KEYWORDS[rounds])
        dense = operator @ np.eye(3) if isinstance(operator, np.ndarray) else np.eye(3)
        shifted = dense - np.eye(3) if rounds is chebyshev_rounds else dense
        square = shifted @ shifted
        last = 2 * square - np.eye(3) if rounds is chebyshev_rounds else square
        expected = (np.eye(3) + 0.5 * shifted + 0.25 * last) @ signal
        np.testing.assert_allclose(found, expected)
        np.testing.assert_array_equal(signal, before)


def exactly(matrix, kernel, signal):
    """``U g(Λ) U^T x``."""
    values, vectors = np.linalg.eigh(matrix.toarray())
    return vectors @ (kernel(np.maximum(values, 0)) * (vectors.T @ signal).T).T


# -- Laplacians --------------------------------------------------------------------------------


@given(undirected())
def test_laplacians_are_those_of_networkx(graph):
    found = as_graph(graph)
    np.testing.assert_allclose(laplacian(found).toarray(), nx.laplacian_matrix(graph).toarray())
    np.testing.assert_array_equal(laplacian(graph).toarray(), laplacian(found).toarray())
    np.testing.assert_allclose(
        laplacian(found, normalized=True).toarray(),
        nx.normalized_laplacian_matrix(graph).toarray(),
        atol=1e-15,
    )


@given(undirected(), st.booleans())
def test_the_bound_is_above_the_greatest_eigenvalue_and_near_it(graph, normalized):
    matrix = laplacian(as_graph(graph), normalized=normalized)
    greatest = np.linalg.eigvalsh(matrix.toarray()).max()
    bound = greatest_eigenvalue_rounds(matrix)
    assert greatest <= bound + 1e-12
    assert bound <= 1.03 * greatest + 1e-12


def test_the_bound_of_a_hermitian_matrix():
    magnetic = np.array([[1, -1j, 0], [1j, 2, -1], [0, -1, 1]])
    greatest = np.linalg.eigvalsh(magnetic).max()
    assert greatest <= greatest_eigenvalue_rounds(magnetic) <= 1.03 * greatest


@pytest.mark.parametrize("weight", [1e-286, 1e-3, 1e150])
def test_weights_may_be_of_any_size(weight):
    path = laplacian(as_graph(nx.path_graph(5)))
    assert greatest_eigenvalue_rounds(weight * path) == pytest.approx(
        weight * greatest_eigenvalue_rounds(path)
    )


# -- the evaluation ----------------------------------------------------------------------------


@given(undirected(), st.booleans(), st.sampled_from(sorted(KERNELS)), st.sampled_from([(), (3,)]))
def test_a_filter_is_a_function_of_the_laplacian(graph, normalized, name, more):
    matrix = laplacian(as_graph(graph), normalized=normalized)
    signal = np.random.default_rng(0).standard_normal((len(graph), *more))
    lmax = greatest_eigenvalue_rounds(matrix) or 1.0
    coefficients = chebyshev_coefficients(KERNELS[name], lmax)
    found = chebyshev_rounds(matrix, signal, coefficients, lmax)
    np.testing.assert_allclose(found, exactly(matrix, KERNELS[name], signal), atol=1e-9)


@given(undirected(), st.lists(st.floats(-2, 2, allow_subnormal=False), min_size=1, max_size=5))
def test_polynomials_are_exact(graph, coefficients):
    matrix, signal = laplacian(as_graph(graph)), np.arange(len(graph)) - 1.5
    powers = [signal]
    for _ in coefficients[1:]:
        powers.append(matrix @ powers[-1])
    expected = sum(c * power for c, power in zip(coefficients, powers))
    scale = sum(np.abs(c * power).max() for c, power in zip(coefficients, powers))
    found = polynomial_rounds(matrix, signal, coefficients)
    np.testing.assert_allclose(found, expected, atol=1e-12 * scale)


@given(st.floats(0, 300), st.floats(0.1, 20), st.sampled_from([1e-4, 1e-8, 1e-11]))
def test_the_order_keeps_the_tolerance(t, lmax, tol):
    coefficients = chebyshev_coefficients(Heat(t), lmax, tol=tol)
    where = np.linspace(0, lmax, 500)
    found = np.polynomial.chebyshev.chebval(2 * where / lmax - 1, coefficients)
    assert np.abs(found - Heat(t)(where)).max() <= 1.01 * tol + 1e-13


def test_the_order_may_be_given():
    assert len(chebyshev_coefficients(np.sqrt, 2.0, order=7)) == 8
    assert len(chebyshev_coefficients(np.sqrt, 2.0, order=0)) == 1


def test_n_hops_reach_nodes_at_distance_n_and_no_further():
    path = laplacian(as_graph(nx.path_graph(9)))
    found = polynomial_rounds(path, np.eye(9)[0], Hops(3).coefficients)
    assert found[3] != 0
    assert (found[4:] == 0).all()


def test_kernels_are_functions_of_eigenvalues():
    where = np.array([0.0, 1.0, 2.0])
    np.testing.assert_array_equal(PolynomialKernel([1, 2])(where), [1, 3, 5])
    np.testing.assert_array_equal(Hops(2)(where), [1, 3, 7])
    np.testing.assert_array_equal(Heat(3.0)(where), np.exp(-3 * where))


# -- the loop ----------------------------------------------------------------------------------


def test_resumed_rounds_continue_from_the_saved_state(heard):
    matrix = laplacian(as_graph(nx.karate_club_graph()))
    signal = np.random.default_rng(0).standard_normal((34, 2))
    c = chebyshev_coefficients(Heat(1.0), 60.0)
    for rounds in (
        lambda loop: chebyshev_rounds(matrix, signal, c, 60.0, loop=loop),
        lambda loop: polynomial_rounds(matrix, signal, np.ones(9), loop=loop),
        lambda loop: greatest_eigenvalue_rounds(matrix, tol=1e-9, loop=loop),
    ):
        whole = heard()
        expected = rounds(whole)
        rest = heard(whole.states[3])
        np.testing.assert_array_equal(rounds(rest), expected)
        assert [p.round for p, _ in rest.reports] == [p.round for p, _ in whole.reports[4:]]
        assert [last for _, last in whole.reports] == [False] * (len(whole.reports) - 1) + [True]


# -- real graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERED)
@pytest.mark.parametrize("normalized", [False, True])
def test_heat_on_real_graphs_is_expm_multiply(name, normalized, data_folder):
    adjacency = signal_graph(name, data_folder)
    matrix = laplacian(as_graph(adjacency), normalized=normalized)
    signal = np.random.default_rng(0).standard_normal((matrix.shape[0], 2))
    lmax = greatest_eigenvalue_rounds(matrix)
    t = 10 / lmax
    coefficients = chebyshev_coefficients(Heat(t), lmax, tol=1e-12)
    found = chebyshev_rounds(matrix, signal, coefficients, lmax)
    np.testing.assert_allclose(found, expm_multiply(-t * sp.csc_array(matrix), signal), atol=1e-10)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from SciPy, about PyGSP's code
@pytest.mark.parametrize("normalized", [False, True])
def test_heat_on_the_logo_is_pygsp(normalized):
    pygsp = pytest.importorskip("pygsp")
    theirs = pygsp.graphs.Logo(lap_type="normalized" if normalized else "combinatorial")
    theirs.compute_fourier_basis()
    signal = np.random.default_rng(0).standard_normal(theirs.N)
    expected = pygsp.filters.Heat(theirs, scale=10).filter(signal, method="exact")
    matrix = laplacian(as_graph(sp.csr_array(theirs.W, dtype=float)), normalized=normalized)
    lmax = greatest_eigenvalue_rounds(matrix)
    coefficients = chebyshev_coefficients(Heat(10 / theirs.lmax), lmax)
    found = chebyshev_rounds(matrix, signal, coefficients, lmax)
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_an_expansion_that_diverges_is_refused():
    matrix = laplacian(as_graph(nx.star_graph(50)))  # whose greatest eigenvalue is 51
    signal = np.random.default_rng(0).standard_normal(51)
    coefficients = chebyshev_coefficients(Heat(2.0), 8.5)
    with pytest.raises(ValueError, match=r"'lmax' must be at least .* with 8.5 the expansion"):
        chebyshev_rounds(matrix, signal, coefficients, 8.5)


@given(undirected(), st.booleans())
def test_a_heavy_signal_does_not_hide_that_another_diverges(graph, heavy_first):
    graph.add_edge(0, 1, weight=5.0)  # an eigenvalue is at least 10
    matrix = laplacian(as_graph(graph))
    light = np.linalg.eigh(matrix.toarray())[1][:, -1]
    signals = np.stack([np.full(len(graph), 1e12), light], axis=1)  # the first has eigenvalue 0
    coefficients = chebyshev_coefficients(Heat(1.0), 2.0, order=6)
    with pytest.raises(ValueError, match=r"'lmax' must be at least .* with 2 the expansion"):
        chebyshev_rounds(matrix, signals[:, :: 1 - 2 * heavy_first], coefficients, 2.0)


def test_a_product_that_is_not_finite_is_no_result():
    signal = np.array([1.0, 2.0])
    with pytest.raises(ValueError, match="the expansion diverges"):
        chebyshev_rounds(np.diag([1.0, np.nan]), signal, [1.0, 0.5, 0.25], 2.0)


@pytest.mark.parametrize("size", [1.0, 1e300])
def test_a_polynomial_that_overflows_is_refused(here, size):
    here(filter)
    star = nx.star_graph(50)  # whose greatest eigenvalue is 51
    signal = size * np.eye(51)[0]
    with pytest.raises(ValueError, match=r"polynomial overflows in product \d+ of 400: pass one"):
        filter(star, signal, Hops(400))
    found = filter(star, np.eye(51)[0], Hops(400), normalized=True)
    assert np.isfinite(found).all()


# -- the public function -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "arguments", "complaint"),
    [
        (nx.DiGraph([(0, 1)]), {}, "expect an undirected graph"),
        # However heavy other edges are.
        (
            sp.block_diag([[[0, 1e13], [1e13, 0]], [[0, 1.0], [0, 0]]], format="csr"),
            {"signal": [1, 2, 3, 4]},
            "expect an undirected graph",
        ),
        (nx.path_graph(3), {"signal": [1.0, 2.0]}, r"'signal' .* shape \(3,\) or \(3, signals\)"),
        (nx.path_graph(3), {"signal": [1.0, np.nan, 0.0]}, "'signal' must be finite"),
        (nx.path_graph(3), {"signal": {7: 1.0}}, "'signal' has the node 7"),
        (nx.path_graph(3), {"tol": 0}, "'tol' must be a positive number, it is 0"),
        (nx.path_graph(3), {"order": -1}, "'order' must be a whole number of at least 0, it is -1"),
        (nx.path_graph(3), {"lmax": 0.0}, "'lmax' must be a positive number, it is 0.0"),
        (sp.csr_array([[0.0, -1.0], [-1.0, 0.0]]), {"signal": [1, 2]}, "taken for a Laplacian"),
        (sp.csr_array([[1, -1j], [1j, -1]]), {"signal": [1, 2]}, "must be real, its dtype is comp"),
        (sp.csr_array([[1.0, -1.0], [0.0, 1.0]]), {"signal": [1, 2]}, "must be symmetric"),
        (
            sp.csr_array([[1.0, -1.0], [-1.0, 1.0]]),
            {"signal": [1, 2], "normalized": True},
            "leave out 'normalized'",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_computed(here, graph, arguments, complaint):
    functions = here(filter)
    with pytest.raises(ValueError, match=complaint):
        filter(graph, **{"signal": np.ones(3), "kernel": Heat(1.0)} | arguments)
    assert not functions


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (lambda x: 1 / x[:3], "one real number for each eigenvalue"),
        (lambda x: 1j * x, "one real number for each eigenvalue"),
        (lambda x: np.where(x < 1, np.nan, x), "must be finite from 0 to .*: it gave nan at"),
        (lambda x: (x < 1.234).astype(float), "not smooth enough for tol=1e-10"),
        # Between the ends of the interval these are all 0, 1 and 0.
        (lambda x: (x < 1e-5).astype(float), "not smooth enough for tol=1e-10"),
        (lambda x: (x > 1e-5).astype(float), "not smooth enough for tol=1e-10"),
        (Heat(1e9), "not smooth enough for tol=1e-10"),
    ],
)
def test_impossible_kernels(here, kernel, complaint):
    here(filter)
    with pytest.raises(ValueError, match=complaint):
        filter(nx.path_graph(3), np.ones(3), kernel)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Heat(-1), "'t' must be 0 or a positive number, it is -1"),
        (lambda: Hops(1.5), "'n' must be a whole number of at least 0, it is 1.5"),
        (lambda: PolynomialKernel([]), "'coefficients' must be one or more finite numbers"),
    ],
)
def test_kernels_check_their_arguments(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


def test_a_graph_without_edges(here):
    here(filter)
    signal = np.array([1.0, 2.0])
    np.testing.assert_allclose(filter(nx.empty_graph(2), signal, Heat(1.0)), signal)


def test_a_laplacian_may_be_given_instead_of_a_graph(here):
    here(filter)
    signal = np.arange(34.0)
    graph = as_graph(nx.karate_club_graph())
    for normalized in (False, True):
        matrix = laplacian(graph, normalized=normalized)
        np.testing.assert_allclose(
            filter(matrix, signal, Heat(1.0)),
            filter(graph, signal, Heat(1.0), normalized=normalized),
            atol=1e-8,
        )


@pytest.mark.parametrize("code", [None, MDS(4, 3)])
def test_filters_on_a_cluster(client, code):
    graph = nx.karate_club_graph()
    matrix = laplacian(as_graph(graph))
    signals = np.random.default_rng(0).standard_normal((34, 3))
    told = []
    for kernel in (Heat(0.5), Hops(3), KERNELS["low pass"]):
        found = filter(graph, signals, kernel, client=client, code=code, callback=told.append)
        expected = exactly(matrix, kernel, signals)
        np.testing.assert_allclose(found, expected, atol=1e-9 * np.abs(expected).max())
    assert 1 <= told[-1].workers <= 4


def test_an_encoded_laplacian_serves_many_signals(client):
    matrix = laplacian(as_graph(nx.karate_club_graph()), normalized=True)
    encoded = coded.encode(matrix, client=client)
    for signal in np.eye(34)[:2]:
        found = filter(encoded, signal, Heat(2.0), client=client)
        np.testing.assert_allclose(found, exactly(matrix, Heat(2.0), signal), atol=1e-9)
    as_mapping = filter(encoded, {3: 1.0}, Heat(2.0), client=client)
    assert as_mapping == pytest.approx(dict(enumerate(exactly(matrix, Heat(2.0), np.eye(34)[3]))))


def test_the_graph_of_an_edge_list_has_edges_in_one_direction():
    graph = as_graph([("a", "b"), ("b", "c")])
    with pytest.raises(ValueError, match="undirected=True"):
        laplacian(graph)
    assert isinstance(graph.to_undirected(), Graph)
    assert laplacian(graph.to_undirected()).shape == (3, 3)


def test_repeated_entries_of_narrow_integers_are_added_up():
    ends = [0, 0, 1, 1], [1, 1, 0, 0]
    weights = sp.coo_array((np.full(4, 100, np.int8), ends), shape=(2, 2))
    expected = [[200, -200], [-200, 200]]
    np.testing.assert_array_equal(laplacian(weights).toarray(), expected)
    ends = [0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0]
    given = sp.coo_array((np.repeat([100, -100], 4).astype(np.int8), ends), shape=(2, 2))
    np.testing.assert_array_equal(check_laplacian(given).toarray(), expected)


def test_a_matrix_with_indices_beyond_its_shape_is_refused():
    matrix = sp.csc_array(np.array([[1.0, -1.0], [-1.0, 1.0]]))
    matrix.indices[1] = 10**6
    with pytest.raises(ValueError, match="indices must be"):
        coded.graph.filter(matrix, np.ones(2), coded.graph.Heat(1.0))


@pytest.mark.parametrize("pairs", [1000, 100_000])
def test_the_bound_counts_a_small_part_beside_many_that_are_alike(pairs):
    """Two rounds leave almost nothing of the small part in the vectors, and seem to be enough."""
    first = 2 * np.arange(pairs)
    edges = [np.column_stack([first, first + 1]), np.array([[0, 1], [1, 2]]) + 2 * pairs]
    row, column = np.concatenate(edges).T
    n = 2 * pairs + 3
    A = sp.coo_array((np.ones(len(row)), (row, column)), shape=(n, n))
    matrix = laplacian(A + A.T)
    assert 3.0 <= greatest_eigenvalue_rounds(matrix) <= 3.2
