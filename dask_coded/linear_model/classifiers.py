"""Classifiers with scikit-learn's names, defaults and conventions."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from distributed import Client
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from dask_coded.arguments import check_fraction, check_positive
from dask_coded.linear_model._base import (
    LinearModel,
    client_of,
    here,
    of_rows,
    rowwise,
)
from dask_coded.linear_model._fit import Callback
from dask_coded.linear_model._objective import Intercept, check_weights
from dask_coded.linear_model.families import Family, Hinge, Logistic, Multinomial, SquaredHinge
from dask_coded.linear_model.penalties import Penalty
from dask_coded.linear_model.solvers import Solution


class _Classifier(ClassifierMixin, LinearModel):
    """Base class of the classifiers: converts classes to targets, and scores to classes."""

    def _targets(
        self, X: Any, y: Any, sample_weight: Any, client: Client | None
    ) -> tuple[Any, Any, Any, Client | None]:
        """Return the data, the class index of each row, the weights or None, and the client."""
        sample_weight = of_rows("sample_weight", sample_weight, X)
        X, y, client = self._data(X, y, client)
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs rows of at least 2 classes, "
                f"all of these have one class: {self.classes_[0]}."
            )
        weights = None
        if sample_weight is not None:
            weights = check_weights("sample_weight", here(sample_weight, client), len(y))
        if self.class_weight is not None:
            with np.errstate(divide="ignore"):  # of a class without weight
                factors = compute_class_weight(
                    self.class_weight, classes=self.classes_, y=y, sample_weight=weights
                )
            if self.class_weight == "balanced" and not np.isfinite(factors).all():
                empty = self.classes_[~np.isfinite(factors)][0]
                raise ValueError(
                    f"With class_weight='balanced' each class needs a row of positive weight in "
                    f"'sample_weight', class {empty} has none."
                )
            factors = check_weights("class_weight", factors, len(self.classes_))[codes]
            weights = factors * (1.0 if weights is None else weights)
            if not weights.any():
                raise ValueError(
                    "The product of 'sample_weight' and 'class_weight' is zero for all rows."
                )
        return X, codes, weights, client

    def _signs(self, codes: Any) -> Any:
        """Return -1 or 1 for two classes; for more, a column per class: 1 for its rows, else -1."""
        # int8, because targets are sent to the cluster.
        if len(self.classes_) == 2:
            return (2 * codes - 1).astype(np.int8)
        return np.where(codes[:, np.newaxis] == np.arange(len(self.classes_)), 1, -1).astype(
            np.int8
        )

    def _keep(self, found: Solution) -> None:
        self.coef_ = np.atleast_2d(found.coefficients.T)
        self.intercept_ = np.atleast_1d(found.intercept)

    def decision_function(self, X: Any) -> Any:
        """Return the score of each row: ``X @ coef_.T + intercept_``.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)

        Returns
        -------
        ndarray, or dask array if X is one, shape (n,) or (n, classes)
            For two classes, positive for the second one.
        """
        scores = self._predictions(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Any:
        """Return the predicted class of each row.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)

        Returns
        -------
        ndarray, or dask array if X is one, shape (n,)
        """
        scores, classes = self.decision_function(X), self.classes_

        def choose(block: Any) -> Any:
            return classes[(block > 0).astype(int) if block.ndim == 1 else block.argmax(axis=1)]

        return rowwise(scores, choose, (), classes.dtype)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy: the share of rows whose class is predicted correctly.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)
        y : array_like, shape (n,)
        sample_weight : array_like, shape (n,), optional

        Returns
        -------
        float
        """
        predicted = here(self.predict(X), client_of(X))
        y, weights = of_rows("Argument 'y'", y, X), of_rows("sample_weight", sample_weight, X)
        return float(accuracy_score(here(y), predicted, sample_weight=here(weights)))


