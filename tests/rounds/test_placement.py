"""Where lost pieces are rebuilt, and what workers that join take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, Repetition
from dask_coded.rounds.placement import relief, spare


def lose(code: Code, homes: list[str], worker: str, alive: dict[str, float]) -> None:
    """Rebuild the pieces of a worker elsewhere, one after another."""
    for piece, home in enumerate(homes):
        if home == worker:
            homes[piece] = spare(code, homes, alive, piece)


def join(code: Code, homes: list[str], worker: str, slow: Sequence[str] = ()) -> None:
    while (piece := relief(code, homes, worker, slow)) is not None:
        homes[piece] = worker


@settings(deadline=None)
@given(st.integers(5, 9), st.integers(2, 3), st.lists(st.integers(0, 99), max_size=20), st.data())
def test_copies_of_a_block_stay_on_different_workers(n, r, events, data) -> None:
    """So that as many losses at once are survived after any number of losses one by one."""
    code = Repetition(n, r)
    homes = [f"w{place}" for place in code.place.tolist()]
    alive = {f"w{place}": 1.0 for place in range(n)}
    for number, event in enumerate(events):
        if event % 2 and len(alive) > r:
            gone = sorted(alive)[event % len(alive)]
            del alive[gone]
            lose(code, homes, gone, alive)
        else:
            alive[f"v{number}"] = data.draw(st.floats(0.1, 2.0))
            slow = data.draw(st.lists(st.sampled_from(sorted(alive)), max_size=2, unique=True))
            join(code, homes, f"v{number}", slow)
        assert set(homes) <= alive.keys()
        assert max(Counter(zip(homes, code.group.tolist(), strict=True)).values()) == 1


@pytest.mark.parametrize("code", [MDS(7, 5), Repetition(7, 3)], ids=repr)
def test_after_a_loss_and_a_join_all_workers_hold_as_much_as_before(code) -> None:
    homes = [f"w{place}" for place in code.place.tolist()]
    alive = {f"w{place}": 1.0 for place in range(1, 7)}
    lose(code, homes, "w0", alive)
    join(code, homes, "new")
    assert set(Counter(homes).values()) == {code.pieces // 7}


def test_a_piece_that_a_new_worker_cannot_take_stays() -> None:
    homes = ["a", "b", "a", "c"]
    assert relief(MDS(4, 3), homes, "d", fixed={2}) == 0
    assert relief(MDS(4, 3), homes, "d", fixed={0, 2}) is None


def test_one_of_two_copies_goes_to_a_worker_that_joins() -> None:
    code = Repetition(3, 2)
    homes = ["a", "b", "b", "c", "a", "c"]  # pieces 1 and 2 are copies of one block
    join(code, homes, "d")
    assert homes[2] == "d"


def test_a_worker_that_joins_takes_from_one_that_holds_several_before_slow_ones() -> None:
    homes = ["a", "b", "c", "a"]
    for newcomer, taken in (("d", 3), ("e", 1), ("f", 2)):
        join(MDS(4, 3), homes, newcomer, slow=["b", "c"])
        assert homes[taken] == newcomer
    join(MDS(4, 3), homes, "g", slow=["b", "c"])
    assert homes == ["a", "e", "f", "d"]
