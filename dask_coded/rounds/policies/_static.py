"""Conventional coded computing: all workers compute everything, and the fastest suffice."""

from __future__ import annotations

from dask_coded.rounds.layout import Layout, StripeRange
from dask_coded.rounds.policies._policy import POLICIES, Policy
from dask_coded.typing import Floats


@POLICIES.register("static")
class Static(Policy):
    """Every worker computes all of its pieces; what the slowest ones compute is wasted."""

    @classmethod
    def first(cls, layout: Layout, speeds: Floats, lags: Floats) -> list[list[StripeRange]]:
        return [[StripeRange(p, 0, layout.stripes) for p in pieces] for pieces in layout.pieces_of]
