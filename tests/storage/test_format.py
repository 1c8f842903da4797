"""What is written is read back to the bit; what is not whole is found."""

from __future__ import annotations

import contextlib
import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from dask_coded import storage as kept
from dask_coded.codes import MDS, Code, Polynomial, RandomLinear, Repetition
from dask_coded.storage import arrays as chunks
from dask_coded.storage import description as writing
from dask_coded.storage import generators, pieces

pytest.importorskip("zarr")
pytestmark = pytest.mark.extras

DTYPES = ["f2", "f4", "f8", "c8", "c16", "i1", "i8", "u4", "?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    begun(folder)
    return folder


def place(folder, token="coded-1", pieces=4) -> kept.Storage:
    return kept.Storage(kept.Location.of(folder), "matrix", token, pieces)


def read(storage, piece, data):
    sparse = type(data) if scipy.sparse.issparse(data) else None
    found, growth = kept.read_piece(
        storage, piece, data.shape, data.dtype, sparse, lambda: np.zeros(data.shape, data.dtype)
    )
    return found, growth


def assert_same(found, data):
    """Compare bits, so that NaN equals itself and 0.0 is not -0.0."""
    assert type(found) is type(data) and found.dtype == data.dtype and found.shape == data.shape
    if scipy.sparse.issparse(data):
        parts = [(getattr(found, name), getattr(data, name)) for name in ("indices", "indptr")]
        assert all((a == b).all() for a, b in parts)
        found, data = found.data, data.data
    assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(data).tobytes()


@given(st.data())
@settings(max_examples=40)
def test_dense_pieces(folder, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9))
    shape = (shape[0], max(shape[1], 1))
    piece = data.draw(arrays(dtype, shape))
    growth = data.draw(st.floats(0, 100))
    # Several chunks, of which the last one is shorter.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_CHUNK", data.draw(st.integers(1, 200)))
        kept.write_piece(place(folder), 2, piece, growth, replace=True)
    found = read(place(folder), 2, piece)
    assert found[1] == growth
    assert_same(found[0], piece)


