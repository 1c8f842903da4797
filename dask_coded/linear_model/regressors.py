"""Least squares with scikit-learn's names, defaults and conventions."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from distributed import Client
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from dask_coded.arguments import check_fraction, check_positive
from dask_coded.linear_model._base import LinearModel, client_of, here, of_rows
from dask_coded.linear_model._fit import Callback
from dask_coded.linear_model._objective import Intercept, check_weights
from dask_coded.linear_model.families import SquaredError
from dask_coded.linear_model.penalties import Penalty


class _Regressor(RegressorMixin, LinearModel):
    """Least squares for one or more targets, which share each round."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        client: Client | None = None,
        callback: Callback | None = None,
    ) -> Self:
        """Fit the model.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)
        y : array_like, shape (n,) or (n, targets)
        sample_weight, client, callback
            As for :meth:`LogisticRegression.fit`.

        Returns
        -------
        Self
            The fitted model.

        Raises
        ------
        ValueError
            If the data or a parameter are invalid.
        """
        self._check()
        sample_weight = of_rows("sample_weight", sample_weight, X)
        X, y, client = self._data(X, y, client, multi_output=True, y_numeric=True)
        if column := y.shape[1:] == (1,):
            y = y[:, 0]
        weights = None
        if sample_weight is not None:
            weights = check_weights("sample_weight", here(sample_weight, client), len(y))
        found = self._minimize(
            X,
            y,
            SquaredError(),
            self._penalty(
                len(y) if weights is None else float(weights.sum()),
                1 if y.ndim == 1 else y.shape[1],
            ),
            weights,
            intercept=Intercept(1.0 if self.fit_intercept else 0.0),
            client=client,
            callback=callback,
        )
        coefficients, intercept = found.coefficients.T, found.intercept
        self.coef_ = coefficients[None] if column and self._keeps_column else coefficients
        self.intercept_: Any = intercept if column or intercept.ndim else float(intercept)
        if not self.fit_intercept:
            self.intercept_ = 0.0  # also of several targets, as scikit-learn's
        elif column:
            self.intercept_ = np.atleast_1d(intercept)
        self.n_iter_ = found.rounds
        return self

    positive: bool
    # Whether the coefficients have shape (1, p) if y has one column, as scikit-learn's do.
    _keeps_column = False

    def _check(self) -> None:
        """Raise ValueError if a parameter is out of range."""
        if self.positive:
            raise ValueError(
                "Argument 'positive' must be False: the signs of coefficients cannot be "
                "restricted. Use scikit-learn's estimator for that."
            )

    def _penalty(self, total: float, targets: int) -> Penalty:
        """Return what is added to half the mean square, for a sum of the weights."""
        return Penalty()

    def predict(self, X: Any) -> Any:
        """Return the prediction for each row.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)

        Returns
        -------
        ndarray, or dask array if X is one, shape (n,) or (n, targets)
        """
        return self._predictions(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the coefficient of determination, 1 at best.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)
        y : array_like, shape (n,) or (n, targets)
        sample_weight : array_like, shape (n,), optional

        Returns
        -------
        float
        """
        predicted = here(self.predict(X), client_of(X))
        y, weights = of_rows("Argument 'y'", y, X), of_rows("sample_weight", sample_weight, X)
        return float(r2_score(here(y), predicted, sample_weight=here(weights)))


class LinearRegression(_Regressor):
    r"""Least squares: minimises :math:`\sum_i s_i (x_i^T w + b - y_i)^2`.

    If the data do not determine the coefficients, the smallest ones that fit are found. Columns
    that are more than 32 times larger or smaller than the median column count in scaled units.

    Parameters
    ----------
    fit_intercept : bool
    tol : float
        Stop when the largest absolute entry of the gradient of half the mean square, in units of
        the standard deviation of each target times that of each column (which is estimated), is at
        most this. Without an intercept they are root mean squares. For data in single precision
        that are coded with parity it is at least 1.2e-6, unless it is 0.
    solver, max_iter, verbose, warm_start, code
        As in :class:`LogisticRegression`.
    positive : bool
        Must be False: the signs of coefficients cannot be restricted.
    copy_X, n_jobs
        Accepted for scikit-learn's sake, and ignored: the data are never changed, and the cluster
        decides how many workers there are.

    Attributes
    ----------
    coef_ : ndarray, shape (p,) or (targets, p)
    intercept_ : float, or ndarray of shape (targets,)
    n_iter_ : int
    n_features_in_ : int
    cluster_ : str or None
        Address of the scheduler whose cluster ran the fit; None if it ran in this process.
    history_ : tuple of Progress
        One entry per iteration; its objective is half the mean square.

    Examples
    --------
    >>> model = LinearRegression().fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> model.predict([[10.0]]).round(4)
    array([21.])
    """

    _keeps_column = True

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-10,
        solver: str = "auto",
        max_iter: int = 2000,
        verbose: int = 0,
        warm_start: bool = False,
        code: Any = None,
        positive: bool = False,
        copy_X: bool = True,
        n_jobs: Any = None,
    ) -> None:
        self.positive = positive
        self.copy_X = copy_X
        self.n_jobs = n_jobs
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.solver = solver
        self.max_iter = max_iter
        self.verbose = verbose
        self.warm_start = warm_start
        self.code = code


class Ridge(_Regressor):
    r"""Ridge regression: minimises :math:`\sum_i s_i (x_i^T w + b - y_i)^2 + \alpha \|w\|_2^2`.

    Parameters
    ----------
    alpha : float, or array_like of shape (targets,)
        The penalty's strength, for all targets or for each; not negative.
    fit_intercept : bool
    tol : float
        Stop when the largest absolute entry of the gradient of half the objective, divided by the
        sum of the weights and in units of the standard deviation of each target times that of each
        column (which is estimated), is at most this. Without an intercept they are root mean
        squares. It has a lower limit as in :class:`LinearRegression`.
    max_iter : int or None
        Maximum number of iterations; None is 1,000.
    solver, verbose, warm_start, code
        As in :class:`LogisticRegression`.
    positive : bool
        Must be False: the signs of coefficients cannot be restricted.
    copy_X, random_state
        Accepted for scikit-learn's sake, and ignored: the data are never changed, and nothing is
        random.

    Attributes
    ----------
    coef_ : ndarray, shape (p,) or (targets, p)
    intercept_ : float, or ndarray of shape (targets,)
    n_iter_ : int
    n_features_in_ : int
    cluster_ : str or None
        Address of the scheduler whose cluster ran the fit; None if it ran in this process.
    history_ : tuple of Progress
        One entry per iteration; its objective is half the mean square plus the penalty.

    Examples
    --------
    >>> model = Ridge(alpha=2.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> model.coef_.round(4), round(model.intercept_, 4)
    (array([1.]), 2.0)
    """

    _iterations = 1000

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-8,
        solver: str = "auto",
        max_iter: int | None = 1000,
        verbose: int = 0,
        warm_start: bool = False,
        code: Any = None,
        positive: bool = False,
        copy_X: bool = True,
        random_state: Any = None,
    ) -> None:
        self.positive = positive
        self.copy_X = copy_X
        self.random_state = random_state
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.solver = solver
        self.max_iter = max_iter
        self.verbose = verbose
        self.warm_start = warm_start
        self.code = code

    def _check(self) -> None:
        super()._check()
        for strength in np.ravel(self.alpha).tolist():
            check_positive("alpha", strength, or_zero=True)

    def _penalty(self, total: float, targets: int) -> Penalty:
        strengths = np.ravel(self.alpha).tolist()
        if len(strengths) == 1:
            return Penalty(l2=strengths[0] / total)
        if len(strengths) != targets:
            raise ValueError(
                f"Argument 'alpha' must be one number or one for each target, it has "
                f"{len(strengths)} numbers for {targets} target{'s' * (targets != 1)}."
            )
        return Penalty(l2=tuple(strength / total for strength in strengths))


class ElasticNet(_Regressor):
    r"""Least squares with an L1 and an L2 penalty, so that many coefficients are zero.

    Minimises :math:`\frac{1}{2 \sum_i s_i} \sum_i s_i (x_i^T w + b - y_i)^2 + \alpha \rho \|w\|_1 +
    \frac{\alpha (1 - \rho)}{2} \|w\|_2^2`, where :math:`\rho` is ``l1_ratio``, by accelerated
    proximal gradient steps [1]_. Each step is a round with the matrix and one with its transpose.

    Parameters
    ----------
    alpha : float
        The penalty's strength; not negative.
    l1_ratio : float
        The share of the L1 penalty, from 0 to 1.
    fit_intercept : bool
    tol : float
        Stop when the largest absolute entry of the objective's least subgradient, in units of the
        standard deviation of each target times that of each column (which is estimated), is at most
        this. Without an intercept they are root mean squares. It has a lower limit as in
        :class:`LinearRegression`.
    solver : {"auto", "nesterov", "proximal"}
        "auto" is "nesterov". With ``l1_ratio=0`` it is "lbfgs", and the other solvers of
        :class:`LogisticRegression` work as well.
    max_iter, verbose, warm_start, code
        As in :class:`LogisticRegression`.
    positive : bool
        Must be False: the signs of coefficients cannot be restricted.
    copy_X, precompute, random_state, selection
        Accepted for scikit-learn's sake, and ignored: they choose between ways to the same
        coefficients.

    Attributes
    ----------
    coef_ : ndarray, shape (p,) or (targets, p)
    intercept_ : float, or ndarray of shape (targets,)
    n_iter_ : int
    n_features_in_ : int
    cluster_ : str or None
        Address of the scheduler whose cluster ran the fit; None if it ran in this process.
    history_ : tuple of Progress
        One entry per iteration; its objective is that above.

    References
    ----------
    .. [1] A. Beck, M. Teboulle, "A Fast Iterative Shrinkage-Thresholding Algorithm for Linear
       Inverse Problems", SIAM J. Imaging Sciences 2(1), 2009, section 4.

    Examples
    --------
    >>> X = [[0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [3.0, 1.0]]
    >>> model = ElasticNet(alpha=0.5).fit(X, [1.0, 3.0, 5.0, 7.0])
    >>> model.coef_.round(4)
    array([1.5, 0. ])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        tol: float = 1e-7,
        solver: str = "auto",
        max_iter: int = 1000,
        verbose: int = 0,
        warm_start: bool = False,
        code: Any = None,
        positive: bool = False,
        copy_X: bool = True,
        precompute: Any = False,
        random_state: Any = None,
        selection: str = "cyclic",
    ) -> None:
        self.copy_X = copy_X
        self.precompute = precompute
        self.random_state = random_state
        self.selection = selection
        self.positive = positive
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.solver = solver
        self.max_iter = max_iter
        self.verbose = verbose
        self.warm_start = warm_start
        self.code = code

    def _check(self) -> None:
        super()._check()
        check_positive("alpha", self.alpha, or_zero=True)
        check_fraction("l1_ratio", self.l1_ratio)

    def _penalty(self, total: float, targets: int) -> Penalty:
        ratio = float(self.l1_ratio)
        return Penalty(l1=ratio * self.alpha, l2=(1 - ratio) * self.alpha)


class Lasso(ElasticNet):
    r"""Least squares with an L1 penalty, so that many coefficients are zero.

    Minimises :math:`\frac{1}{2 \sum_i s_i} \sum_i s_i (x_i^T w + b - y_i)^2 + \alpha \|w\|_1`.

    Parameters
    ----------
    alpha : float
        The penalty's strength; not negative.
    fit_intercept, tol, solver, max_iter, verbose, warm_start, code, positive
        As in :class:`ElasticNet`.
    copy_X, precompute, random_state, selection
        Accepted for scikit-learn's sake, and ignored, as in :class:`ElasticNet`.

    Attributes
    ----------
    coef_ : ndarray, shape (p,) or (targets, p)
    intercept_ : float, or ndarray of shape (targets,)
    n_iter_ : int
    n_features_in_ : int
    cluster_ : str or None
        Address of the scheduler whose cluster ran the fit; None if it ran in this process.
    history_ : tuple of Progress
        One entry per iteration; its objective is that above.

    Examples
    --------
    >>> X = [[0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [3.0, 1.0]]
    >>> Lasso(alpha=0.5).fit(X, [1.0, 3.0, 5.0, 7.0]).coef_.round(4)
    array([1.6, 0. ])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-7,
        solver: str = "auto",
        max_iter: int = 1000,
        verbose: int = 0,
        warm_start: bool = False,
        code: Any = None,
        positive: bool = False,
        copy_X: bool = True,
        precompute: Any = False,
        random_state: Any = None,
        selection: str = "cyclic",
    ) -> None:
        super().__init__(
            alpha,
            l1_ratio=1.0,
            fit_intercept=fit_intercept,
            tol=tol,
            solver=solver,
            max_iter=max_iter,
            verbose=verbose,
            warm_start=warm_start,
            code=code,
            positive=positive,
            copy_X=copy_X,
            precompute=precompute,
            random_state=random_state,
            selection=selection,
        )
