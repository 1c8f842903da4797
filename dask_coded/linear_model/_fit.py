"""Run a fit as one task in the cluster if there is a client, else in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import scipy.sparse
from dask.base import is_dask_collection
from distributed import Client, default_client

from dask_coded.array import CodedArray
from dask_coded.display import Display
from dask_coded.linear_model.families import Family, SquaredError
from dask_coded.linear_model.penalties import Penalty
from dask_coded.linear_model.solvers import Solution, check_options, minimize
from dask_coded.loop import Loop, Progress
from dask_coded.submission import as_coded, run

Callback = Callable[[Progress], object]

_FACTORISED = 1000  # columns; with more, conjugate gradients take less time than a factorisation


def current_cluster(client: Client | None, X: Any, verbose: bool) -> Client | None:
    """Return the client whose cluster runs a fit, or None if this process does.

    A coded array is fitted in its own cluster. Data in the memory of this process go to a cluster
    only if the caller passes a client, or if there is a current one and they are not smaller than
    ``coded.linear-model.minimum-size``.

    Parameters
    ----------
    client : distributed.Client or None
    X : NumPy array, SciPy sparse matrix, dask array or CodedArray, shape (n, p)
    verbose : bool
        Show why the fit does not use the current client.
    """
    if client is not None:
        return client
    if isinstance(X, CodedArray):
        return X.encoded.client
    try:
        client = default_client()
    except ValueError:
        return None
    if is_dask_collection(X):
        return client
    size = X.nnz if scipy.sparse.issparse(X) else X.size
    least = dask.config.get("coded.linear-model.minimum-size")
    if size >= least:
        return client
    if verbose:
        Display().say(
            f"Fitting in this process, because {size:,} numbers are fewer than "
            f"`coded.linear-model.minimum-size`, {least:,}. Pass `client` to use the cluster."
        )
    return None


def check_dask(X: Any) -> bool:
    """Return whether the data are a dask array, and check it.

    Raises
    ------
    TypeError
        If they are a different dask collection.
    ValueError
        If they are not a matrix of real numbers with known chunk sizes.
    """
    if not is_dask_collection(X):
        return False
    if not isinstance(X, da.Array):
        raise TypeError(
            f"Argument 'X' must be an array, it is a {type(X).__name__}: "
            "pass `X.to_dask_array(lengths=True)`."
        )
    if X.ndim != 2:
        raise ValueError(f"Argument 'X' must be a matrix, it has {X.ndim} dimensions.")
    if np.isnan(X.shape).any():
        raise ValueError(
            "Argument 'X' has chunks of unknown size: call `X.compute_chunk_sizes()` first."
        )
    if X.dtype.kind not in "fbiu":
        raise ValueError(f"Argument 'X' must hold real numbers, its dtype is {X.dtype}.")
    return True


def fit(
    X: Any,
    y: Any,
    family: Family,
    penalty: Penalty,
    *,
    client: Client | None,
    code: Any,
    callback: Callback | None,
    display: Display | None = None,
    **options: Any,
) -> Solution:
    """Minimise an objective over data in this process or in a cluster.

    Parameters
    ----------
    X : NumPy array, SciPy sparse matrix, dask array or CodedArray
        A CodedArray is not encoded again.
    y, family, penalty, **options
        As for :func:`~dask_coded.linear_model.minimize`.
    client : distributed.Client or None
        None runs the fit in this process.
    code : Code or str or None
        Code for data that are not encoded yet; None lets :func:`~dask_coded.encode` choose.
    callback : callable or None
        Called with a :class:`~dask_coded.Progress`.
    display : Display or None
        Shows the encoding.
    """
    # Before the data are encoded, which may take long.
    check_options(penalty, options["solver"], options["tol"], options["max_iter"])
    if client is None and not isinstance(X, CodedArray):
        ridge = isinstance(family, SquaredError) and np.any(penalty.l2) and penalty.smooth
        if ridge and np.ndim(y) == 1 and isinstance(X, np.ndarray) and options["solver"] == "auto":
            # Exact, as scikit-learn's solver is. Without a penalty the Hessian may be singular.
            pair = _Rows(X) if X.shape[1] <= _FACTORISED else None
            options |= {"solver": "newton", "pair": pair}
        return minimize(X, y, family, penalty, loop=_Told(callback), **options)
    if not isinstance(X, CodedArray):
        # Parity and real coefficients need floating-point data, of more than three digits.
        fits = X.dtype.kind == "f" and X.dtype.itemsize >= 4
        real = X if fits else X.astype(np.float64)
        X = as_coded(real, code, client, transpose=True, callback=display)
    elif not isinstance(X.T, CodedArray):
        raise ValueError(
            "A fit multiplies from both sides, but this array was encoded without its transpose: "
            "encode it with `transpose=True`."
        )
    return run(minimize, X, y, family, penalty, client=client, callback=callback, **options)


class _Rows:
    """Stands for the coded pair of a matrix in this process."""

    def __init__(self, X: np.ndarray) -> None:
        self._X = X

    def product(self, weights: np.ndarray) -> np.ndarray:
        return (self._X.T * weights) @ self._X


class _Told(Loop):
    """Passes each report to a callback in this process."""

    def __init__(self, callback: Callback | None) -> None:
        self._callback = callback

    def report(self, progress: Progress, state: Any = None, last: bool = False) -> None:
        if self._callback is not None:
            self._callback(progress)
