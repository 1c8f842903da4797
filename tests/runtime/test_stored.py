"""Arrays that are kept in files: other clusters open them, and damage is found and mended."""

from __future__ import annotations

import asyncio
import errno
import tempfile
import threading
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from distributed import Event, Worker, utils_test
from distributed.utils_test import async_poll_for, captured_logger, poll_for

import dask_coded as coded
from dask_coded.runtime.worker import stored
from dask_coded.runtime.worker.disk import Disk
from dask_coded.storage import Location, Storage

pytest.importorskip("zarr")
pytestmark = pytest.mark.extras


def gen_cluster(**options):
    """Have zarr keep its threads, which it starts when it is first used."""
    return utils_test.gen_cluster(client=True, clean_kwargs={"threads": False}, **options)


RNG = np.random.default_rng(0)
DENSE = RNG.integers(-9, 9, (60, 8)).astype(float)
# Parity and what is recovered from it are exact, so that results do not depend on who is late.
EXACT = coded.Code([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])
X = np.arange(8.0)

CASES = {
    "MDS": (DENSE, coded.MDS(4, 3)),
    "float32": (DENSE.astype("f4"), coded.MDS(4, 2)),
    "complex": (DENSE * (1 + 2j), coded.RandomLinear(4, 3)),
    "integers": (DENSE.astype(int), coded.Repetition(4, 2)),
    "sparse": (scipy.sparse.csr_array(DENSE * (DENSE > 5)), coded.Repetition(4, 2)),
    "matrix": (scipy.sparse.csr_matrix(DENSE * (DENSE > 5)), coded.MDS(4, 3)),
    "more blocks than rows": (DENSE[:2], coded.Repetition(4, 2)),
}


def flip(folder: Path, piece: int) -> None:
    [path] = folder.glob(f"matrix-*/piece-{piece}/c/0/0")
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)


def bits(piece):
    if scipy.sparse.issparse(piece):
        return [part.tobytes() for part in (piece.data, piece.indices, piece.indptr)]
    return np.ascontiguousarray(piece).tobytes()


async def pieces_of(c, C):
    return [bits(piece) for piece in await c.gather(list(C.encoded.futures))]


@pytest.mark.parametrize("case", CASES)
def test_another_array_of_fewer_workers_has_the_same_pieces(case, tmp_path):
    A, code = CASES[case]

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
    async def encoded(c, s, *workers):
        C = await coded.encode(A, code, c, storage=tmp_path / "A")
        assert str(tmp_path / "A") in repr(C._summary())
        return C.encoded.spec, await pieces_of(c, C), C.encoded.nbytes

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path / "A", c)
        product = await c.compute(C @ X)
        np.testing.assert_allclose(product, A @ X, rtol=1e-5, atol=1e-3)
        whole = await c.compute(C)
        assert abs(whole - A).sum() == 0
        return C.encoded.spec, await pieces_of(c, C), C.encoded.nbytes

    before, after = encoded(), opened()
    assert after[1:] == before[1:]
    for name in ("geometry", "columns", "dtype", "sparse", "code", "check_finite"):
        assert getattr(after[0], name) == getattr(before[0], name)
    assert repr(after[0].exponents) == repr(before[0].exponents)
    condition = coded.check(tmp_path / "A")
    assert condition.whole and condition.shape == A.shape


def test_a_piece_that_takes_every_worker_with_it_is_given_up(tmp_path):
    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
    async def run(c, s, *workers):
        C = await coded.encode(DENSE, coded.MDS(4, 3), c, storage=tmp_path)
        arrays, key = s.extensions["dask-coded"].arrays, C.encoded.spec.keys[0]
        ts, lost = s.tasks[key], 0
        while not ts.suspicious:
            lost += 1
            ts.suspicious = 1  # as Dask does when a worker is lost that runs the task
            arrays.remove_worker([])
        assert lost > 12  # all workers of a fleet may leave at once

    run()


