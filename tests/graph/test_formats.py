"""Formats are recognised by content, and named if they are not read."""

from __future__ import annotations

import io
import json
from itertools import count

import networkx as nx
import numpy as np
import pytest

from dask_coded.graph import read_graph

from .content import edges

PATH = nx.path_graph(["a", "b", "c"], create_using=nx.DiGraph)
MATRIX_MARKET = "%%MatrixMarket matrix coordinate real general\n% x\n2 2 2\n1 2 5\n2 1 1\n"


@pytest.mark.parametrize("name", ["g.mtx", "g.txt", "g.dat", "g.edges", "g.csv", "g"])
@pytest.mark.parametrize("change", [str, lambda s: "\ufeff" + s, lambda s: s.replace("\n", "\r\n")])
def test_matrix_market_is_recognised_whatever_the_file_is_called(write, name, change):
    assert edges(read_graph(write(name, change(MATRIX_MARKET)))) == {(0, 1): 5.0, (1, 0): 1.0}


@pytest.mark.parametrize("name", ["g.npz", "g.zip", "g.txt", "g"])
def test_an_archive_is_recognised_whatever_it_is_called(write, name):
    content = io.BytesIO()
    np.savez(content, indptr=[0, 1, 2], indices=[1, 0])
    assert len(read_graph(write(name, content.getvalue())).nodes) == 2


def written(function, *args):
    file = io.BytesIO()
    function(PATH, file, *args)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            json.dumps(nx.node_link_data(PATH, edges="edges")),
            "JSON: read it with networkx.node_link_graph",
        ),
        (json.dumps(list(PATH.edges)), "JSON"),
        ("[1, 2]", "JSON"),
        (written(nx.write_pajek), "Pajek: read it with networkx.read_pajek"),
        ("% a comment\n*Network x\n*Vertices 2\n", "Pajek"),
        (written(nx.write_gml), "GML: read it with networkx.read_gml"),
        ('Creator "x"\ngraph\n[\n  node\n  [\n', "GML"),
        (written(nx.write_graphml), "XML: read it with networkx.read_graphml"),
        (written(nx.write_gexf), "XML: read it with networkx.read_graphml or networkx.read_gexf"),
        (written(nx.write_edgelist), "attributes: read it with networkx.read_edgelist"),
        (written(nx.write_multiline_adjlist), "read it with networkx.read_multiline_adjlist"),
        (written(nx.write_adjlist), "as in the first line, line 6 has 1"),
        ("c made by x\nc\np edge 3 2\ne 1 2\ne 2 3\n", "DIMACS"),
        ("p sp 3 1\na 1 2 4\n", "DIMACS"),
        ("digraph {\n  a -> b;\n}\n", "DOT"),
        ("// x\nstrict graph g { a -- b }\n", "DOT"),
        ("nodedef>name VARCHAR\n", "GDF"),
        ("<!DOCTYPE html>\n<html></html>", "a web page"),
        (">>graph6<<A_\n", "graph6"),
        (b"\x93NUMPY\x01\x00", "NumPy's .npy"),
        (b"PAR1\x15\x04", "Parquet"),
        (b"\xfd7zXZ\x00\x00", "compressed by xz"),
        (b"\x28\xb5\x2f\xfd\x00", "compressed by Zstandard"),
        ("a b\n".encode("utf-16"), "text in UTF-16: save it in UTF-8"),
        ("a b\n".encode("utf-16-le"), "the file is binary"),
        (b"\x7fELF\x02\x01\x01\x00", "the file is binary"),
    ],
    ids=count(),  # because some contents hold the time, which would become part of the names
)
def test_other_formats_are_named(write, content, complaint):
    path = write("g.txt", content)
    with pytest.raises(ValueError) as caught:
        read_graph(path)
    message = str(caught.value)
    assert complaint in message
    assert message.startswith(f"{path}: expected ")
    assert "\n" not in message


@pytest.mark.parametrize(
    "first", ["graph theory", "p 7", "c 1", "[a] b", "<http://a> <http://b>", "*a b", "{a} b"]
)
def test_names_that_look_like_other_formats_are_names(write, first):
    one, two = first.split()
    assert set(read_graph(write("g.txt", f"{first}\n{two} x\n")).nodes) == {one, two, "x"}


@pytest.mark.parametrize(
    "part", ["\n", "c\n", "c x\n", "#\n", "//\n ", "%\n\n", "<!---->", "{} ", "} ", "[ ", "x x"]
)
def test_a_beginning_that_repeats_itself_is_recognised_at_once(part):
    """Regular expressions may take exponential time to find that they do not match."""
    for start in ("", "<?xml>"):
        try:
            read_graph(io.StringIO(start + part * 5_000 + "x"))
        except ValueError as error:
            assert str(error).startswith("<StringIO>: expected")
