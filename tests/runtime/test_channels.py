"""Channels between workers break where nothing more can come of them."""

from __future__ import annotations

import pytest
from distributed.comm import CommClosedError, connect, listen
from distributed.utils_test import gen_test

from dask_coded.runtime import channels
from dask_coded.runtime.wire import pack


@gen_test()
async def test_who_waits_for_an_answer_that_cannot_be_packed_learns_that_none_comes(monkeypatch):
    def no_room(messages):
        raise MemoryError

    monkeypatch.setattr(channels, "pack", no_room)

    async def serving(comm):
        await channels.serve(comm, lambda message, answer: answer({"op": "share"}))

    async with listen("tcp://127.0.0.1:0", serving) as listener:
        comm = await connect(listener.contact_address)
        await comm.write(pack([{"op": "ask"}]))
        with pytest.raises(CommClosedError):
            await comm.read()