def test_products_are_the_same_to_the_bit(tmp_path):
    """Of the array and its transpose, whichever workers are late: arithmetic is exact here."""

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
    async def encoded(c, s, *workers):
        C = await coded.encode(
            da.from_array(DENSE, chunks=(7, 3)), EXACT, c, transpose=True, storage=tmp_path
        )
        return await c.gather(c.compute([C @ X, DENSE[:, 0] @ C, C.T @ DENSE[:, 1]]))

    @gen_cluster(nthreads=[("127.0.0.1", 1)])
    async def opened(c, s, worker):
        C = await coded.open(str(tmp_path), c)
        return await c.gather(c.compute([C @ X, DENSE[:, 0] @ C, C.T @ DENSE[:, 1]]))

    for before, after in zip(encoded(), opened()):
        assert before.tobytes() == after.tobytes()


def kept(folder, code=EXACT, A=DENSE, **options):
    """Keep a coded array of a cluster that is gone afterwards; return its pieces."""

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * code.n)
    async def encoded(c, s, *workers):
        return await pieces_of(c, await coded.encode(A, code, c, storage=folder, **options))

    return encoded()


def test_verified_arrays_are_verified_again(tmp_path):
    kept(tmp_path, verify=True)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 3)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        assert (await c.compute(C @ X)).tobytes() == (DENSE @ X).tobytes()
        checks = C.encoded.spec.check_keys
        assert len(checks) == EXACT.k
        assert all(s.tasks[key].who_has for key in checks)

    opened()


def test_extended_arrays_keep_their_first_pieces(tmp_path):
    kept(tmp_path, coded.RandomLinear(4, 3))

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 5)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        D = await C.extend()
        assert D.code.n == 5
        np.testing.assert_allclose(await c.compute(D @ X), DENSE @ X)
        for worker in workers[1:]:
            await worker.close()
        np.testing.assert_allclose(await c.compute(D @ X), DENSE @ X)

    opened()


def test_what_cannot_be_kept_is_refused_in_one_sentence(tmp_path, client):
    class Mine(coded.Code):
        pass

    def refused(error, match, A=DENSE, code=EXACT, storage=tmp_path / "A"):
        with pytest.raises(error, match=match) as found:
            coded.encode(A, code, client, storage=storage)
        assert str(found.value).endswith(".") and "\n" not in str(found.value)
        assert not (tmp_path / "A").exists()

    refused(TypeError, "cannot name the class", code=Mine(EXACT.G))
    refused(TypeError, "Argument 'storage' must be", storage=3)
    refused(TypeError, "dtype float128", DENSE.astype("longdouble"))
    xarray = pytest.importorskip("xarray")
    labelled = xarray.DataArray(DENSE, dims=("a", "b"), coords={"b": list("abcdefgh")})
    refused(TypeError, "cannot hold the labels", labelled)
    C = coded.encode(labelled.drop_vars("b"), EXACT, client, storage=tmp_path / "A")
    assert [axis.name for axis in C.labels] == ["a", "b"]
    D = coded.open(tmp_path / "A", client)
    assert [axis.name for axis in D.labels] == ["a", "b"]
    with pytest.raises(FileExistsError, match="is not empty: delete it"):
        coded.encode(DENSE, EXACT, client, storage=tmp_path / "A")
    with pytest.raises(FileNotFoundError, match="There is no coded array"):
        coded.open(tmp_path / "nothing", client)


def test_stores_of_fsspec(client):
    from zarr.storage import FsspecStore

    for storage in ("memory://a/b", FsspecStore.from_url("memory://c")):
        coded.encode(DENSE, EXACT, client, storage=storage)
        C = coded.open(storage, client)
        assert client.compute(C @ X).result().tobytes() == (DENSE @ X).tobytes()
        assert coded.check(storage).whole


def test_an_encoding_that_fails_leaves_a_store_that_is_refused(tmp_path, client):
    bad = DENSE.copy()
    bad[-1] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        coded.encode(bad, EXACT, client, storage=tmp_path)
    for use in (lambda: coded.open(tmp_path, client), lambda: coded.check(tmp_path)):
        with pytest.raises(coded.StoreError, match="half written, because its encoding has not"):
            use()
    coded.encode(DENSE, EXACT, client, storage=tmp_path)
    assert coded.check(tmp_path).whole


def test_pieces_that_this_process_does_not_see(tmp_path, client, monkeypatch):
    monkeypatch.setattr("dask_coded.runtime.client.stored.marked", lambda storage, i: i != 2)
    with pytest.raises(coded.StoreError, match=r"pieces \[2\].* a place that is the same for all"):
        coded.encode(DENSE, EXACT, client, storage=tmp_path)


