"""How a coordinator gets its plans, and how workers are measured, without a cluster."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from dask_coded.rounds import RoundOptions
from dask_coded.runtime.answers import RoundPlan
from dask_coded.runtime.coordinator.rounds import Coordinator, _Current
from dask_coded.runtime.spec import CodedDataLostError
from dask_coded.runtime.worker import probe


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
        return await asyncio.gather(*(found._plan(None) for _ in range(3)))

    found = coordinator("plan")
    assert asyncio.run(plans()) == ["plan"] * 3


def test_a_plan_is_asked_for_again_after_an_error():
    async def plans():
        with pytest.raises(CodedDataLostError):
            await found._plan(None)
        return await found._plan(None)

    found = coordinator(CodedDataLostError("for now"), "plan")
    assert asyncio.run(plans()) == "plan"


def test_lags_do_not_count_for_an_operand_of_another_width():
    plan = RoundPlan(("a", "b"), (0, 1), (30.0, 20.0), (0.1, 0.2), None, None, None, (), ())
    current = _Current(None, plan, None, None, row=(32,))
    assert current.plan_for((32,)).lags == (0.1, 0.2)
    assert current.plan_for(()).lags == (0.0, 0.0)
    assert current.plan_for(()).speeds == (30.0, 20.0)


def test_no_measurements_pile_up_while_all_threads_of_a_worker_are_busy(monkeypatch):
    def submit(call):
        waiting.append(Future())
        return waiting[-1]

    monkeypatch.setattr(probe, "_EVERY", -1.0)
    waiting: list[Future[None]] = []
    found = probe.Probe(SimpleNamespace(submit=submit))
    for _ in range(3):
        found.refresh()
    assert len(waiting) == 1
    waiting[0].set_result(None)
    found.refresh()
    assert len(waiting) == 2
