"""The networkx backend: its interface, and functions called through networkx."""

from __future__ import annotations

import inspect
import subprocess
import sys

import networkx as nx
import pytest
from networkx.utils.backends import _registered_algorithms

import _dask_coded_networkx
from dask_coded import networkx_backend as backend
from dask_coded.codes import MDS

FUNCTIONS = sorted(_dask_coded_networkx.get_info()["functions"])

# Entry points exist only if the package is installed.
installed = pytest.mark.skipif(
    backend.NAME not in nx.utils.backends.backends, reason="dask-coded is not installed"
)


@pytest.fixture(autouse=True)
def _no_warning_of_cached_graphs():
    with nx.config(warnings_to_ignore={"cache"}):
        yield


EXACT = {"tol": 1e-14, "max_iter": 999}


def graphs():
    club = nx.karate_club_graph()
    some = nx.gnp_random_graph(30, 0.2, seed=1, directed=True)
    some.add_edges_from([(0, node) for node in range(1, 30)], weight=2.0, votes=5)
    some.add_edge("name", ("a", "tuple"))
    return [club, some]


# -- what it declares --------------------------------------------------------------------------


def test_it_implements_exactly_the_functions_that_it_declares():
    public = {name for name in vars(backend) if not name.startswith("_")}
    assert sorted(public & set(_registered_algorithms)) == FUNCTIONS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_and_defaults_are_those_of_networkx(name):
    theirs = inspect.signature(_registered_algorithms[name].orig_func).parameters
    ours = dict(inspect.signature(getattr(backend, name)).parameters)
    assert ours.pop("options").kind == inspect.Parameter.VAR_KEYWORD
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]


def test_get_info_imports_neither_numpy_nor_dask():
    program = (
        "import sys, _dask_coded_networkx as m; m.get_info(); "
        "sys.exit(any(n in sys.modules for n in ('numpy', 'dask', 'dask_coded', 'networkx')))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# -- conversion --------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", graphs(), ids=str)
def test_conversion_and_back(graph):
    there = backend.convert_from_nx(graph, edge_attrs={"weight": 1, "votes": 1})
    back = backend.convert_to_nx(there)
    assert list(back) == list(graph)
    assert back.is_directed() == graph.is_directed() == there.is_directed()
    for source, target, data in graph.edges(data=True):
        got = back.edges[source, target]
        assert got == {"weight": data.get("weight", 1), "votes": data.get("votes", 1)}
    assert back.number_of_edges() == graph.number_of_edges()


def test_a_graph_converted_with_weights_also_serves_without():
    multi = nx.MultiDiGraph([(0, 1, {"weight": 5}), (0, 1, {"weight": 2}), (1, 0)])
    for graph, ones, weights in [(multi, 2, 7), (nx.DiGraph(multi), 1, 2)]:
        there = backend.convert_from_nx(graph, edge_attrs={"weight": 1})
        assert there.by(None).adjacency[0, 1] == ones
        assert there.by("weight").adjacency[0, 1] == weights


def test_a_graph_converted_without_an_attribute_says_so():
    with pytest.raises(ValueError, match=r"with `edge_attrs=\{'votes': 1\}`"):
        backend.convert_from_nx(nx.path_graph(2), edge_attrs={"weight": 1}).by("votes")


def test_multigraphs_cannot_be_converted_back():
    with pytest.raises(NotImplementedError, match="Parallel edges"):
        backend.convert_to_nx(backend.convert_from_nx(nx.MultiGraph([(0, 1)])))


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_graphs_with_invalid_weights_are_left_to_other_backends(weight):
    graph = nx.Graph([(0, 1, {"weight": weight})])
    with pytest.raises(NotImplementedError, match="finite and not negative"):
        backend.convert_from_nx(graph, edge_attrs={"weight": 1})


# -- can_run and should_run --------------------------------------------------------------------


def test_negative_values_are_left_to_other_backends():
    graph = nx.path_graph(3)
    assert backend.can_run("pagerank", (graph, 0.85, {0: 1}), {}) is True
    assert "'personalization'" in backend.can_run("pagerank", (graph, 0.85, {0: -1}), {})
    assert "'nstart'" in backend.can_run("hits", (graph,), {"nstart": {0: -1}})
    assert backend.can_run("katz_centrality", (graph,), {"nstart": {0: -1}}) is True