@pytest.mark.parametrize("piece", [0, 3])
@pytest.mark.parametrize("damage", ["flipped", "missing", "half written"])
def test_a_damaged_piece_is_made_from_others_and_written_again(damage, piece, tmp_path):
    pieces = kept(tmp_path)
    [folder] = tmp_path.glob(f"matrix-*/piece-{piece}")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if damage == "flipped":
        flip(tmp_path, piece)
    elif damage == "missing":
        (folder / "c" / "0" / "0").unlink()
    else:
        (folder / "zarr.json").unlink()
    assert [p.piece for p in coded.check(tmp_path).pieces if p.problem] == [piece]

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        assert (await c.compute(C @ X)).tobytes() == (DENSE @ X).tobytes()
        assert await pieces_of(c, C) == pieces
        state = s.plugins["dask-coded"].arrays[C.encoded.spec.id]
        await async_poll_for(lambda: not state.damaged, timeout=60)  # it is written

    with captured_logger("distributed.dask_coded") as log:
        opened()
    assert f"A stored piece is damaged, and is made from others: piece {piece}" in log.getvalue()
    assert coded.check(tmp_path).whole
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after.keys() == before.keys()
    assert all(after[p] == before[p] for p in before if p.name != "zarr.json")


def test_too_many_damaged_pieces_end_products_with_one_sentence(tmp_path):
    kept(tmp_path)
    flip(tmp_path, 1)
    flip(tmp_path, 3)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 3)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        for wanted in (C @ X, C):
            with pytest.raises(coded.CodedDataLostError, match=r"Pieces \[1, 3\] of the 4 of"):
                await c.compute(wanted)

    with captured_logger("distributed"):
        opened()


def test_a_store_that_is_away_for_a_while_is_waited_for(tmp_path, monkeypatch):
    kept(tmp_path)
    tries = []
    read = stored.read_piece

    def away(storage, piece, *args):
        tries.append(piece)
        if len(tries) < 12:
            raise OSError("no route to host")
        return read(storage, piece, *args)

    monkeypatch.setattr(stored, "read_piece", away)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        assert (await c.compute(C @ X)).tobytes() == (DENSE @ X).tobytes()

    with captured_logger("distributed.dask_coded") as log:
        opened()
    assert "A stored piece cannot be read at present: no route to host" in log.getvalue()
    assert coded.check(tmp_path).whole


@pytest.mark.parametrize(
    "error", [(errno.EACCES, "mine alone"), ("mine alone",)], ids=["a folder", "an object store"]
)
@pytest.mark.parametrize("pieces", [[1], [1, 3]])
def test_a_store_that_refuses_a_worker_is_not_waited_for(tmp_path, monkeypatch, pieces, error):
    """It is asked once for each piece, and the reason is said once."""
    kept(tmp_path)
    read = stored.read_piece

    def refused(storage, piece, *args):
        if piece in pieces:
            raise PermissionError(*error)  # object stores give no number
        return read(storage, piece, *args)

    monkeypatch.setattr(stored, "read_piece", refused)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        if len(pieces) == 1:
            assert (await c.compute(C @ X)).tobytes() == (DENSE @ X).tobytes()
            await c.gather(list(C.encoded.futures))
        else:
            match = r"may not read pieces \[1, 3\] of the 4 .*mine alone"
            with pytest.raises(coded.CodedDataLostError, match=match):
                await c.gather(list(C.encoded.futures))

    with captured_logger("distributed.dask_coded") as log:
        opened()
    said = [line for line in log.getvalue().splitlines() if "This worker may not" in line]
    assert len(said) == len(pieces)
    assert coded.check(tmp_path).whole  # nothing was written


def test_reasons_are_said_once(tmp_path, monkeypatch):
    kept(tmp_path)
    tries = []
    read = stored.read_piece

    def away(storage, piece, *args):
        tries.append(piece)
        if len(tries) < 12:
            raise OSError("no route to host")
        return read(storage, piece, *args)

    monkeypatch.setattr(stored, "read_piece", away)

    @gen_cluster(nthreads=[("127.0.0.1", 1)])
    async def opened(c, s, worker):
        C = await coded.open(tmp_path, c)
        await c.gather(list(C.encoded.futures))

    with captured_logger("distributed.dask_coded") as log:
        opened()
    assert len(tries) > 12
    assert log.getvalue().count("no route to host") <= EXACT.n


