"""Where graph files come from, and how long they may be."""

from __future__ import annotations

import bz2
import gzip
import io
import os

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.graph import read_graph, sources

from .content import edges

TEXT = "# é\n1 2\n2 3\n"
EXPECTED = {(1, 2): 1.0, (2, 3): 1.0}


@pytest.mark.parametrize(
    "file",
    [
        io.StringIO(TEXT),
        io.BytesIO(TEXT.encode()),
        io.BytesIO(gzip.compress(TEXT.encode())),
        io.BytesIO(bz2.compress(TEXT.encode())),
    ],
)
def test_open_files_of_text_and_bytes_are_read(file):
    assert edges(read_graph(file)) == EXPECTED
    assert not file.closed


def test_an_open_file_is_read_from_where_it_is(write):
    with open(write("g.txt", "not a line of two columns\n" + TEXT), encoding="utf-8") as file:
        file.readline()
        assert edges(read_graph(file)) == EXPECTED


def test_a_pipe_that_brings_one_byte_at_a_time_is_read():
    class Slow(io.RawIOBase):
        def __init__(self, content):
            self.left = content

        def readable(self):
            return True

        def read(self, size=-1):
            found, self.left = self.left[:1], self.left[1:]
            return found

    archive = io.BytesIO()
    sp.save_npz(archive, sp.csr_array(np.eye(2)))
    market = b"%%MatrixMarket matrix coordinate pattern general\n2 2 2\n1 1\n2 2\n"
    for content in (market, gzip.compress(market), archive.getvalue()):
        assert edges(read_graph(Slow(content))) == {(0, 0): 1.0, (1, 1): 1.0}
    assert edges(read_graph(Slow(TEXT.encode()))) == EXPECTED


def test_an_error_names_an_open_file(write):
    with open(write("g.txt", "1\n"), "rb") as file:
        with pytest.raises(ValueError, match=r"/g\.txt: expected lines of 2 columns"):
            read_graph(file)
    with pytest.raises(ValueError, match=r"^<BytesIO>: expected lines of 2 columns"):
        read_graph(io.BytesIO(b"1\n"))
    with pytest.raises(TypeError, match="expected a path or an open file, not list"):
        read_graph([(1, 2)])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_devices_and_pipes_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(OSError, match="is a device or a pipe, which may never end"):
            read_graph(path)


def test_a_path_with_control_characters_is_shown_with_escapes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"/a\\x1b\[2J' does not exist"):
        read_graph(tmp_path / "a\x1b[2J")


# -- limits ------------------------------------------------------------------------------------


@pytest.fixture
def megabyte(monkeypatch):
    """Only a megabyte of memory is available."""
    monkeypatch.setattr(sources, "available_memory", lambda: 2**20)


@pytest.mark.usefixtures("megabyte")
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
@pytest.mark.parametrize("line", [b"1 2\n", b"a b\n", b"# a comment\n", b"\n"])
def test_a_file_of_more_lines_than_memory_holds_is_refused(write, pack, line):
    path = write("g", pack(line * 200_000))
    with pytest.raises(ValueError, match=r"1\.00 MiB of memory that are available"):
        read_graph(path)


@pytest.mark.usefixtures("megabyte")
def test_matrices_that_memory_does_not_hold_are_refused(write):
    banner = "%%MatrixMarket matrix coordinate pattern general\n"
    for content in (banner + "2 2 50000\n", banner + "70000 70000 1\n", banner + "% x\n" * 10**6):
        with pytest.raises(ValueError, match=r"1\.00 MiB"):
            read_graph(write("g.mtx", content))
    archive = io.BytesIO()
    np.savez_compressed(archive, indptr=np.zeros(10**6, np.int64), indices=[0])
    assert archive.tell() < 10_000
    for name, content in (("g.npz", archive.getvalue()), ("g.gz", gzip.compress(bytes(2**22)))):
        with pytest.raises(ValueError, match=r"1\.00 MiB|binary"):
            read_graph(write(name, content))
    with pytest.raises(ValueError, match=r"longer than the 1\.00 MiB"):
        read_graph(io.BytesIO(b"PK\x03\x04" + bytes(2**21)))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("start", [b"1 2\n", b"", b"a b\r"])
def test_a_line_without_end_is_refused(write, pack, start):
    path = write("g.txt", pack(start + b"x" * 3_000_000))
    line = 2 if start.endswith(b"\n") else 1
    with pytest.raises(ValueError, match=f"line {line} has more than 393,216 bytes"):
        read_graph(path)


@given(st.binary(max_size=60), st.sampled_from([b"", b"%%MatrixMarket ", b"1 2\n", b"\x1f\x8b"]))
def test_any_bytes_are_a_graph_or_one_sentence(content, start):
    try:
        read_graph(io.BytesIO(start + content))
    except ValueError as error:
        assert "\n" not in str(error)
        assert str(error).isprintable()
