"""How a coordinator gets its plans, without a cluster."""

from __future__ import annotations

import asyncio

import pytest

from dask_coded.rounds import RoundOptions
from dask_coded.runtime.coordinator import Coordinator
from dask_coded.runtime.spec import CodedDataLostError


def coordinator(*answers):
    """Return a coordinator that is given these plans, one after the other."""
    found, left = Coordinator(None, "array", RoundOptions(), "task"), list(answers)

    async def ask():
        await asyncio.sleep(0)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    found._ask = ask
    return found


def test_rounds_that_threads_of_an_algorithm_start_at_once_share_a_plan():
    async def plans():
        return await asyncio.gather(*(found._plan() for _ in range(3)))

    found = coordinator("plan")
    assert asyncio.run(plans()) == ["plan"] * 3


def test_a_plan_is_asked_for_again_after_an_error():
    async def plans():
        with pytest.raises(CodedDataLostError):
            await found._plan()
        return await found._plan()

    found = coordinator(CodedDataLostError("for now"), "plan")
    assert asyncio.run(plans()) == "plan"
