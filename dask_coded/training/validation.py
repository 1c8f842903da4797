"""Scores on data that a training does not use, while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dask_coded.arguments import check_whole


@dataclass(frozen=True, eq=False)
class Validation:
    """Have parameters scored on other data every few updates, and after the last one.

    A thread of the worker that leads the training computes the scores; the training does not wait,
    unless it has ended. If a score takes longer than the updates in between, some are left out. If
    the leader is lost, scores of the last 1,000 updates survive.

    Parameters
    ----------
    score : callable
        ``score(parameters, samples, targets)`` returns a number, the *sum* over the given samples,
        such as how many are classified correctly. It must not change its arguments.
    data : (samples, targets)
        As for :func:`train`, but not in batches. They must fit into the memory of one worker.
    every : int
        Number of updates between scores.

    Examples
    --------
    >>> import numpy as np, dask_coded as coded
    >>> from distributed import Client
    >>> client = Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> def squares(w, X, y):
    ...     return X.T @ (X @ w - y)
    >>> def error(w, X, y):
    ...     return np.square(X @ w - y).sum()
    >>> X = np.random.default_rng(0).normal(size=(60, 2))
    >>> y = X @ [2.0, -1.0]
    >>> found = coded.training.train(
    ...     squares,
    ...     np.zeros(2),
    ...     (X[:40], y[:40]),
    ...     validation=coded.training.Validation(error, (X[40:], y[40:]), every=50),
    ... )
    >>> found.scores.keys() >= {100}, found.scores[100] < 1e-6
    (True, True)
    >>> client.close()
    """

    score: Callable[[Any, Any, Any], float]
    data: Any
    every: int = 100

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise TypeError(f"Argument 'score' must be a function, it is {self.score!r}.")
        check_whole("every", self.every)