@given(st.data())
@settings(max_examples=20)
def test_sparse_pieces(folder, data):
    dtype = data.draw(st.sampled_from(["f4", "f8", "c16", "i8"]))
    shape = data.draw(st.tuples(st.integers(0, 9), st.integers(1, 9)))
    kind = data.draw(st.sampled_from([scipy.sparse.csr_array, scipy.sparse.csr_matrix]))
    piece = kind(data.draw(arrays(dtype, shape)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_CHUNK", data.draw(st.integers(1, 64)))
        kept.write_piece(place(folder), 0, piece, replace=True)
    assert_same(read(place(folder), 0, piece)[0], piece)


CODES = [
    MDS(5, 3),
    MDS(1, 1),
    RandomLinear(6, 4, density=0.7, seed=3),
    RandomLinear(4, 3).extended(2),
    Repetition(5, 2),
    Code([[1, 0], [0, 1], [1, 1], [2, 2]]),
    Code(np.eye(2)[[0, 0, 1, 1]], place=[0, 1, 0, 1], group=[0, 0, 1, 1], need=[1, 1]),
]


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_codes(code):
    found = generators.from_json(json.loads(json.dumps(generators.to_json(code))))
    assert found == code and repr(found) == repr(code)
    assert found.G.tobytes() == code.G.tobytes()
    names = ("n", "k", "tolerance", "exact", "threshold", "systematic")
    assert all(getattr(found, name) == getattr(code, name) for name in names)
    assert (found.need == code.need).all() and (found.block_of == code.block_of).all()


def test_codes_of_other_classes_are_refused():
    class Mine(Code):
        pass

    for code in (Mine(np.eye(2)), Polynomial(6, 2, 2)):
        with pytest.raises(TypeError, match="cannot name the class"):
            kept.check_storable(code)


def description(**more) -> kept.Description:
    rows = (3, 2)
    scales = tuple(np.arange(r, dtype=np.int16) - 7 for r in rows)
    array = kept.ArrayDescription(
        "coded-1", rows, 2, True, 4, "<f8", None, True, False, 123, scales, scales, (b"ab", b"c")
    )
    return kept.Description(MDS(3, 2), {"matrix": array}, ("x", None), **more)


def begun(folder, token="coded-1") -> kept.Location:
    location = kept.Location.of(folder)
    kept.begin_store(location, {"matrix": token})
    return location


def test_descriptions(tmp_path):
    location = begun(tmp_path / "store")
    written = description()
    kept.write_description(location, written)
    found = kept.read_description(location)
    assert (found.code, found.names, found.version) == (written.code, ("x", None), written.version)
    a, b = found.arrays["matrix"], written.arrays["matrix"]
    assert a.footprints == b.footprints and a.shape == (5, 4)
    for name in ("exponents", "typical"):
        assert [x.tolist() for x in getattr(a, name)] == [x.tolist() for x in getattr(b, name)]


def test_a_store_that_was_begun_again_is_not_declared_complete(tmp_path, monkeypatch):
    """As by a thread of an encoding that was interrupted, while it writes the last arrays."""
    location = begun(tmp_path / "store")
    write, writes = writing.write_array, []

    def slow(*args):
        write(*args)
        writes.append(args)
        if len(writes) == 2:
            begun(tmp_path / "store", "coded-2")

    monkeypatch.setattr(writing, "write_array", slow)
    with pytest.raises(kept.StoreError):
        kept.write_description(location, description())
    assert len(writes) > 2
    with pytest.raises(kept.StoreError, match="is half written"):
        kept.read_description(location)


def test_stores_that_are_not_complete_are_refused(tmp_path):
    folder = tmp_path / "store"
    location = kept.Location.of(folder)
    with pytest.raises(FileNotFoundError, match="There is no coded array in"):
        kept.read_description(location)
    begun(folder)
    with pytest.raises(kept.StoreError, match="is half written"):
        kept.read_description(location)
    begun(folder)  # may be begun again
    kept.write_description(location, description())
    with pytest.raises(FileExistsError, match="is not empty"):
        begun(folder)
    root = folder / "zarr.json"
    text = root.read_text()
    root.write_text(text.replace('"columns": 4', '"columns": 5'))
    with pytest.raises(kept.StoreError, match="differs from its checksum"):
        kept.read_description(location)
    for damaged in (text[:-9], text.replace('"dask_coded"', '"dask_xoded"'), ""):
        root.write_text(damaged)
        with pytest.raises(kept.StoreError, match="or its description is damaged"):
            kept.read_description(location)
        with pytest.raises(FileExistsError, match="is not empty"):
            begun(folder)
    root.write_text(text)
    chunk = folder / "matrix-coded-1" / "exponents" / "c" / "0"
    flip(chunk, 1)
    with pytest.raises(kept.StoreError, match="are damaged"):
        kept.read_description(location)


def tree(folder) -> dict[Path, bytes | None]:
    return {path: None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def put(location, key: str, content: bytes) -> None:
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    sync(location.store().set(key, default_buffer_prototype().buffer.from_bytes(content)))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "key", ["notes.txt", "results/a.npy", "matrix/x", "matrix-coded-1/x", ".zgroup", "c/0"]
)
def test_foreign_files_are_never_deleted(tmp_path, half, key):
    if half:
        begun(tmp_path)
        kept.write_piece(place(tmp_path), 0, np.ones((3, 4)))
    foreign = tmp_path / key
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=r"is not empty: .*\.$") as found:
        begun(tmp_path, "coded-2")
    assert "\n" not in str(found.value)
    assert tree(tmp_path) == before
    foreign.unlink()
    begun(tmp_path, "coded-2")
    assert not (tmp_path / "matrix-coded-1" / "piece-0").exists()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["address", "store"])
