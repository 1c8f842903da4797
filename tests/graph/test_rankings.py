"""HITS, Katz and eigenvector centrality: the iterations over plain operators, and on a cluster."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import assume, given
from hypothesis import strategies as st

from dask_coded.codes import MDS
from dask_coded.graph import (
    ConvergenceError,
    Heat,
    as_graph,
    eigenvector_centrality,
    filters,
    hits,
    katz_centrality,
    read_graph,
)
from dask_coded.graph.centrality import eigenvector_rounds, katz_rounds
from dask_coded.graph.hits import hits_rounds
from dask_coded.graph.pagerank import pagerank_rounds, transition_matrix
from dask_coded.graph.values import by_node, distribution, vector
from dask_coded.simulation import SimulatedOperator, Simulation, constant


@st.composite
def adjacencies(draw):
    n = draw(st.integers(2, 10))
    weight = st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0])
    rows = draw(st.lists(st.lists(weight, min_size=n, max_size=n), min_size=n, max_size=n))
    return np.array(rows)


# -- against LAPACK ----------------------------------------------------------------------------


@given(adjacencies())
def test_authorities_are_the_first_singular_vector(matrix):
    _, values, right = np.linalg.svd(matrix)
    # Without a gap the vector is not unique; a small gap takes too many rounds.
    assume(values[0] > 0 and values[1] < 0.95 * values[0])
    hubs, authorities = hits_rounds(matrix, tol=1e-12, max_iter=5000)
    np.testing.assert_allclose(authorities, np.abs(right[0]), atol=1e-9)
    np.testing.assert_allclose(hubs, matrix @ authorities)


def test_katz_of_numbers_whose_squares_cannot_be_represented(client):
    graph = sp.csr_array(RING)
    expected = katz_centrality(graph, alpha=0.3, client=client)
    for beta in (1e200, 1e-200):
        found = katz_centrality(graph, alpha=0.3, beta=beta, client=client)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@given(adjacencies(), st.floats(0.05, 0.9), st.integers(0, 5))
def test_katz_solves_its_equation(matrix, share, seed):
    # With this alpha the iteration contracts from the first round on.
    alpha = share / max(matrix.sum(axis=0).max(), 1.0)
    beta = np.random.default_rng(seed).uniform(-1, 5, len(matrix))
    found = katz_rounds(matrix.T, beta, alpha=alpha, tol=1e-12, max_iter=5000)
    exact = np.linalg.solve(np.eye(len(matrix)) - alpha * matrix.T, beta)
    np.testing.assert_allclose(found, exact, rtol=1e-8, atol=1e-9 * np.abs(exact).max())


@given(adjacencies())
def test_eigenvector_centrality_is_the_eigenvector(matrix):
    # With an edge between every two nodes, the eigenvector is unique and positive.
    matrix = matrix + 0.1
    found = eigenvector_rounds(matrix.T, tol=1e-13, max_iter=5000)
    greatest = np.linalg.eigvals(matrix).real.max()
    np.testing.assert_allclose(matrix.T @ found, greatest * found, rtol=1e-8)
    assert np.linalg.norm(found) == pytest.approx(1)
    assert (found > 0).all()


def test_bipartite_graphs_do_not_alternate():
    star = nx.to_numpy_array(nx.star_graph(9))
    found = eigenvector_rounds(star)
    np.testing.assert_allclose(found[0], 3 * found[1:], rtol=1e-8)


@given(adjacencies())
def test_pagerank_sends_dangling_mass_to_the_given_nodes(matrix):
    matrix[0] = 0
    graph = nx.from_numpy_array(matrix, create_using=nx.DiGraph)
    to = {node: node + 1.0 for node in graph}
    expected = nx.pagerank(graph, dangling=to, tol=1e-14, max_iter=2000)
    adjacency = nx.to_scipy_sparse_array(graph, dtype=float)
    found = pagerank_rounds(
        *transition_matrix(adjacency), from_dangling=list(to.values()), tol=1e-13, max_iter=2000
    )
    np.testing.assert_allclose(found.scores, list(expected.values()), rtol=1e-9)


# -- the loop ----------------------------------------------------------------------------------

RING = np.roll(np.eye(5), 1, axis=0) + np.eye(5)[::-1]


@pytest.mark.parametrize(
    "rounds",
    [
        lambda **k: hits_rounds(RING, **k)[1],
        lambda **k: katz_rounds(RING, np.arange(5), alpha=0.3, **k),
        lambda **k: eigenvector_rounds(RING, **k),
    ],
    ids=["hits", "katz", "eigenvector"],
)
def test_a_resumed_iteration_continues_from_the_saved_state(rounds, heard):
    whole, part = heard(), heard()
    expected = rounds(tol=0, max_iter=9, loop=whole)
    rounds(tol=0, max_iter=4, loop=part)
    rest = heard(part.state)
    np.testing.assert_array_equal(rounds(tol=0, max_iter=9, loop=rest), expected)
    assert [progress.round for progress, _ in rest.reports] == [5, 6, 7, 8, 9]
    assert [last for _, last in whole.reports] == [False] * 8 + [True]


def test_the_same_function_runs_on_a_simulated_cluster():
    operator = SimulatedOperator(RING, Simulation(MDS(4, 3), constant([1, 1, 1, 0.2])))
    expected = hits_rounds(RING, tol=0, max_iter=3)
    np.testing.assert_array_equal(hits_rounds(operator, tol=0, max_iter=3), expected)
    assert len(operator.rounds) == 2 * 3 + 1


# -- errors ------------------------------------------------------------------------------------


def test_too_large_an_alpha_fails_early_with_advice():
    with pytest.raises(ConvergenceError, match=r"lower alpha, which is 50 "):
        katz_rounds(np.ones((3, 3)), np.ones(3), alpha=50.0, max_iter=10**9)


@pytest.mark.parametrize("rounds", [hits_rounds, eigenvector_rounds])
@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ({"tol": -1}, "'tol' must be 0 or a positive number, it is -1"),
        ({"max_iter": 0}, "'max_iter' must be a whole number of at least 1, it is 0"),
        ({"start": np.zeros(5)}, "'start' .* not zero everywhere"),
        ({"start": np.ones(4)}, "'start' must have one value for each of the 5 nodes"),
    ],
)
def test_arguments_out_of_range(rounds, argument, complaint):
    with pytest.raises(ValueError, match=complaint):
        rounds(RING, **argument)


@pytest.mark.parametrize(
    ("function", "arguments", "complaint"),
    [
        (hits, {"graph": nx.empty_graph(3)}, "HITS expects a graph with edges"),
        (hits, {"start": {99: 1.0}}, "'start' has the node 99"),
        (katz_centrality, {"alpha": np.inf}, "'alpha' must be finite"),
        (katz_centrality, {"beta": {0: 1.0}}, "'beta' must have all nodes, .* is missing"),
        (katz_centrality, {"beta": [1.0]}, "'beta' must have one value for each of the 34 nodes"),
        (eigenvector_centrality, {"start": {0: -1.0}}, "'start' .* not negative"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_computed(
    here, friends, function, arguments, complaint
):
    functions = here(function)
    with pytest.raises(ValueError, match=complaint):
        function(**{"graph": friends} | arguments)
    assert not functions


def test_no_edge_to_a_node_with_a_start_score():
    with pytest.raises(ValueError, match="another 'start'"):
        hits_rounds(np.array([[0, 1], [0, 0]]), start=[1, 0])


# -- the public functions ----------------------------------------------------------------------


def test_results_have_the_form_of_the_graph(here, friends):
    adjacency = nx.to_scipy_sparse_array(friends)
    for function in (hits, katz_centrality, eigenvector_centrality):
        here(function)
    assert list(katz_centrality(friends, alpha=0.02)) == list(friends)
    assert isinstance(katz_centrality(adjacency, alpha=0.02), np.ndarray)
    assert isinstance(eigenvector_centrality(adjacency), np.ndarray)
    assert all(isinstance(part, np.ndarray) for part in hits(adjacency))
    assert hits(nx.DiGraph()) == ({}, {})
    assert katz_centrality(nx.Graph()) == eigenvector_centrality(nx.Graph()) == {}


@pytest.mark.parametrize("weight", [1e-170, 1e-12, 1e3, 1e200])
def test_the_unit_of_weights_does_not_matter(here, weight):
    for function in (hits, eigenvector_centrality):
        here(function)
    star = nx.to_scipy_sparse_array(nx.star_graph(5), dtype=float)  # bipartite
    expected, found = (eigenvector_centrality(w * star, weight="weight") for w in (1.0, weight))
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    np.testing.assert_allclose(hits(weight * star), hits(star), rtol=1e-8)
    (hubs, _), (other, _) = (hits(w * star, normalized=False) for w in (1.0, weight))
    np.testing.assert_allclose(other, weight * hubs, rtol=1e-8)


@pytest.mark.parametrize("code", [None, MDS(4, 3)])
def test_agrees_with_networkx_on_a_cluster(client, friends, code):
    options = {"client": client, "code": code}
    for weight in (None, "weight"):
        assert eigenvector_centrality(friends, weight=weight, **options) == pytest.approx(
            nx.eigenvector_centrality_numpy(friends, weight=weight), rel=1e-7
        )
        assert katz_centrality(friends, alpha=0.02, weight=weight, **options) == pytest.approx(
            nx.katz_centrality_numpy(friends, alpha=0.02, weight=weight), rel=1e-7
        )
    for found, expected in zip(hits(friends, **options), nx.hits(friends, tol=1e-14)):
        assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.extras
def test_a_series_is_matched_by_its_index():
    pandas = pytest.importorskip("pandas")
    graph = as_graph([("a", "b"), ("b", "c")])
    values = {"c": 3.0, "a": 1.0}
    series = pandas.Series(values)
    assert (vector("start", series, graph) == [1.0, 0.0, 3.0]).all()
    signal = {**values, "b": 2.0}
    series = by_node("signal", pandas.Series(signal))
    assert filters._signal(series, graph).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="has the node 'a' twice"):
        by_node("signal", pandas.Series([1.0, 2.0], index=["a", "a"]))


@pytest.mark.extras
def test_a_data_frame_is_matched_by_its_index():
    pandas = pytest.importorskip("pandas")
    graph = as_graph([("a", "b"), ("b", "c")])
    frame = pandas.DataFrame({"one": [3.0, 1.0], "two": [30, 10]}, index=["c", "a"])
    found = filters._signal(by_node("signal", frame), graph)
    np.testing.assert_array_equal(found, [[1, 10], [0, 0], [3, 30]])
    with pytest.raises(ValueError, match="the node 0 in its index"):
        filters._signal(pandas.DataFrame(np.eye(3)), graph)


@pytest.mark.extras
def test_values_of_xarray_are_in_the_order_of_the_nodes():
    xarray = pytest.importorskip("xarray")
    values = xarray.DataArray([1.0, 2.0, 3.0], dims="node")
    graph = as_graph([("a", "b"), ("b", "c")])
    assert vector("start", values, graph).tolist() == [1.0, 2.0, 3.0]


def test_masked_values_are_refused():
    masked = np.ma.masked_equal([1.0, -999.0, 3.0], -999.0)
    graph = as_graph([("a", "b"), ("b", "c")])
    refused = pytest.raises(TypeError, match="must not be masked")
    with refused:
        vector("start", masked, graph)
    with refused:
        distribution("start", masked, 3)
    with refused:
        filters.filter(graph, masked, Heat(1.0))
    with refused:
        katz_centrality(graph, beta=masked)


@pytest.mark.slow
def test_hits_of_a_real_graph_on_a_cluster(client, data_folder):
    graph, told = read_graph(data_folder / "graph_wiki-Vote.txt.gz"), []
    hubs, authorities = hits(
        graph.adjacency, tol=1e-12, max_iter=2000, client=client, callback=told.append
    )
    again = graph.adjacency.T @ (graph.adjacency @ authorities)
    np.testing.assert_allclose(again / again.sum(), authorities, atol=1e-11)
    np.testing.assert_allclose(
        hubs, graph.adjacency @ authorities / (graph.adjacency @ authorities).sum(), rtol=1e-10
    )
    assert told[-1].residual < 1e-12
