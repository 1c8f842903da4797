"""Graph files: compressed, open, damaged."""

from __future__ import annotations

import bz2
import gzip

import pytest

from dask_coded.graph import read_graph

from .content import edges

INTEGERS = "# from to\n30 1412\n30\t3352\n\n5 30\n30 1412\n"


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress)])
@pytest.mark.parametrize("text", [INTEGERS, INTEGERS.replace("1412", "x")])
def test_compressed_files_read_as_plain_ones(write, suffix, pack, text):
    plain = read_graph(write("g.txt", text))
    packed = read_graph(write(f"g.txt.{suffix}", pack(text.encode())))
    assert edges(packed) == edges(plain)


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
        ("g.csv", '"a","' + "b" * 2**18 + '"\n', "larger than field limit"),
        ("g.csv", "a b\nc " + "d" * 2**20 + "\n", "line 2 has more than 393,216 bytes"),
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


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_graph(tmp_path / "absent.txt")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_graph(tmp_path)