def test_a_full_worker_does_not_blame_the_store(tmp_path, monkeypatch):
    kept(tmp_path)
    full = [True] * 3
    zeros = Disk.zeros

    def no_room(self, *args):
        if full:
            full.pop()
            raise PermissionError(errno.EACCES, "local disk")
        return zeros(self, *args)

    monkeypatch.setattr(Disk, "zeros", no_room)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        assert (await c.compute(C @ X)).tobytes() == (DENSE @ X).tobytes()

    with captured_logger("distributed.dask_coded") as log:
        opened()
    assert "is not read yet, because there is no room for it" in log.getvalue()
    assert "cannot be read" not in log.getvalue() and "may not" not in log.getvalue()


def test_a_piece_that_cannot_be_written_again_stays_damaged(tmp_path, monkeypatch):
    kept(tmp_path)
    flip(tmp_path, 1)
    tries = []

    def full(*args, **kwargs):
        tries.append(args)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(stored, "write_piece", full)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        await c.gather(list(C.encoded.futures))
        await async_poll_for(lambda: "is not written to its store" in log.getvalue(), timeout=60)
        assert tries
        assert s.plugins["dask-coded"].arrays[C.encoded.spec.id].damaged == {1}

    with captured_logger("distributed.dask_coded") as log:
        opened()


def test_a_piece_that_is_made_again_does_not_wait_until_it_is_written(tmp_path, monkeypatch):
    pieces = kept(tmp_path)
    flip(tmp_path, 1)
    gate = threading.Event()
    write = stored.write_piece
    monkeypatch.setattr(
        stored, "write_piece", lambda *args, **more: gate.wait() and write(*args, **more)
    )

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def opened(c, s, *workers):
        C = await coded.open(tmp_path, c)
        state = s.plugins["dask-coded"].arrays[C.encoded.spec.id]
        try:
            assert await pieces_of(c, C) == pieces
            assert state.damaged == {1}
        finally:
            gate.set()
        await async_poll_for(lambda: not state.damaged, timeout=60)

    with captured_logger("distributed.dask_coded"):
        opened()
    assert coded.check(tmp_path).whole


