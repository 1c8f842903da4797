"""Every aggregation gives every worker the exact sum, whatever the order of messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.aggregation import ROOT, Aggregation, Ring, Star

from .driver import Group, agree


def gradients(parts: int, length: int = 23, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((parts, length))


@given(
    st.sampled_from([Star, Ring]), st.integers(1, 7), st.integers(1, 3), st.booleans(), st.data()
)
def test_any_order_of_messages_gives_the_sum(
    kind: type[Star] | type[Ring], workers: int, segments: int, twice: bool, data: st.DataObject
) -> None:
    plan = kind(segments=segments).plan(workers)
    group = Group(plan, gradients(plan.parts))
    random = data.draw(st.randoms(use_true_random=False))
    group.run(random.randrange, twice=twice)
    agree(group, [*range(workers), *([ROOT] if plan.rooted else [])])


@pytest.mark.parametrize("aggregation", [Star(), Ring()])
def test_no_workers_are_refused(aggregation: Aggregation) -> None:
    with pytest.raises(ValueError, match="needs at least 1 workers, there are 0"):
        aggregation.plan(0)


def test_a_ring_sends_twice_the_gradient_less_two_chunks() -> None:
    plan = Ring().plan(5)
    group = Group(plan, gradients(5, length=50))
    group.run(lambda count: 0)
    for worker in range(5):
        sent = [send for sender, send in group.sent if sender == worker]
        assert {send.to for send in sent} == {(worker + 1) % 5}
        assert sum(send.payload.vector.size for send in sent) == 2 * 4 * 10