def test_without_a_client_it_should_not_run():
    assert "no Dask client" in backend.should_run("hits", (nx.path_graph(3),), {})


@installed
@pytest.mark.filterwarnings("ignore:networkx does not run")
def test_it_should_run_for_large_and_dense_graphs_only(client):
    graph = nx.path_graph(3)
    assert "one process is faster" in backend.should_run("hits", (), {"G": graph, "client": client})
    config = nx.config.backends.dask_coded
    with config(minimum_edges=2):
        assert "2 edges and 3 nodes" in backend.should_run("hits", (graph,), {"client": client})
    with config(minimum_edges=2, minimum_edges_per_node=0.5):
        assert backend.should_run("hits", (graph,), {"client": client}) is True


# -- through networkx --------------------------------------------------------------------------


@installed
@pytest.mark.parametrize("graph", graphs(), ids=str)
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            nx.pagerank,
            {"personalization": {0: 1, 3: 2, "unknown": 9}, **EXACT},
        ),
        (
            nx.pagerank,
            {"alpha": 0.7, "weight": None, "dangling": {1: 1}, **EXACT},
        ),
        (nx.katz_centrality, {"alpha": 0.01, "beta": 2.0, "tol": 1e-13}),
        (nx.hits, {"tol": 0, "max_iter": 1000}),
        (nx.katz_centrality, {"alpha": 0.01, "weight": "weight", "normalized": False}),
        (nx.hits, {"tol": 1e-13, "max_iter": 1000}),
    ],
)
def test_results_are_those_of_networkx(client, graph, function, arguments):
    found = function(graph, backend="dask_coded", client=client, **arguments)
    expected = function(graph, backend="networkx", **arguments)
    if function is nx.hits:
        assert found[0] == pytest.approx(expected[0], rel=1e-7, abs=1e-10)
        assert found[1] == pytest.approx(expected[1], rel=1e-7, abs=1e-10)
    else:
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, rel=1e-9)


@installed
def test_eigenvector_centrality_is_at_least_as_exact_as_that_of_networkx(client):
    club = nx.karate_club_graph()
    for weight in (None, "weight"):
        ours = nx.eigenvector_centrality(club, weight=weight, backend="dask_coded", client=client)
        theirs = nx.eigenvector_centrality(club, weight=weight, backend="networkx")
        exact = nx.eigenvector_centrality_numpy(club, weight=weight)
        error, theirs_error = (
            sum(abs(scores[node] - exact[node]) for node in club) for scores in (ours, theirs)
        )
        assert error <= theirs_error


@installed
def test_the_code_may_be_chosen_in_the_call(client):
    club = nx.karate_club_graph()
    found = nx.pagerank(club, backend="dask_coded", client=client, code=MDS(4, 3))
    assert found == pytest.approx(nx.pagerank(club), rel=1e-9)


@installed
def test_a_graph_whose_cache_is_turned_off(client):
    club = nx.karate_club_graph()
    club.__networkx_cache__ = None
    found = nx.pagerank(club, backend="dask_coded", client=client)
    assert found == pytest.approx(nx.pagerank(club), rel=1e-9)


@pytest.mark.extras
def test_personalizations_that_only_have_get():
    """As of pandas, which networkx takes."""
    pandas = pytest.importorskip("pandas")
    some = pandas.Series({0: 1.0, 1: 2.0})
    assert backend.can_run("pagerank", (nx.path_graph(3),), {"personalization": some}) is True
    refused = backend.can_run("pagerank", (nx.path_graph(3),), {"personalization": -some})
    assert refused == "'personalization' has a negative value"


@installed
def test_a_graph_is_converted_once(client, monkeypatch):
    seen = []
    convert = backend.convert_from_nx
    monkeypatch.setattr(
        backend, "convert_from_nx", lambda graph, **k: seen.append(k) or convert(graph, **k)
    )
    club = nx.karate_club_graph()
    for _ in range(2):
        nx.pagerank(club, backend="dask_coded", client=client)
        nx.katz_centrality(club, alpha=0.01, backend="dask_coded", client=client)
    assert len(seen) == 1
    club.add_edge(0, 99)
    assert 99 in nx.pagerank(club, backend="dask_coded", client=client)