class LogisticRegression(_Classifier):
    r"""Logistic regression for two classes, softmax regression for more.

    Minimises :math:`C \sum_i s_i \ell_i + \frac{1 - \rho}{2} \|w\|_2^2 + \rho \|w\|_1`, as
    scikit-learn does; the intercept is not penalised.

    Parameters
    ----------
    penalty : {"auto", "deprecated", "l2", "l1", "elasticnet", None}
        "auto", "elasticnet" and "deprecated" use ``l1_ratio``, as scikit-learn does from version
        1.8. The others are the former names: "l2" is ``l1_ratio=0``, "l1" is ``l1_ratio=1``, None
        is ``C=np.inf``.
    C : float
        Inverse of the penalty's strength, positive; ``np.inf`` for no penalty.
    l1_ratio : float or None
        :math:`\rho`, from 0 (ridge) to 1 (lasso); None is 0.
    tol : float
        Stop when the largest absolute entry of the gradient of the objective, divided by C and by
        the sum of the weights, is at most this. For data in single precision that are coded with
        parity it is at least 1.2e-6, unless it is 0.
    fit_intercept : bool
    class_weight : dict, "balanced" or None
        Factor of the row weights for each class.
    solver : str
        One of the solvers of :func:`~dask_coded.linear_model.minimize`, or scikit-learn's name of
        one: "newton-cg" and "newton-cholesky" are "newton", "sparse_cg" and "lsqr" are "lbfgs",
        "sag" and "saga" are "auto".
    max_iter : int
        Maximum number of iterations.
    verbose : int
        Show the iterations while the fit runs, see :class:`dask_coded.Display`, and why it does
        not use the current client.
    warm_start : bool
        Start from the result of the previous fit.
    code : Code or str, optional
        Code for the data, see :func:`dask_coded.encode`, which also chooses the default.
    dual, intercept_scaling, n_jobs, random_state
        Accepted for scikit-learn's sake, and ignored: the first two are for its solver "liblinear",
        the cluster decides how many workers there are, and nothing is random.

    Attributes
    ----------
    classes_ : ndarray, shape (classes,)
    coef_ : ndarray, shape (1, p) or (classes, p)
    intercept_ : ndarray, shape (1,) or (classes,)
    n_iter_ : ndarray of int, shape (1,)
    n_features_in_ : int
    cluster_ : str or None
        Address of the scheduler whose cluster ran the fit; None if it ran in this process.
    history_ : tuple of Progress
        One entry per iteration; its objective is the mean loss plus the penalty.

    Examples
    --------
    >>> model = LogisticRegression().fit([[0.0], [1.0], [2.0], [3.0]], ["no", "no", "yes", "yes"])
    >>> model.predict([[0.2], [2.9]])
    array(['no', 'yes'], dtype='<U3')
    """

    def __init__(
        self,
        penalty: str | None = "auto",
        *,
        C: float = 1.0,
        l1_ratio: float | None = 0.0,
        tol: float = 3e-5,
        fit_intercept: bool = True,
        class_weight: Any = None,
        solver: str = "auto",
        max_iter: int = 100,
        verbose: int = 0,
        warm_start: bool = False,
        code: Any = None,
        dual: bool = False,
        intercept_scaling: float = 1.0,
        n_jobs: Any = None,
        random_state: Any = None,
    ) -> None:
        self.dual = dual
        self.intercept_scaling = intercept_scaling
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.penalty = penalty
        self.C = C
        self.l1_ratio = l1_ratio
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.solver = solver
        self.max_iter = max_iter
        self.verbose = verbose
        self.warm_start = warm_start
        self.code = code

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
        y : array_like, shape (n,)
            Classes, of any type.
        sample_weight : array_like, shape (n,), or float, optional
            Not negative.
        client : distributed.Client, optional
            The cluster. Default: the current client. Without one, or if the data are smaller than
            ``coded.linear-model.minimum-size`` in the configuration, the fit runs in this process.
        callback : callable, optional
            Called with a :class:`~dask_coded.Progress`; see :func:`dask_coded.graph.pagerank`.

        Returns
        -------
        LogisticRegression
            The fitted model.

        Raises
        ------
        ValueError
            If the data or a parameter are invalid.
        """
        check_positive("C", self.C, or_infinite=True)
        ratio = 0.0 if self.l1_ratio is None else self.l1_ratio
        ratios: dict[Any, float] = {"l1": 1.0, "l2": 0.0}
        ratios |= dict.fromkeys(("auto", "deprecated", "elasticnet"), ratio)
        if self.penalty is not None and self.penalty not in ratios:
            raise ValueError(
                f"Argument 'penalty' must be None or one of {sorted(ratios)}, "
                f"it is {self.penalty!r}."
            )
        check_fraction("l1_ratio", ratio := ratios.get(self.penalty, 0.0))
        X, codes, weights, client = self._targets(X, y, sample_weight, client)
        strength = 0.0
        if self.penalty is not None:
            strength = 1 / (self.C * (len(codes) if weights is None else weights.sum()))
        y = self._signs(codes)
        family: Family = Logistic()
        if y.ndim == 2:
            y, family = (y > 0).astype(np.int8), Multinomial()
        found = self._minimize(
            X,
            y,
            family,
            Penalty(l1=ratio * strength, l2=(1 - ratio) * strength),
            weights,
            intercept=Intercept(1.0 if self.fit_intercept else 0.0),
            client=client,
            callback=callback,
        )
        self._keep(found)
        if y.ndim == 2:
            # A constant that all classes share changes no probability. Scikit-learn has none.
            self.intercept_ = self.intercept_ - self.intercept_.mean()
        self.n_iter_ = np.array([found.rounds])
        return self

    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithm of :meth:`predict_proba`."""
        scores = self.decision_function(X)
        return rowwise(scores, _log_probabilities, (len(self.classes_),))

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)

        Returns
        -------
        ndarray, or dask array if X is one, shape (n, classes)
            In the order of ``classes_``; rows sum to 1.
        """
        return np.exp(self.predict_log_proba(X))


class LinearSVC(_Classifier):
    r"""Linear support vector classification, one-against-rest for more than two classes.

    Minimises :math:`C \sum_i s_i \ell_i + r(w, b)` as scikit-learn does: the intercept is the
    coefficient of a constant column of value ``intercept_scaling`` and is penalised like the
    others. All classes are fitted together and share each round.

    Parameters
    ----------
    penalty : {"l2", "l1"}
    loss : {"squared_hinge", "hinge"}
        The hinge is not smooth, so it is approximated more and more closely until the objective is
        within a relative ``tol`` of its minimum. This takes many more rounds.
    tol : float
        Stop when the largest absolute entry of the gradient of the objective, divided by C and by
        the sum of the weights, is at most this. For data in single precision that are coded with
        parity it is at least 1.2e-6, unless it is 0.
    C : float
        Inverse of the penalty's strength, positive.
    fit_intercept : bool
    intercept_scaling : float
        Positive; a larger value penalises the intercept less.
    class_weight, solver, max_iter, verbose, warm_start, code
        As in :class:`LogisticRegression`. With more than two classes, ``class_weight`` weights a
        row in the problems of all classes; scikit-learn weights it only in that of its own class.
    multi_class : {"ovr"}
        Each class is separated from all others.
    dual, random_state
        Accepted for scikit-learn's sake, and ignored: the primal problem is solved, which has the
        same minimum, and nothing is random.

    Attributes
    ----------
    classes_ : ndarray, shape (classes,)
    coef_ : ndarray, shape (1, p) or (classes, p)
    intercept_ : ndarray, shape (1,) or (classes,)
    n_iter_ : int
    n_features_in_ : int
    cluster_ : str or None
        Address of the scheduler whose cluster ran the fit; None if it ran in this process.
    history_ : tuple of Progress
        One entry per iteration; its objective is the mean loss plus the penalty.

    Examples
    --------
    >>> model = LinearSVC().fit([[0.0], [1.0], [2.0], [3.0]], ["no", "no", "yes", "yes"])
    >>> model.predict([[0.2], [2.9]])
    array(['no', 'yes'], dtype='<U3')
    """

    def __init__(
        self,
        penalty: str = "l2",
        loss: str = "squared_hinge",
        *,
        tol: float = 3e-9,
        C: float = 1.0,
        fit_intercept: bool = True,
        intercept_scaling: float = 1.0,
        class_weight: Any = None,
        solver: str = "auto",
        max_iter: int = 1000,
        verbose: int = 0,
        warm_start: bool = False,
        code: Any = None,
        dual: Any = "auto",
        multi_class: str = "ovr",
        random_state: Any = None,
    ) -> None:
        self.multi_class = multi_class
        self.dual = dual
        self.random_state = random_state
        self.penalty = penalty
        self.loss = loss
        self.tol = tol
        self.C = C
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.class_weight = class_weight
        self.solver = solver
        self.max_iter = max_iter
        self.verbose = verbose
        self.warm_start = warm_start
        self.code = code

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        client: Client | None = None,
        callback: Callback | None = None,
    ) -> Self:
        """Fit the model; see :meth:`LogisticRegression.fit`."""
        check_positive("C", self.C)
        check_positive("intercept_scaling", self.intercept_scaling)
        families = {"hinge": Hinge(), "squared_hinge": SquaredHinge()}
        choices = {"loss": families, "penalty": ("l1", "l2"), "multi_class": ("ovr",)}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"Argument {name!r} must be one of {sorted(known)}, it is {value!r}."
                )
        X, codes, weights, client = self._targets(X, y, sample_weight, client)
        strength = 1 / (self.C * (len(codes) if weights is None else weights.sum()))
        found = self._minimize(
            X,
            self._signs(codes),
            families[self.loss],
            Penalty(**{self.penalty: strength}),
            weights,
            intercept=Intercept(
                float(self.intercept_scaling) if self.fit_intercept else 0.0, penalised=True
            ),
            client=client,
            callback=callback,
        )
        self._keep(found)
        self.n_iter_ = found.rounds
        return self


def _log_probabilities(scores: Any) -> Any:
    if scores.ndim == 1:
        return -np.logaddexp(0, np.stack([scores, -scores], axis=1))
    return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
