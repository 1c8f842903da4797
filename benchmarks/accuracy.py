"""Compare results of the cluster with those of one process: objectives and test accuracy.

For every linear model on real data, the report has the error of its objective against
scikit-learn's at a tight tolerance, and the difference in accuracy on rows that were held out.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.io
import scipy.sparse as sp
from distributed import Client

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.datasets import folder
from benchmarks.report import Report, options

WORKERS = 4


@dataclass(frozen=True)
class Split:
    """A binary classification problem with classes 0 and 1, split into training and test rows."""

    X: Any
    y: np.ndarray
    X_test: Any
    y_test: np.ndarray


def a9a(data: Path) -> Split:
    """Load UCI Adult with its own test split; sparse."""
    from sklearn.datasets import load_svmlight_file

    X, y = load_svmlight_file(data / "clf_a9a.libsvm.gz", n_features=123)
    X_test, y_test = load_svmlight_file(data / "clf_a9a.t.libsvm.gz", n_features=123)
    return Split(_sparse(X), (y > 0).astype(int), _sparse(X_test), (y_test > 0).astype(int))


def mnist_4_9(data: Path) -> Split:
    """Load the MNIST images of fours and nines, with pixels from 0 to 1."""
    with gzip.open(data / "img_mnist_t10k-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(data / "img_mnist_t10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    chosen = np.isin(labels, [4, 9])
    return _split(images[chosen] / 255.0, labels[chosen])


def arcene(data: Path) -> Split:
    """Load mass spectra with far more columns than rows, and values from 0 to 1."""
    found = scipy.io.loadmat(data / "clf_arcene.mat")
    return _split(found["X"] / 999.0, found["Y"].ravel())


def basehock(data: Path) -> Split:
    """Load log(1 + word counts) of two news groups; sparse."""
    found = scipy.io.loadmat(data / "clf_BASEHOCK.mat")
    X = _sparse(found["X"])
    X.data = np.log1p(X.data)
    return _split(X, found["Y"].ravel())


def _sparse(matrix: Any) -> sp.csr_matrix:
    """Convert to float64 with int32 indices, which some of scikit-learn's solvers require."""
    X = sp.csr_matrix(matrix, dtype=np.float64)
    X.indices, X.indptr = X.indices.astype(np.int32), X.indptr.astype(np.int32)
    return X


def _split(X: Any, y: np.ndarray) -> Split:
    """Hold out a quarter of the rows for the test, drawn with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(y))
    test, train = np.split(order, [len(y) // 4])
    codes = (y == y.max()).astype(int)
    return Split(X[train], codes[train], X[test], codes[test])


def _synthetic(data: Path | None) -> Split:
    """Make a small problem for smoke runs."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((160, 5))
    return _split(X, (X @ rng.standard_normal(5) + rng.standard_normal(160) > 0).astype(int))


SETS: dict[str, Callable[[Path], Split]] = {
    "a9a": a9a,
    "MNIST 4-9": mnist_4_9,
    "arcene": arcene,
    "BASEHOCK": basehock,
}


@dataclass(frozen=True)
class Case:
    """Our model, scikit-learn's model, and the objective that both minimise."""

    ours: Any
    theirs: Any
    objective: Callable[[Any, Any, np.ndarray], float]


def _logistic(model: Any, X: Any, y: np.ndarray) -> float:
    losses = np.logaddexp(0, -(2 * y - 1) * model.decision_function(X)).sum()
    w = model.coef_
    l1 = model.l1_ratio * np.abs(w).sum()
    return float(model.C * losses + l1 + (1 - model.l1_ratio) * np.vdot(w, w) / 2)


def _svc(model: Any, X: Any, y: np.ndarray) -> float:
    margin = np.maximum(1 - (2 * y - 1) * model.decision_function(X), 0)
    losses = margin.sum() if model.loss == "hinge" else np.square(margin).sum()
    w = np.append(model.coef_, model.intercept_)
    return float(model.C * losses + np.vdot(w, w) / 2)


