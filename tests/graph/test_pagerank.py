"""PageRank: the iteration over plain operators, and how `pagerank` handles its arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_coded.graph
from benchmarks import datasets
from dask_coded.codes import MDS
from dask_coded.graph import ConvergenceError, pagerank, read_graph
from dask_coded.graph.pagerank import pagerank_rounds, transition_matrix
from dask_coded.loop import Progress

# The module and the function share a name: the package's attribute is the function.
MODULE = "dask_coded.graph.pagerank"


def plain_pagerank(graph, **kwargs):
    """PageRank of a networkx graph, without a cluster."""
    adjacency = nx.to_scipy_sparse_array(graph, dtype=float)
    return pagerank_rounds(*transition_matrix(adjacency), **kwargs).scores


# -- against networkx --------------------------------------------------------------------------


@st.composite
def graphs(draw):
    n = draw(st.integers(1, 12))
    node = st.integers(0, n - 1)
    graph = nx.empty_graph(n, create_using=draw(st.sampled_from([nx.DiGraph, nx.Graph])))
    weight = st.sampled_from([0.0, 0.25, 1.0, 3.0])
    graph.add_weighted_edges_from(draw(st.lists(st.tuples(node, node, weight), max_size=40)))
    return graph


@given(graphs(), st.floats(0, 0.95), st.randoms(use_true_random=False))
def test_agrees_with_networkx(graph, damping, random):
    # Neither networkx nor this package accepts a personalization that is zero everywhere.
    weights = {node: random.random() + (node == 0) for node in graph}
    for personalization in (None, weights):
        expected = nx.pagerank(
            graph, alpha=damping, personalization=personalization, tol=1e-14, max_iter=2000
        )
        scores = plain_pagerank(
            graph,
            damping=damping,
            personalization=personalization and list(personalization.values()),
            tol=1e-13,
            max_iter=2000,
        )
        np.testing.assert_allclose(scores, list(expected.values()), rtol=1e-10, atol=1e-12)


@given(graphs(), st.integers(1, 5))
def test_every_round_gives_a_distribution(graph, rounds):
    scores = plain_pagerank(graph, tol=0, max_iter=rounds)
    assert (scores >= 0).all()
    assert scores.sum() == pytest.approx(1)


@given(graphs())
def test_operators_of_any_kind_give_the_same(graph):
    matrix, dangling = transition_matrix(nx.to_scipy_sparse_array(graph, dtype=float))
    sparse = pagerank_rounds(matrix, dangling, tol=0, max_iter=20).scores
    dense = pagerank_rounds(matrix.toarray(), dangling, tol=0, max_iter=20).scores
    np.testing.assert_allclose(sparse, dense, rtol=1e-12)


# -- against published values ------------------------------------------------------------------

# As published, to 10 decimal places: README.md of the data folder.
REFERENCE = {
    "graph_wiki-Vote.txt.gz": {
        4037: 0.0046071735,
        15: 0.0036798641,
        6634: 0.0035868523,
        2625: 0.0032836561,
        2398: 0.0026086354,
        2470: 0.0025237718,
    },
    "graph_p2p-Gnutella31.txt.gz": {
        585: 0.0001286023,
        5638: 0.0001196895,
        3544: 0.0000919246,
        8847: 0.0000918117,
        6071: 0.0000907628,
        17829: 0.0000814737,
    },
    "graph_cnr-2000.npz": {
        60595: 0.0177718842,
        60597: 0.0177718842,
        285152: 0.0075048725,
        318525: 0.0068034021,
        247028: 0.0056185854,
        236401: 0.0037226051,
    },
}


def data_file(name: str) -> Path:
    path = datasets.data_file(name)
    if path is None:
        pytest.skip(f"needs {name} in the folder that DASK_CODED_DATA names")
    return path


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_values(name):
    graph = read_graph(data_file(name))
    ranks = pagerank_rounds(*transition_matrix(graph.adjacency), tol=1e-13)
    expected = REFERENCE[name]
    position = np.searchsorted(graph.nodes, list(expected))
    # For some scores, half a unit of the last published digit is more than 1e-8 of the score.
    np.testing.assert_allclose(
        ranks.scores[position], list(expected.values()), rtol=1e-8, atol=0.5e-10
    )
    assert graph.nodes[ranks.scores.argmax()] in list(expected)[:2]


def test_published_vector_after_ten_rounds():
    graph = read_graph(data_file("graph_p2p-Gnutella31.txt.gz")).to_undirected()
    published = np.loadtxt(data_file("graph_p2p-Gnutella31_undirected_pagerank10.txt.gz"))
    ranks = pagerank_rounds(*transition_matrix(graph.adjacency), tol=0, max_iter=10)
    assert ranks.rounds == 10
    np.testing.assert_array_equal(graph.nodes, published[:, 0])
    np.testing.assert_allclose(ranks.scores, published[:, 1], rtol=1e-10)


# -- stopping ----------------------------------------------------------------------------------

CYCLE = np.roll(np.eye(4), 1, axis=0)
NONE_DANGLING = np.zeros(4, dtype=bool)


def test_stops_at_the_first_change_below_tol():
    start = [1, 0, 0, 0]
    ranks = pagerank_rounds(CYCLE, NONE_DANGLING, start=start, tol=1e-3)
    one_less = pagerank_rounds(CYCLE, NONE_DANGLING, start=start, tol=0, max_iter=ranks.rounds - 1)
    assert ranks.residual < 1e-3 <= one_less.residual


def test_the_convergence_error_states_tolerance_and_rounds():
    with pytest.raises(ConvergenceError, match=r"tol=1e-10 .* max_iter=3 .* raise max_iter or tol"):
        pagerank_rounds(CYCLE, NONE_DANGLING, start=[1, 0, 0, 0], max_iter=3)


def test_zero_tol_does_exactly_max_iter_rounds_even_at_the_fixed_point():
    ranks = pagerank_rounds(CYCLE, NONE_DANGLING, tol=0, max_iter=7)
    assert (ranks.rounds, ranks.residual) == (7, 0.0)


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ({"damping": 1.5}, "'damping' must be between 0 and 1, it is 1.5"),
        ({"damping": float("nan")}, "'damping'"),
        ({"tol": -1}, "'tol' must be 0 or a positive number, it is -1"),
        ({"tol": float("nan")}, "'tol'"),
        ({"max_iter": 0}, "'max_iter' must be a whole number of at least 1, it is 0"),
        ({"max_iter": 2.5}, "'max_iter'"),
        ({"personalization": [0, 0, 0, 0]}, "'personalization' .* not zero everywhere"),
        ({"personalization": [1, 1, 1, -1]}, "'personalization' .* not negative"),
        ({"personalization": [1, 1, 1, float("nan")]}, "'personalization' must be finite"),
        ({"personalization": [1, 1j, 1, 1]}, "'personalization' must hold real numbers"),
        ({"personalization": [1, 1]}, "'personalization' must have one value for each of the 4"),
        ({"start": [0, 0, 0, 0]}, "'start'"),
    ],
)
def test_arguments_out_of_range(argument, complaint):
    with pytest.raises(ValueError, match=complaint):
        pagerank_rounds(CYCLE, NONE_DANGLING, **argument)


# -- progress ----------------------------------------------------------------------------------


class Timed:
    """An operator that records its last round, as the one in the cluster does."""

    last_round = None

    def __matmul__(self, x):
        self.last_round = SimpleNamespace(seconds=0.25, workers=3)
        return CYCLE @ x


def test_every_round_is_reported_and_the_last_marked(heard):
    loop = heard()
    pagerank_rounds(Timed(), NONE_DANGLING, tol=0, max_iter=3, loop=loop)
    assert [(p.round, p.seconds, p.workers, last) for p, last in loop.reports] == [
        (1, 0.25, 3, False),
        (2, 0.25, 3, False),
        (3, 0.25, 3, True),
    ]


def test_the_round_that_converges_is_the_last(heard):
    loop = heard()
    ranks = pagerank_rounds(CYCLE, NONE_DANGLING, loop=loop)
    assert loop.reports == [(Progress(ranks.rounds, ranks.residual), True)]


def test_a_resumed_iteration_continues_from_the_saved_state(heard):
    start = [0.7, 0.2, 0.1, 0.0]
    whole, part, rest = heard(), heard(), heard()
    ranks = pagerank_rounds(CYCLE, NONE_DANGLING, start=start, tol=0, max_iter=9, loop=whole)
    pagerank_rounds(CYCLE, NONE_DANGLING, start=start, tol=0, max_iter=4, loop=part)
    rest.state = part.state
    resumed = pagerank_rounds(CYCLE, NONE_DANGLING, start=start, tol=0, max_iter=9, loop=rest)
    assert [progress.round for progress, _ in rest.reports] == [5, 6, 7, 8, 9]
    np.testing.assert_array_equal(resumed.scores, ranks.scores)


# -- the public function, run in this process instead of a cluster -----------------------------


@pytest.fixture
def pagerank_here(here):
    """Run `pagerank` in this process; return the list of functions that ran."""
    return here(pagerank)


PAIRS = [(3, 1), (1, 2), (2, 3), (1, 3)]


@pytest.mark.usefixtures("pagerank_here")
def test_results_have_the_form_of_the_graph():
    expected = nx.pagerank(nx.DiGraph(PAIRS), tol=1e-12, max_iter=999)
    from_networkx = pagerank(nx.DiGraph(PAIRS))
    assert list(from_networkx) == [3, 1, 2]
    assert from_networkx == pytest.approx(expected)
    assert pagerank(PAIRS) == pytest.approx(expected)
    assert pagerank(np.array(PAIRS)) == pytest.approx(expected)
    scores = pagerank(nx.to_scipy_sparse_array(nx.DiGraph(PAIRS)))
    assert isinstance(scores, np.ndarray)
    np.testing.assert_allclose(scores, list(expected.values()), atol=1e-10)


def test_an_empty_networkx_graph_has_no_ranks(pagerank_here):
    assert pagerank(nx.DiGraph()) == {}
    assert not pagerank_here


@pytest.mark.usefixtures("pagerank_here")
def test_weights_and_personalization_by_node():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([("a", "b", 3), ("a", "c", 1), ("c", "a", 1)])
    graph.add_edge("b", "a", weight=2, votes=5)
    wanted = {"b": 2.0, "c": 1.0}
    for weight in ("weight", "votes", None):
        expected = nx.pagerank(
            graph, personalization=wanted, weight=weight, tol=1e-12, max_iter=999
        )
        assert pagerank(graph, personalization=wanted, weight=weight) == pytest.approx(expected)
    as_vector = pagerank(graph, personalization=np.array([0.0, 2.0, 1.0]))
    assert as_vector == pytest.approx(pagerank(graph, personalization=wanted))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            {"personalization": {9: 1.0}},
            "'personalization' has the node 9, which is not in the graph",
        ),
        ({"personalization": {1: 0.0}}, "'personalization' .* not zero everywhere"),
        ({"start": {1: -1.0}}, "'start' .* not negative"),
        ({"damping": 2}, "'damping'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_computed(pagerank_here, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        pagerank(PAIRS, **arguments)
    assert not pagerank_here


# -- the public function, on a cluster ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("graph_wiki-Vote.txt.gz", None),
        ("graph_wiki-Vote.txt.gz", MDS(4, 3)),
        pytest.param("graph_cnr-2000.npz", None, marks=pytest.mark.long),
    ],
)
def test_reference_values_on_a_cluster(client, name, code):
    graph, heard = read_graph(data_file(name)), []
    scores = pagerank(graph, tol=1e-12, code=code, client=client, callback=heard.append)
    expected = REFERENCE[name]
    assert [scores[node] for node in expected] == pytest.approx(
        list(expected.values()), rel=1e-8, abs=0.5e-10
    )
    last = heard[-1]
    assert last.residual < 1e-12
    assert last.seconds is not None
    assert 1 <= last.workers <= 4


@pytest.mark.slow
def test_published_vector_after_ten_rounds_on_a_cluster(client):
    graph = read_graph(data_file("graph_p2p-Gnutella31.txt.gz")).to_undirected()
    published = np.loadtxt(data_file("graph_p2p-Gnutella31_undirected_pagerank10.txt.gz"))
    scores = pagerank(graph.adjacency, tol=0, max_iter=10, client=client)
    np.testing.assert_allclose(scores, published[:, 1], rtol=1e-10)


def test_no_convergence_on_a_cluster_is_the_same_error(client):
    with pytest.raises(ConvergenceError, match="max_iter=2"):
        pagerank(PAIRS, max_iter=2, client=client)


def test_the_package_exports_the_function_not_the_module():
    assert dask_coded.graph.pagerank is pagerank
    assert pagerank.__module__ == MODULE
