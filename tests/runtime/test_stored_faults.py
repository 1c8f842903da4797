"""Clusters are killed, and arrays in files go on: on another cluster, or after a pause."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import dask.array as da
import numpy as np
import pytest
from distributed.utils_test import poll_for

import dask_coded as coded
from tests.processes import Processes
from tests.runtime.test_faults import BLOCKS, WHOLE, Log, Loop, check, complete, source

pytest.importorskip("zarr")
pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]

# The sum of these integers is exact, and so is a block that is recovered from it.
EXACT = coded.Code(np.vstack([np.eye(5), np.ones(5)]))
WHOLE_NUMBERS = np.random.default_rng(3).integers(-9, 9, (4000, 50)).astype(float)
X = np.arange(50.0)


def kill_all(cluster: Processes) -> None:
    """kill -9 of the scheduler and of all workers, before any of them can say goodbye."""
    cluster.kill_scheduler()
    for process in cluster.workers.values():
        process.kill()
    for process in cluster.workers.values():
        process.join()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(EXACT, marks=pytest.mark.long),
        pytest.param(coded.Repetition(6, 2), marks=pytest.mark.long),
        coded.MDS(6, 4),
    ],
    ids=["exact", "repetition", "mds"],
)
def test_everything_killed_and_opened_by_fewer_workers(code, clusters, tmp_path):
    made, store = Log(tmp_path / "blocks"), tmp_path / "A"
    path, rows = str(made.path), WHOLE_NUMBERS.tolist()

    def block(block_id=None):
        with open(path, "a") as file:
            file.write(f"{block_id}\n")
        return np.array(rows[block_id[0] * 500 : (block_id[0] + 1) * 500])

    A = da.map_blocks(block, chunks=((500,) * 8, (50,)), dtype=float, meta=np.empty((0, 0)))
    first = clusters()
    first.add(6)
    C = coded.encode(A, code, first.client, storage=store)
    assert len(made) == 8
    product = first.client.compute(C @ X).result(timeout=60)
    pieces = [piece.tobytes() for piece in first.client.gather(list(C.encoded.futures))]
    kill_all(first)

    second = clusters()
    second.add(4)
    D = coded.open(store, second.client)
    found = second.client.compute(D @ X).result(timeout=60)
    if code.worst_condition_number() == 1 or code is EXACT:
        assert found.tobytes() == product.tobytes() == (WHOLE_NUMBERS @ X).tobytes()
    np.testing.assert_allclose(found, product, rtol=1e-12)
    again = second.client.gather(list(D.encoded.futures))
    assert [piece.tobytes() for piece in again] == pieces
    assert len(made) == 8  # no chunk of the source was computed again
    assert len({a for held in second.client.who_has(D.encoded.futures).values() for a in held}) == 4
    del C


def test_everything_killed_while_encoding(clusters, tmp_path):
    made, store = Log(tmp_path / "blocks"), tmp_path / "A"
    first = clusters()
    first.add(4)
    with ThreadPoolExecutor(1) as executor:
        encoding = executor.submit(
            coded.encode, source(made, "never"), coded.MDS(4, 3), first.client, storage=store
        )
        made.wait(1)
        kill_all(first)
        assert isinstance(encoding.exception(timeout=120), ConnectionError)
    second = clusters()
    second.add(3)
    with pytest.raises(coded.StoreError, match="is half written"):
        coded.open(store, second.client)
    C = coded.encode(WHOLE, coded.MDS(3, 2), second.client, storage=store)
    check(second.client, C)
    assert coded.check(store).whole


def test_damage_is_mended_on_the_next_cluster(clusters, tmp_path):
    store = tmp_path / "A"
    first = clusters()
    first.add(4)
    code = coded.Code(np.vstack([np.eye(3), np.ones(3)]))
    coded.encode(WHOLE_NUMBERS, code, first.client, storage=store)
    kill_all(first)
    [chunk] = store.glob("matrix-*/piece-1/c/0/0")
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 64
    chunk.write_bytes(content)
    second = clusters()
    second.add(2)
    D = coded.open(store, second.client)
    found = second.client.compute(D @ X).result(timeout=60)
    assert found.tobytes() == (WHOLE_NUMBERS @ X).tobytes()
    poll_for(lambda: complete(second.client, D), timeout=60)
    poll_for(lambda: coded.check(store).whole, timeout=60)


@pytest.mark.parametrize("survivors", [pytest.param(2, marks=pytest.mark.long), 1])
def test_more_workers_killed_than_the_code_tolerates_during_a_loop(
    survivors, patient, processes, tmp_path
):
    """Those that are left, the loop's among them, read what they lack; others join later."""
    processes.add(5)
    client = processes.client
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), coded.MDS(5, 4), client, storage=tmp_path / "A")
    loop = Loop(client, C, tmp_path)
    loop.progress(5)
    keep = loop.coordinator()
    others = [a for a in client.ncores() if a != keep]
    for address in others[survivors - 1 :]:
        processes.kill(address)
    poll_for(lambda: len(client.ncores()) == survivors, timeout=60)
    loop.progress(5)
    processes.add(3)
    poll_for(lambda: complete(client, C), timeout=60)
    loop.progress(5)
    loop.finish()
    assert loop.runs() == 1
    assert len(made) == BLOCKS
    check(client, C)


def test_all_workers_killed_during_a_loop(patient, processes, tmp_path):
    """The loop starts again, from the store, when workers return."""
    processes.add(4)
    client = processes.client
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), coded.MDS(4, 3), client, storage=tmp_path / "A")
    loop = Loop(client, C, tmp_path)
    loop.progress(5)
    # The coordinator last: otherwise the loop may begin on another worker before that is killed.
    for address in sorted(client.ncores(), key=lambda address: address == loop.coordinator()):
        processes.kill(address)
    poll_for(lambda: not client.ncores(), timeout=60)
    processes.add(2)
    loop.progress(5)
    loop.finish()
    assert loop.runs() == 2
    assert len(made) == BLOCKS
    check(client, C)


@pytest.mark.long
def test_a_fleet_that_shrinks_and_grows_again_and_again(patient, processes, tmp_path):
    """Also more often than Dask lets a task lose its worker, during rounds and while reading."""
    processes.add(6)
    client = processes.client
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), coded.MDS(6, 4), client, storage=tmp_path / "A")
    loop = Loop(client, C, tmp_path)
    for _ in range(3):
        loop.progress(3)
        keep = loop.coordinator()
        for address in [a for a in client.ncores() if a != keep]:
            processes.kill(address)
        processes.add(4)
    loop.progress(3)
    loop.finish()
    assert loop.runs() == 1
    assert len(made) == BLOCKS
    poll_for(lambda: complete(client, C), timeout=60)
    check(client, C)
