r"""The largest singular values and their vectors, by a randomized range finder.

``A`` is multiplied by a random block :math:`\Omega` with a few more columns than the number of
singular values wanted. An orthonormal basis ``Q`` of the product captures most of the range of
``A``, and captures more after each pass

.. math:: Q R_1 = A X, \qquad X' R_2 = A^H Q, \qquad X = \Omega \text{ in the first pass.}

Because :math:`Q^H A = R_2^H X'^H`, the singular values of the small matrix :math:`R_2` approximate
those of ``A``. A pass is two rounds, each with a block of ``k + oversample`` columns on the right,
so every piece is read once for all columns. Orthonormalising between the products keeps rounding
errors from drowning the small singular values.

References
----------
.. [1] N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness: probabilistic
       algorithms for constructing approximate matrix decompositions", SIAM Review 53(2), 2011:
       algorithms 4.4 and 5.1, error bounds in section 10.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_whole
from dask_coded.loop import QUIET, Loop, Progress
from dask_coded.runtime.client.waiting import waiting_client
from dask_coded.submission import as_coded, client_for, run

Matrix = npt.NDArray[Any]


def svd_rounds(
    operator: Any,
    k: int,
    *,
    oversample: int = 10,
    power_iterations: int = 2,
    seed: Any = None,
    loop: Loop = QUIET,
) -> tuple[Matrix, Matrix, Matrix]:
    """Compute a randomized SVD over an operator, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ x``, ``operator.T @ x`` and ``shape``
        A NumPy array, a SciPy sparse matrix, or a coded operator inside the cluster.
    k, oversample, power_iterations, seed
        See :func:`randomized_svd`.
    loop : Loop
        Receives a report of each pass. The residual is the largest change of a singular value,
        relative to the largest singular value.

    Returns
    -------
    U : ndarray, shape (rows, k)
    s : ndarray, shape (k,)
    Vh : ndarray, shape (k, columns)

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> A = np.diag([5.0, 3.0, 1.0, 0.0])
    >>> U, s, Vh = svd_rounds(A, 2, seed=0)
    >>> s.round(6)
    array([5., 3.])
    >>> ((U * s) @ Vh).round(6).diagonal()
    array([5., 3., 0., 0.])
    """
    _check(operator.shape, k, oversample, power_iterations)
    columns = operator.shape[1]
    width = min(k + oversample, *operator.shape)
    x = np.random.default_rng(seed).standard_normal((columns, width))
    # A product of single precision with a block of double precision would be no more accurate.
    if getattr(operator, "dtype", None) in (np.float32, np.complex64):
        x = x.astype(np.float32)
    first, x, s = loop.resume((0, x, np.zeros(width)))
    # At least one: a loop that has ended may be resumed.
    for i in range(min(first, power_iterations), power_iterations + 1):
        q, _ = np.linalg.qr(operator @ x)
        x, r = np.linalg.qr((operator.T @ q.conj()).conj())
        previous, (u, s, vh) = s, np.linalg.svd(r.conj().T)
        change = np.abs(s - previous)[:k].max() / (s[0] or 1)
        last = i == power_iterations
        loop.report(Progress.of(operator, i + 1, change), state=(i + 1, x, s), last=last)
    return q @ u[:, :k], s[:k], vh[:k] @ x.conj().T


def randomized_svd(
    A: Any,
    k: int,
    oversample: int = 10,
    power_iterations: int = 2,
    seed: Any = None,
    *,
    code: Any = None,
    client: Any = None,
    callback: Callable[[Progress], object] | None = None,
) -> tuple[Any, Matrix, Matrix]:
    """Compute the largest singular values and their vectors, in coded rounds.

    Parameters
    ----------
    A : dask array, NumPy array, SciPy sparse matrix or CodedArray, shape (rows, columns)
        A coded array must have been encoded with ``transpose=True``.
    k : int
        Number of singular values.
    oversample : int
        Number of additional columns of the random block, for safety: 5 or 10.
    power_iterations : int
        Passes over the matrix after the first, two rounds each. The faster the singular values
        decay, the more a pass reduces the error; 0 suffices if they drop off at once.
    seed : int, Generator, ... , optional
        Seed of the random block, see :func:`numpy.random.default_rng`.
    code : Code or str, optional
        The code of the matrix, see :func:`dask_coded.encode`, which chooses one by default.
    client : distributed.Client, optional
        The cluster. Default: the current client.
    callback : callable, optional
        Called with a :class:`~dask_coded.Progress` after the last pass, and at most ten times a
        second before it. It runs in the client's event loop, so it should return quickly.

    Returns
    -------
    U : ndarray or dask array, shape (rows, k)
        Left singular vectors as columns; a dask array with the row chunks of A if A is one.
    s : ndarray, shape (k,)
        Singular values, largest first.
    Vh : ndarray, shape (k, columns)
        Right singular vectors as rows, conjugated.

    Raises
    ------
    TypeError
        If A was encoded without its transpose, or A is coded and ``code`` is given.
    ValueError
        If an argument is out of range, or there is no client.

    See Also
    --------
    scipy.sparse.linalg.svds : to full precision, in many more rounds.
    dask.array.linalg.svd_compressed : the same method over plain dask arrays.

    Notes
    -----
    The approximation is close to the best of rank ``k``: its error is the singular value ``k + 1``
    times a factor that tends to 1 as ``power_iterations`` grows ([1]_, section 10.4).
    ``U``, which has ``k + oversample`` columns during the computation, must fit into the memory of
    one worker. If it is returned as a dask array, two workers keep a copy of it.

    References
    ----------
    .. [1] N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", SIAM
           Review 53(2), 2011.

    Examples
    --------
    >>> import numpy as np
    >>> from distributed import Client
    >>> client = Client(
    ...     n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
    ... )
    >>> A = np.outer([3.0, 4.0, 0.0], [0.0, 2.0])
    >>> U, s, Vh = randomized_svd(A, 1, seed=0)
    >>> s.round(6)
    array([10.])
    >>> client.close()
    """
    client = waiting_client(client_for(client, A))
    _check(np.shape(A), k, oversample, power_iterations)
    coded = as_coded(A, code, client, transpose=True)
    U, s, Vh = run(
        svd_rounds,
        coded,
        k,
        oversample=oversample,
        power_iterations=power_iterations,
        seed=seed,
        client=client,
        callback=callback,
        tolerant=False,
    )
    if isinstance(A, da.Array):
        # Scattered, because a tall array does not belong in a task graph. Dask cannot compute it
        # again, so two workers keep it.
        copies = min(1 + coded.code.tolerance, 2, len(client.nthreads()))
        future = client.scatter(U, broadcast=copies)
        U = da.from_delayed(future, U.shape, U.dtype, meta=U[:0]).rechunk((A.chunks[0], -1))
    return U, s, Vh


def _check(shape: tuple[int, ...], k: int, oversample: int, power_iterations: int) -> None:
    check_whole("k", k)
    check_whole("oversample", oversample, 0)
    check_whole("power_iterations", power_iterations, 0)
    if k > min(shape):
        raise ValueError(
            f"Argument 'k' must be at most {min(shape)} for a matrix of shape {shape}, it is {k}."
        )
