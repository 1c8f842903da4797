"""Conventional coded computing: everybody computes everything, the first sufficient count."""

from __future__ import annotations

from dask_coded.planning.layout import Floats, Layout, Run
from dask_coded.planning.policies._policy import Policy


class Static(Policy):
    """Every worker computes all of its pieces; the slack of the slowest is thrown away."""

    def first(self, layout: Layout, speeds: Floats, lags: Floats) -> list[list[Run]]:
        return [[Run(p, 0, layout.stripes) for p in pieces] for pieces in layout.pieces_of]
