"""Graphs from objects in memory."""

from __future__ import annotations

import tracemalloc

import dask.array as da
import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.graph import as_graph

from .content import edges

# -- networkx ----------------------------------------------------------------------------------


def test_networkx_keeps_order_names_and_weights():
    given_graph = nx.DiGraph()
    given_graph.add_edge("z", (1, 2), weight=0.5)
    given_graph.add_edge((1, 2), 7)
    graph = as_graph(given_graph)
    assert graph.nodes.tolist() == ["z", (1, 2), 7]
    assert edges(graph) == {("z", (1, 2)): 0.5, ((1, 2), 7): 1.0}
    assert edges(as_graph(given_graph, weight=None)) == {("z", (1, 2)): 1.0, ((1, 2), 7): 1.0}


def test_undirected_networkx_graphs_have_both_directions():
    assert edges(as_graph(nx.path_graph(2))) == {(0, 1): 1.0, (1, 0): 1.0}


def test_nodes_without_edges_are_kept():
    assert len(as_graph(nx.empty_graph(3, create_using=nx.DiGraph)).nodes) == 3


# -- lists and tables --------------------------------------------------------------------------


def test_integers_of_64_bits_are_kept_apart():
    pairs = [(2**64 - 1, 1), (1, 2**64 - 2), (2**53 + 1, 2**53)]
    assert edges(as_graph(pairs)) == dict.fromkeys(pairs, 1.0)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1))
def test_edge_lists_agree_with_networkx(pairs):
    expected = nx.DiGraph(pairs)
    graph = as_graph(pairs)
    assert graph.nodes.tolist() == sorted(expected)
    assert edges(graph) == dict.fromkeys(expected.edges, 1.0)
    assert edges(graph.to_undirected()) == dict.fromkeys(
        expected.to_undirected().to_directed().edges, 1.0
    )


def test_lists_and_arrays_of_names_are_edges_however_many_they_are():
    assert edges(as_graph([[0, 1], [0, 2]])) == {(0, 1): 1.0, (0, 2): 1.0}
    assert edges(as_graph(np.array([["a", "b"], ["b", "a"]]))) == {("a", "b"): 1.0, ("b", "a"): 1.0}


def test_strings_from_a_data_frame_are_names():
    class Frame:
        def __init__(self, *rows):
            self.rows = rows

        def __iter__(self):
            return iter(["source", "target"])

        def to_numpy(self):
            return np.array(self.rows, dtype=object)

    assert edges(as_graph(Frame(("a", "b"), ("b", "c")))) == {("a", "b"): 1.0, ("b", "c"): 1.0}
    assert edges(as_graph(Frame(("a", "b", 2.0), ("b", "c", 3.0)))) == {
        ("a", "b"): 2.0,
        ("b", "c"): 3.0,
    }
    assert edges(as_graph(Frame((1, 2)).to_numpy())) == {(1, 2): 1.0}


def test_undirected_takes_the_greater_weight():
    graph = as_graph(np.array([[1, 2, 0.5], [2, 1, 3.0]]), undirected=True)
    assert edges(graph) == {(1, 2): 3.0, (2, 1): 3.0}


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_graph", "complaint"),
    [
        ([], "this list is empty"),
        (np.empty((0, 2), dtype=int), "this list is empty"),
        (nx.DiGraph(), "at least one node"),
        ("votes.txt", "pass that to read_graph first"),
        (7, "not int"),
        (["ab", "cd"], "2 entries"),
        ([(1, 2), (1, 2, 3)], "2 entries"),
        (np.eye(4), "scipy.sparse.csr_array"),
        (np.array([[0, 1], [0, 0]]), "2 x 2 numbers may be 2 edges or an adjacency matrix"),
        (np.ones((3, 3)), "3 x 3 numbers may be 3 edges or an adjacency matrix"),
        ([(1, "a")], "all integers"),
        ([(1, None)], "all integers"),
        (np.array([[1.5, 2.0]]), "all integers"),
        (np.array([[2.0**63, 1.0]]), "all integers"),
        ([(2**63, -1)], "all integers"),
        ([(2**64, 1)], "all integers"),
        (np.array([["2020-01-01", "2020-01-02"]], dtype="M8[ns]"), "of dtype datetime64[ns]"),
        ([(1, 2, {"weight": 3})], "third entry must be a number"),
        ([(1, 2, -1)], "edge 1 -> 2 has -1.0"),
        (sp.csr_array(np.ones((2, 3))), "this one is 2 x 3"),
        (sp.csr_array((0, 0)), "at least one row"),
        (sp.csr_array([[1j]]), "real numbers"),
    ],
)
def test_objects_that_are_not_graphs_are_refused(given_graph, complaint):
    with pytest.raises(ValueError) as caught:
        as_graph(given_graph)
    assert complaint in str(caught.value)


