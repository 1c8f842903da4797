"""Real processes die, stop and come back: during rounds and while encoding."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from distributed import Event, futures_of
from distributed.utils_test import poll_for

import dask_coded as coded

BLOCKS, ROWS, COLUMNS = 8, 1600, 200
ROUNDS = 50

WHOLE = np.cos(np.add.outer(7.0 * np.arange(ROWS), np.arange(COLUMNS) ** 2))
CHUNKS = ((ROWS // BLOCKS,) * BLOCKS, (COLUMNS,))


class Log:
    """A file that workers write lines to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __len__(self) -> int:
        return len(self.path.read_text().splitlines())

    def wait(self, lines: int) -> None:
        poll_for(lambda: len(self) >= lines, timeout=60)


def source(log: Log, gate: str | None = None) -> da.Array:
    """Return ``WHOLE`` as a dask array; each block writes a line to ``log`` when it is computed."""
    path, rows, columns = str(log.path), ROWS // BLOCKS, COLUMNS

    # Nested functions are pickled by value, because workers cannot import this module.
    def block(block_id=None):
        with open(path, "a") as file:
            file.write(f"{block_id}\n")
        if gate is not None:
            Event(gate).wait()
        first = block_id[0] * rows
        return np.cos(np.add.outer(7.0 * np.arange(first, first + rows), np.arange(columns) ** 2))

    return da.map_blocks(block, chunks=CHUNKS, dtype=float, meta=np.empty((0, 0)))


class Loop:
    """A loop of rounds in the cluster, which goes on until the test calls :meth:`finish`."""

    def __init__(self, client, C, folder: Path, workers=None) -> None:
        self._client = client
        self.log = Log(folder / "rounds")
        self.starts = Log(folder / "starts")
        self._over = folder / "over"
        paths = [str(log) for log in (self.log.path, self.starts.path, self._over)]

        def rounds(operator, whole, count, log, starts, over):
            with open(starts, "a") as file:
                file.write("started\n")
            i = after = 0
            while i < count or after < 5:
                x = np.sin(np.arange(whole.shape[1]) + i)
                np.testing.assert_allclose(operator @ x, whole @ x, rtol=1e-10, atol=1e-10)
                after += Path(over).exists()
                i += 1
                with open(log, "a") as file:
                    file.write(f"{i}\n")
            return i

        self._future = coded.submit(
            rounds, C, WHOLE, ROUNDS, *paths, client=client, workers=workers
        )

    def coordinator(self) -> str:
        """Return the address of the worker that the loop runs on."""
        processing = self._client.processing()
        return next((a for a, keys in processing.items() if self._future.key in keys), "")

    def runs(self) -> int:
        """How often it started, but for moves away from a slow worker: others may be busy here."""
        events = [event for _, event in self._client.get_events("dask-coded")]
        return len(self.starts) - sum(event.get("reason") == "is slow" for event in events)

    def progress(self, rounds: int) -> None:
        """Wait for that many more rounds; raise the error of the loop if one ends it."""
        wanted = len(self.log) + rounds
        poll_for(lambda: len(self.log) >= wanted or self._future.done(), timeout=60)
        if self._future.done():
            self._future.result()

    def finish(self) -> None:
        """Run a few more rounds, and check that all rounds were right."""
        self._over.touch()
        assert self._future.result(timeout=60) >= ROUNDS


def check(client, C) -> None:
    x = np.sin(np.arange(COLUMNS))
    np.testing.assert_allclose(client.compute(C @ x).result(timeout=60), WHOLE @ x, atol=1e-10)


def complete(client, C) -> bool:
    """Return whether each piece is on some worker."""
    return all(client.who_has(C.encoded.futures).values())


