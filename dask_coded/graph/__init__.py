"""Graph algorithms with coded matrix products: NumPy code over an operator with ``@``."""

from __future__ import annotations

from dask_coded.graph.adjacency import Graph
from dask_coded.graph.centrality import eigenvector_centrality, katz_centrality
from dask_coded.graph.conversion import as_graph
from dask_coded.graph.filters import filter
from dask_coded.graph.hits import hits
from dask_coded.graph.kernels import Heat, Hops, PolynomialKernel
from dask_coded.graph.laplacian import laplacian
from dask_coded.graph.pagerank import pagerank
from dask_coded.graph.readers import read_graph
from dask_coded.loop import ConvergenceError

__all__ = [
    "ConvergenceError",
    "Graph",
    "Heat",
    "Hops",
    "PolynomialKernel",
    "as_graph",
    "eigenvector_centrality",
    "filter",
    "hits",
    "katz_centrality",
    "laplacian",
    "pagerank",
    "read_graph",
]
