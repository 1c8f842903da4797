"""Which peers are there: the machine against simple records of what happened, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.membership import Ask, Changed, Membership, Standing, Timeouts

PEERS = "abc"
T = Timeouts(1.0)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "asked",
                "called",
                "heard",
                "answers",
                "settled",
                "closed",
                "opened",
                "suspect",
                "look",
                "unheard",
            ]
        ),
        st.sampled_from(PEERS),
        st.floats(0.0, 3.0),
    ),
    max_size=60,
)


def act(machine: Membership, event: str, peer: str, now: float) -> list:
    """Hand an event to the machine; return its commands."""
    match event:
        case "asked" | "called":
            machine.asked(peer, now, call=event == "called")
        case "heard" | "answers":
            return machine.heard(peer, now, answers=event == "answers")
        case "settled":
            machine.settled(peer, machine.time - now % 1)
        case "closed":
            return machine.closed(peer)
        case "opened":
            return [machine.opened(peer, now)]
        case "suspect":
            return machine.suspect(peer)
        case "unheard":
            return machine.unheard(2.0, now)
        case "look":
            return machine.react(now, dict.fromkeys(PEERS, T.quiet()))
    return []


@given(EVENTS)
def test_only_the_end_of_a_connection_makes_a_peer_gone(events):
    machine, now, gone, epochs = Membership(T), 0.0, set(), dict.fromkeys(PEERS, 0)
    for event, peer, seconds in [("opened", p, 0.0) for p in PEERS] + events:
        now += seconds
        act(machine, event, peer, now)
        if event == "closed":
            gone.add(peer)
        elif event == "opened":
            gone.discard(peer)
            epochs[peer] += 1
        assert {p for p in PEERS if machine.standing(p) is Standing.GONE} == gone
        assert set(machine.gone) == gone
        assert machine.suspects == {p for p in PEERS if machine.standing(p) is Standing.SUSPECT}
    assert {p: machine.opened(p, now).epoch - 1 for p in PEERS} == epochs


def test_the_peers_that_went_first_are_the_first_of_those_that_are_gone():
    machine = Membership(T)
    for peer in PEERS:
        machine.opened(peer, 0.0)
    for peer in "cab":
        machine.closed(peer)
    machine.closed("c")
    assert list(machine.gone) == ["c", "a", "b"]
    machine.opened("c", 1.0)
    machine.closed("c")
    machine.forget("b")
    assert list(machine.gone) == ["a", "c"]


@given(EVENTS)
def test_changes_tell_every_standing_and_nothing_else(events):
    machine, now, told = Membership(T), 0.0, {}
    for event, peer, seconds in events:
        now += seconds
        for command in act(machine, event, peer, now):
            if isinstance(command, Changed):
                assert command.standing is machine.standing(command.peer)
                told[command.peer] = command.standing
        assert {p: s for p in PEERS if (s := told.get(p, Standing.ALIVE))} == {
            p: machine.standing(p) for p in PEERS
        }


@given(EVENTS)
def test_a_peer_is_asked_once_until_it_is_heard(events):
    """Or until a run ends, after which it does not answer what it was asked."""
    machine, now, asked = Membership(T), 0.0, set()
    for event, peer, seconds in [("opened", p, 0.0) for p in PEERS] + events:
        now += seconds
        for command in act(machine, event, peer, now):
            if isinstance(command, Ask):
                assert command.peer not in asked
                assert machine.standing(command.peer) is not Standing.GONE
                asked.add(command.peer)
        if event in ("heard", "answers", "settled", "closed", "opened"):
            asked.discard(peer)


@given(EVENTS)
def test_a_suspect_peer_is_alive_once_it_is_heard(events):
    machine, now = Membership(T), 0.0
    for event, peer, seconds in [("opened", p, 0.0) for p in PEERS] + events:
        now += seconds
        act(machine, event, peer, now)
    for peer in PEERS:
        before = machine.standing(peer)
        machine.heard(peer, now)
        assert machine.standing(peer) is (
            Standing.GONE if before is Standing.GONE else Standing.ALIVE
        )
        assert not machine.owes(peer)


@given(EVENTS, st.floats(0.5, 1e6), st.booleans())
def test_an_observer_that_stood_still_blames_no_peer_whose_answer_is_there(events, gap, hears):
    """It reads the answers that came meanwhile, one before its first look, or all after that."""
    machine, now = Membership(T), 0.0
    for event, peer, seconds in [("opened", p, 0.0) for p in PEERS] + events:
        now += seconds
        act(machine, event, peer, now)
    before = set(machine.suspects)
    now += gap
    if hears:
        machine.heard("a", now)
    machine.react(now)
    for peer in PEERS:
        machine.heard(peer, now)
    machine.react(now + T.tick)
    assert machine.suspects <= before


@given(st.floats(0.0, 3.0), st.lists(st.floats(0.01, 0.39), min_size=1, max_size=80))
def test_a_peer_is_suspect_when_it_has_owed_an_answer_for_its_patience(answer, gaps):
    machine, now = Membership(T), 0.0
    machine.opened("a", now)
    machine.asked("a", now, call=True)
    while now < answer:
        now = min(now + T.tick, answer)
        machine.react(now)
    machine.heard("a", now, answers=True)
    patience = machine.patience("a")
    assert patience == pytest.approx(min(max(1.0, 10 * answer), 5.0))
    machine.asked("a", now)
    since = now
    for gap in gaps:
        now += gap
        machine.react(now)
        late = now - since >= patience - T.tick / 2
        if abs(now - since - (patience - T.tick / 2)) > 1e-6:
            assert (machine.standing("a") is Standing.SUSPECT) == late
    # Nothing is due of a peer that is suspect, so no timer of the observer runs.
    assert (machine.wake is None) == (machine.standing("a") is Standing.SUSPECT)


def test_answer_times_fall_slowly():
    machine, now = Membership(T), 0.0
    machine.opened("a", now)
    seen = []
    for seconds in (0.001, 0.3, 0.001, 60.0):
        machine.asked("a", now, call=True)
        for _ in range(int(seconds / T.tick)):
            now += T.tick
            machine.react(now)
        now += seconds % T.tick
        machine.heard("a", now, answers=True)
        seen.append(machine.patience("a"))
    assert seen == pytest.approx([1.0, 3.0, 1.5, 5.0])
    for _ in range(3):
        machine.settled("a", machine.time)
    assert machine.patience("a") == 1.0
    # What it answers to other messages says nothing, because it may compute first.
    machine.asked("a", now)
    machine.heard("a", now + 0.4, answers=True)
    assert machine.patience("a") == 1.0


@pytest.mark.parametrize(("lag", "pause"), [(0.0, 0.5), (0.02, 2.0), (10.0, 5.0)])
def test_a_quiet_peer_is_asked_the_less_often_the_slower_it_is(lag, pause):
    machine, asked = Membership(T), []
    machine.opened("a", 0.0)
    for eighth in range(200):
        now = eighth / 8
        if machine.react(now, {"a": T.quiet(lag)}):
            asked.append(now)
            machine.heard("a", now, answers=True)
    assert asked[:3] == [pause, 2 * pause, 3 * pause]


def test_a_peer_that_owes_an_answer_is_called_in_time_to_give_it():
    machine = Membership(T)
    machine.opened("a", 0.0)
    machine.asked("a", 0.0)
    found = {t: machine.react(t / 10, {"a": 0.0}) for t in range(1, 12)}
    assert {t: commands for t, commands in found.items() if commands} == {
        5: [Ask("a")],
        9: [Changed("a", 1, Standing.SUSPECT)],
    }


def test_what_a_closed_peer_sends_or_owes_says_nothing():
    machine = Membership(T)
    machine.opened("a", 0.0)
    machine.asked("a", 0.0)
    assert machine.closed("a") == [Changed("a", 1, Standing.GONE)]
    assert machine.wake is None and not machine.closed("a") and not machine.heard("a", 1.0)
    machine.asked("a", 1.0)
    assert not machine.owes("a")
    assert machine.opened("a", 1.0) == Changed("a", 2, Standing.ALIVE)
    machine.forget("a")
    assert machine.standing("a") is Standing.ALIVE


def test_a_peer_that_answered_otherwise_is_called_once_more_and_no_more():
    """It sent something after a call that it has not answered, and then fell silent."""
    machine = Membership(T)
    machine.opened("a", 0.0)
    machine.asked("a", 0.0, call=True)
    machine.heard("a", 0.1)
    machine.asked("a", 0.2)
    found = [c for t in range(3, 30) for c in machine.react(t / 10, {"a": 0.0})]
    assert found == [Ask("a"), Changed("a", 1, Standing.SUSPECT)]


@given(EVENTS)
def test_peers_that_report_unasked_are_suspect_once_they_have_not_been_heard_for_long(events):
    """By the machine's time, in which a gap of an observer that stood still does not count."""
    machine, now, heard = Membership(T), 0.0, {}
    for event, peer, seconds in [("opened", p, 0.0) for p in PEERS] + events:
        now += seconds
        act(machine, event, peer, now)
        says = event in ("heard", "answers") and machine.standing(peer) is not Standing.GONE
        if says or event == "opened":
            heard[peer] = machine.time
        elif event == "unheard":
            late = {p for p in PEERS if machine.time - heard[p] > 2.0}
            there = {p for p in PEERS if machine.standing(p) is Standing.ALIVE}
            assert not late & there