@pytest.mark.parametrize(
    "code",
    [coded.MDS(5, 3), pytest.param(coded.Repetition(5, 3), marks=pytest.mark.long)],
    ids=repr,
)
def test_workers_killed_during_rounds(code, patient, processes, tmp_path):
    processes.add(5)
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), code, processes.client)
    assert len(made) == BLOCKS
    loop = Loop(processes.client, C, tmp_path)
    rng = random.Random(7)
    for _ in range(2):
        loop.progress(rng.randrange(1, 15))
        others = sorted(set(processes.client.ncores()) - {loop.coordinator()})
        processes.kill(rng.choice(others))
    loop.progress(5)
    loop.finish()
    assert loop.runs() == 1
    poll_for(lambda: complete(processes.client, C), timeout=60)
    np.testing.assert_allclose(processes.client.compute(C).result(), WHOLE, atol=1e-10)
    assert len(made) == BLOCKS  # lost pieces were rebuilt from the others


@pytest.mark.versions
def test_workers_killed_one_after_another(processes, tmp_path):
    """In all, more workers than the code can lose at once; pieces are rebuilt after each loss."""
    processes.add(5)
    client = processes.client
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), coded.MDS(5, 3), client)
    loop = Loop(client, C, tmp_path)
    for _ in range(3):
        loop.progress(3)
        gone = next(a for a in client.ncores() if a != loop.coordinator())
        processes.kill(gone)
        poll_for(lambda gone=gone: gone not in client.ncores(), timeout=60)
        poll_for(lambda: complete(client, C), timeout=60)
    loop.finish()
    assert len(made) == BLOCKS


def test_worker_stopped_during_rounds(processes, tmp_path):
    addresses = processes.add(4)
    C = coded.encode(source(Log(tmp_path / "blocks")), coded.MDS(4, 3), processes.client)
    loop = Loop(processes.client, C, tmp_path, workers=addresses[0])
    loop.progress(3)
    with processes.stopped(addresses[1]):
        loop.progress(20)  # rounds end without it
    loop.progress(5)
    loop.finish()
    # The worker is back, and the rounds that it missed do no harm.
    assert addresses[1] in processes.client.ncores()
    check(processes.client, C)


def test_worker_stopped_and_another_killed_during_rounds(processes, tmp_path):
    addresses = processes.add(5)
    C = coded.encode(source(Log(tmp_path / "blocks")), coded.MDS(5, 3), processes.client)
    loop = Loop(processes.client, C, tmp_path, workers=addresses[0])
    loop.progress(3)
    with processes.stopped(addresses[1]):
        loop.progress(3)
        processes.kill(addresses[2])
        loop.progress(10)
    loop.finish()


@pytest.mark.versions
def test_coordinator_killed_during_rounds(processes, tmp_path):
    processes.add(4)
    made = Log(tmp_path / "blocks")
    C = coded.encode(source(made), coded.MDS(4, 3), processes.client)
    loop = Loop(processes.client, C, tmp_path)
    loop.progress(10)
    processes.kill(loop.coordinator())
    loop.starts.wait(2)  # it starts again on another worker
    loop.progress(5)
    loop.finish()
    assert len(made) == BLOCKS


def test_coordinator_stopped_during_rounds(processes, tmp_path):
    processes.add(4)
    client = processes.client
    C = coded.encode(source(Log(tmp_path / "blocks")), coded.MDS(4, 3), client)
    loop = Loop(client, C, tmp_path)
    loop.progress(10)
    stopped = loop.coordinator()
    with processes.stopped(stopped):
        loop.starts.wait(2)  # it starts again on another worker
        poll_for(lambda: loop.coordinator() not in ("", stopped), timeout=60)
        loop.progress(10)
    # The worker is back. It does not go on with the loop, and takes part in rounds.
    loop.progress(5)
    loop.finish()
    poll_for(lambda: not unfinished(client)[stopped], timeout=60)
    assert stopped in client.ncores()
    check(client, C)


def test_coordinator_stopped_during_lazy_rounds(processes, tmp_path):
    processes.add(4)
    client = processes.client
    C = coded.encode(source(Log(tmp_path / "blocks")), coded.MDS(4, 3), client)
    x = np.cos(np.arange(COLUMNS * 12.0)).reshape(12, COLUMNS)
    check(client, C)
    stopped = C.encoded.workers[0]
    with processes.stopped(stopped):
        # Some of these rounds are given to the stopped worker.
        futures = client.compute([C @ row for row in x])
        for future, row in zip(futures, x, strict=True):
            np.testing.assert_allclose(future.result(timeout=200), WHOLE @ row, atol=1e-10)
    poll_for(lambda: not unfinished(client)[stopped], timeout=60)
    check(client, C)