def _ridge(model: Any, X: Any, y: np.ndarray) -> float:
    error = np.square(model.predict(X) - y).sum()
    return float(error + model.alpha * np.vdot(model.coef_, model.coef_))


def cases(columns: int) -> dict[str, Case]:
    """Return the models, each paired with the most exact scikit-learn solver for it."""
    from sklearn import linear_model as reference
    from sklearn import svm

    tight: dict[str, Any] = {"tol": 1e-12, "max_iter": 10**6}
    loose: dict[str, Any] = {"tol": 1e-7, "max_iter": 20_000}
    lm = coded.linear_model
    narrow = "newton-cholesky" if columns < 1_000 else "lbfgs"
    # liblinear penalises the intercept with L1, so both models are fitted without one.
    lasso: dict[str, Any] = {"l1_ratio": 1.0, "fit_intercept": False}
    return {
        "logistic, L2": Case(
            lm.LogisticRegression(**loose),
            reference.LogisticRegression(solver=narrow, **tight),
            _logistic,
        ),
        "logistic, L1": Case(
            lm.LogisticRegression(**lasso, **loose),
            reference.LogisticRegression(
                **lasso, solver="liblinear", tol=1e-9, max_iter=10**5, random_state=0
            ),
            _logistic,
        ),
        "squared hinge": Case(
            lm.LinearSVC(**loose),
            svm.LinearSVC(dual=False, tol=1e-10, max_iter=10**6),
            _svc,
        ),
        "ridge": Case(
            lm.Ridge(**loose),
            reference.Ridge(solver="auto", tol=1e-12),
            _ridge,
        ),
    }


def linear_models(report: Report, client: Client, smoke: bool) -> None:
    """Compare objective and test accuracy of linear models with scikit-learn's."""
    if importlib.util.find_spec("sklearn") is None:
        raise click.ClickException("scikit-learn is needed: pip install 'dask-coded[linear-model]'")
    data = folder()
    if data is None and not smoke:
        raise click.ClickException(
            "This needs the real data sets: set DASK_CODED_DATA to their folder."
        )
    sets: dict[str, Any] = {"synthetic": _synthetic} if smoke else SETS
    for name, load in sets.items():
        split = load(data)
        encoded = coded.encode(split.X, client=client, transpose=True)
        for model, case in cases(split.X.shape[1]).items():
            ours = case.ours.fit(encoded, split.y, client=client)
            theirs = case.theirs.fit(split.X, split.y)
            best = case.objective(theirs, split.X, split.y)
            found = case.objective(ours, split.X, split.y)
            keys: dict[str, Any] = {"set": name, "model": model, "rounds": len(ours.history_)}
            report.add(
                f"{name}, {model}",
                "objective_relative_error",
                abs(found - best) / best,
                goal=1e-6,
                above=bool(found > best),
                **keys,
            )
            report.add(
                f"{name}, {model}",
                "accuracy_difference",
                100 * abs(_accuracy(ours, split) - _accuracy(theirs, split)),
                unit="points",
                goal=0.1,
                accuracy=_accuracy(ours, split),
                **keys,
            )


def _accuracy(model: Any, split: Split) -> float:
    """Return the share of test rows classified correctly; least squares decides at 0.5."""
    scores = model.predict(split.X_test)
    return float(np.mean((scores > 0.5) == split.y_test))


Part = Callable[[Report, Client, bool], None]


def parts() -> list[Part]:
    """Return the parts of the benchmark, each a function of report, client and smoke flag."""
    found: list[Part] = [linear_models]
    if importlib.util.find_spec("benchmarks.accuracy_graphs") is not None:
        found.append(importlib.import_module("benchmarks.accuracy_graphs").graphs)
    return found


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Compare the results of coded fits with those of one process."""
    report = Report("accuracy")
    with local_workers(2 if smoke else WORKERS) as (client, _):
        for part in parts():
            part(report, client, smoke)
    report.finish(json_file)


if __name__ == "__main__":
    main()
