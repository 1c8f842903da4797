"""Edge lists: text with a source, a target and optionally a weight on each line.

Without ``delimiter`` the first line decides what separates columns: tabs, else semicolons,
commas or bars, else blanks. A first line that may be read in two ways is an error, which says what
to pass.

A file is read once, in blocks of lines. Blocks of integers are parsed by NumPy. All others are
parsed as text, which takes about five times as long. Since only integers in their usual form count
as integers, they turn back into the same names if a later block has a name that is none.
"""

from __future__ import annotations

import csv
import re
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import numpy as np

from dask_coded.graph.adjacency import Array, Graph, from_names, from_numbers

_BLOCK = 2**16
# Names that NumPy would read as other integers, such as 007 or +7. It may also be a weight.
_PADDED = re.compile(r"0(?<![\w.+-]0)\d|\+(?<![\w.]\+)|-0(?<![\w.]-0)(?:\d|(?![\w.]))")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_BLANK = re.compile(r"[^\S\n]")
_QUOTED = re.compile(r'"[^"]*"')
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+")
# Also what is no valid weight, such as 1_0. The first line is no header then.
_LIKE_A_NUMBER = re.compile(r"[+-]?(?:[.,]?\d|inf|nan)", re.IGNORECASE)
_MISSING = {"na", "n/a", "none", "null"}
_COLUMNS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars", " ": "blanks"}
_ADVICE = "`delimiter=` (on the command line --delimiter) says what separates columns"
_ANYWAY = "`header=False` (--no-header) reads it as an edge list"
# Headers that are recognised above names too, without `id`, `node`, `name` and punctuation.
_HEADERS = {
    *[("source", word) for word in ("target", "destination", "dest", "sink")],
    *[("src", word) for word in ("dst", "dest", "tgt", "target")],
    ("from", "to"),
    ("origin", "destination"),
    ("follower", "followee"),
    ("citing", "cited"),
}


