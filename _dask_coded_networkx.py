"""The description of the backend ``dask_coded`` that networkx reads when it is imported.

This module is separate and free of imports because networkx loads it in every program that uses
networkx, and importing Dask would slow all of them down.
"""

from __future__ import annotations

from typing import Any

_CODED = {
    "code : Code or str, optional": "The code of the matrix, see `dask_coded.encode`.",
    "client : distributed.Client, optional": "The cluster. Default: the current client.",
    "callback : callable, optional": "Called after rounds, see `dask_coded.graph.pagerank`.",
}


def get_info() -> dict[str, Any]:
    """The entry point ``networkx.backend_info``.

    Returns
    -------
    dict
        In networkx's format. networkx may choose this backend by itself for graphs of at least the
        sizes in ``default_config``.
    """
    return {
        "backend_name": "dask_coded",
        "project": "dask-coded",
        "package": "dask_coded",
        "short_summary": "Coded rounds on a Dask cluster, for large graphs.",
        "default_config": {"minimum_edges": 20_000_000, "minimum_edges_per_node": 100},
        "functions": {
            "pagerank": {"additional_parameters": _CODED},
            "hits": {
                "additional_docs": "Uses power iteration, with at most `max_iter` rounds.",
                "additional_parameters": _CODED,
            },
            "katz_centrality": {"additional_parameters": _CODED},
            "eigenvector_centrality": {"additional_parameters": _CODED},
        },
    }