def test_a_dask_array_of_edges_is_refused_and_not_read():
    def read(block):
        raise AssertionError("a block was computed")

    dask_edges = da.zeros((10**7, 2), chunks=10**6, dtype=int).map_blocks(
        read, meta=np.empty((0, 2))
    )
    with pytest.raises(ValueError, match=r"pass `graph\.compute\(\)`"):
        as_graph(dask_edges)


# -- integers are exact ------------------------------------------------------------------------

BIG = [2**53, 2**53 + 1, 2**53 + 2]


def test_large_integers_beside_weights_in_a_structured_array_stay_apart():
    rows = [(BIG[0], BIG[1], 0.5), (BIG[1], BIG[2], 1.5)]
    table = np.array(rows, dtype=[("source", "i8"), ("target", "i8"), ("weight", "f8")])
    assert edges(as_graph(table)) == {row[:2]: row[2] for row in rows}


@pytest.mark.extras
@pytest.mark.parametrize("dtype", ["int64", "uint64", "Int64", "object"])
def test_large_integers_beside_weights_in_a_data_frame_stay_apart(dtype):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": BIG, "b": BIG[::-1], "w": [0.5, 1.5, 2.5]})
    expected = {(BIG[0], BIG[2]): 0.5, (BIG[1], BIG[1]): 1.5, (BIG[2], BIG[0]): 2.5}
    assert edges(as_graph(frame.astype({"a": dtype, "b": dtype}))) == expected


@pytest.mark.extras
def test_columns_of_a_data_frame_may_have_different_integer_types():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"a": np.array([2**64 - 1, 5], "u8"), "b": np.array([7, 2**62 + 1], "i8")}
    )
    assert set(edges(as_graph(frame))) == {(2**64 - 1, 7), (5, 2**62 + 1)}
    frame["b"] -= 8
    with pytest.raises(ValueError, match=r"negative ones do not fit beside those from 2\*\*63"):
        as_graph(frame)


@pytest.mark.extras
def test_a_data_frame_whose_labels_are_those_of_a_matrix_is_refused():
    pandas = pytest.importorskip("pandas")
    frame = nx.to_pandas_adjacency(nx.path_graph(["a", "b"]))
    for given_frame in (frame, pandas.DataFrame([[1, 2], [2, 1]])):
        with pytest.raises(ValueError, match="may be 2 edges or an adjacency matrix"):
            as_graph(given_frame)


@pytest.mark.extras
def test_data_frames_of_strings_and_of_rounded_integers():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": ["x", "y", "y"], "b": ["y", "y", "x"], "w": [1, 2, 3]})
    assert edges(as_graph(frame)) == {("x", "y"): 1.0, ("y", "y"): 2.0, ("y", "x"): 3.0}
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [2, 3], "w": [1, 2]})
    assert set(edges(as_graph(frame))) == {(1, 2), (2, 3)}
    frame["a"] = [2.0**53 + 2, 1.0]
    with pytest.raises(ValueError, match=r"at most 2\*\*53: pass columns of integers"):
        as_graph(frame)
    frame["a"] = [1.0, None]
    with pytest.raises(ValueError, match="all integers"):
        as_graph(frame)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1))
