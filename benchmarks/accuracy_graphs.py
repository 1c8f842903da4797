"""Measure the errors of rankings and filters of real graphs against references from one process.

The references use other methods: Krylov solvers and ARPACK for rankings; the eigendecomposition of
the dense Laplacian and ``expm_multiply`` for filters. An error is the Euclidean norm of the
difference of the whole vectors, relative to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
import scipy.io
import scipy.sparse as sp
from distributed import Client
from scipy.sparse.linalg import eigs, expm_multiply, gmres, svds
from scipy.spatial import cKDTree

from benchmarks import datasets
from benchmarks.report import Report
from dask_coded import graph as coded

#: Largest relative error that meets the goal.
GOAL = 1e-8

RANKED = {
    "wiki-Vote": "graph_wiki-Vote.txt.gz",
    "p2p-Gnutella31": "graph_p2p-Gnutella31.txt.gz",
    "cnr-2000": "graph_cnr-2000.npz",
}
FILTERED = ("minnesota", "bunny", "logogsp", "airfoil", "molene")

Vector = npt.NDArray[np.float64]
#: Name of the comparison, result, reference.
Compared = tuple[str, Any, Vector]


def graphs(report: Report, client: Client, smoke: bool) -> None:
    """Add a row for every graph and function.

    Parameters
    ----------
    report : Report
    client : distributed.Client
    smoke : bool
        Use only the karate club, which comes with networkx, instead of the real graphs in the
        folder that ``DASK_CODED_DATA`` names.
    """
    folder = datasets.folder()
    if smoke or folder is None:
        club = nx.to_scipy_sparse_array(nx.karate_club_graph(), dtype=np.float64, format="csr")
        ranked, filtered = {"karate club": club}, {"karate club": club}
    else:
        ranked = {name: coded.read_graph(folder / file).adjacency for name, file in RANKED.items()}
        filtered = {name: signal_graph(name, folder) for name in FILTERED}
    for vectors, cases in ((_rankings, ranked), (_filters, filtered)):
        for name, adjacency in cases.items():
            for what, found, expected in vectors(adjacency.astype(np.float64), client):
                error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
                report.add(f"{name}, {what}", "vector_relative_error", float(error), goal=GOAL)


def _rankings(adjacency: sp.csr_array, client: Client) -> Iterator[Compared]:
    n = adjacency.shape[0]
    options: dict[str, Any] = {"client": client, "tol": 1e-12, "max_iter": 2000}

    # Dangling mass is redistributed like jumps, so it only changes the scale of the solution.
    out = adjacency.sum(axis=1)
    step = (sp.diags_array(1 / np.where(out > 0, out, 1)) @ adjacency).T
    surfer = _solve(sp.eye_array(n) - 0.85 * step)
    yield "pagerank", coded.pagerank(adjacency, **options), surfer / surfer.sum()

    _, _, right = svds(adjacency, k=1, tol=1e-14, v0=np.ones(n))
    hubs, authorities = coded.hits(adjacency, normalized=False, **options)
    yield "hits, authorities", authorities, np.abs(right[0])
    yield "hits, hubs", hubs, adjacency @ np.abs(right[0])

    # Eigenvectors of directed graphs need not be unique.
    both = sp.csr_array(adjacency.maximum(adjacency.T))
    values, vectors = eigs(both, k=1, which="LR", tol=1e-14, v0=np.ones(n))
    found = coded.eigenvector_centrality(both, **options)
    yield "eigenvector centrality, undirected", found, np.abs(vectors[:, 0].real)

    alpha = 0.5 / float(values[0].real)
    found = coded.katz_centrality(adjacency, alpha, normalized=False, **options)
    yield "katz centrality", found, _solve(sp.eye_array(n) - alpha * adjacency.T)


def _solve(matrix: Any) -> Vector:
    x, failed = gmres(sp.csr_array(matrix), np.ones(matrix.shape[0]), rtol=1e-13, restart=80)
    if failed:
        raise ArithmeticError("The reference solver GMRES did not converge.")
    return x


def _filters(adjacency: sp.csr_array, client: Client) -> Iterator[Compared]:
    signals = np.random.default_rng(0).standard_normal((adjacency.shape[0], 2))
    for normalized in (False, True):
        laplacian = coded.laplacian(coded.as_graph(adjacency), normalized=normalized)
        eigenvalues, modes = np.linalg.eigh(laplacian.toarray())
        t = 10 / eigenvalues[-1]
        kernels: dict[str, Callable[[Vector], Vector]] = {
            "heat": coded.Heat(t),
            "3 hops": coded.Hops(3),
            "x^2 - x / 2": coded.PolynomialKernel((0, -0.5, 1)),
            "1 / (1 + t x)": lambda x, t=t: 1 / (1 + t * x),  # type: ignore[misc]
            "t x exp(-t x)": lambda x, t=t: t * x * np.exp(-t * x),  # type: ignore[misc]
        }
        which = "normalised" if normalized else "combinatorial"
        for name, kernel in kernels.items():
            found = coded.filter(adjacency, signals, kernel, normalized=normalized, client=client)
            expected = modes @ (kernel(eigenvalues)[:, None] * (modes.T @ signals))
            yield f"{name}, {which}", found, expected
            if name == "heat":
                expected = expm_multiply(-t * sp.csc_array(laplacian), signals)
                yield f"heat, {which}, expm_multiply", found, expected


def signal_graph(name: str, folder: Path) -> sp.csr_array:
    """Return the symmetric weights of a graph of PyGSP, or of Molène's weather stations.

    Parameters
    ----------
    name : str
        One of `FILTERED`.
    folder : Path
        Folder of the files ``gsp_*``.

    Returns
    -------
    scipy.sparse.csr_array of float, shape (n, n)
    """
    if name == "molene":
        with np.load(folder / "gsp_molene_2014-01.npz") as arrays:
            # All but two of the weights in the file underflow: compute them from the distances.
            distance = arrays["temp_dist"]
        near = np.exp(-((distance / np.median(distance)) ** 2))
        weights = sp.csr_array(near - np.diag(near.diagonal()))
    else:
        content = scipy.io.loadmat(folder / f"gsp_{name}.mat")
        if name == "bunny":  # a point cloud in which near points are neighbours
            ends = cKDTree(content["bunny"]).query_pairs(0.02, output_type="ndarray").T
            weights = _from_ends(ends)
        elif name == "airfoil":
            weights = _from_ends(np.stack([content["i_inds"], content["j_inds"]]).squeeze() - 1)
        else:
            weights = sp.csr_array(content["A" if name == "minnesota" else "W"])
    return sp.csr_array(weights.maximum(weights.T)).astype(np.float64)


def _from_ends(ends: npt.NDArray[Any]) -> sp.csr_array:
    n = int(ends.max()) + 1
    return sp.csr_array((np.ones(ends.shape[1]), ends.astype(np.int64)), shape=(n, n))
