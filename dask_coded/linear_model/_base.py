"""The base class of the estimators: input validation, fitting and prediction."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse
from distributed import Client
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_consistent_length
from sklearn.utils.validation import check_is_fitted, validate_data

from dask_coded.arguments import check_unmasked, unwrapped
from dask_coded.array import CodedArray
from dask_coded.display import Display
from dask_coded.labels import aligned
from dask_coded.linear_model._fit import Callback, check_dask, current_cluster, fit
from dask_coded.linear_model._objective import Intercept
from dask_coded.linear_model.families import Family
from dask_coded.linear_model.penalties import Penalty
from dask_coded.linear_model.solvers import Solution
from dask_coded.loop import Progress
from dask_coded.products import ProductArray
from dask_coded.runtime.client.waiting import result_of, waiting_client

# scikit-learn's solvers whose steps, or at least whose minimum, one of ours has.
_NAMES = {
    "newton-cg": "newton",
    "newton-cholesky": "newton",
    "lsqr": "lbfgs",
    "sparse_cg": "lbfgs",
    "sag": "auto",
    "saga": "auto",
}
_FACTORISES = "factorises the matrix, which needs all of it in one process"
_WITHOUT = {
    "cholesky": _FACTORISES,
    "svd": _FACTORISES,
    "liblinear": "penalises the intercept, which is another objective",
}


class LinearModel(BaseEstimator):
    """Base class of the four estimators: validates data, runs one fit, predicts."""

    # What `max_iter=None` stands for, if an estimator takes it.
    _iterations: int | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # -- fitting -------------------------------------------------------------------------------

    def _data(
        self, X: Any, y: Any, client: Client | None, **checks: Any
    ) -> tuple[Any, Any, Client | None]:
        """Return valid data, and the client whose cluster runs the fit or None for this process.

        ``X`` has a form that can be encoded or multiplied, and ``y`` is a NumPy array. Only valid
        data have a size, so they are checked before the cluster is chosen.
        """
        X = check_unmasked("The data", unwrapped(X))
        y = check_unmasked("The targets", of_rows("Argument 'y'", y, X))
        if check_dask(X):
            client = current_cluster(client, X, bool(self.verbose))
            y = here(y, client)
            if client is not None:
                y = check_array(y, ensure_2d=False, dtype=None, input_name="y")
                check_consistent_length(range(X.shape[0]), y)
                self.n_features_in_ = X.shape[1]
                names = X.labels[1].index if isinstance(X, ProductArray) else None
                if names is not None and all(isinstance(name, str) for name in names):
                    self.feature_names_in_ = names.to_numpy(dtype=object)
                elif hasattr(self, "feature_names_in_"):  # of an earlier fit
                    del self.feature_names_in_
                return X, y, client
            X = here(X)
        X, y = validate_data(
            self, _wide(X), here(y, client), accept_sparse="csr", dtype=np.float64, **checks
        )
        return X, y, current_cluster(client, X, bool(self.verbose))

    def _minimize(
        self,
        X: Any,
        y: Any,
        family: Family,
        penalty: Penalty,
        weights: Any,
        *,
        intercept: Intercept,
        client: Client | None,
        callback: Callback | None,
    ) -> Solution:
        if self.solver in _WITHOUT:
            raise ValueError(
                f"Solver {self.solver!r} {_WITHOUT[self.solver]}: use solver='auto', with a small "
                "tol if the result must be exact."
            )
        start = None
        if self.warm_start and hasattr(self, "coef_"):
            start = self._start((X.shape[1], *np.shape(y)[1:]))
        max_iter: Any = self._iterations if self.max_iter is None else self.max_iter
        display = Display() if self.verbose else None

        def report(progress: Progress) -> None:
            if display is not None:
                display(progress)
            if callback is not None:
                callback(progress)

        with display or nullcontext():
            found = fit(
                X,
                y,
                family,
                penalty,
                weights=weights,
                intercept=intercept,
                start=start,
                solver=_NAMES.get(self.solver, self.solver),
                tol=self.tol,
                max_iter=max_iter,
                client=client,
                code=self.code,
                callback=report if self.verbose or callback else None,
                display=display,
            )
        self.history_ = found.history
        self.cluster_ = getattr(client.scheduler, "address", None) if client else None
        if found.hidden:
            warnings.warn(
                f"Columns of the data ({found.hidden}) vary so little beside their means that they "
                "are taken as constant: subtract the means, or a time at which they begin.",
                stacklevel=3,
            )
        if not found.converged:
            advice = "raise max_iter or tol, or scale the data"
            if found.rounds < max_iter:
                advice = "products are not accurate enough for less, so raise tol or scale the data"
            warnings.warn(
                f"{type(self).__name__} did not reach tol={self.tol:g} in {found.rounds} of "
                f"max_iter={max_iter} iterations, its residual is {found.residual:.3g}: "
                f"{advice}.",
                ConvergenceWarning,
                stacklevel=3,
            )
        return found

    def _start(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return coefficients of this shape and the intercept of the previous fit."""
        coefficients = np.atleast_2d(self.coef_).T
        shift = np.broadcast_to(self.intercept_, coefficients.shape[1:])
        columns, sets = (*shape, 1)[:2]
        if coefficients.shape != (columns, sets):
            before, sets_before = coefficients.shape
            raise ValueError(
                f"With warm_start=True a fit starts from the one before, which had {before} "
                f"columns and {sets_before} sets of coefficients, this one has {columns} and "
                f"{sets}: set warm_start=False."
            )
        return coefficients.reshape(shape), shift.reshape(shape[1:])

    # -- predicting ----------------------------------------------------------------------------

    def _predictions(self, X: Any) -> Any:
        """Return ``X @ coef_.T + intercept_``, as a dask array if X is one."""
        check_is_fitted(self)
        X = unwrapped(X)
        if not check_dask(X):
            X = validate_data(self, _wide(X), accept_sparse="csr", dtype=np.float64, reset=False)
            return np.asarray(X @ self.coef_.T) + self.intercept_
        if X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )
        if isinstance(X, ProductArray):
            self._check_names(X)
        if isinstance(X, CodedArray):
            return X @ self.coef_.T + self.intercept_
        coefficients, shift = self.coef_.T, self.intercept_
        return rowwise(
            X.rechunk({1: -1}), lambda block: block @ coefficients + shift, coefficients.shape[1:]
        )

    def _check_names(self, X: ProductArray) -> None:
        """Refuse a labelled array whose columns are not those of the fit, in their order."""
        columns = X.labels[1].index
        if columns is None or not hasattr(self, "feature_names_in_"):
            return
        if all(isinstance(name, str) for name in columns) and list(columns) != list(
            self.feature_names_in_
        ):
            raise ValueError(
                "The feature names should match those that were passed during fit, in the same "
                "order: encode the columns in that order."
            )


