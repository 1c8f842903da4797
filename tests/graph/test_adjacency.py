"""Graphs as algorithms take them."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.graph import Graph, as_graph

from .content import edges

MATRIX = sp.csr_array(np.array([[0, 2.5, 0], [1, 0, 0], [0, 3, 1]]))


def test_sparse_adjacency_is_kept_unchanged():
    graph = as_graph(MATRIX.tocoo())
    assert graph.nodes.tolist() == [0, 1, 2]
    assert (graph.adjacency != MATRIX).nnz == 0


@pytest.mark.parametrize("kind", [sp.csc_array, sp.coo_array, sp.csr_matrix])
def test_graphs_of_matrices_in_any_format(kind):
    matrix = kind(np.array([[0.0, 2.0], [0.0, 3.0]]))
    graph = Graph(["a", ("b", 1)], matrix)
    assert edges(graph) == {("a", ("b", 1)): 2.0, (("b", 1), ("b", 1)): 3.0}
    assert graph.adjacency.format == "csr"
    with pytest.raises(ValueError, match=r"edge a -> .* has -2\.0"):
        Graph(["a", "b"], kind(np.array([[0.0, -2.0], [0.0, 3.0]])))


def test_a_dense_matrix_is_no_adjacency():
    with pytest.raises(ValueError, match="expected a SciPy sparse adjacency matrix, not a ndarray"):
        Graph(np.arange(2), np.eye(2))


def test_a_graph_needs_a_name_for_each_node():
    with pytest.raises(ValueError, match="each of 3 nodes, not 2"):
        Graph(np.arange(2), MATRIX)


@pytest.mark.parametrize("nodes", [np.array(["b", "a", "b"]), [("x", 1), 2, ("x", 1)]])
def test_two_nodes_cannot_have_one_name(nodes):
    with pytest.raises(ValueError, match=r"occurs twice\.$"):
        Graph(nodes, MATRIX)


def entries(kind, values, dtype):
    """A matrix of one row and column that has several entries for its only cell."""
    data, zeros, ends = np.array(values, dtype), np.zeros(len(values), int), [0, len(values)]
    if kind in (sp.coo_array, sp.coo_matrix):
        return kind((data, (zeros, zeros)), shape=(1, 1))
    if kind is sp.bsr_array:
        data = data.reshape(-1, 1, 1)
    return kind((data, zeros, ends), shape=(1, 1))


@pytest.mark.parametrize(
    "kind", [sp.coo_array, sp.coo_matrix, sp.csr_array, sp.csr_matrix, sp.csc_array, sp.bsr_array]
)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("u1", [200, 100]),
        ("i1", [100, 100]),
        ("i8", [2**62, 2**62]),
        ("?", [True, True]),
        ("f4", [3e38, 3e38]),
    ],
)
def test_entries_of_one_cell_are_added_up_whatever_their_dtype(kind, dtype, values):
    matrix = entries(kind, values, dtype)
    expected = np.array(values, dtype).astype(float).sum()
    for graph in (as_graph(matrix), as_graph(matrix, undirected=True)):
        assert edges(graph) == {(0, 0): expected}
    assert edges(Graph(["a"], matrix)) == {("a", "a"): expected}
    assert matrix.data.ravel().tolist() == np.array(values, dtype).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 255)), max_size=30),
    st.sampled_from(["coo", "csr", "csc", "bsr"]),
)
def test_a_graph_of_repeated_entries_is_that_of_their_sums(triples, layout):
    row, column, data = np.array(triples, dtype=int).reshape(-1, 3).T
    order = np.argsort(row, kind="stable")
    ends = np.searchsorted(row[order], np.arange(5))
    matrix = sp.csr_array((data[order].astype("u1"), column[order], ends), shape=(4, 4))
    expected = np.zeros((4, 4))
    np.add.at(expected, (row, column), data)
    # With larger blocks SciPy itself adds up in their dtype when it makes them.
    graph = as_graph(matrix.tobsr((1, 1)) if layout == "bsr" else matrix.asformat(layout))
    np.testing.assert_array_equal(graph.adjacency.toarray(), expected)
    assert graph.adjacency.has_canonical_format


def test_the_dtype_of_a_matrix_without_repeated_entries_is_kept():
    matrix = sp.csr_array(([1, 2], [1, 0], [0, 2, 2]), shape=(2, 2), dtype=np.uint8)
    assert as_graph(matrix).adjacency.dtype == np.uint8


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_array, sp.bsr_array])
@pytest.mark.parametrize("index", [-1, 9])
def test_indices_out_of_range_are_refused(kind, index):
    matrix = kind(np.eye(4))
    matrix.indices[2] = index
    with pytest.raises(ValueError, match="must be"):
        as_graph(matrix)


def test_an_error_shows_names_with_escapes():
    with pytest.raises(ValueError, match=r"edge a\\x1b\[2J -> b has -1\.0\.$"):
        Graph(["a\x1b[2J", "b"], sp.csr_array([[0.0, -1.0], [0.0, 0.0]]))