def check_options(delimiter: Any, comments: Any) -> tuple[str, ...]:
    """Check the options of :func:`read_edges`, and return the marks of comments as a tuple.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    one = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter not in '"\r\n'
    if delimiter is not None and not one:
        raise ValueError(
            f"Argument 'delimiter' must be one character that is no quote, it is {delimiter!r}."
        )
    marks = (comments,) if isinstance(comments, str) else tuple(comments or ())
    if not all(isinstance(mark, str) and mark for mark in marks):
        raise ValueError(
            f"Argument 'comments' must be a mark, several marks or None, it is {comments!r}."
        )
    return marks


def read_edges(
    file: TextIO, delimiter: str | None, marks: tuple[str, ...], header: bool | None
) -> Graph:
    """Read an edge list, see :func:`~dask_coded.graph.readers.read_graph` for the parameters."""
    blocks = _blocks(file)
    commented = False
    for start, lines in blocks:
        if first := next(_content(start, lines, marks), None):
            break
        commented = commented or any(map(str.strip, lines))
    else:
        advice = ": `comments=None` keeps lines that begin as comments do" if commented else ""
        raise ValueError(f"expected one edge a line, the file has none{advice}.")
    number, line = first
    layout = _layout(number, line, delimiter)
    role = _role(layout, line, header)
    if role != "edge":
        lines = lines[number + 1 - start :]
        start = number + 1
    found = _Edges()
    end = start + len(lines)
    try:
        _add(found, start, lines, marks, layout)
        for start, lines in blocks:
            end = start + len(lines)
            _add(found, start, lines, marks, layout)
    except _Ragged:
        end += sum(len(more) for _, more in blocks)
        _check_no_metis(line, below=end - 1 - number)
        raise
    if role == "perhaps" and not (found.ends and found.names is None):
        source, target = layout.row(number, line)
        found.add([source], [target], [])
    if not found.ends:
        advice = "" if header else ": `header=False` reads it as an edge"
        raise ValueError(f"expected one edge a line, the file has only a header{advice}.")
    if found.names is None and header is None:
        _check_no_matrix(*found.columns())
    return found.graph()


# -- the layout of a file, from its first line -------------------------------------------------


class _Ragged(ValueError):
    """A line has not as many columns as the first one."""


@dataclass(frozen=True)
class _Layout:
    """How the lines of a file are divided: by a character, or by any white space if it is " "."""

    delimiter: str
    width: int

    def row(self, number: int, line: str) -> list[str]:
        """Return the fields of a line, the first two of which are names."""
        fields = _fields(line, self.delimiter)
        if len(fields) != self.width:
            raise _Ragged(
                f"expected {self.width} columns as in the first line, line {number} has "
                f"{len(fields)}: {_ADVICE}."
            )
        if not (fields[0] and fields[1]):
            raise ValueError(
                f"expected a source and a target, one of line {number} is empty: {_ADVICE}."
            )
        return fields

    def weight(self, number: int, text: str) -> float:
        """Return a weight, which may have a decimal comma if commas do not separate columns."""
        plain = text
        if self.delimiter != "," and _THOUSANDS.fullmatch(text):
            raise ValueError(
                f"expected a number as weight, {reprlib.repr(text)} in line {number} may have a "
                "decimal comma or one of thousands: write it with a decimal point."
            )
        if self.delimiter != "," and _DECIMAL_COMMA.fullmatch(text):
            plain = text.replace(",", ".")
        if (weight := _number(plain)) is None:
            raise ValueError(
                f"expected a number as weight, line {number} has {reprlib.repr(text)}."
            )
        return weight


def _layout(number: int, line: str, delimiter: str | None) -> _Layout:
    given, delimiter = delimiter, delimiter or _delimiter(number, _QUOTED.sub("", line))
    fields = _fields(line, delimiter)
    parts = line.replace(delimiter, " ").split()
    if not given and len(fields) == 2 and len(parts) == 3 and None not in map(_number, parts):
        raise ValueError(
            f"expected one kind of separator, line {number} has {_COLUMNS[delimiter]} and blanks: "
            f"{_ADVICE}."
        )
    if len(fields) in (2, 3):
        return _Layout(delimiter, len(fields))
    advice = _ADVICE
    if len(fields) > 3 and all(_number(field) is not None for field in fields):
        advice += ", or, if it is a matrix, pass `scipy.sparse.csr_array(numpy.loadtxt(path))`"
    raise ValueError(
        "expected lines of 2 columns (source, target) or 3 (and a weight), "
        f"line {number} has {len(fields)}, separated by "
        f"{_COLUMNS.get(delimiter, repr(delimiter))}: {advice}."
    )


def _delimiter(number: int, line: str) -> str:
    """Return what separates the columns of a line without its quoted parts.

    A blank may be part of a name between other marks. So another mark separates columns, unless the
    line may as well be one of blanks whose names or numbers contain that mark.
    """
    if "\t" in line:
        return "\t"
    parts = line.split()
    marks = [mark for mark in ";," if mark in line]
    if len(line.split("|")) in (2, 3):  # others may be parts of names
        marks.append("|")
    if not marks:
        return " "
    mark, *others = marks
    fields = [field.strip() for field in line.split(mark)]
    if others:
        # A decimal comma beside semicolons is the only mixture with one meaning.
        clear = len(fields) == 3 and others == [","] and _DECIMAL_COMMA.fullmatch(fields[2])
        if clear and "," not in fields[0] + fields[1]:
            return mark
    else:
        within = [mark in part.strip(mark) for part in parts]
        names = within[:2] == [True, True] and not (len(fields) == 3 and _number(fields[2]))
        last = mark == "," and len(parts) == 3 and _DECIMAL_COMMA.fullmatch(parts[2])
        if len(parts) not in (2, 3) or not (names or (last and not any(within[:2]))):
            return mark
        others = [" "]
    found = " and ".join(_COLUMNS[each] for each in (mark, *others))
    raise ValueError(
        f"expected one kind of separator, line {number} has {found}, which may be read in several "
        f"ways: {_ADVICE}."
    )


def _role(layout: _Layout, line: str, header: bool | None) -> Literal["header", "edge", "perhaps"]:
    """Return what the first line is. Above integers it may turn out to be a header."""
    if header is not None:
        return "header" if header else "edge"
    fields = _fields(line, layout.delimiter)
    if not all(fields[:2]) or any(_number(name) is not None for name in fields[:2]):
        return "edge"
    if layout.width == 3:
        word = any(map(str.isalpha, fields[2])) and fields[2].lower() not in _MISSING
        return "header" if word and not _LIKE_A_NUMBER.match(fields[2]) else "edge"
    source, target = (re.sub(r"[\W_]|node|name|id", "", name.lower()) for name in fields)
    return "header" if (source, target) in _HEADERS else "perhaps"


def _fields(line: str, delimiter: str) -> list[str]:
    if '"' not in line:
        if delimiter == " ":
            return line.split()
        return [field.strip() for field in line.split(delimiter)]
    return _unquoted([line], delimiter)[0]


def _unquoted(lines: list[str], delimiter: str) -> list[list[str]]:
    """Return the fields of lines that have quotes."""
    if delimiter == " ":
        lines = [" ".join(line.split()) for line in lines]
    rows = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    return [[field.strip() for field in row] for row in rows]


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


# -- its lines ---------------------------------------------------------------------------------


class _Edges:
    """Edges between integers, until a name is none; then between the numbers of names."""

    def __init__(self) -> None:
        self.ends: list[Array] = []
        self.weights: list[Array] = []
        self.names: dict[str, int] | None = None

    def add(self, sources: Sequence[str], targets: Sequence[str], weights: list[float]) -> None:
        """Add edges that were parsed as text."""
        self.weights.append(np.array(weights))
        if self.names is None:
            if all(map(_INTEGER.fullmatch, {*sources, *targets})):
                try:
                    ends = [[int(name) for name in names] for names in (sources, targets)]
                    self.ends.append(np.array(ends, dtype=np.int64))
                    return
                except OverflowError:
                    pass  # names of more than 64 bits
            self.names = {}
            self.ends = [self._numbered([map(str, e.tolist()) for e in b]) for b in self.ends]
        self.ends.append(self._numbered([sources, targets]))

    def _numbered(self, ends: Iterable[Iterable[str]]) -> Array:
        index = self.names
        assert index is not None
        return np.array([[index.setdefault(name, len(index)) for name in names] for names in ends])

    def columns(self) -> tuple[Array, Array]:
        """Return the ends, shape (2, m), and the weights, shape (m,) or (0,) without any."""
        weights = np.concatenate(self.weights) if self.weights else np.array([])
        return np.concatenate(self.ends, axis=1), weights

    def graph(self) -> Graph:
        """Return the graph of all edges."""
        ends, found = self.columns()
        weights = found if len(found) else None
        if self.names is None:
            return from_numbers(ends, weights)
        return from_names(self.names, ends, weights)


def _add(
    found: _Edges, start: int, lines: list[str], marks: tuple[str, ...], layout: _Layout
) -> None:
    content = [text for line in lines if (text := line.strip()) and not text.startswith(marks)]
    if not content:
        return
    if found.names is None and (table := _integers(content, layout)) is not None:
        found.ends.append(np.stack([table["source"], table["target"]]))
        if layout.width == 3:
            found.weights.append(table["weight"])
        return
    if (columns := _texts(content, layout)) is not None:
        found.add(*columns)
        return
    # Line by line, to say which is wrong, or because a weight has a decimal comma.
    numbered = list(_content(start, lines, marks))
    rows = [layout.row(number, line) for number, line in numbered]
    weights = [
        layout.weight(number, row[2])
        for (number, _), row in zip(numbered, rows)
        if layout.width == 3
    ]
    found.add([row[0] for row in rows], [row[1] for row in rows], weights)


def _texts(content: list[str], layout: _Layout) -> tuple[list[str], list[str], list[float]] | None:
    """Return the columns of lines that are all in order, None for others."""
    text = "\n".join(content)
    if '"' in text:
        rows = _unquoted(content, layout.delimiter)
    elif layout.delimiter != " " and _BLANK.search(text):
        rows = [_fields(line, layout.delimiter) for line in content]
    else:
        by = None if layout.delimiter == " " else layout.delimiter
        rows = [line.split(by) for line in content]
    # A quote that does not end joins lines.
    if len(rows) != len(content) or set(map(len, rows)) != {layout.width}:
        return None
    sources, targets = [row[0] for row in rows], [row[1] for row in rows]
    texts = [row[2] for row in rows] if layout.width == 3 else []
    try:
        weights = list(map(float, texts))
    except ValueError:
        return None
    # Python would read 1_0 as a number.
    odd = "_" in "".join(texts) or not (all(sources) and all(targets))
    return None if odd else (sources, targets, weights)


def _integers(content: list[str], layout: _Layout) -> Array | None:
    """Return the columns of lines whose names are all integers, None for others."""
    text = "\n".join(content)
    # NumPy's parser may end the process at a character that is not ASCII: it looks up each of them
    # in the C library's table of 256.
    if not text.isascii() or _PADDED.search(text):
        return None
    # Split at any white space even if the first line has a tab, because files mix tabs and blanks.
    delimiter = None if layout.delimiter.isspace() else layout.delimiter
    columns = [("source", np.int64), ("target", np.int64), ("weight", np.float64)]
    with warnings.catch_warnings():
        # Older versions of NumPy only warn of integers that they have rounded.
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return np.loadtxt(
                content,
                dtype=columns[: layout.width],
                comments=None,
                delimiter=delimiter,
                ndmin=1,
            )
        except (ValueError, DeprecationWarning):
            return None


def _blocks(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yield lines, and the number of the first one from 1."""
    start = 1
    while lines := file.readlines(_BLOCK):
        yield start, lines
        start += len(lines)


