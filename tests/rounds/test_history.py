"""What is kept from round to round of a loop."""

from __future__ import annotations

from dask_coded.rounds import Rest


def test_a_worker_that_always_fails_is_tried_ever_more_rarely() -> None:
    rest, tried = Rest(), []
    for round_ in range(100):
        failed = [] if "broken" in rest else ["broken"]
        tried += [round_] * len(failed)
        rest.record(failed)
        assert "sound" not in rest
    assert tried == [0, 2, 5, 10, 19, 36, 69]


def test_a_worker_that_failed_once_returns_for_good() -> None:
    rest = Rest()
    rest.record(["short of memory"])
    assert "short of memory" in rest
    for _ in range(10):
        rest.record([])
        assert "short of memory" not in rest


def test_a_worker_that_has_left_is_forgotten() -> None:
    """Another one may come at its address, which is not to rest for its failures."""
    rest = Rest()
    for _ in range(4):
        rest.record(["left", "stays"])
    rest.keep(["stays", "new"])
    assert "stays" in rest
    assert "left" not in rest
    rest.record(["left"])
    rest.record([])
    assert "left" not in rest
