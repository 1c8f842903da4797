"""Graphs from files and from memory."""

from __future__ import annotations

import bz2
import gzip
import io
import warnings

import dask.array as da
import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.graph.readers import Graph, as_graph, read_graph

INTEGERS = "# from to\n30 1412\n30\t3352\n\n5 30\n30 1412\n"


def edges(graph: Graph) -> dict[tuple[object, object], float]:
    """``{(source, target): weight}`` with the names of the nodes."""
    coo = graph.adjacency.tocoo()
    names = graph.nodes.tolist()
    return {(names[i], names[j]): w for i, j, w in zip(*coo.coords, coo.data.tolist())}


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


# -- edge lists --------------------------------------------------------------------------------


def test_integer_ids_comments_and_duplicates(write):
    graph = read_graph(write("g.txt", INTEGERS))
    assert graph.nodes.tolist() == [5, 30, 1412, 3352]
    assert graph.nodes.dtype == np.int64
    assert edges(graph) == {(30, 1412): 1.0, (30, 3352): 1.0, (5, 30): 1.0}


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress)])
@pytest.mark.parametrize("text", [INTEGERS, INTEGERS.replace("1412", "x")])
def test_compressed_files_read_as_plain_ones(write, suffix, pack, text):
    plain = read_graph(write("g.txt", text))
    packed = read_graph(write(f"g.txt.{suffix}", pack(text.encode())))
    assert edges(packed) == edges(plain)


@pytest.mark.parametrize(
    "text",
    [
        "1 2\n2 3",
        "1\t2\r\n2\t3\r\n",
        "1,2\n2, 3\n",
        "  1   2\n2 \t 3\n",
        "\ufeff1 2\n2 3\n",
        "% a comment\n1 2\n# another\n2 3\n",
        "source,target\n1,2\n2,3\n",
        '"id_1","id_2"\n"1","2"\n"2","3"\n',
    ],
)
def test_separators_line_ends_comments_and_headers(write, text):
    assert edges(read_graph(write("g", text))) == {(1, 2): 1.0, (2, 3): 1.0}


def test_one_name_that_is_not_an_integer_makes_all_names_strings(write):
    graph = read_graph(write("g.txt", "1 2\n2 c#\n"))
    assert edges(graph) == {("1", "2"): 1.0, ("2", "c#"): 1.0}


def test_a_mark_within_a_line_begins_no_comment(write):
    graph = read_graph(write("g.txt", "1 7#1\n1 7%2\n"))
    assert edges(graph) == {("1", "7#1"): 1.0, ("1", "7%2"): 1.0}


@pytest.mark.parametrize("name", ["1.5", "1e3", str(2**63)])
def test_numbers_that_are_no_integers_of_64_bits_are_names(write, name):
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # NumPy may only warn
        assert edges(read_graph(write("g.txt", f"{name} 1\n"))) == {(name, "1"): 1.0}


def test_only_the_first_line_may_be_a_header(write):
    text = "source,target,weight\nA,1,1.0\n2,3,1.0\n"
    assert edges(read_graph(write("g.csv", text))) == {("A", "1"): 1.0, ("2", "3"): 1.0}
    with pytest.raises(ValueError, match="expected a number as weight, line 2 has 'y'"):
        read_graph(write("g.txt", "a b x\nc d y\ne f 1.0\n"))


@pytest.mark.parametrize("first", ["root 1", "1 root", "1.5 1", "root 1 0.5", f"{2**64} 1 0.5"])
def test_a_first_line_with_a_number_is_no_header(write, first):
    below = " 1" if first.count(" ") == 2 else ""
    graph = read_graph(write("g.txt", f"{first}\n1 2{below}\n2 3{below}\n"))
    assert len(edges(graph)) == 3
    assert set(graph.nodes) == {*first.split()[:2], "1", "2", "3"}


def test_integers_beyond_64_bits_are_names(write):
    big = str(2**70)
    assert edges(read_graph(write("g.txt", f"{big} 1\n"))) == {(big, "1"): 1.0}


def test_names_with_underscores_are_no_integers(write):
    graph = read_graph(write("g.txt", "1_1 11\n1_10 11_0\n"))
    assert edges(graph) == {("1_1", "11"): 1.0, ("1_10", "11_0"): 1.0}


@pytest.mark.parametrize(
    "text", ["01 2\n1 3\n007 2\n", "1,2\n1, 02\n", "+1 2\n1 3\n", "0 1\n-0 2\n"]
)
def test_names_that_are_not_written_as_integers_usually_are_stay_apart(write, text):
    pairs = [tuple(line.replace(",", " ").split()) for line in text.splitlines()]
    assert edges(read_graph(write("g.txt", text))) == dict.fromkeys(pairs, 1.0)


def test_weights_with_leading_zeros_are_numbers(write):
    graph = read_graph(write("g.txt", "-1 0 00.5\n10 -20 +2\n"))
    assert edges(graph) == {(-1, 0): 0.5, (10, -20): 2.0}