def _content(start: int, lines: list[str], marks: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank or comments, with their numbers."""
    for number, line in enumerate(lines, start):
        if (text := line.strip()) and not text.startswith(marks):
            yield number, text


# -- files of numbers that are no edge lists ---------------------------------------------------


def _check_no_metis(first: str, below: int) -> None:
    """Check that the first of ragged lines does not count those below, as in METIS files."""
    counts = first.split()
    if len(counts) in (2, 3, 4) and all(map(str.isdecimal, counts)):
        nodes, edges = map(int, counts[:2])
        if nodes == below and edges <= nodes * (nodes - 1) // 2:
            raise _metis()


def _metis() -> ValueError:
    return ValueError(
        "expected an edge list, Matrix Market or .npz, the file is METIS, whose line i + 1 lists "
        f"the neighbours of node i: write one edge a line. {_ANYWAY}."
    )


def _check_no_matrix(ends: Array, weights: Array) -> None:
    """Check that numbers are not certainly a graph of METIS, and not perhaps a matrix."""
    nodes, edges = ends[:, 0]
    if not len(weights) and nodes == edges == ends.shape[1] - 1 > 2:
        # Every node has two neighbours. They are each other's neighbours, and not their own.
        pairs = {(node, other) for node, row in enumerate(ends[:, 1:].T, 1) for other in row}
        if len(pairs) == 2 * nodes and all((b, a) in pairs and a != b for a, b in pairs):
            raise _metis()
    if len(weights) == ends.shape[1] == 3 and {*ends.flat, *weights} <= {0, 1}:
        raise ValueError(
            "expected an edge list, 3 lines of 3 numbers that are 0 or 1 may be a matrix: pass "
            f"`scipy.sparse.csr_array(numpy.loadtxt(path))`. {_ANYWAY}."
        )