# -- helpers -----------------------------------------------------------------------------------


def _wide(X: Any) -> Any:
    """Return sparse data in double precision, so that entries of one cell can be added up."""
    real = scipy.sparse.issparse(X) and X.dtype.kind in "biuf"
    return X.astype(np.float64, copy=False) if real else X


def rowwise(
    scores: Any, function: Callable[[Any], Any], tail: tuple[int, ...], dtype: Any = np.float64
) -> Any:
    """Apply a function to rows: at once to an array, lazily to each block of a dask array."""
    if not isinstance(scores, da.Array):
        return function(scores)
    return da.map_blocks(
        function,
        scores,
        chunks=(scores.chunks[0], *((length,) for length in tail)),
        drop_axis=list(range(1 + len(tail), scores.ndim)),
        new_axis=list(range(scores.ndim, 1 + len(tail))),
        dtype=dtype,
        meta=np.empty((0,) * (1 + len(tail)), dtype=dtype),
    )


def of_rows(what: str, values: Any, X: Any) -> Any:
    """Return values in the order of the rows of X.

    X may be coded, or derived from a coded array. Without labels, values are in that order already.
    """
    X = unwrapped(X)
    return aligned(what, values, X.labels[0]) if isinstance(X, ProductArray) else unwrapped(values)


def here(values: Any, client: Client | None = None) -> Any:
    """Compute a dask array; return anything else unchanged."""
    values = unwrapped(values)
    if not isinstance(values, da.Array):
        return values
    if client is None:
        return values.compute()
    return result_of(waiting_client(client).compute(values))


def client_of(X: Any) -> Client | None:
    """Return the client of a coded array, whose cluster computes its products."""
    return X.encoded.client if isinstance(X, CodedArray) else None
