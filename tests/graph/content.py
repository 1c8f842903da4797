"""What a graph holds, in a form that tests compare."""

from __future__ import annotations

from dask_coded.graph import Graph


def edges(graph: Graph) -> dict[tuple[object, object], float]:
    """``{(source, target): weight}`` with the names of the nodes."""
    coo = graph.adjacency.tocoo()
    names = graph.nodes.tolist()
    return {(names[i], names[j]): w for i, j, w in zip(*coo.coords, coo.data.tolist())}