def of_stores():
    """Return the threads that read and write pieces."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("Coded-store")]


@pytest.mark.parametrize("case", ["MDS", "sparse"])
def test_a_piece_whose_store_hangs_is_made_from_others(case, tmp_path, monkeypatch):
    A, code = CASES[case]
    pieces = kept(tmp_path, code, A)
    gate, hung = threading.Event(), []
    read = stored.read_piece

    def hanging(storage, piece, *args):
        if piece == 3 and not gate.is_set():
            hung.append(threading.current_thread())
            gate.wait()
        return read(storage, piece, *args)

    monkeypatch.setattr(stored, "read_piece", hanging)

    @gen_cluster(nthreads=[("127.0.0.1", 1)], config={"coded.encode.timeout": "100ms"})
    async def opened(c, s, worker):
        try:
            C = await coded.open(tmp_path, c)
            found = await c.gather(list(C.encoded.futures))
            for piece, data in enumerate(found):
                if piece != 3:
                    assert bits(data) == pieces[piece]
            np.testing.assert_allclose(await c.compute(C @ X), A @ X)
            assert hung and all(thread.daemon and thread.is_alive() for thread in hung)
        finally:
            gate.set()
        assert not worker.extensions["dask-coded"].disk._filling

    with captured_logger("distributed.dask_coded") as log:
        opened()
    assert f"{tmp_path} has not answered for 0.1 seconds" in log.getvalue()
    poll_for(lambda: not of_stores(), timeout=60)
    assert coded.check(tmp_path).whole  # what came too late has changed nothing


def test_a_store_that_hangs_leaves_threads_to_other_stores(tmp_path, monkeypatch):
    kept(tmp_path / "first")
    kept(tmp_path / "second")
    gate, hung, read = threading.Event(), [], stored.read_piece

    def hanging(storage, *args):
        if storage.location.name.endswith("first"):
            hung.append(storage)
            gate.wait()
        return read(storage, *args)

    monkeypatch.setattr(stored, "read_piece", hanging)

    @gen_cluster(nthreads=[("127.0.0.1", 1)])
    async def opened(c, s, worker):
        try:
            first = [await coded.open(tmp_path / "first", c) for _ in range(2)]
            await async_poll_for(lambda: len(hung) == stored._THREADS < 2 * EXACT.k, timeout=60)
            D = await coded.open(tmp_path / "second", c)
            assert (await c.compute(D @ X)).tobytes() == (DENSE @ X).tobytes()
            assert len(hung) == stored._THREADS
        finally:
            gate.set()
        assert (await c.compute(first[1] @ X)).tobytes() == (DENSE @ X).tobytes()

    opened()
    poll_for(lambda: not of_stores(), timeout=60)


def test_a_write_ends_that_nothing_waits_for(tmp_path, monkeypatch):
    """Another worker may have written the piece by now."""
    begun, gate, ended, errors = threading.Event(), threading.Event(), threading.Event(), []

    def hanging(storage, piece, data, growth, written, replace):
        written(0, 1)
        begun.set()
        gate.wait()
        try:
            written(1, 2)
        except BaseException as exc:
            errors.append(exc)
        ended.set()

    monkeypatch.setattr(stored, "write_piece", hanging)

    async def write():
        storage = Storage(Location(str(tmp_path)), "matrix", "coded-1", 1)
        stores = stored.Stores(worker=None, disk=None)
        writing = asyncio.create_task(stores.write(None, storage, 0, DENSE, 0.0, must=True))
        await asyncio.to_thread(begun.wait)
        writing.cancel()
        await asyncio.wait([writing])

    asyncio.run(write())
    gate.set()
    ended.wait()
    [error] = errors
    assert isinstance(error, TimeoutError)


def test_a_worker_that_closes_waits_for_no_store(tmp_path, monkeypatch):
    kept(tmp_path)
    gate, read = threading.Event(), stored.read_piece
    monkeypatch.setattr(stored, "read_piece", lambda *args: gate.wait() and read(*args))

    @gen_cluster(nthreads=[("127.0.0.1", 1)])
    async def opened(c, s, worker):
        try:
            arrays = [await coded.open(tmp_path, c) for _ in range(2)]
            stores = worker.extensions["dask-coded"].stores
            await async_poll_for(lambda: len(stores._waiting) == 2 * EXACT.k, timeout=60)
            await worker.close()
            await async_poll_for(lambda: not stores._waiting, timeout=60)
            del arrays
        finally:
            gate.set()

    with captured_logger("distributed"):
        opened()
    poll_for(lambda: not of_stores(), timeout=60)


def test_a_store_that_hangs_stops_nothing_else(tmp_path, monkeypatch):
    """All threads that read wait; others of the worker go on, and none is left at the end."""
    kept(tmp_path)
    gate = threading.Event()
    read = stored.read_piece

    def hanging(*args):
        gate.wait()
        return read(*args)

    monkeypatch.setattr(stored, "read_piece", hanging)

    @gen_cluster(nthreads=[("127.0.0.1", 4)])
    async def opened(c, s, worker):
        try:
            # More pieces than asyncio's own threads.
            arrays = [await coded.open(tmp_path, c) for _ in range(12)]
            await async_poll_for(lambda: len(of_stores()) == stored._THREADS, timeout=60)
            D = await coded.encode(DENSE[:4], coded.Repetition(1, 1), c)
            np.testing.assert_allclose(await c.compute(D @ X), DENSE[:4] @ X)
        finally:
            gate.set()
        assert (await c.compute(arrays[-1] @ X)).tobytes() == (DENSE @ X).tobytes()

    with captured_logger("distributed"):
        opened()
    poll_for(lambda: not of_stores(), timeout=60)


def test_products_that_wait_for_pieces_leave_no_room_for_others(tmp_path, monkeypatch):
    """Not to more than there are threads: each loads its operand. Everything else has room."""
    kept(tmp_path)
    gate = threading.Event()
    read = stored.read_piece
    monkeypatch.setattr(stored, "read_piece", lambda *args: gate.wait() and read(*args))
    asked = []

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 3)
    async def opened(c, s, *workers):
        try:
            D = await coded.encode(DENSE, coded.Repetition(3, 1), c)
            C = await coded.open(tmp_path, c)
            plan = s.handlers["coded_plan"]

            async def asking(array, attempt=None, **more):
                if array == C.encoded.spec.id:
                    asked.append(str(attempt[0]))
                return await plan(array=array, attempt=attempt, **more)

            s.handlers["coded_plan"] = asking
            products = c.compute([C @ (i * X) for i in range(12)])
            # Each asks twice a second. Those that may leave do after a second.
            await async_poll_for(lambda: max(map(asked.count, asked), default=0) > 12, timeout=60)
            assert len(set(asked)) <= 6
            np.testing.assert_allclose(await c.compute(D @ X), DENSE @ X)
            assert await c.gather(c.map(abs, [-1, -2, -3])) == [1, 2, 3]
        finally:
            gate.set()
        for i, product in enumerate(await c.gather(products)):
            np.testing.assert_allclose(product, DENSE @ (i * X))

    opened()


@pytest.mark.parametrize("verify", [False, True])
def test_products_that_begin_before_the_pieces_of_another_array(tmp_path, verify):
    """Each array's products have the threads that the pieces of the other one need."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        kept(folder, coded.Repetition(2, 2), verify=verify)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
    async def opened(c, s, *workers):
        event, addresses = Event("go", client=c), [w.address for w in workers]
        busy = [c.submit(wait_for, "go", workers=[a], pure=False) for a in addresses]
        await async_poll_for(lambda: all(w.state.executing for w in workers))
        halves = addresses[:2], addresses[2:]
        arrays = [await coded.open(f, c, workers=h) for f, h in zip(folders, halves, strict=True)]
        products = [
            c.compute(C @ (i * X), priority=1, workers=half, allow_other_workers=False)
            for C, half in zip(arrays, halves[::-1], strict=True)
            for i in range(4)
        ]
        await async_poll_for(lambda: sum(len(w.state.ready) for w in workers) >= 12)
        await event.set()
        await c.gather(busy)
        for i, product in enumerate(await c.gather(products)):
            np.testing.assert_allclose(product, DENSE @ (i % 4 * X))

    opened()


