"""Matrix Market files and archives of arrays."""

from __future__ import annotations

import gzip
import io
import zipfile
from itertools import count

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.graph import read_graph

from .content import edges

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


def test_the_last_of_equal_entries_counts_in_matrix_market_files(write):
    lines = "%%MatrixMarket matrix coordinate real general\n2 2 3\n1 2 5\n1 2 7\n2 1 1\n"
    assert edges(read_graph(write("g.mtx", lines))) == {(0, 1): 7.0, (1, 0): 1.0}


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


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"votes": [1]}, "the archive holds ['votes']"),
        ({"indptr": [0, 1], "indices": [5]}, "ind"),
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


def test_matrix_market_in_capital_letters_of_a_web_address(write):
    text = "%%MatrixMarket matrix coordinate pattern general\n2 2 1\n1 2\n"
    for name in ("WEB.MTX", "WEB.MTX.GZ", "WEB.Mtx.gz"):
        content = text.encode() if name == "WEB.MTX" else gzip.compress(text.encode())
        assert edges(read_graph(write(name, content))) == {(0, 1): 1.0}


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr", "dia"])
@pytest.mark.parametrize("index", [-1, 5, 2**31, 2**40])
def test_an_archive_whose_indices_are_out_of_range_is_refused(tmp_path, layout, index):
    sp.save_npz(tmp_path / "good.npz", sp.csr_array(np.diag([1.0, 2.0, 3.0])).asformat(layout))
    with np.load(tmp_path / "good.npz") as good:
        arrays = dict(good)
    name = {"coo": "row", "dia": "offsets"}.get(layout, "indices")
    name = name if name in arrays else "coords"
    arrays[name] = arrays[name].astype(np.int64)
    arrays[name].flat[0] = index
    np.savez(tmp_path / "g.npz", **arrays)
    if (layout, index) == ("dia", -1):
        assert edges(read_graph(tmp_path / "g.npz")) == {(1, 0): 1.0, (2, 1): 2.0}
        return
    with pytest.raises(ValueError, match=r"g\.npz: ") as caught:
        read_graph(tmp_path / "g.npz")
    assert "\n" not in str(caught.value)


def test_repeated_entries_in_an_archive_are_added_up(tmp_path):
    twice = sp.coo_array((np.array([200, 100], np.uint8), ([0, 0], [1, 1])), shape=(2, 2))
    sp.save_npz(tmp_path / "g.npz", twice)
    assert edges(read_graph(tmp_path / "g.npz")) == {(0, 1): 300.0}


@pytest.mark.parametrize(
    "sizes", ["1000000000000 1000000000000 1", "5 5 1000000000000", "9" * 25 + " 2 1"]
)
@pytest.mark.parametrize("layout", ["coordinate", "array"])
def test_sizes_that_no_memory_holds_are_refused_before_anything_is_allocated(write, sizes, layout):
    if layout == "array":
        sizes = sizes.rpartition(" ")[0]
        if sizes == "5 5":
            return
    text = f"%%MatrixMarket matrix {layout} real general\n{sizes}\n1 1 1\n"
    with pytest.raises(ValueError, match=r"of memory, .* are available|out of range"):
        read_graph(write("g.mtx", text))


def archive(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name.replace("_", "."), content)
    return file.getvalue()


def array_of(shape, content=b""):
    file = io.BytesIO()
    header = {"shape": shape, "fortran_order": False, "descr": "<i8"}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            archive(indptr_npy=array_of((10**12,), b"0" * 8), indices_npy=array_of((0,))),
            "array 'indptr' is damaged: its length is not that of (1000000000000,)",
        ),
        (archive(indptr_npy=b"junk", indices_npy=b""), "EOF"),
        (archive(a_txt=b"1 2"), "this one of zip holds other files, 'a.txt' among them"),
        (archive(), "the archive holds []"),
        (
            archive(indptr_npy=b"\x93NUMPY\x01\x00\x10\x00" + b"{'descr': [[[[[[", indices_npy=b""),
            "the archive holds no valid sparse matrix",
        ),
    ],
    ids=count(),  # because archives hold the time, which would become part of the names
)
def test_archives_made_to_harm_are_refused_in_one_sentence(write, content, complaint):
    with pytest.raises(ValueError) as caught:
        read_graph(write("g.npz", content))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arrays",
    [
        {"format": "coo", "shape": [10**12] * 2, "data": [1.0], "row": [0], "col": [0]},
        {"format": "dia", "shape": [10**12] * 2, "data": [[1.0]], "offsets": [0]},
        {
            "format": "bsr",
            "shape": [4, 4],
            "data": np.ones((1, 0, 0)),
            "indices": [0],
            "indptr": [0, 1],
        },
        {"format": "csr", "shape": [2, 2], "data": ["a"], "indices": [0], "indptr": [0, 1, 1]},
        {"format": "csr", "shape": [1, 1], "data": [1.0], "indices": [0.0], "indptr": [0, 1]},
        {"format": 3, "shape": [1, 1]},
        {"format": "csr"},
        {"indptr": 0, "indices": [0]},
        {"indptr": [0, 1], "indices": [0], "n": 10**12},
        {"indptr": [0, 1], "indices": [0], "data": np.array([{}], dtype=object)},
    ],
)
def test_arrays_of_the_wrong_kind_are_refused_in_one_sentence(write, arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    with pytest.raises(ValueError, match=r"g\.npz: ") as caught:
        read_graph(write("g.npz", file.getvalue()))
    assert "\n" not in str(caught.value)


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_damaged_archive_is_read_or_refused(changes):
    file = io.BytesIO()
    np.savez_compressed(file, indptr=np.arange(40), indices=np.zeros(39, int))
    content = bytearray(file.getvalue())
    for place, value in changes:
        content[place % len(content)] = value
    try:
        read_graph(io.BytesIO(bytes(content)))
    except ValueError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("symmetry", "values", "wanted"),
    [("symmetric", 2, 6), ("symmetric", 0, 6), ("skew-symmetric", 2, 3)],
)
def test_a_triangle_that_is_cut_off_is_refused(tmp_path, symmetry, values, wanted):
    """SciPy takes what is missing for zeros."""
    file = tmp_path / "cut.mtx"
    lines = [f"%%MatrixMarket matrix array real {symmetry}", "% a comment", "3 3"]
    file.write_text("\n".join([*lines, *["1.5"] * values, ""]))
    with pytest.raises(ValueError, match=f"cut off: it has {values} of {wanted} values"):
        read_graph(file)
    file.write_text("\n".join([*lines, *["1.5"] * wanted, ""]))
    if symmetry == "symmetric":  # otherwise there are negative weights
        assert len(read_graph(file).nodes) == 3


@pytest.mark.parametrize("end", ["4.2E", "4.2E-", "4.2", "4"])
def test_a_file_that_ends_within_a_number_does_not_end_the_process(tmp_path, end):
    file = tmp_path / "cut.mtx"
    file.write_text(f"%%MatrixMarket matrix coordinate real general\n3 3 3\n2 1 {end}")
    with pytest.raises(ValueError):
        read_graph(file)
