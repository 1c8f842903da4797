"""Which workers are there, as the scheduler sees it, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.compat import heartbeat_interval
from dask_coded.membership import Standing
from dask_coded.runtime.scheduler.standings import Standings
from tests.clocks import Clock

WORKERS = "abc"
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["look", "heartbeat", "answer", "report", "plan", "leave", "join"]),
        st.sampled_from(WORKERS),
        st.floats(0.0, 0.4),
    ),
    max_size=60,
)


class Observed:
    """Standings of some workers, with what they were asked and what was told of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: dict[str, Standing] = {}
        self.clock = Clock(0.0)
        scheduler = SimpleNamespace(
            workers=dict.fromkeys(WORKERS),
            stream_comms=dict.fromkeys(WORKERS),
            worker_send=lambda worker, message: self.asked.append(worker),
        )
        self.standings = Standings(scheduler, self._changed)
        self.standings.clock = self.clock
        for worker in WORKERS:
            self.standings.joined(worker)

    def _changed(self, change) -> None:
        self.told[change.peer] = change.standing

    def act(self, event: str, worker: str) -> None:
        standings = self.standings
        match event:
            case "look":
                standings.look(dict.fromkeys(WORKERS, 0.0))
            case "heartbeat" | "answer":
                standings.heard(worker, answers=event == "answer")
            case "report":
                standings.suspect([worker])
            case "plan":
                standings.expect_heartbeats()
            case "leave":
                standings.left(worker)
                self.told.pop(worker, None)
            case "join":
                standings.joined(worker)


@given(EVENTS)
def test_a_worker_is_suspect_only_for_a_reason(events):
    """It is reported, owes an answer for the timeout, or has ceased to send heartbeats."""
    observed = Observed()
    standings, membership = observed.standings, observed.standings.membership
    heard, reported = dict.fromkeys(WORKERS, 0.0), set()
    patience = membership.timeouts.silence - membership.timeouts.tick / 2
    beats = membership.timeouts.beats(heartbeat_interval(len(WORKERS)))
    there = set(WORKERS)
    for event, worker, seconds in events:
        observed.clock.now += seconds
        observed.act(event, worker)
        if event == "leave":
            there.discard(worker)
        elif event == "join":
            there.add(worker)
        if event in ("heartbeat", "answer", "join", "leave"):
            heard[worker] = observed.clock.now
            reported.discard(worker)
        elif event == "report":
            reported.add(worker)
        quiet = {w for w in WORKERS if observed.clock.now - heard[w] > min(beats, patience) - 1e-9}
        assert standings.suspects <= there & (quiet | reported)
        assert standings.suspects >= there & reported
        assert standings.suspects == {w for w, s in observed.told.items() if s is Standing.SUSPECT}


@given(EVENTS)
def test_a_worker_is_asked_once_until_it_is_heard(events):
    observed, owing = Observed(), set()
    for event, worker, seconds in events:
        observed.clock.now += seconds
        observed.act(event, worker)
        assert not owing & set(observed.asked)
        owing |= set(observed.asked)
        observed.asked.clear()
        if event in ("heartbeat", "answer", "join", "leave"):
            owing.discard(worker)


@pytest.mark.parametrize("lasts", [0.0, 3.0])
def test_a_stopped_worker_is_suspect_within_the_timeout_and_two_ticks(lasts):
    """However long the scheduler has watched it, from its last sign of life on."""
    observed = Observed()
    standings = observed.standings
    tick = standings.membership.timeouts.tick
    while observed.clock.now < lasts:
        observed.clock.now += tick
        observed.act("look", "a")
        for worker in WORKERS:
            standings.heard(worker, answers=True)
    stopped = observed.clock.now
    while "a" not in standings.suspects:
        observed.clock.now += tick
        observed.act("look", "a")
        for worker in "bc":
            standings.heard(worker, answers=True)
    silence = standings.membership.timeouts.silence
    assert silence <= observed.clock.now - stopped + 1e-9 <= silence + 2 * tick
    assert standings.suspects == {"a"}
    standings.heard("a")
    assert not standings.suspects
