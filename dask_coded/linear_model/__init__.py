"""Linear models: loss families, penalties and solvers to combine, and estimators.

:func:`minimize` is NumPy code over an operator with ``@``.

The estimators follow scikit-learn's names, defaults and conventions. They need scikit-learn (the
extra ``dask-coded[linear-model]``), which is imported when an estimator is first accessed. With a
client passed to ``fit``, or a current one and data that are not small, the data are encoded with
their transpose and the solver runs in the cluster as one task; each iteration takes two coded
rounds. A :class:`~dask_coded.CodedArray` is not encoded again. Otherwise the same solver runs in
this process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dask_coded.linear_model._objective import Intercept
from dask_coded.linear_model.families import (
    Family,
    Hinge,
    Logistic,
    Multinomial,
    SquaredError,
    SquaredHinge,
)
from dask_coded.linear_model.penalties import Penalty
from dask_coded.linear_model.solvers import Solution, minimize

if TYPE_CHECKING:
    from dask_coded.linear_model.classifiers import LinearSVC as LinearSVC
    from dask_coded.linear_model.classifiers import LogisticRegression as LogisticRegression
    from dask_coded.linear_model.random_features import RBFSampler as RBFSampler
    from dask_coded.linear_model.regressors import ElasticNet as ElasticNet
    from dask_coded.linear_model.regressors import Lasso as Lasso
    from dask_coded.linear_model.regressors import LinearRegression as LinearRegression
    from dask_coded.linear_model.regressors import Ridge as Ridge

# Excludes the estimators so that `import *` works without scikit-learn.
__all__ = [
    "Family",
    "Hinge",
    "Intercept",
    "Logistic",
    "Multinomial",
    "Penalty",
    "Solution",
    "SquaredError",
    "SquaredHinge",
    "minimize",
]

_ESTIMATORS = {
    "ElasticNet": "regressors",
    "Lasso": "regressors",
    "LinearRegression": "regressors",
    "LinearSVC": "classifiers",
    "LogisticRegression": "classifiers",
    "RBFSampler": "random_features",
    "Ridge": "regressors",
}


def __getattr__(name: str) -> Any:
    if name not in _ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_ESTIMATORS[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        raise ImportError(
            f"{name} needs scikit-learn: pip install 'dask-coded[linear-model]'."
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, *_ESTIMATORS]
