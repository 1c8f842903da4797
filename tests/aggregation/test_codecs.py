"""Lossy codecs: all replicas get the same bits, and codes that subtract refuse them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dask_coded.aggregation import (
    Aggregation,
    CodedReduce,
    DynamicClusters,
    GradientCoding,
    Ring,
    Star,
    StaticClusters,
    Tree,
)
from dask_coded.compression import Codec, Partial

from .driver import Group
from .test_exact import gradients, nodes


class Half(Codec):
    """Packs numbers in sixteen bits."""

    lossy = True

    def pack(self, partial: Partial) -> Any:
        return partial.vector.astype(np.float16), partial.loss

    def unpack(self, packed: Any) -> Partial:
        vector, loss = packed
        return Partial(vector.astype(np.float64), loss)


@pytest.mark.parametrize(
    "aggregation",
    [
        Star(),
        Ring(segments=2),
        Tree(segments=2),
        GradientCoding(stragglers=1),
        CodedReduce(stragglers=1),
        StaticClusters(size=3),
        DynamicClusters(size=3),
    ],
    ids=str,
)
def test_replicas_get_the_same_bits(aggregation: Aggregation) -> None:
    for workers in (1 if not hasattr(aggregation, "size") else 2, 2, 5, 12):
        if workers == 1 and isinstance(aggregation, GradientCoding | CodedReduce):
            continue
        plan = aggregation.plan(workers)
        assert plan.plain
        values = gradients(plan.parts, length=31)
        group = Group(plan, values, codec=Half())
        group.run(random.Random(workers).randrange, twice=True)
        first, loss = group.total(0)
        scale = np.abs(values).sum(axis=0).max()
        np.testing.assert_allclose(first, values.sum(axis=0), rtol=0, atol=1e-2 * scale)
        # All nodes have what the packed total unpacks to, including the node that packed it.
        assert (first == first.astype(np.float16)).all()
        for node in nodes(plan):
            assert group.total(node)[0].tobytes() == first.tobytes()
            assert group.total(node)[1] == loss == plan.parts


@pytest.mark.parametrize(
    "aggregation",
    [
        GradientCoding(stragglers=1, code="cyclic"),
        CodedReduce(fan_in=3, code="cyclic"),
        StaticClusters(size=3, code="cyclic"),
        DynamicClusters(size=3, code="cyclic"),
    ],
    ids=str,
)
def test_codes_that_amplify_are_refused(aggregation: Aggregation) -> None:
    plan = aggregation.plan(12)
    assert not plan.plain
    plan.machine(0)
    with pytest.raises(ValueError, match=r"Half loses digits, and C.* would multiply the error"):
        plan.machine(0, codec=Half())
