"""Rows that workers fetch from each other."""

from __future__ import annotations

from threading import Event

import numpy as np
import pytest
import scipy.sparse
from distributed.utils_test import gen_cluster

import dask_coded as coded
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport import rows as module
from dask_coded.transport.rows import RowReader, RowsGoneError
from tests.clocks import set_timeouts

TWO = {"client": True, "nthreads": [("127.0.0.1", 1)] * 2}
WIDE = np.random.default_rng(0).random((60, 400))  # 192 kB
ROW = WIDE.shape[1] * 8


async def a_reader(c, *workers) -> RowReader:
    await coded.encode(np.ones((4, 4)), coded.MDS(2, 1), c)  # installs the plugins
    exchange = worker_plugin(workers[0]).exchange
    return RowReader(workers[0], exchange.readable_memory)


def spy(monkeypatch) -> list[bool]:
    left, leave = [], module.leave

    def spied(*args):
        left.append(leave(*args))
        return left[-1]

    monkeypatch.setattr(module, "leave", spied)
    return left


@pytest.mark.parametrize(
    "data",
    [WIDE, np.asfortranarray(WIDE), WIDE[::2].astype("f4"), WIDE > 0.5],
    ids=["C", "F", "f4", "bool"],
)
def test_rows_are_left_in_memory(data, monkeypatch):
    @gen_cluster(**TWO)
    async def test(c, s, *workers):
        reader, left = await a_reader(c, *workers), spy(monkeypatch)
        x = await c.scatter({"x": data}, workers=[workers[1].address])  # noqa: F841
        for start, stop in ((0, 30), (3, 29)):
            found = await reader.read(workers[1].address, "x", start, stop, ROW)
            np.testing.assert_array_equal(found, data[start:stop])
            assert found.dtype == data.dtype and found.flags.aligned
        assert left == [True, True]

    test()


@pytest.mark.parametrize(
    "data",
    [np.ma.masked_less(WIDE, 0.5), scipy.sparse.csr_array(WIDE), WIDE.astype(complex)],
    ids=["masked", "sparse", "larger"],
)
def test_rows_that_do_not_fit_into_memory_are_sent(data, monkeypatch):
    @gen_cluster(**TWO)
    async def test(c, s, *workers):
        reader, left = await a_reader(c, *workers), spy(monkeypatch)
        x = await c.scatter({"x": data}, workers=[workers[1].address])  # noqa: F841
        found = await reader.read(workers[1].address, "x", 5, 45, ROW)
        assert type(found) is type(data)
        assert (found != data[5:45]).sum() == 0
        assert not any(left)

    test()


@pytest.mark.parametrize("data", [WIDE, scipy.sparse.csr_array(WIDE)], ids=["dense", "sparse"])
def test_rows_are_sent_while_a_long_round_is_computed(data, monkeypatch):
    set_timeouts(monkeypatch, 0.5, module)

    @gen_cluster(**TWO)
    async def test(c, s, *workers):
        reader, over = await a_reader(c, *workers), Event()
        x = await c.scatter({"x": data}, workers=[workers[1].address])  # noqa: F841
        worker_plugin(workers[1])._executor.submit(over.wait)
        try:
            found = await reader.read(workers[1].address, "x", 5, 45, ROW)
        finally:
            over.set()
        assert (found != data[5:45]).sum() == 0

    test()


@gen_cluster(**TWO, config={"coded.shared-memory": False})
async def test_rows_are_sent_without_shared_memory(c, s, *workers):
    reader = await a_reader(c, *workers)
    x = await c.scatter({"x": WIDE}, workers=[workers[1].address])  # noqa: F841
    found = await reader.read(workers[1].address, "x", 5, 45, ROW)
    np.testing.assert_array_equal(found, WIDE[5:45])


@gen_cluster(**TWO)
async def test_memory_that_a_late_worker_may_write_into_is_not_used_again(c, s, *workers):
    reader = await a_reader(c, *workers)
    x = await c.scatter({"x": WIDE}, workers=[workers[1].address])  # noqa: F841
    address = workers[1].address
    before = await reader.read(address, "x", 0, 30, ROW)
    with pytest.raises(RowsGoneError):
        await reader.read(address, "y", 0, 30, ROW)
    np.testing.assert_array_equal(await reader.read(address, "x", 30, 60, ROW), WIDE[30:])
    np.testing.assert_array_equal(before, WIDE[:30])


@gen_cluster(**TWO)
async def test_a_worker_that_has_no_plugin_or_no_memory_has_no_rows(c, s, *workers):
    reader = await a_reader(c, *workers)
    x = await c.scatter({"x": WIDE}, workers=[workers[1].address])  # noqa: F841

    def no_room(**arguments):
        raise MemoryError

    handlers = workers[1].handlers
    handlers["coded_rows"] = no_room
    with pytest.raises(RowsGoneError):
        await reader.read(workers[1].address, "x", 0, 30, ROW)
    del handlers["coded_rows"]
    with pytest.raises(RowsGoneError):
        await reader.read(workers[1].address, "x", 0, 30, ROW)