def wait_for(name):
    Event(name).wait()


@pytest.mark.parametrize("good", range(4))
def test_what_is_opened_in_vain_is_released(tmp_path, monkeypatch, good):
    """If the first or the second array, or its checks, cannot be asked for."""
    kept(tmp_path, transpose=True, verify=True)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def opened(c, s, *workers):
        get, calls = c.get, []

        def failing(*args, **kwargs):
            calls.append(args)
            if len(calls) > good:
                raise RuntimeError("in vain")
            return get(*args, **kwargs)

        monkeypatch.setattr(c, "get", failing)
        with pytest.raises(RuntimeError, match="in vain"):
            await coded.open(tmp_path, c)
        arrays = s.plugins["dask-coded"].arrays
        await async_poll_for(lambda: not arrays and not s.tasks, timeout=60)

    with captured_logger("distributed"):
        opened()


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
async def test_what_could_not_be_read_leaves_nothing(c, s, *workers):
    """Neither an unknown key with the scheduler, nor room that is taken on the worker."""
    with tempfile.TemporaryDirectory() as folder:
        C = await coded.encode(DENSE, EXACT, c, storage=folder)
        homecoming = s.plugins["dask-coded"].arrays._homes._homecoming
        homecoming.unread(workers[0].address, ("unknown", 1), "lost")
        assert not homecoming._unread
        flip(Path(folder), 2)
        plugin = workers[0].extensions["dask-coded"]
        storage, spec = C.encoded.storage, C.encoded.spec
        with captured_logger("distributed.dask_coded"):
            found = await plugin.stores.read(spec, storage, 2)
        assert found[0] is None and found[2].kind == "damaged"
        assert spec.keys[2] not in plugin.disk._filling


