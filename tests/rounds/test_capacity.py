"""Which workers had better be replaced."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.codes import MDS, RandomLinear, Repetition
from dask_coded.rounds import capacity
from dask_coded.rounds.capacity import Capacity

worth_replacing = partial(capacity.worth_replacing, gain=0.05)
CODES = [MDS(4, 3), MDS(9, 5), RandomLinear(6, 4), Repetition(6, 2)]


def seconds(code, homes, speeds) -> float:
    held = Counter(homes)
    pieces = np.array(list(held.values()))
    return Capacity(code.need, pieces, 1).seconds(np.array([speeds[home] for home in held]))


@given(st.sampled_from(CODES), st.data())
def test_each_replacement_makes_rounds_shorter_by_a_twentieth(code, data) -> None:
    workers = [f"w{i}" for i in range(data.draw(st.integers(1, code.n)))]
    homes = [workers[place % len(workers)] for place in code.place.tolist()]
    speeds = {worker: data.draw(st.floats(0.01, 2.0)) for worker in workers}
    before, usual = seconds(code, homes, speeds), float(np.median(list(speeds.values())))
    for worker in worth_replacing(code, homes, speeds):
        assert speeds[worker] < usual
        speeds[worker] = usual
        after = seconds(code, homes, speeds)
        assert after <= 0.95 * before * (1 + 1e-9)
        before = after
    assert not worth_replacing(code, homes, dict.fromkeys(speeds, 0.5))


@pytest.mark.parametrize(("workers", "found"), [(6, ["w3"]), (40, [])])
def test_one_slow_worker_of_many_is_not_worth_another(workers, found) -> None:
    homes = [f"w{i}" for i in range(workers)]
    speeds = dict.fromkeys(homes, 1.0) | {"w3": 0.2}
    assert worth_replacing(MDS(workers, workers - 2), homes, speeds) == found


def test_workers_that_do_nothing_are_worth_replacing() -> None:
    homes = ["a", "b", "c", "d", "away"]
    speeds = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0}  # too few for a round
    assert worth_replacing(MDS(5, 4), homes, speeds) == ["b", "c"]
    assert worth_replacing(MDS(5, 4), homes, dict.fromkeys(speeds, 0.0)) == []
