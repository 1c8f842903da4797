"""Edge lists in text files."""

from __future__ import annotations

import io
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.graph import edge_lists, read_graph

from .content import edges


def test_integer_ids_comments_and_duplicates(write):
    graph = read_graph(write("g.txt", "# from to\n30 1412\n30\t3352\n\n5 30\n30 1412\n"))
    assert graph.nodes.tolist() == [5, 30, 1412, 3352]
    assert graph.nodes.dtype == np.int64
    assert edges(graph) == {(30, 1412): 1.0, (30, 3352): 1.0, (5, 30): 1.0}


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


# -- separators --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ada\tcy\t0,5", {("ada", "cy"): 0.5}),
        ("ada;cy;0,5", {("ada", "cy"): 0.5}),
        ("ada;cy;1.5", {("ada", "cy"): 1.5}),
        ("Smith, J\tLee, K", {("Smith, J", "Lee, K"): 1.0}),
        ("a;b\tc|d", {("a;b", "c|d"): 1.0}),
        ("ada|cy", {("ada", "cy"): 1.0}),
        ("ada | cy | 2", {("ada", "cy"): 2.0}),
        ("sp|P1|X sp|Q1|Y", {("sp|P1|X", "sp|Q1|Y"): 1.0}),
        ("New York;Bonn", {("New York", "Bonn"): 1.0}),
        ("Paris,New York,2", {("Paris", "New York"): 2.0}),
        ('"New York" "Bonn, Rhein" 2', {("New York", "Bonn, Rhein"): 2.0}),
        ("5\" 6'", {('5"', "6'"): 1.0}),
        ("1;2;0,5", {(1, 2): 0.5}),
        ("1|2|3", {(1, 2): 3.0}),
    ],
)
def test_tabs_come_before_other_marks_and_these_before_blanks(write, line, expected):
    assert edges(read_graph(write("g.txt", line + "\n"))) == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("ada cy 0,5", "line 1 has commas and blanks, which may be read in several ways"),
        ("ada cy 1,000", "line 1 has commas and blanks, which may be read in several ways"),
        ("Smith,J Lee,K", "line 1 has commas and blanks, which may be read in several ways"),
        ("a;b,c", "line 1 has semicolons and commas, which may be read in several ways"),
        ("a,b|c", "line 1 has commas and bars, which may be read in several ways"),
        ("1,2,0.5,New York", "line 1 has 4, separated by commas"),
        ("a b c d", "line 1 has 4, separated by blanks"),
        ("1 2\n3 4 5", "expected 2 columns as in the first line, line 2 has 3"),
        ("1\t\t2", "expected a source and a target, one of line 1 is empty"),
        ("a,,2", "expected a source and a target, one of line 1 is empty"),
        ("1,2 5", "expected one kind of separator, line 1 has commas and blanks"),
        ("1\t2 0.5", "expected one kind of separator, line 1 has tabs and blanks"),
    ],
)
def test_a_line_with_several_meanings_is_refused_and_names_the_option(write, line, complaint):
    with pytest.raises(ValueError, match="`delimiter=`") as caught:
        read_graph(write("g.txt", line + "\n"))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("line", "delimiter", "expected"),
    [
        ("ada cy 0,5", " ", {("ada", "cy"): 0.5}),
        ("ada  \tcy 0,5e1", " ", {("ada", "cy"): 5.0}),
        ("Smith,J Lee,K", " ", {("Smith,J", "Lee,K"): 1.0}),
        ("a;b,c", ",", {("a;b", "c"): 1.0}),
        ("a;b,c", ";", {("a", "b,c"): 1.0}),
        ("1:2:0.5", ":", {(1, 2): 0.5}),
        ("a b\tc\t2", "\t", {("a b", "c"): 2.0}),
    ],
)
def test_delimiter_says_what_separates_columns(write, line, delimiter, expected):
    assert edges(read_graph(write("g.txt", line), delimiter=delimiter)) == expected


@pytest.mark.parametrize("line", ["a;b;1,000", "a\tb\t-12,345,678"])
def test_a_weight_with_commas_of_thousands_is_refused(write, line):
    with pytest.raises(ValueError, match="may have a decimal comma or one of thousands"):
        read_graph(write("g.txt", line))


@pytest.mark.parametrize("delimiter", ["", "::", '"', "\n", 7])
def test_a_delimiter_is_one_character(write, delimiter):
    with pytest.raises(ValueError, match="Argument 'delimiter' must be one character"):
        read_graph(write("g.txt", "a b\n"), delimiter=delimiter)


# -- comments and headers ----------------------------------------------------------------------


def test_names_that_begin_as_comments_are_kept_on_request(write):
    path = write("g.txt", "#a %b\n%b #c\n")
    assert edges(read_graph(path, comments=None)) == {("#a", "%b"): 1.0, ("%b", "#c"): 1.0}
    assert edges(read_graph(path, comments="%")) == {("#a", "%b"): 1.0}
    assert edges(read_graph(path, comments=["#", "//"])) == {("%b", "#c"): 1.0}
    with pytest.raises(ValueError, match="has none: `comments=None` keeps lines that begin as"):
        read_graph(path)
    with pytest.raises(ValueError, match="Argument 'comments' must be a mark"):
        read_graph(path, comments=[""])


@pytest.mark.parametrize(
    "header",
    ["source,target", "Source, Target", '"from","to"', "FromNodeId\tToNodeId", "src dst"],
)
def test_a_header_above_names_is_recognised(write, header):
    mark = next((mark for mark in ",\t" if mark in header), " ")
    path = write("g.txt", f"{header}\na{mark}b\n")
    assert edges(read_graph(path)) == {("a", "b"): 1.0}
    assert len(edges(read_graph(path, header=False))) == 2