def test_integers_of_two_types_are_exact_or_refused(pairs):
    table = np.array(pairs, dtype=[("source", "u8"), ("target", "i8")])
    fits = min(b for _, b in pairs) >= 0 or max(a for a, _ in pairs) < 2**63
    if not fits:
        with pytest.raises(ValueError, match="do not fit beside"):
            as_graph(table)
        return
    assert set(edges(as_graph(table))) == set(pairs)


def test_a_list_of_rounded_and_of_large_integers_is_refused():
    assert edges(as_graph([(1, 2.0), (2.0, np.int64(3))])) == {(1, 2): 1.0, (2, 3): 1.0}
    with pytest.raises(ValueError, match=r"at most 2\*\*53"):
        as_graph([(2**53 + 1, 1), (2.0, 1)])
    mixed = [(np.uint64(2**60 + 1), np.int64(-3))]
    assert edges(as_graph(mixed)) == {(2**60 + 1, -3): 1.0}


@pytest.mark.parametrize(("dtype", "largest"), [("f4", 2**24 - 1), ("f2", 2**11 - 1)])
def test_integers_that_a_short_float_may_have_rounded_are_refused(dtype, largest):
    pairs = np.array([[largest, 1], [1, 2], [2, 1]], dtype=dtype)
    assert edges(as_graph(pairs)) == {(largest, 1): 1.0, (1, 2): 1.0, (2, 1): 1.0}
    rounded = np.array([[largest + 1, 1], [largest + 2, 2], [1, 2]], dtype=dtype)
    assert rounded[0, 0] == rounded[1, 0]
    for edge_list in (rounded, [tuple(row) for row in rounded]):
        with pytest.raises(ValueError, match="pass columns of integers"):
            as_graph(edge_list)


def test_names_that_differ_in_a_trailing_null_stay_apart():
    assert edges(as_graph([("a", "a\0")])) == {("a", "a\0"): 1.0}


def test_a_long_name_takes_the_memory_of_one_name():
    pairs = [("x" * 60_000, "y"), *[(str(i), "y") for i in range(5_000)]]
    tracemalloc.start()
    graph = as_graph(pairs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(graph.nodes) == 5_002
    assert peak < 10_000_000  # with NumPy's strings more than a billion


def test_masked_edges_are_refused():
    with pytest.raises(TypeError, match="must not be masked"):
        as_graph(np.ma.masked_equal([[1, 2], [3, 4], [5, 6]], 4))


@pytest.mark.parametrize("extra", [{}, {"weight": [1.0, 2.0]}], ids=str)
def test_columns_with_names_are_taken_by_their_names(extra):
    pandas = pytest.importorskip("pandas")
    columns = {**extra, "target": [2, 3], "source": [1, 1]}
    found = as_graph(pandas.DataFrame(columns))
    kinds = [(name, float if name == "weight" else int) for name in columns]
    rows = [*zip(*columns.values(), strict=True)]
    for graph in (found, as_graph(np.array(rows, dtype=kinds))):
        assert graph.nodes.tolist() == [1, 2, 3]
        np.testing.assert_array_equal(
            graph.adjacency.toarray(), [[0, 1, 2 if extra else 1], [0, 0, 0], [0, 0, 0]]
        )


def test_a_dictionary_is_refused():
    with pytest.raises(ValueError, match="not a dictionary: pass `nx"):
        as_graph({("a", "b"): 3.0, ("a", "c"): 1.0})


def test_names_beyond_signed_integers_stay_what_they_are():
    found = as_graph([(np.uint64(1), np.uint64(2**63 + 5))])
    assert found.nodes.tolist() == [1, 2**63 + 5]