def test_foreign_objects_are_never_deleted(half, kind):
    from zarr.storage import FsspecStore

    address = f"memory://foreign/{kind}-{half}"
    location = kept.Location.of(FsspecStore.from_url(address) if kind == "store" else address)
    if half:
        kept.begin_store(location, {"matrix": "coded-1"})
        kept.write_piece(kept.Storage(location, "matrix", "coded-1", 1), 0, np.ones((3, 4)))
    put(location, "results/a.npy", b"mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        kept.begin_store(location, {"matrix": "coded-2"})
    if half:
        storage = kept.Storage(location, "matrix", "coded-1", 1)
        assert_same(read(storage, 0, np.ones((3, 4)))[0], np.ones((3, 4)))


def test_pieces_without_a_root_are_not_deleted(tmp_path):
    """The root of a store that was complete may be what is lost."""
    begun(tmp_path)
    (tmp_path / "zarr.json").rename(tmp_path / "zarr.0ab1.partial")
    with pytest.raises(FileExistsError, match="is not empty"):
        begun(tmp_path, "coded-2")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_late_writer_of_an_earlier_encoding(tmp_path, monkeypatch, moment):
    """It goes on writing while another encoding is written to the same place, and afterwards."""
    monkeypatch.setattr(chunks, "_CHUNK", 32)
    old, new = np.zeros((4, 4)), np.ones((4, 4))
    begun(tmp_path, "coded-1")

    def overtaken(first, last):
        if first:
            return
        begun(tmp_path, "coded-2")
        if moment == "before":
            kept.write_piece(place(tmp_path, "coded-2"), 1, new)

    with contextlib.suppress(Exception):
        kept.write_piece(place(tmp_path, "coded-1"), 1, old, written=overtaken)
    if moment == "after":
        kept.write_piece(place(tmp_path, "coded-2"), 1, new)
    assert_same(read(place(tmp_path, "coded-2"), 1, new)[0], new)
    with pytest.raises(kept.StoreError, match="holds no store of this encoding"):
        kept.write_piece(place(tmp_path, "coded-1"), 2, old)
    with pytest.raises(kept.StoreError, match="Another encoding has begun"):
        kept.write_description(kept.Location.of(tmp_path), description())
    assert not kept.marked(place(tmp_path, "coded-2"), 2)


def test_pieces_are_written_only_where_their_store_is(tmp_path):
    """Not to the folder where a shared one is not mounted."""
    with pytest.raises(kept.StoreError, match="holds no store of this encoding on this worker"):
        kept.write_piece(place(tmp_path), 1, np.ones((4, 4)))
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("sparse", [False, True])
def test_a_store_that_is_away_is_not_damaged(tmp_path, sparse):
    """Nothing is where a shared folder is not mounted."""
    folder = tmp_path / "store"
    begun(folder)
    storage = place(folder)
    data = scipy.sparse.csr_array(np.eye(3)) if sparse else np.eye(3)
    kept.write_piece(storage, 0, data)
    folder.rename(tmp_path / "away")
    folder.mkdir()
    for use in (
        lambda: read(storage, 0, data),
        lambda: kept.marked(storage, 0),
        lambda: pieces.size_of(storage, 0),
    ):
        with pytest.raises(OSError, match="there is no store of this array"):
            use()
    assert tree(folder) == {}
    folder.rmdir()
    begun(folder, "coded-2")  # something else is there
    with pytest.raises(OSError, match="there is no store of this array"):
        read(storage, 0, data)


@pytest.mark.parametrize(
    "error", [RuntimeError("no route"), ValueError("no route"), KeyError("no route"), EOFError()]
)
def test_errors_of_a_store_are_not_damage(tmp_path, monkeypatch, error):
    """Clients of object stores have errors of their own."""
    from zarr.storage import LocalStore

    location, data = begun(tmp_path), np.ones((4, 4))
    storage = place(tmp_path)
    kept.write_piece(storage, 0, data)
    kept.write_description(location, description())

    async def get(self, key, *args, **kwargs):
        raise error

    monkeypatch.setattr(LocalStore, "get", get)
    for use in (
        lambda: read(storage, 0, data),
        lambda: kept.marked(storage, 0),
        lambda: kept.read_description(location),
        lambda: kept.write_piece(storage, 0, data),
    ):
        with pytest.raises(OSError, match=type(error).__name__):
            use()


def test_errors_that_say_nothing_of_a_piece_are_not_damage(tmp_path, monkeypatch):
    begun(tmp_path)
    kept.write_piece(place(tmp_path), 0, np.ones((4, 4)))

    def none(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pieces, "read_into", none)
    with pytest.raises(RuntimeError, match="new thread"):
        read(place(tmp_path), 0, np.ones((4, 4)))


def test_another_format_is_refused(tmp_path, monkeypatch):
    location = begun(tmp_path)
    monkeypatch.setattr("dask_coded.storage.description.FORMAT", 2)
    kept.write_description(location, description(version="9.9"))
    monkeypatch.undo()
    with pytest.raises(kept.StoreError, match=r"has format 2.* install dask_coded 9\.9"):
        kept.read_description(location)


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("sparse", [False, True])
def test_flipped_bytes_of_a_piece_are_found(tmp_path, sparse):
    """Or it changes nothing: a space, or the fill value, which nothing is filled with."""
    begun(tmp_path)
    storage = place(tmp_path)
    data = np.array([[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]])
    data = scipy.sparse.csr_array(data) if sparse else data
    kept.write_piece(storage, 1, data, 0.5)
    harmless = 0
    for file in sorted((tmp_path / "matrix-coded-1" / "piece-1").rglob("*")):
        if file.is_dir():
            continue
        before = file.read_bytes()
        # Of metadata every fifth byte, which is no divisor of the width of its lines.
        for byte in range(0, len(before), 5 if file.name == "zarr.json" else 1):
            flip(file, byte)
            try:
                found, growth = read(storage, 1, data)
            except kept.DamagedError:
                pass
            else:
                assert file.name == "zarr.json"
                assert_same(found, data)
                assert growth == 0.5
                harmless += 1
            file.write_bytes(before)
    assert_same(read(storage, 1, data)[0], data)
    assert harmless > 0


@pytest.mark.parametrize("missing", ["c/1/0", "zarr.json", "."])
def test_missing_files_are_found(tmp_path, missing, monkeypatch):
    begun(tmp_path)
    monkeypatch.setattr(chunks, "_CHUNK", 32)
    storage, data = place(tmp_path), np.zeros((4, 4))
    kept.write_piece(storage, 1, data)
    assert kept.marked(storage, 1)
    gone = tmp_path / "matrix-coded-1" / "piece-1" / missing
    gone.rename(tmp_path / "gone")
    with pytest.raises(kept.DamagedError, match="missing"):
        read(storage, 1, data)
    assert kept.marked(storage, 1) == (missing == "c/1/0")


def test_a_half_written_piece_is_found(tmp_path):
    class Killed(BaseException):
        pass

    def killed(first, last):
        raise Killed

    begun(tmp_path)
    storage, data = place(tmp_path), np.ones((4, 4))
    with pytest.raises(Killed):
        kept.write_piece(storage, 1, data, written=killed)
    assert not kept.marked(storage, 1)
    with pytest.raises(kept.DamagedError, match="half written"):
        read(storage, 1, data)
    kept.write_piece(storage, 1, data)
    kept.write_piece(storage, 1, data, written=killed)  # a late worker, which leaves it alone
    assert_same(read(storage, 1, data)[0], data)
    with pytest.raises(Killed):
        kept.write_piece(storage, 1, data, written=killed, replace=True)
    assert not kept.marked(storage, 1)
    kept.write_piece(storage, 2, data)
    (tmp_path / "matrix-coded-1" / "piece-2").rename(tmp_path / "matrix-coded-1" / "piece-3")
    with pytest.raises(kept.DamagedError, match="of another encoding"):
        read(storage, 3, data)


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_of_two_writers_are_found(tmp_path, parts):
    """One of them hangs after some parts, and goes on when the other one has written the piece."""
    location = begun(tmp_path)
    storage = place(tmp_path, pieces=1)
    one, other = (scipy.sparse.csr_array(np.roll(np.eye(3), k, axis=1)) for k in (0, 1))
    other.data = np.array([1.0, 2.0, 3.0])
    written = []

    def overtaken(first, last):
        written.append(last)
        if len(written) == parts:
            kept.write_piece(storage, 0, other, replace=True)
            assert_same(read(storage, 0, other)[0], other)

    kept.write_piece(storage, 0, one, written=overtaken)
    with pytest.raises(kept.DamagedError, match="do not belong together"):
        read(storage, 0, one)
    kept.write_description(location, replace(description(), code=MDS(1, 1)))
    [found] = kept.condition_of(location).pieces
    assert "do not belong together" in found.problem


def test_parts_of_different_lengths_are_found(tmp_path):
    begun(tmp_path)
    storage, data = place(tmp_path), scipy.sparse.csr_array(np.eye(3))
    longer = scipy.sparse.csr_array(np.eye(3))
    longer.data, longer.indices = np.ones(4), np.zeros(4, np.int32)
    kept.write_piece(storage, 0, longer)  # its mark is right, its indptr is not
    with pytest.raises(kept.DamagedError, match="do not belong together"):
        read(storage, 0, data)


def test_sparse_pieces_of_older_stores_are_read(tmp_path, monkeypatch):
    """Their marks have no checksum of all parts."""
    begun(tmp_path)
    storage, data = place(tmp_path), scipy.sparse.csr_array(np.eye(3))
    signed = pieces._signed
    monkeypatch.setattr(pieces, "_signed", lambda *about: signed(*about[:3]))
    kept.write_piece(storage, 0, data)
    monkeypatch.undo()
    assert_same(read(storage, 0, data)[0], data)
    assert kept.marked(storage, 0)
    assert pieces.size_of(storage, 0) == sum(
        x.nbytes for x in (data.data, data.indices, data.indptr)
    )


def test_conditions(tmp_path):
    location = begun(tmp_path)
    storage = place(tmp_path, pieces=3)
    for piece in range(3):
        kept.write_piece(storage, piece, np.ones((3, 4)))
    kept.write_description(location, description())
    found = kept.condition_of(location)
    assert found.whole and found.usable
    assert str(found).splitlines()[1] == "3 of 3 pieces are whole."
    flip(tmp_path / "matrix-coded-1" / "piece-2" / "c" / "0" / "0", 3)
    found = kept.condition_of(location)
    assert not found.whole and found.usable
    assert [p.piece for p in found.pieces if p.problem] == [2]
    assert "The others suffice" in str(found)
    (tmp_path / "matrix-coded-1" / "piece-0" / "zarr.json").unlink()
    found = kept.condition_of(location)
    assert not found.usable
    assert "The others do not suffice: restore these pieces, or encode the array again." in str(
        found
    )


def test_a_piece_that_cannot_be_read_hides_no_other(tmp_path, monkeypatch):
    location = begun(tmp_path)
    for piece in range(3):
        kept.write_piece(place(tmp_path, pieces=3), piece, np.ones((3, 4)))
    kept.write_description(location, description())
    refused, size_of = {1}, pieces.size_of

    def broken(storage, piece):
        if piece in refused:
            raise OSError(errno.EIO, "Input/output error")
        return size_of(storage, piece)

    monkeypatch.setattr("dask_coded.storage.checking.size_of", broken)
    found = kept.condition_of(location)
    assert found.usable and not found.whole
    assert [bool(piece.problem) for piece in found.pieces] == [False, True, False]
    assert "matrix: piece 1 cannot be read: [Errno 5] Input/output error" in str(found)
    refused |= {0, 2}
    with pytest.raises(OSError, match="Input/output error"):
        kept.condition_of(location)


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_addresses_of_folders(tmp_path, scheme):
    from zarr.storage import LocalStore

    store = kept.Location.of(f"{scheme}://{tmp_path}").store()
    assert isinstance(store, LocalStore) and Path(store.root) == tmp_path


def test_locations(tmp_path, monkeypatch):
    from zarr.storage import FsspecStore, LocalStore, MemoryStore

    monkeypatch.chdir(tmp_path)
    assert kept.Location.of("a").name == str(tmp_path / "a")
    assert kept.Location.of(LocalStore("a")) == kept.Location.of(tmp_path / "a")
    for storage in ("memory://test/A", FsspecStore.from_url("memory://test/A")):
        location = kept.Location.of(storage)
        kept.begin_store(location, {"matrix": "coded-1"})
        data = np.arange(6.0).reshape(2, 3)
        kept.write_piece(kept.Storage(location, "matrix", "coded-1", 1), 0, data)
        assert_same(read(kept.Storage(location, "matrix", "coded-1", 1), 0, data)[0], data)
    for wrong in (MemoryStore(), 5, "", b"a"):
        with pytest.raises(TypeError, match="Argument 'storage' must be"):
            kept.Location.of(wrong)
    with pytest.raises(TypeError, match="float128"):
        kept.check_dtype(np.dtype("longdouble"))
