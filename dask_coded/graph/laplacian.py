r"""Laplacians of undirected graphs, and a bound on their largest eigenvalue.

With ``W`` the symmetric matrix of edge weights and ``D`` the diagonal matrix of its row sums, the
Laplacians are

.. math:: L = D - W \quad \text{(combinatorial)}, \qquad L = D^{-1/2} (D - W) D^{-1/2}
          \quad \text{(normalised)}

Both are positive semidefinite; the eigenvalues of the normalised one are at most 2. A node without
edges has a zero row in both.

The largest eigenvalue is found by Lanczos iteration [1]_, with one product in each step. The
vectors are not reorthogonalised, so the state needs only two of them. Extreme eigenvalues may then
appear several times, but are no less accurate [2]_. A start with only a small component of the
first eigenvector may find the second eigenvalue instead, so four starts are iterated together and
share their rounds.

References
----------
.. [1] C. Lanczos, "An iteration method for the solution of the eigenvalue problem of linear
       differential and integral operators", J. Res. Natl. Bur. Stand. 45, 1950.
.. [2] C. Paige, "Accuracy and effectiveness of the Lanczos algorithm for the symmetric
       eigenproblem", Linear Algebra and its Applications 34, 1980.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.linalg import eigh_tridiagonal, norm

from dask_coded.graph.adjacency import summed
from dask_coded.graph.conversion import as_graph
from dask_coded.graph.iteration import Vector
from dask_coded.loop import QUIET, Loop, Progress

# Number of Lanczos iterations that share their rounds.
_STARTS = 4
# Rounds in which a small part of a graph is found beside a large one of few eigenvalues, and the
# share of an eigenvalue that is rounding.
_LEAST, _EXACT = 10, 1e-12


def laplacian(graph: Any, *, normalized: bool = False) -> sp.csr_array:
    """Return the Laplacian of an undirected graph.

    Parameters
    ----------
    graph : Graph, or anything that :func:`as_graph` takes
        With a symmetric adjacency matrix, see :meth:`Graph.to_undirected`. Rows and columns are in
        the order of ``as_graph(graph).nodes``.
    normalized : bool
        Return the normalised Laplacian instead of the combinatorial one.

    Returns
    -------
    scipy.sparse.csr_array of float, shape (n, n)

    Raises
    ------
    ValueError
        If an edge has no reverse edge of the same weight.

    Examples
    --------
    >>> laplacian(as_graph([("a", "b"), ("b", "c")], undirected=True)).toarray()
    array([[ 1., -1.,  0.],
           [-1.,  2., -1.],
           [ 0., -1.,  1.]])
    """
    weights = as_graph(graph).adjacency.astype(np.float64)
    _check_symmetric(
        weights,
        "Graph filters expect an undirected graph, this one has an edge without a reverse edge of "
        "the same weight: use `as_graph(graph, undirected=True)`.",
    )
    degree = weights.sum(axis=1)
    found = sp.csr_array(sp.diags_array(degree) - weights)
    if normalized:
        # Nodes without edges have a zero row, which any finite factor leaves unchanged.
        scale = sp.diags_array(1 / np.sqrt(np.where(degree > 0, degree, 1)))
        found = sp.csr_array(scale @ found @ scale)
    return found


def check_laplacian(matrix: sp.csr_array) -> sp.csr_array:
    """Check that a matrix can be a Laplacian, and return it as floats.

    Parameters
    ----------
    matrix : sparse matrix, shape (n, n)

    Returns
    -------
    scipy.sparse.csr_array of float, shape (n, n)

    Raises
    ------
    ValueError
        If the matrix is complex, is not symmetric, is not finite, or has signs that no Laplacian
        has.
    """
    if matrix.dtype.kind == "c":
        raise ValueError(
            f"A sparse Laplacian must be real, its dtype is {matrix.dtype}: encode a Hermitian "
            "one, and pass the coded array."
        )
    found = summed(matrix).astype(np.float64)
    _check_symmetric(found, "A Laplacian must be symmetric, this matrix is not.")
    diagonal = found.diagonal()
    others = found - sp.diags_array(diagonal)
    used = np.asarray(abs(others).sum(axis=1)) > 0
    if not np.isfinite(found.data).all() or others.max() > 0 or (diagonal[used] <= 0).any():
        raise ValueError(
            "A sparse matrix with negative entries is taken for a Laplacian, but this one is not "
            "finite, not positive on the diagonal, or positive elsewhere: pass a Laplacian, or an "
            "adjacency matrix without negative weights."
        )
    return found


def _check_symmetric(matrix: sp.csr_array, complaint: str) -> None:
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(complaint)
    # Laplacians that were computed elsewhere are symmetric only to within rounding errors. Those of
    # light edges must not be judged by heavy ones.
    sizes = abs(matrix)
    largest = np.sqrt(np.maximum(*(sizes.max(axis=axis).toarray().ravel() for axis in (0, 1))))
    odd = abs(matrix - matrix.T).tocoo()
    if (odd.data > 1e-12 * largest[odd.row] * largest[odd.col]).any():
        raise ValueError(complaint)


def greatest_eigenvalue_rounds(
    operator: Any, *, tol: float = 1e-2, max_iter: int = 100, loop: Loop = QUIET
) -> float:
    """Return a tight upper bound on the largest eigenvalue of a positive semidefinite operator.

    Parameters
    ----------
    operator : anything with ``operator @ x``
        Of shape (n, n), symmetric.
    tol : float
        Stop when the uncertainty of each of the four eigenvalues, relative to the eigenvalue, is at
        most this.
    max_iter : int
        Maximum number of products, each with a matrix of four columns.
    loop : Loop
        Receives a report of each product. The residual is the largest relative uncertainty.

    Returns
    -------
    float
        The eigenvalue that was found, increased by its uncertainty and by ``tol``. It is too large
        by about ``2 * tol`` times the eigenvalue.

    Examples
    --------
    >>> import numpy as np
    >>> round(greatest_eigenvalue_rounds(np.diag([1.0, 2.0, 4.0])), 2)
    4.04
    """
    n = operator.shape[0]
    start = np.random.default_rng(0).standard_normal((n, _STARTS))
    nothing = np.zeros((0, _STARTS))
    first, before, q, diagonal, off = loop.resume(
        (1, np.zeros_like(start), start / norm(start, axis=0), nothing, nothing)
    )
    # At least one: a loop that has ended may be resumed.
    for i in range(min(first, max_iter), max_iter + 1):
        w = operator @ q
        if i > 1:
            w = w - off[-1] * before
        diagonal = np.vstack([diagonal, (q.conj() * w).sum(axis=0).real])
        w = w - diagonal[-1] * q
        # Unlike NumPy's, this norm does not square tiny numbers, which would underflow.
        beta = np.array([norm(column) for column in w.T])
        greatest, last_entry = np.transpose([_top(d, o) for d, o in zip(diagonal.T, off.T)])
        # Each tridiagonal matrix's eigenvalue is at most this far from one of the operator's.
        uncertain = beta * np.abs(last_entry)
        share = float((uncertain / np.where(greatest == 0, 1, np.abs(greatest))).max())
        # A graph of few distinct eigenvalues seems to be done after two rounds, before what is in
        # the small rest of it was found.
        last = (share <= tol and (i >= _LEAST or share <= _EXACT)) or i == max_iter
        before, q, off = q, w / np.where(beta == 0, 1, beta), np.vstack([off, beta])
        loop.report(
            Progress.of(operator, i, share), state=(i + 1, before, q, diagonal, off), last=last
        )
        if last:
            break
    return float((1 + tol) * (greatest + uncertain).max())


def _top(diagonal: Vector, off: Vector) -> tuple[float, float]:
    """Return a tridiagonal matrix's largest eigenvalue, and its eigenvector's last entry."""
    top = len(diagonal) - 1
    values, vectors = eigh_tridiagonal(diagonal, off, select="i", select_range=(top, top))
    return float(values[0]), float(vectors[-1, 0])