def test_the_last_of_equal_entries_counts_in_matrix_market_files(write):
    lines = "%%MatrixMarket matrix coordinate real general\n2 2 3\n1 2 5\n1 2 7\n2 1 1\n"
    assert edges(read_graph(write("g.mtx", lines))) == {(0, 1): 7.0, (1, 0): 1.0}


def test_integers_of_64_bits_are_kept_apart():
    pairs = [(2**64 - 1, 1), (1, 2**64 - 2), (2**53 + 1, 2**53)]
    assert edges(as_graph(pairs)) == dict.fromkeys(pairs, 1.0)


def test_names_between_tabs_may_contain_blanks(write):
    assert edges(read_graph(write("g.tsv", "New York\tBonn\n"))) == {("New York", "Bonn"): 1.0}


@pytest.mark.parametrize("mark", [",", "\t", ", "])
def test_names_in_quotes_may_contain_separators_and_quotes(write, mark):
    lines = ['"Doe, ""J"""', '"a\tb"', "2"], ['"1"', "5'", "3"]
    text = "".join(mark.join(line) + "\n" for line in lines)
    assert edges(read_graph(write("g.csv", text))) == {('Doe, "J"', "a\tb"): 2.0, ("1", "5'"): 3.0}


def test_a_single_line_of_words_is_an_edge_and_not_a_header(write):
    assert edges(read_graph(write("g.txt", "a b\n"))) == {("a", "b"): 1.0}


@pytest.mark.parametrize("header", ["", "source,target,weight\n"])
@pytest.mark.parametrize(("one", "two"), [(1, 2), ("a", "b")])
def test_weights_and_the_last_of_equal_edges(write, header, one, two):
    text = f"{header}{one},{two},0.5\n{two},{one},2\n{one},{two},3e-1\n"
    assert edges(read_graph(write("g.csv", text))) == {(one, two): 0.3, (two, one): 2.0}


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1))
def test_edge_lists_agree_with_networkx(pairs):
    expected = nx.DiGraph(pairs)
    graph = as_graph(pairs)
    assert graph.nodes.tolist() == sorted(expected)
    assert edges(graph) == dict.fromkeys(expected.edges, 1.0)
    assert edges(graph.to_undirected()) == dict.fromkeys(
        expected.to_undirected().to_directed().edges, 1.0
    )


# -- matrices ----------------------------------------------------------------------------------

MATRIX = sp.csr_array(np.array([[0, 2.5, 0], [1, 0, 0], [0, 3, 1]]))


@pytest.mark.parametrize("suffix", ["mtx", "mtx.gz"])
def test_matrix_market(write, suffix):
    text = io.BytesIO()
    scipy.io.mmwrite(text, MATRIX)
    content = text.getvalue()
    graph = read_graph(write(f"g.{suffix}", gzip.compress(content) if ".gz" in suffix else content))
    assert graph.nodes.tolist() == [0, 1, 2]
    assert (graph.adjacency != MATRIX).nnz == 0


def test_symmetric_matrix_market_pattern_has_both_directions(write):
    text = "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 3\n"
    assert edges(read_graph(write("g.mtx", text))) == {(0, 1): 1, (1, 0): 1, (2, 2): 1}


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_npz_of_scipy(tmp_path, layout):
    sp.save_npz(tmp_path / "g.npz", MATRIX.asformat(layout))
    assert (read_graph(tmp_path / "g.npz").adjacency != MATRIX).nnz == 0


@pytest.mark.parametrize(
    ("extra", "n", "weight"),
    [({}, 2, 1.0), ({"n": 2}, 2, 1.0), ({"shape": [2, 2], "data": [4.0, 4.0]}, 2, 4.0)],
)
def test_npz_of_bare_arrays(tmp_path, extra, n, weight):
    np.savez(tmp_path / "g.npz", indptr=[0, 1, 2], indices=[1, 0], **extra)
    graph = read_graph(tmp_path / "g.npz")
    assert len(graph.nodes) == n
    assert edges(graph) == {(0, 1): weight, (1, 0): weight}


def test_sparse_adjacency_is_kept_unchanged():
    graph = as_graph(MATRIX.tocoo())
    assert graph.nodes.tolist() == [0, 1, 2]
    assert (graph.adjacency != MATRIX).nnz == 0


# -- networkx ----------------------------------------------------------------------------------


def test_networkx_keeps_order_names_and_weights():
    given_graph = nx.DiGraph()
    given_graph.add_edge("z", (1, 2), weight=0.5)
    given_graph.add_edge((1, 2), 7)
    graph = as_graph(given_graph)
    assert graph.nodes.tolist() == ["z", (1, 2), 7]
    assert edges(graph) == {("z", (1, 2)): 0.5, ((1, 2), 7): 1.0}
    assert edges(as_graph(given_graph, weight=None)) == {("z", (1, 2)): 1.0, ((1, 2), 7): 1.0}


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


