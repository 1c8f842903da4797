"""What networkx is told of its backend ``dask_coded`` when it is imported.

A module of its own, and free of imports: networkx asks for this in every program that uses it,
and nobody is to wait for Dask there.
"""

from __future__ import annotations

from typing import Any

_CODED = {
    "code : Code or str, optional": "How the matrix is coded, see `dask_coded.encode`.",
    "client : distributed.Client, optional": "The cluster. Default: the current client.",
    "callback : callable, optional": "Told of the rounds, see `dask_coded.graph.pagerank`.",
}


def get_info() -> dict[str, Any]:
    """The entry point ``networkx.backend_info``.

    Returns
    -------
    dict
        As networkx wants it. From the sizes in ``default_config`` on, networkx may choose this
        backend by itself.
    """
    return {
        "backend_name": "dask_coded",
        "project": "dask-coded",
        "package": "dask_coded",
        "short_summary": "Coded rounds on a Dask cluster, for graphs that are large.",
        "default_config": {"minimum_edges": 20_000_000, "minimum_edges_per_node": 100},
        "functions": {
            "pagerank": {"additional_parameters": _CODED},
            "hits": {
                "additional_docs": "By power iteration, of at most `max_iter` rounds.",
                "additional_parameters": _CODED,
            },
            "katz_centrality": {"additional_parameters": _CODED},
            "eigenvector_centrality": {"additional_parameters": _CODED},
        },
    }