def test_the_worker_that_holds_operands_is_stopped(processes, tmp_path):
    """Dask alone waits until it is back."""
    processes.add(4)
    client = processes.client
    C = coded.encode(source(Log(tmp_path / "blocks")), coded.MDS(4, 3), client)
    x = np.cos(np.arange(COLUMNS * 12.0)).reshape(12, COLUMNS)
    stopped = C.encoded.workers[0]
    where = {"workers": [stopped], "allow_other_workers": True}
    operands = client.persist([da.from_array(row, -1).map_blocks(np.copy) for row in x], **where)
    poll_for(lambda: all(future.done() for future in futures_of(operands)), timeout=60)
    with processes.stopped(stopped):
        futures = client.compute([C @ operand for operand in operands])
        for future, row in zip(futures, x, strict=True):
            np.testing.assert_allclose(future.result(timeout=200), WHOLE @ row, atol=1e-10)
    check(client, C)


def unfinished(client) -> dict[str, int]:
    """Count the tasks that each worker runs, and the rounds that it coordinates."""

    def count(dask_worker):
        state = dask_worker.state
        rounds = dask_worker.extensions["dask-coded"]._rounds
        return len(state.executing) + len(state.long_running) + len(rounds)

    return client.run(count)


def test_coordinator_killed_during_lazy_rounds(processes, tmp_path):
    processes.add(4)
    client = processes.client
    C = coded.encode(source(Log(tmp_path / "blocks")), coded.MDS(4, 3), client)
    x = np.cos(np.arange(COLUMNS * 40.0)).reshape(COLUMNS, 40)
    future = client.compute(C @ da.from_array(x, chunks=(COLUMNS, 1)))
    processes.kill(C.encoded.workers[0])
    np.testing.assert_allclose(future.result(timeout=60), WHOLE @ x, atol=1e-10)


@pytest.mark.versions
@pytest.mark.parametrize("blocks", [1, BLOCKS])
def test_worker_killed_while_encoding(blocks, processes, tmp_path):
    processes.add(4, threads=2)
    client = processes.client
    made = Log(tmp_path / "blocks")
    with ThreadPoolExecutor(1) as executor:
        encoding = executor.submit(
            coded.encode, source(made, gate="encode"), coded.MDS(3, 2), client
        )
        made.wait(blocks)
        busy = max(client.processing().items(), key=lambda item: len(item[1]))[0]
        processes.kill(busy)
        Event("encode", client=client).set()
        C = encoding.result(timeout=60)
    check(client, C)
    poll_for(lambda: complete(client, C), timeout=60)
    np.testing.assert_allclose(client.compute(C).result(), WHOLE, atol=1e-10)


def test_too_many_workers_killed(processes, tmp_path):
    processes.add(4)
    client = processes.client
    C = coded.encode(source(Log(tmp_path / "blocks")), coded.MDS(4, 3), client)
    gone, left = C.encoded.workers[:2], C.encoded.workers[2:]
    # No worker can rebuild a piece before both are gone.
    with processes.stopped(*left):
        for process in [processes.process(address) for address in gone]:
            process.kill()
            process.join()
        poll_for(lambda: set(client.ncores()) == set(left), timeout=60)
    with pytest.raises(
        coded.CodedDataLostError,
        match=r"MDS\(n=4, k=3\) can lose 1 of its workers; 2 of its 4 pieces are left.*"
        "encode the array",
    ):
        client.compute(C @ np.ones(COLUMNS)).result(timeout=60)
    poll_for(lambda: "2 lost since" in repr(C), timeout=60)


def test_too_many_workers_killed_during_rounds(processes, tmp_path):
    processes.add(3)
    C = coded.encode(source(Log(tmp_path / "blocks")), coded.MDS(3, 3), processes.client)
    loop = Loop(processes.client, C, tmp_path)
    loop.progress(3)
    processes.kill(next(a for a in C.encoded.workers if a != loop.coordinator()))
    with pytest.raises(coded.CodedDataLostError, match=r"2 of its 3 pieces are left"):
        loop.finish()