@pytest.mark.parametrize("first", ["ada,cy,NA", "ada,cy,$5"])
def test_a_first_edge_whose_weight_is_no_number_is_no_header(write, first):
    with pytest.raises(ValueError, match="line 1"):
        read_graph(write("g.txt", f"{first}\nbob,cy,2\n"))


def test_header_says_whether_the_first_line_is_one(write):
    path = write("g.txt", "# a comment\n\n1 2\n2 3\n")
    assert edges(read_graph(path, header=True)) == {(2, 3): 1.0}
    assert edges(read_graph(path, header=False)) == {(1, 2): 1.0, (2, 3): 1.0}
    words = write("h.txt", "a b\n1 2\n")
    assert edges(read_graph(words)) == {(1, 2): 1.0}
    assert edges(read_graph(words, header=False)) == {("a", "b"): 1.0, ("1", "2"): 1.0}
    with pytest.raises(ValueError, match="only a header: `header=False` reads it as an edge"):
        read_graph(write("i.txt", "source target\n"))


# -- files of numbers that are no edge lists ---------------------------------------------------


@pytest.mark.parametrize(
    "text", ["5 5\n2 5\n1 3\n2 4\n3 5\n1 4\n", "3 2\n2\n1 3\n2\n", "3 3 1\n2 3\n1 3\n1 2\n"]
)
def test_metis_is_named_where_it_is_certain(write, text):
    with pytest.raises(ValueError, match="the file is METIS"):
        read_graph(write("g.graph", text))


@pytest.mark.parametrize("text", ["1 1\n1 1\n", "2 2\n1 2\n2 1\n", "3 3\n1 2\n2 3\n3 1\n"])
def test_edge_lists_that_begin_as_metis_are_read(write, text):
    pairs = [tuple(map(int, line.split())) for line in text.splitlines()]
    assert edges(read_graph(write("g.txt", text))) == dict.fromkeys(pairs, 1.0)


def test_a_matrix_as_text_is_refused(write):
    with pytest.raises(ValueError, match="3 lines of 3 numbers that are 0 or 1 may be a matrix"):
        read_graph(write("g.txt", "0 1 0\n1 0 1\n0 1 0\n"))
    graph = read_graph(write("g.txt", "0 1 0\n1 0 1\n0 1 0\n"), header=False)
    assert edges(graph) == {(0, 1): 0.0, (1, 0): 1.0}
    with pytest.raises(ValueError, match=r"scipy\.sparse\.csr_array\(numpy\.loadtxt\(path\)\)"):
        read_graph(write("g.txt", "0 1 0 1\n1 0 0 1\n1 1 0 0\n0 0 1 0\n"))


@pytest.mark.parametrize("separator", [",", "\t", " "])
def test_a_quote_that_does_not_end_joins_no_lines(write, separator):
    text = f'a{separator}"b\nc{separator}"d\n"e"{separator}f\n'
    found = edges(read_graph(write("g.txt", text)))
    assert found == {("a", "b"): 1.0, ("c", "d"): 1.0, ("e", "f"): 1.0}


@pytest.mark.parametrize("name", ["é", "名前", "\U0001f600", "\U0010fffd", "١"])
def test_names_in_other_scripts_are_parsed_without_numpy(write, monkeypatch, name):
    """Its parser of integers reads memory that is not its own for them."""
    monkeypatch.setattr(np, "loadtxt", None)
    graph = read_graph(write("g.txt", f"{name}\t2\n2\t3\n"))
    assert edges(graph) == {(name.strip(), "2"): 1.0, ("2", "3"): 1.0}


# -- many lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["7 8", "007 8", "x 8", '"7" 8', f"{2**64} 8"])
def test_names_mean_the_same_in_all_blocks_of_a_file(write, monkeypatch, last):
    monkeypatch.setattr(edge_lists, "_BLOCK", 16)
    lines = ["from to", "1 2", "# x", "", "2 30", "30 -4", "5 6", "6 1", last]
    names = [tuple(line.replace('"', "").split()) for line in lines if line[:1] not in ("", "#")]
    integers = last in ("7 8", '"7" 8')
    expected = [(int(a), int(b)) for a, b in names[1:]] if integers else names
    # Only above integers is a header certain, unless its words are known.
    header = None if integers else False
    graph = read_graph(write("g.txt", "\n".join(lines)), header=header)
    assert edges(graph) == dict.fromkeys(expected, 1.0)


@given(
    st.lists(
        st.tuples(
            *2 * [st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)]
        ),
        min_size=1,
    )
)
def test_any_names_between_tabs_are_kept(pairs):
    quoted = [tuple('"' + name.replace('"', '""') + '"' for name in pair) for pair in pairs]
    for written in (quoted, pairs) if not any('"' in a + b for a, b in pairs) else (quoted,):
        text = "".join(f"{a}\t{b}\n" for a, b in written)
        graph = read_graph(io.StringIO(text), comments=None, header=False)
        found = {(str(a), str(b)) for a, b in edges(graph)}
        assert found == set(pairs)


def test_a_long_name_takes_the_memory_of_one_name(write):
    path = write("g.txt", "x" * 60_000 + " y\n" + "".join(f"{i} y\n" for i in range(5_000)))
    tracemalloc.start()
    graph = read_graph(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(graph.nodes) == 5_002
    assert peak < 20_000_000  # with NumPy's strings more than a billion
