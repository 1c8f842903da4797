"""How far default fits are from the optimum, ours and scikit-learn's.

The distance is the largest error of a coefficient over the largest coefficient; for `Lasso`, whose
coefficients are not unique if columns depend on each other, that of the predictions. Errors below
`EXACT` count as `EXACT`. Fits run in this process; a cluster runs the same solvers, apart from
dense `Ridge`, where it iterates (the column "cluster").
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp

import dask_coded as coded
from benchmarks.accuracy import SETS
from benchmarks.datasets import folder
from benchmarks.report import Report, options

EXACT = 1e-8
REGRESSORS = ("Ridge", "LinearRegression", "Lasso", "ElasticNet")


def data_sets(data: Path | None, smoke: bool) -> dict[str, tuple[Any, np.ndarray]]:
    """Return the data sets, each a matrix and classes 0 and 1."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200 if smoke else 5_000, 30))
    y = X @ rng.standard_normal(30) + rng.standard_normal(len(X)) > 0
    found: dict[str, tuple[Any, np.ndarray]] = {"normal": (X, y.astype(int))}
    if data is not None and not smoke:
        for name, load in SETS.items():
            split = load(data)
            found[name] = split.X, split.y
    return found


def least_squares(X: Any, y: np.ndarray, alpha: float) -> np.ndarray:
    """Return the coefficients of ridge regression with an intercept, by decomposition.

    Without a penalty they are those of least norm.
    """
    dense = X.toarray() if sp.issparse(X) else X
    U, s, Vt = np.linalg.svd(dense - dense.mean(axis=0), full_matrices=False)
    kept = s > 1e-12 * s[0]
    U, s, Vt = U[:, kept], s[kept], Vt[kept]
    return np.asarray(Vt.T @ (s / (s**2 + alpha) * (U.T @ (y - y.mean()))))


def optimum(name: str, X: Any, y: np.ndarray) -> np.ndarray:
    """Return the coefficients that minimise the objective of the estimator with its defaults."""
    from sklearn import linear_model, svm

    if name in ("Ridge", "LinearRegression"):
        return least_squares(X, y, float(name == "Ridge"))
    narrow = "newton-cholesky" if X.shape[1] < 1_000 else "lbfgs"
    exact = {
        "LogisticRegression": linear_model.LogisticRegression(
            solver=narrow, tol=1e-12, max_iter=10**5
        ),
        "LinearSVC": svm.LinearSVC(dual=False, tol=1e-12, max_iter=10**6),
        "Lasso": linear_model.Lasso(tol=1e-12, max_iter=20_000),
        "ElasticNet": linear_model.ElasticNet(tol=1e-12, max_iter=20_000),
    }
    return np.ravel(exact[name].fit(X, y).coef_)


def compare(report: Report, data: str, X: Any, y: np.ndarray) -> None:
    """Add the errors of the default fits to one data set."""
    from sklearn import linear_model, svm

    for name in ("LogisticRegression", "LinearSVC", *REGRESSORS):
        # In percent, so that the penalties of Lasso and ElasticNet leave some coefficients.
        target = 100.0 * y if name in REGRESSORS else y
        best = optimum(name, X, target)

        def error(model: Any, best: np.ndarray = best, target: np.ndarray = target) -> float:
            found = np.ravel(model.fit(X, target).coef_)
            if isinstance(model, coded.linear_model.Lasso | linear_model.Lasso):
                # Without the mean, which the intercept makes up for.
                found, best = ((X @ w) - (X @ w).mean() for w in (found, best))
            return max(EXACT, float(np.abs(found - best).max() / np.abs(best).max()))

        model = getattr(coded.linear_model, name)
        reference = svm.LinearSVC if name == "LinearSVC" else getattr(linear_model, name)
        ours = model()
        errors = error(ours), error(reference())
        iterates = name == "Ridge" and not sp.issparse(X)
        report.add(
            f"{data}, {name}",
            "error_over_scikit_learn",
            errors[0] / errors[1],
            goal=1.1,
            ours=errors[0],
            theirs=errors[1],
            iterations=len(ours.history_),
            cluster=error(model(solver="lbfgs")) if iterates else errors[0],
        )


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Compare the errors of fits with default parameters."""
    if importlib.util.find_spec("sklearn") is None:
        raise click.ClickException("scikit-learn is needed: pip install 'dask-coded[linear-model]'")
    report = Report("defaults")
    with warnings.catch_warnings():
        # Stopping early is what this measures.
        warnings.simplefilter("ignore")
        for name, (X, y) in data_sets(folder(), smoke).items():
            compare(report, name, X, y)
    report.finish(json_file)


if __name__ == "__main__":
    main()