def test_an_observer_that_stood_still_blames_no_peer_that_it_has_yet_to_hear():
    machine = Membership(T)
    for peer in PEERS:
        machine.opened(peer, 0.0)
    assert machine.unheard(2.0, 60.0) == []
    changes = []
    for tick in range(1, 20):
        machine.heard("a", 60.0 + tick / 5)
        changes += machine.unheard(2.0, 60.0 + tick / 5)
    assert changes == [Changed(peer, 1, Standing.SUSPECT) for peer in "bc"]
    assert machine.heard("b", 64.0) == [Changed("b", 1, Standing.ALIVE)]


@given(EVENTS, st.floats(0.0, 3.0))
def test_how_long_a_peer_has_owed_an_answer_agrees_with_what_it_was_asked(events, seconds):
    machine, now, since = Membership(T), 0.0, {}
    for event, peer, gap in [("opened", p, 0.0) for p in PEERS] + events:
        now += gap
        asked = [c.peer for c in act(machine, event, peer, now) if isinstance(c, Ask)]
        if event in ("asked", "called"):
            asked.append(peer)
        if event in ("heard", "answers", "closed", "opened"):
            since.pop(peer, None)
        elif event == "settled" and since.get(peer, -1.0) >= machine.time - now % 1:
            del since[peer]
        for p in asked:
            if machine.standing(p) is not Standing.GONE:
                since.setdefault(p, machine.time)
        owed = {p: machine.time - since[p] if p in since else 0.0 for p in PEERS}
        assert {p: machine.owed(p) for p in PEERS} == owed
    for p in PEERS:
        late = p in since and machine.time - since[p] >= seconds - T.tick / 2
        assert machine.owes(p, seconds) == late


def test_an_observer_that_always_stands_still_is_excused_for_one_look_only():
    machine, found = Membership(T), []
    machine.opened("a", 0.0)
    machine.asked("a", 0.0)
    for look in range(1, 6):
        found += [c for c in machine.react(3.0 * look) if isinstance(c, Changed)]
        # By the machine's own time, in which a gap counts as two ticks.
        assert (machine.standing("a") is Standing.SUSPECT) == (look >= 3)
    assert found == [Changed("a", 1, Standing.SUSPECT)]


def test_a_run_that_begins_at_once_after_another_settles_only_its_own():
    """Otherwise a silent peer would never owe an answer for longer than a short round."""
    machine = Membership(Timeouts(1.0))
    machine.opened("a", 0.0)
    machine.asked("a", 0.1)  # that the run before has ended
    began = machine.at(0.1 + 1e-9)
    machine.asked("a", 0.2)
    machine.settled("a", began)
    assert machine.owes("a")