@installed
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda **k: nx.pagerank(nx.path_graph(4), max_iter=1, **k), "PowerIterationFailed"),
        (lambda **k: nx.pagerank(nx.path_graph(4), max_iter=0, **k), "PowerIterationFailed"),
        (lambda **k: nx.pagerank(nx.path_graph(4), tol=0, **k), "PowerIterationFailed"),
        (lambda **k: nx.pagerank(nx.path_graph(4), personalization={0: 0}, **k), "ZeroDivision"),
        (lambda **k: nx.pagerank(nx.path_graph(4), nstart={0: 0}, **k), "PowerIterationFailed"),
        (lambda **k: nx.pagerank(nx.path_graph(4), dangling={0: 0}, **k), "PowerIterationFailed"),
        (lambda **k: nx.katz_centrality(nx.path_graph(4), alpha=9, **k), "PowerIterationFailed"),
        (lambda **k: nx.pagerank(nx.path_graph(4), alpha=1.2, **k), "PowerIterationFailed"),
        (lambda **k: nx.katz_centrality(nx.path_graph(4), beta={0: 1}, **k), "NetworkXError"),
        (lambda **k: nx.katz_centrality(nx.path_graph(4), beta="b", **k), "NetworkXError"),
        (lambda **k: nx.eigenvector_centrality(nx.Graph(), **k), "NetworkXPointless"),
        (lambda **k: nx.eigenvector_centrality(nx.path_graph(2), nstart={0: 0}, **k), "NetworkXEr"),
    ],
)
def test_exceptions_are_those_of_networkx(client, call, error):
    with pytest.raises(Exception) as caught:
        call(backend="dask_coded", client=client)
    assert type(caught.value).__name__.startswith(error)


@installed
def test_without_a_client_the_error_advises_to_create_one():
    with pytest.raises(ValueError, match=r"create a\s+`dask\.distributed\.Client\(\)` first"):
        nx.pagerank(nx.path_graph(3), backend="dask_coded")


@installed
def test_without_a_client_a_graph_is_not_even_converted(monkeypatch):
    def adjacency(*args):
        raise AssertionError("It is converted.")

    monkeypatch.setattr(backend, "_adjacency", adjacency)
    for function in (nx.pagerank, nx.hits, nx.katz_centrality, nx.eigenvector_centrality):
        with pytest.raises(ValueError, match=r"create a `dask\.distributed\.Client\(\)` first"):
            function(nx.path_graph(3), backend="dask_coded")


def test_a_small_graph_is_left_to_networkx_and_it_is_said(client):
    graph = nx.path_graph(3)
    priority = nx.config.backend_priority.algos
    with client.as_current(), nx.config.backend_priority(algos=["dask_coded", *priority]):
        with pytest.warns(UserWarning, match="'pagerank' on the cluster: with 2 edges") as seen:
            nx.pagerank(graph)
    assert seen[0].filename == __file__


def test_a_graph_that_was_converted_before_runs_on_the_cluster(client, monkeypatch):
    graph = nx.path_graph(3)
    with client.as_current():
        nx.pagerank(graph, backend="dask_coded")
        assert backend.should_run("pagerank", (graph,), {}) is True
        assert backend.should_run("hits", (graph,), {}) is True
        assert backend.should_run("katz_centrality", (graph,), {}) is True
        with pytest.warns(UserWarning, match="one process is faster"):
            assert backend.should_run("pagerank", (graph,), {"weight": "length"}) is not True
        graph.add_edge(0, 2)  # networkx forgets the conversion
        with pytest.warns(UserWarning, match="one process is faster"):
            assert backend.should_run("pagerank", (graph,), {}) is not True


def test_empty_graphs(client):
    options = {"backend": "dask_coded", "client": client}
    assert nx.pagerank(nx.Graph(), **options) == {}
    assert nx.hits(nx.Graph(), **options) == ({}, {})
    assert nx.katz_centrality(nx.Graph(), **options) == {}


@installed
def test_a_graph_that_could_not_be_converted_is_once_there_is_a_client(request):
    graph = nx.path_graph(3)
    with pytest.raises(ValueError, match="first"):
        nx.pagerank(graph, backend="dask_coded")
    client = request.getfixturevalue("client")
    found = nx.pagerank(graph, backend="dask_coded", client=client)
    assert found == pytest.approx(nx.pagerank(graph), abs=1e-5)