def test_undirected_networkx_graphs_have_both_directions():
    assert edges(as_graph(nx.path_graph(2))) == {(0, 1): 1.0, (1, 0): 1.0}


def test_undirected_takes_the_greater_weight():
    graph = as_graph(np.array([[1, 2, 0.5], [2, 1, 3.0]]), undirected=True)
    assert edges(graph) == {(1, 2): 3.0, (2, 1): 3.0}


def test_nodes_without_edges_are_kept():
    assert len(as_graph(nx.empty_graph(3, create_using=nx.DiGraph)).nodes) == 3


# -- bad files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("g.txt", "", "expected one edge a line, the file has none"),
        ("g.txt", "# nothing\n\n", "expected one edge a line, the file has none"),
        ("g.csv", "source,target,weight\n", "only a header"),
        ("g.txt", "1\n2\n", "line 1 has 1"),
        ("g.txt", "# four\n1 2 3 4\n", "line 2 has 4"),
        (
            "g.txt",
            "# ragged\n1 2\n3 4 5\n",
            "expected 2 columns as in the first line, line 3 has 3",
        ),
        ("g.txt", "a b\nc\n", "line 2 has 1"),
        ("g.txt", "1 2 0.5\n1 3 heavy\n", "expected a number as weight, line 2 has 'heavy'"),
        ("g.txt", "1 2 n/a\n2 3 0.5\n", "expected a number as weight, line 1 has 'n/a'"),
        ("g.csv", "a,1,\nb,2,0.5\n", "expected a number as weight, line 1 has ''"),
        ("g.txt", "1 2 0.5\n1 3 -2\n", "edge 1 -> 3 has -2.0"),
        ("g.csv", '"a,b\nc,d\n', "line 1 has 1"),
        ("g.csv", "a," + "b" * 2**18 + "\n", "larger than field limit"),
        ("g.txt", "1 2 nan\n", "edge 1 -> 2 has nan"),
        ("g.txt", "1 2 inf\n", "edge 1 -> 2 has inf"),
        ("g.txt", b"\x89PNG\xff\xfe\x00", "expected text in UTF-8"),
        ("g.txt.gz", b"1 2\n", "damaged"),
        ("g.txt.gz", gzip.compress(b"1 2\n" * 99, mtime=0)[:-9], "damaged"),
        ("g.txt.bz2", b"1 2\n", "damaged"),
        ("g.mtx", "1 2\n", "Not a Matrix Market file"),
        ("g.mtx", "", "Not a Matrix Market file"),
        ("g.mtx.gz", b"1 2\n", "damaged"),
        (
            "g.mtx",
            "%%MatrixMarket matrix coordinate pattern general\n2 3 1\n1 3\n",
            "square adjacency matrix, this one is 2 x 3",
        ),
        (
            "g.mtx",
            "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 2 -1\n",
            "edge 0 -> 1 has -1.0",
        ),
        (
            "g.mtx",
            "%%MatrixMarket matrix coordinate complex general\n1 1 1\n1 1 1 1\n",
            "real numbers, not complex128",
        ),
        ("g.npz", b"PK", "expected an .npz archive"),
        ("g.npz", "", "expected an .npz archive"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(write, name, content, complaint):
    path = write(name, content)
    with pytest.raises(ValueError) as caught:
        read_graph(path)
    message = str(caught.value)
    assert complaint in message
    assert message.startswith(str(path))
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"votes": [1]}, "the archive holds ['votes']"),
        ({"indptr": [0, 1], "indices": [5]}, "indices"),
        ({"indptr": [0, 2], "indices": [0]}, ""),
        ({"indptr": [0, 1, 1], "indices": [2], "shape": [2, 3]}, "this one is 2 x 3"),
        ({"indptr": [0, 1], "indices": [0], "data": [-1.0]}, "edge 0 -> 0 has -1.0"),
        ({"indptr": [0], "indices": []}, "at least one row"),
    ],
)
def test_bad_archives_are_refused_in_one_sentence(tmp_path, arrays, complaint):
    path = tmp_path / "g.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError) as caught:
        read_graph(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_graph(tmp_path / "absent.txt")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_graph(tmp_path)


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


def test_a_graph_needs_a_name_for_each_node():
    with pytest.raises(ValueError, match="each of 3 nodes, not 2"):
        Graph(np.arange(2), MATRIX)


@pytest.mark.parametrize("nodes", [np.array(["b", "a", "b"]), [("x", 1), 2, ("x", 1)]])
def test_two_nodes_cannot_have_one_name(nodes):
    with pytest.raises(ValueError, match=r"occurs twice\.$"):
        Graph(nodes, MATRIX)


def test_a_dask_array_of_edges_is_refused_and_not_read():
    def read(block):
        raise AssertionError("a block was computed")

    dask_edges = da.zeros((10**7, 2), chunks=10**6, dtype=int).map_blocks(
        read, meta=np.empty((0, 2))
    )
    with pytest.raises(ValueError, match=r"pass `graph\.compute\(\)`"):
        as_graph(dask_edges)
