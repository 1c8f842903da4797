r"""The dominant eigenpair by power iteration.

.. math:: x' = A x / \|A x\|, \qquad \theta = x^H A x, \qquad r = \|A x - \theta x\|

A round multiplies the error by :math:`|\lambda_2 / \lambda_1|`, so only one eigenvalue may have the
largest modulus: for a real matrix whose dominant eigenvalues are a complex pair, or
:math:`\pm\lambda`, the iteration never converges. Nearly all the work is the product; the rest is a
few vector operations.

References
----------
.. [1] G. Golub, C. Van Loan, "Matrix Computations", 4th edition, 2013, section 7.3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import norm

from dask_coded.arguments import check_stopping, reachable
from dask_coded.labels import aligned, labels_of
from dask_coded.loop import QUIET, ConvergenceError, Loop, Progress
from dask_coded.products import ProductArray
from dask_coded.submission import as_coded, run
from dask_coded.summary import Summary


@dataclass(frozen=True, repr=False)
class Eigenpair(Summary):
    """The result of a power iteration.

    Parameters
    ----------
    value : float or complex
        The eigenvalue.
    vector : ndarray, shape (n,)
        Its eigenvector, of Euclidean norm 1.
    rounds : int
        Number of products.
    residual : float
        Euclidean norm of ``A @ vector - value * vector``.
    """

    value: Any
    vector: npt.NDArray[Any]
    rounds: int
    residual: float


def power_rounds(
    operator: Any,
    *,
    tol: float = 1e-8,
    max_iter: int = 1000,
    start: npt.ArrayLike | None = None,
    seed: Any = None,
    loop: Loop = QUIET,
) -> Eigenpair:
    """Run a power iteration over an operator, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ x`` and ``shape``
        A square matrix: a NumPy array, a SciPy sparse matrix, or a coded operator inside the
        cluster.
    tol, max_iter, start, seed
        See :func:`power_iteration`.
    loop : Loop
        Receives a report of each round, with the residual relative to the eigenvalue.

    Returns
    -------
    Eigenpair

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds, or a product is not
        finite.
    ValueError
        If an argument is out of range, or the operator is not square.

    Examples
    --------
    >>> import numpy as np
    >>> pair = power_rounds(np.array([[2.0, 1.0], [1.0, 2.0]]), seed=0)
    >>> round(pair.value, 6), abs(pair.vector).round(4)
    (3.0, array([0.7071, 0.7071]))
    """
    _check(operator.shape, tol, max_iter)
    tol = reachable(tol, operator)
    n = operator.shape[0]
    x = np.random.default_rng(seed).standard_normal(n) if start is None else _start(start, n)
    first, x = loop.resume((1, _unit(x)))
    for i in range(first, max_iter + 1):
        y = operator @ x
        value = np.vdot(x, y)
        residual = _norm(y - value * x)
        converged = residual <= tol * abs(value)
        last = converged or i == max_iter or not np.isfinite(residual)
        # Relative, as `tol` is. Of a pair of value 0 it is 0 if the pair is exact.
        share = residual / float(abs(value)) if value else (math.inf if residual else 0.0)
        progress = Progress.of(operator, i, share)
        if last:
            loop.report(progress, last=True)
            break
        # y is not zero here: a zero y is an exact eigenpair of value 0, which ends the loop.
        x = _unit(y)
        loop.report(progress, state=(i + 1, x))
    if not np.isfinite(residual) or (tol > 0 and not converged):
        raise ConvergenceError(
            f"Power iteration did not reach a residual of tol={tol:g} times the eigenvalue in {i} "
            f"of max_iter={max_iter} rounds: the residual is {residual:.3g}, the eigenvalue "
            f"{value:.3g}. Raise max_iter or tol, or use `scipy.sparse.linalg.eigs` if two "
            f"eigenvalues may have equal modulus."
        )
    return Eigenpair(value.item(), x, i, residual)


def power_iteration(
    A: Any,
    tol: float = 1e-8,
    max_iter: int = 1000,
    *,
    start: npt.ArrayLike | None = None,
    seed: Any = None,
    code: Any = None,
    client: Any = None,
    callback: Callable[[Progress], object] | None = None,
) -> Eigenpair:
    """Compute the eigenvalue of largest modulus and its eigenvector, in coded rounds.

    Parameters
    ----------
    A : dask array, NumPy array, SciPy sparse matrix or CodedArray, shape (n, n)
        Need not be symmetric.
    tol : float
        Stop when the norm of ``A @ x - value * x`` is at most this times the modulus of the value.
        With 0, run exactly ``max_iter`` rounds, unless the pair becomes exact. Of a matrix in
        single precision that is coded with parity, it is at least 1.2e-6 unless it is 0.
    max_iter : int
        Maximum number of rounds.
    start : array_like, shape (n,), optional
        Initial vector, converted to double precision and normalised. Default: random.
    seed : int, Generator, ... , optional
        Seed of the random initial vector, see :func:`numpy.random.default_rng`.
    code : Code or str, optional
        The code of the matrix, see :func:`dask_coded.encode`, which chooses one by default.
    client : distributed.Client, optional
        The cluster. Default: the current client.
    callback : callable, optional
        Called with a :class:`~dask_coded.Progress` after the last round, and at most ten times a
        second before it. It runs in the client's event loop, so it should return quickly.

    Returns
    -------
    Eigenpair
        ``value``, ``vector``, ``rounds``, ``residual``.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds, possibly because
        two eigenvalues have equal or nearly equal modulus.
    ValueError
        If an argument is out of range, the matrix is not square, or there is no client.

    See Also
    --------
    scipy.sparse.linalg.eigsh : needs far fewer rounds where eigenvalues are close together.
        ``coded.submit(scipy.sparse.linalg.eigsh, C, k=1)`` runs it over coded rounds.

    Notes
    -----
    A symmetric or Hermitian matrix has an eigenvalue within ``residual`` of ``value``. Codes that
    mix rows decode with rounding errors that differ from round to round, and the more blocks a
    code has, the larger they may be. In double precision, a ``tol`` much below 1e-12 may not be
    reached with 12 pieces, nor one below 1e-9 with 100. In single precision errors are 1e8 times
    larger: convert a matrix to ``float64`` for codes of many pieces.

    Examples
    --------
    >>> import numpy as np
    >>> from distributed import Client
    >>> client = Client(
    ...     n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
    ... )
    >>> pair = power_iteration(np.diag([1.0, -5.0, 2.0]), seed=0)
    >>> round(pair.value, 6), abs(pair.vector).round(6)
    (-5.0, array([0., 1., 0.]))
    >>> client.close()
    """
    _check(np.shape(A), tol, max_iter)
    if start is not None:
        labels = A.labels if isinstance(A, ProductArray) else labels_of(A)
        start = _start(aligned("Argument 'start'", start, labels[1]), np.shape(A)[0])
    coded = as_coded(A, code, client)
    return run(
        power_rounds,
        coded,
        tol=tol,
        max_iter=max_iter,
        start=start,
        seed=seed,
        client=client,
        callback=callback,
    )


def _norm(x: npt.NDArray[Any]) -> float:
    # Unlike NumPy's, this norm does not square its entries, which could overflow or underflow.
    return float(norm(x, check_finite=False))


def _unit(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # Scaled first, because the norm of the largest numbers overflows.
    x = x / np.abs(x).max()
    return x / _norm(x)


def _check(shape: tuple[int, ...], tol: float, max_iter: int) -> None:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"Only a square matrix has eigenvalues, the shape of this one is {shape}.")
    check_stopping(tol, max_iter)


def _start(start: npt.ArrayLike, n: int) -> npt.NDArray[Any]:
    x = np.asarray(start)
    numbers = x.dtype.kind in "biufc" and x.shape == (n,)
    if not numbers or not np.isfinite(x).all() or not x.any():
        raise ValueError(
            f"Argument 'start' must be {n} finite numbers, not all zero, it has shape {x.shape} "
            f"and dtype {x.dtype}."
        )
    # The smallest number of a narrow integer has no absolute value in its dtype.
    return x.astype(np.result_type(x, np.float64), copy=False)
