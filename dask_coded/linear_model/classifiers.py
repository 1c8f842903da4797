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

from dask_coded.arguments import check_positive
from dask_coded.linear_model._base import (
    LinearModel,
    here,
    rowwise,
)
from dask_coded.linear_model._fit import Callback, current_cluster
from dask_coded.linear_model._objective import Intercept, check_weights
from dask_coded.linear_model.families import Family, Hinge, Logistic, Multinomial, SquaredHinge
from dask_coded.linear_model.penalties import Penalty
from dask_coded.linear_model.solvers import Solution


class _Classifier(ClassifierMixin, LinearModel):
    """A classifier: classes by name, scores by class."""

    def _targets(
        self, X: Any, y: Any, sample_weight: Any, client: Client | None
    ) -> tuple[Any, Any, Any]:
        """Data, number of each row's class, weights or None."""
        X, y = self._data(X, y, client)
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
            factors = compute_class_weight(
                self.class_weight, classes=self.classes_, y=y, sample_weight=weights
            )
            weights = factors[codes] * (1.0 if weights is None else weights)
        return X, codes, weights

    def _signs(self, codes: Any) -> Any:
        """Of two classes -1 and 1, of more a column each with 1 where the row belongs to it."""
        # Small integers: targets travel to the cluster.
        if len(self.classes_) == 2:
            return (2 * codes - 1).astype(np.int8)
        return np.where(codes[:, np.newaxis] == np.arange(len(self.classes_)), 1, -1).astype(
            np.int8
        )

    def _keep(self, found: Solution) -> None:
        self.coef_ = np.atleast_2d(found.coefficients.T)
        self.intercept_ = np.atleast_1d(found.intercept)

    def decision_function(self, X: Any) -> Any:
        """How far rows are on the side of a class.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)

        Returns
        -------
        ndarray, or dask array if X is one, shape (n,) or (n, classes)
            Of two classes, positive for the second.
        """
        scores = self._predictions(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Any:
        """Class of each row.

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
        """Share of the rows whose class is predicted rightly.

        Parameters
        ----------
        X : array, sparse matrix, dask array or CodedArray, shape (n, p)
        y : array_like, shape (n,)
        sample_weight : array_like, shape (n,), optional

        Returns
        -------
        float
        """
        return float(
            accuracy_score(here(y), here(self.predict(X)), sample_weight=here(sample_weight))
        )


class LogisticRegression(_Classifier):
    r"""Logistic regression, of two classes or, as softmax regression, of more.

    Minimises :math:`C \sum_i s_i \ell_i + \frac{1 - \rho}{2} \|w\|_2^2 + \rho \|w\|_1`, as
    scikit-learn's does, with the intercept free.

    Parameters
    ----------
    penalty : {"auto", "l2", "l1", "elasticnet", None}
        "auto", and "elasticnet": what ``l1_ratio`` says, as in scikit-learn from version 1.8;
        the others are the names before: "l2" is ``l1_ratio=0``, "l1" is ``l1_ratio=1``, None is
        ``C=np.inf``.
    C : float
        Inverse of the penalty's strength, positive; ``np.inf`` for no penalty.
    l1_ratio : float
        :math:`\rho`, from 0 (ridge) to 1 (lasso).
    tol : float
        Stop when no entry of the gradient of the objective, divided by C and by the sum of the
        weights, is larger.
    fit_intercept : bool
    class_weight : dict, "balanced" or None
        Factors of the weights of rows, by class.
    solver : str
        One of the solvers of :func:`~dask_coded.linear_model.minimize`.
    max_iter : int
        Most iterations to do.
    verbose : int
        Show the iterations while they go on, see :class:`dask_coded.Display`.
    warm_start : bool
        Begin where the last fit ended.
    code : Code or str, optional
        How data are coded, see :func:`dask_coded.encode`, which also chooses by default.

    Attributes
    ----------
    classes_ : ndarray, shape (classes,)
    coef_ : ndarray, shape (1, p) or (classes, p)
    intercept_ : ndarray, shape (1,) or (classes,)
    n_iter_ : ndarray of int, shape (1,)
    n_features_in_ : int
    history_ : tuple of Progress
        One entry for each iteration; its objective is the mean loss and penalty.

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
        l1_ratio: float = 0.0,
        tol: float = 1e-4,
        fit_intercept: bool = True,
        class_weight: Any = None,
        solver: str = "auto",
        max_iter: int = 100,
        verbose: int = 0,
        warm_start: bool = False,
        code: Any = None,
    ) -> None:
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
        sample_weight : array_like, shape (n,), optional
            Not negative.
        client : distributed.Client, optional
            The cluster. Default: the current client; without one, this process.
        callback : callable, optional
            Called with a :class:`~dask_coded.Progress`; see :func:`dask_coded.graph.pagerank`.

        Returns
        -------
        LogisticRegression
            This one.

        Raises
        ------
        ValueError
            If data or a parameter are not as they should be.
        """
        check_positive("C", self.C, or_infinite=True)
        ratios: dict[Any, float] = {
            "l1": 1.0,
            "l2": 0.0,
            "auto": self.l1_ratio,
            "elasticnet": self.l1_ratio,
        }
        if self.penalty is not None and self.penalty not in ratios:
            raise ValueError(
                f"Argument 'penalty' must be None or one of {sorted(ratios)}, "
                f"it is {self.penalty!r}."
            )
        if not 0 <= (ratio := ratios.get(self.penalty, 0.0)) <= 1:
            raise ValueError(f"Argument 'l1_ratio' must be between 0 and 1, it is {ratio}.")
        client = current_cluster(client)
        X, codes, weights = self._targets(X, y, sample_weight, client)
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
        self.n_iter_ = np.array([found.rounds])
        return self

    def predict_log_proba(self, X: Any) -> Any:
        """Logarithm of :meth:`predict_proba`."""
        scores = self.decision_function(X)
        return rowwise(scores, _log_probabilities, (len(self.classes_),))

    def predict_proba(self, X: Any) -> Any:
        """Probability of each class.

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
    r"""Linear support vector classification; of more than two classes, each against the rest.

    Minimises :math:`C \sum_i s_i \ell_i + r(w, b)` as scikit-learn's does: the intercept is the
    coefficient of a constant column of value ``intercept_scaling``, and penalised like the others.
    All classes are fitted together, and share each round.

    Parameters
    ----------
    penalty : {"l2", "l1"}
    loss : {"squared_hinge", "hinge"}
        The hinge is not smooth: it is approximated, closer and closer, until the objective is
        within ``tol`` of its minimum, relatively. That takes many more rounds.
    tol : float
        Stop when no entry of the gradient of the objective, divided by C and by the sum of the
        weights, is larger.
    C : float
        Inverse of the penalty's strength, positive.
    fit_intercept : bool
    intercept_scaling : float
        Positive; the larger, the less is the intercept penalised.
    class_weight, solver, max_iter, verbose, warm_start, code
        As in :class:`LogisticRegression`. Of more than two classes, ``class_weight`` weighs rows
        for all of the classes' problems, where scikit-learn does so only for the row's own.

    Attributes
    ----------
    classes_ : ndarray, shape (classes,)
    coef_ : ndarray, shape (1, p) or (classes, p)
    intercept_ : ndarray, shape (1,) or (classes,)
    n_iter_ : int
    n_features_in_ : int
    history_ : tuple of Progress
        One entry for each iteration; its objective is the mean loss and penalty.

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
        tol: float = 1e-4,
        C: float = 1.0,
        fit_intercept: bool = True,
        intercept_scaling: float = 1.0,
        class_weight: Any = None,
        solver: str = "auto",
        max_iter: int = 1000,
        verbose: int = 0,
        warm_start: bool = False,
        code: Any = None,
    ) -> None:
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
        """Fit the model: see :meth:`LogisticRegression.fit`."""
        check_positive("C", self.C)
        check_positive("intercept_scaling", self.intercept_scaling)
        families = {"hinge": Hinge(), "squared_hinge": SquaredHinge()}
        for name, known in (("loss", families), ("penalty", ("l1", "l2"))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"Argument {name!r} must be one of {sorted(known)}, it is {value!r}."
                )
        client = current_cluster(client)
        X, codes, weights = self._targets(X, y, sample_weight, client)
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
