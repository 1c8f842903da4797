r"""Graph filters: signals on the nodes of a graph, filtered by a function of its Laplacian.

For the Laplacian :math:`L = U \Lambda U^T` and a kernel ``g``, a real function of eigenvalues, the
filtered signal is

.. math:: y = g(L) x = U \, g(\Lambda) \, U^T x

This needs no eigenvectors. A polynomial of degree ``m`` is evaluated by Horner's rule in
``m`` products with ``L``. Any other kernel is expanded in Chebyshev polynomials on
:math:`[0, \lambda_{max}]`, again with one product for each degree [1]_:

.. math:: y \approx \sum_{k=0}^{m} c_k T_k(\tilde L) x, \qquad
          \tilde L = \tfrac{2}{\lambda_{max}} L - I, \qquad T_{k+1} = 2 \tilde L T_k - T_{k-1}

The error of ``y`` in Euclidean norm is at most the truncation error of the expansion, see
:mod:`dask_coded.graph.kernels`, times :math:`\|x\|_2`.

References
----------
.. [1] D. Hammond, P. Vandergheynst, R. Gribonval, "Wavelets on graphs via spectral graph theory",
       Applied and Computational Harmonic Analysis 30(2), 2011, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from dask_coded.arguments import check_positive, check_whole
from dask_coded.array import CodedArray
from dask_coded.graph.adjacency import Graph, check_square, summed
from dask_coded.graph.conversion import as_graph
from dask_coded.graph.iteration import product
from dask_coded.graph.kernels import Hops, Kernel, PolynomialKernel, chebyshev_coefficients
from dask_coded.graph.laplacian import check_laplacian, greatest_eigenvalue_rounds, laplacian
from dask_coded.graph.values import by_node, in_order, is_pandas, named, vector
from dask_coded.loop import QUIET, Loop, Progress
from dask_coded.submission import as_coded, run

Array = npt.NDArray[Any]


def chebyshev_rounds(
    operator: Any,
    signal: npt.ArrayLike,
    coefficients: npt.ArrayLike,
    lmax: float,
    *,
    loop: Loop = QUIET,
) -> Array:
    """Evaluate a Chebyshev expansion of an operator on a signal, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ x``
        The Laplacian, shape (n, n), with eigenvalues from 0 to ``lmax``.
    signal : array_like, shape (n,) or (n, signals)
    coefficients : array_like, shape (order + 1,)
        As returned by :func:`chebyshev_coefficients`.
    lmax : float
    loop : Loop
        Receives a report of each product. The residual is a bound on the norm of the remaining
        terms, relative to the same bound for all terms.

    Returns
    -------
    ndarray, shape of ``signal``

    Raises
    ------
    ValueError
        If the terms grow, because an eigenvalue is greater than ``lmax``.

    Examples
    --------
    >>> import numpy as np
    >>> from dask_coded.graph.kernels import chebyshev_coefficients
    >>> c = chebyshev_coefficients(np.exp, lmax=2.0)
    >>> chebyshev_rounds(np.diag([1.0, 2.0]), [1, 1], c, lmax=2.0).round(4)
    array([2.7183, 7.3891])
    """
    x = np.asarray(signal, dtype=np.float64)
    c = np.asarray(coefficients, dtype=np.float64)
    # No term is longer than the signal if the Laplacian is symmetric. With that of a random walk
    # terms may be longer by the square root of the ratio of degrees.
    most = 1e3 * _norms(x)
    to_come = np.append(np.cumsum(np.abs(c)[::-1])[::-1], 0.0)
    to_come /= to_come[0] or 1
    first, before, now, y = loop.resume((1, np.zeros_like(x), x, c[0] * x))
    term = None  # memory for all terms, which new arrays would cost much more than computing
    for k in range(first, len(c)):
        # T_1 is L~ T_0, and T_{k+1} is 2 L~ T_k - T_{k-1}.
        found = product(operator, now)
        found *= 2 / lmax
        found -= now
        if k > 1:
            found *= 2
            found -= before
        if not (_norms(found) <= most).all():  # also if it is NaN
            raise ValueError(
                "Argument 'lmax' must be at least the largest eigenvalue of the Laplacian: with "
                f"{lmax:.4g} the expansion diverges. Pass a larger one."
            )
        before, now = now, found
        term = np.multiply(now, c[k], out=term)
        y = y + term if k == first else np.add(y, term, out=y)
        loop.report(
            Progress.of(operator, k, to_come[k + 1]),
            state=(k + 1, before, now, y),
            last=k == len(c) - 1,
        )
    return y


def polynomial_rounds(
    operator: Any, signal: npt.ArrayLike, coefficients: npt.ArrayLike, *, loop: Loop = QUIET
) -> Array:
    """Evaluate a polynomial of an operator on a signal by Horner's rule, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ x``
        Shape (n, n).
    signal : array_like, shape (n,) or (n, signals)
    coefficients : array_like, shape (m + 1,)
        ``c_0, …, c_m`` of ``sum c_i L^i``.
    loop : Loop
        Receives a report of each product. The residual is the number of products that remain.

    Returns
    -------
    ndarray, shape of ``signal``

    Raises
    ------
    ValueError
        If the polynomial overflows.

    Examples
    --------
    >>> import numpy as np
    >>> polynomial_rounds(np.diag([1.0, 2.0]), [1, 1], [1, 0, 3])
    array([ 4., 13.])
    """
    x = np.asarray(signal, dtype=np.float64)
    c = np.asarray(coefficients, dtype=np.float64)
    degree = len(c) - 1
    first, y = loop.resume((1, c[degree] * x))
    term = np.empty_like(x)
    for i in range(first, degree + 1):
        with np.errstate(over="ignore", invalid="ignore"):
            found = product(operator, y)
            found += np.multiply(x, c[degree - i], out=term)
        if not np.isfinite(found).all():
            raise ValueError(
                f"The polynomial overflows in product {i} of {degree}: pass one of lower degree or "
                "with smaller coefficients, or use the normalised Laplacian, whose eigenvalues are "
                "at most 2."
            )
        y = found
        loop.report(Progress.of(operator, i, degree - i), state=(i + 1, y), last=i == degree)
    return y


def filter(
    graph: Any,
    signal: Mapping[Any, float] | npt.ArrayLike,
    kernel: Kernel,
    *,
    normalized: bool = False,
    tol: float = 1e-10,
    order: int | None = None,
    lmax: float | None = None,
    weight: str | None = "weight",
    code: Any = None,
    client: Any = None,
    callback: Callable[[Progress], object] | None = None,
) -> dict[Any, float] | Array:
    """Filter signals on the nodes of a graph, on a Dask cluster in coded rounds.

    Parameters
    ----------
    graph : networkx graph, SciPy sparse matrix, edge list, Graph, or CodedArray
        An undirected graph, as for :func:`pagerank`, or its Laplacian. A sparse matrix with
        negative entries and a coded array are taken as Laplacians; a coded array is not encoded
        again, and its labels, if it has some, are the nodes.
    signal : mapping node -> number, or array_like of shape (n,) or (n, signals)
        One signal or several. Nodes that a mapping leaves out get zero. A pandas Series or
        DataFrame is a mapping from its index, an xarray object from the labels of its first
        dimension.
    kernel : callable
        The function ``g`` of eigenvalues, which maps an ndarray to one of the same shape:
        :class:`Hops`, :class:`PolynomialKernel`, :class:`Heat`, or your own.
    normalized : bool
        Use the normalised Laplacian of a graph instead of the combinatorial one.
    tol : float
        Maximum error of the result in Euclidean norm, relative to the signal's norm times the
        kernel's largest absolute value. It determines the number of terms.
    order : int, optional
        The degree of the expansion, and so the number of products; replaces ``tol``.
    lmax : float, optional
        An upper bound on the eigenvalues; with less the result is wrong. Default: 2 if
        ``normalized``; otherwise ten to thirty rounds are spent to find a bound.
    weight, code, client, callback
        As for :func:`pagerank`.

    Returns
    -------
    ndarray of the signal's shape, or dict node -> float
        A dictionary if the signal was a mapping or a Series. The rows of an array are in the order
        of the nodes.

    Raises
    ------
    ValueError
        If the graph is directed, the signal does not fit the graph, the kernel is not smooth
        enough for ``tol``, the expansion diverges because ``lmax`` is too small, a polynomial
        overflows, another argument is out of range, or there is no client.
    TypeError
        If some values of the signal are masked.

    Notes
    -----
    Polynomials are exact and need none of ``tol``, ``order`` and ``lmax``. Among other kernels,
    smoother ones need fewer terms; ``Heat(t)`` needs about ``5 * sqrt(t * lmax)``.

    To filter signals on the same graph again and again, encode its Laplacian once and pass the
    coded array.

    Examples
    --------
    >>> from dask.distributed import Client
    >>> client = Client(
    ...     n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
    ... )
    >>> import networkx as nx
    >>> path = nx.path_graph(["a", "b", "c"])
    >>> from dask_coded.graph import Heat, Hops
    >>> filter(path, [3.0, 0.0, 0.0], Heat(1.0)).round(4)
    array([1.5767, 0.9502, 0.4731])
    >>> filter(path, {"a": 1.0}, Hops(1))
    {'a': 2.0, 'b': -1.0, 'c': 0.0}
    >>> client.shutdown()
    """
    check_positive("tol", tol)
    if order is not None:
        check_whole("order", order, least=0)
    if lmax is not None:
        check_positive("lmax", lmax)
    signal = by_node("signal", signal)
    operand, nodes = _operand(graph, normalized, weight)
    x = _signal(signal, nodes)
    coded = as_coded(operand, code, client)
    on_cluster: dict[str, Any] = {"client": client, "callback": callback}
    if isinstance(kernel, (PolynomialKernel, Hops)):
        y = run(polynomial_rounds, coded, x, kernel.coefficients, tolerant=False, **on_cluster)
    else:
        if lmax is None:
            # A graph without edges has only the eigenvalue 0, so any interval will do.
            bound = 2.0 if normalized else run(greatest_eigenvalue_rounds, coded, **on_cluster)
            lmax = bound or 1.0
        coefficients = chebyshev_coefficients(kernel, lmax, tol=tol, order=order)
        y = run(chebyshev_rounds, coded, x, coefficients, lmax, tolerant=False, **on_cluster)
    return named(y, nodes, None) if isinstance(signal, Mapping) else y


def _norms(x: Array) -> Any:
    """Return the Euclidean norm of each signal, without memory for their squares."""
    return np.sqrt(np.einsum("i...,i...->...", x, x.conj()).real)


def _operand(graph: Any, normalized: bool, weight: str | None) -> tuple[Any, Graph]:
    """Return the Laplacian, coded or not, and a graph that holds its nodes."""
    if not (isinstance(graph, CodedArray) or _has_negatives(graph)):
        found = as_graph(graph, weight=weight)
        return laplacian(found, normalized=normalized), found
    if normalized:
        raise ValueError(
            "Argument 'normalized' chooses the Laplacian of a graph, but a Laplacian was given: "
            "pass the graph, or leave out 'normalized'."
        )
    if graph.shape[0] != graph.shape[1]:
        raise ValueError(f"A Laplacian must be square, this matrix has shape {graph.shape}.")
    nodes = np.arange(graph.shape[0])
    operand = graph if isinstance(graph, CodedArray) else check_laplacian(graph)
    if isinstance(graph, CodedArray) and (labels := graph.labels[0].index) is not None:
        if not labels.equals(graph.labels[1].index):
            raise ValueError("The rows and the columns of a Laplacian must have the same labels.")
        # Of times, NumPy's own would become numbers in a list.
        nodes = labels.to_numpy(dtype=object if labels.dtype.kind in "mM" else None)
    return operand, Graph(nodes, sp.csr_array((len(nodes), len(nodes))))


def _has_negatives(graph: Any) -> bool:
    if not sp.issparse(graph):
        return False
    check_square(graph)  # otherwise a conversion may write to memory that is not the matrix's
    return bool((summed(graph).data < 0).any())


def _signal(signal: Any, graph: Graph) -> Array:
    if isinstance(signal, Mapping):
        return vector("signal", signal, graph)
    x = np.asarray(in_order("signal", signal, graph) if is_pandas(signal) else signal)
    n = len(graph.nodes)
    if x.ndim not in (1, 2) or x.shape[0] != n or x.dtype.kind not in "fiub":
        raise ValueError(
            f"Argument 'signal' must be real numbers of shape ({n},) or ({n}, signals), its dtype "
            f"is {x.dtype} and its shape {x.shape}."
        )
    if not np.isfinite(x).all():
        raise ValueError("Argument 'signal' must be finite, it has NaN or infinity.")
    return x.astype(np.float64)
