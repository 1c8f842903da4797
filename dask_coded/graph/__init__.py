"""Algorithms on graphs whose rounds are coded: NumPy code over an operator with ``@``."""

from __future__ import annotations

from dask_coded.graph.pagerank import pagerank
from dask_coded.graph.readers import Graph, read_graph
from dask_coded.loop import ConvergenceError

__all__ = ["ConvergenceError", "Graph", "pagerank", "read_graph"]