def homes(s, C):
    """The workers that hold each piece."""
    return [{ws.address for ws in s.tasks[key].who_has or ()} for key in C.encoded.spec.keys]


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_lost_piece_is_read_and_a_worker_that_joins_reads_its_own(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        C = await coded.encode(DENSE, EXACT, c, storage=folder)
        pieces = await pieces_of(c, C)
        copied = []
        s.request_acquire_replicas = lambda address, keys, **more: copied.append(keys)
        gone = next(w for w in workers if w.address == C.encoded.workers[3])
        await gone.close()
        await async_poll_for(lambda: all(homes(s, C)), timeout=60)
        [made] = [e for _, e in s.get_events("dask-coded") if e["action"] == "made"]
        assert (made["piece"], made["received"]) == (3, 0)
        assert len(set.union(*homes(s, C))) == 3
        async with Worker(s.address, nthreads=1) as new:
            await async_poll_for(lambda: [new.address in h for h in homes(s, C)].count(True) == 1)
            await async_poll_for(lambda: all(len(found) == 1 for found in homes(s, C)))
            assert (await c.compute(C @ X)).tobytes() == (DENSE @ X).tobytes()
            assert await pieces_of(c, C) == pieces
        assert copied == []


def test_a_worker_that_joins_does_other_work_while_its_store_hangs(monkeypatch):
    """Dask handles no message of the scheduler until a coroutine that handles one has ended."""
    gate, reading = threading.Event(), threading.Event()
    read = stored.read_piece

    def hanging(*args):
        reading.set()
        gate.wait()
        return read(*args)

    @gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
    async def test(c, s, *workers):
        with tempfile.TemporaryDirectory() as folder:
            C = await coded.encode(DENSE, EXACT, c, storage=folder)
            gone = next(w for w in workers if w.address == C.encoded.workers[3])
            await gone.close()
            await async_poll_for(lambda: all(homes(s, C)), timeout=60)
            monkeypatch.setattr(stored, "read_piece", hanging)
            async with Worker(s.address, nthreads=1) as new:
                try:
                    await async_poll_for(reading.is_set, timeout=60)
                    assert await c.submit(sum, [1, 2], workers=[new.address]) == 3
                    assert not any(new.address in found for found in homes(s, C))
                finally:
                    gate.set()
                await async_poll_for(lambda: any(new.address in h for h in homes(s, C)))

    test()


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_worker_that_cannot_read_its_piece_gets_a_copy(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        C = await coded.encode(DENSE, EXACT, c, storage=folder)
        gone = next(w for w in workers if w.address == C.encoded.workers[3])
        await gone.close()
        await async_poll_for(lambda: all(homes(s, C)), timeout=60)
        for piece in range(4):
            flip(Path(folder), piece)
        with captured_logger("distributed.dask_coded"):
            async with Worker(s.address, nthreads=1) as new:
                at = new.address
                await async_poll_for(lambda: [at in h for h in homes(s, C)].count(True) == 1)
                await async_poll_for(lambda: all(len(found) == 1 for found in homes(s, C)))
                assert (await c.compute(C @ X)).tobytes() == (DENSE @ X).tobytes()
                [said] = [e for _, e in s.get_events("dask-coded") if e["action"] == "unread"]
                assert said["worker"] == at and "computed checksum do not match" in said["reason"]


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
async def test_without_workers_an_array_is_paused(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        C = await coded.encode(DENSE, EXACT, c, storage=folder)
        for worker in workers:
            await worker.close()
        product = c.compute(C @ X)
        await async_poll_for(lambda: product.key in s.tasks)
        async with Worker(s.address, nthreads=1):
            assert (await product).tobytes() == (DENSE @ X).tobytes()


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
async def test_without_a_store_the_error_offers_one(c, s, *workers):
    C = await coded.encode(DENSE, EXACT, c)
    for worker in workers[1:]:
        await worker.close()
    with pytest.raises(coded.CodedDataLostError, match="with `storage=` to keep its pieces"):
        await c.compute(C @ X)


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 4)
async def test_arrays_that_are_opened_are_forgotten_like_others(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        C = await coded.encode(DENSE, EXACT, c, storage=folder)
        D = await coded.open(folder, c)
        E = await coded.open(folder, c)
        assert len({C.name, D.name, E.name}) == 3
        assert (await c.compute(E @ X)).tobytes() == (DENSE @ X).tobytes()
        arrays = s.plugins["dask-coded"].arrays
        assert len(arrays) == 3
        del C, D, E
        await async_poll_for(lambda: not arrays and not s.tasks)
        assert coded.check(folder).whole
