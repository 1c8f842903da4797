"""Short representations of results."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.aggregation import Star
from dask_coded.graph.iteration import Ranks
from dask_coded.linalg import Eigenpair
from dask_coded.linear_model import SquaredError, minimize
from dask_coded.summary import brief
from dask_coded.training.result import TrainingResult
from dask_coded.training.runtime.spec import Step

LONG = np.arange(100_000.0)
STEPS = [Step(i, 1 / (i + 1), 0.01, (), dict.fromkeys("abcdef", 0.1)) for i in range(1000)]


@pytest.mark.parametrize(
    "result",
    [
        Ranks(LONG, 7, 1e-9),
        Eigenpair(2.0 + 1.0j, LONG, 7, 1e-9),
        TrainingResult(LONG, 1000, STEPS, {}, Star()),
        minimize(np.eye(500), np.ones(500), SquaredError(), tol=0, max_iter=50),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_are_short_on_terminals_and_in_notebooks(result):
    assert len(repr(result)) < 600
    page = result._repr_html_()
    assert len(page) < 1500
    assert "&lt;(" in page


def test_the_last_round_is_shown():
    result = minimize(
        [[0.0], [1.0], [2.0]] @ np.eye(1), [1.0, 3.0, 5.5], SquaredError(), tol=0, max_iter=5
    )
    assert "history=<5 items, the last: Progress(round=5, residual=" in repr(result)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float64(1 / 3), "0.333333"),
        (np.array(2.5), "2.5"),
        (np.array([[1, 2], [3, 4]]), "<(2, 2) int64: 1, 2, 3, ...>"),
        (np.array([1.5, 2.0]), "<(2,) float64: 1.5, 2>"),
        (np.array([]), "<(0,) float64: >"),
        ((1, 2), "(1, 2)"),
        (list(range(9)), "<9 items, the last: 8>"),
        (dict.fromkeys(range(9)), "<9 items>"),
        (None, "None"),
        ("text", "'text'"),
    ],
)
def test_brief(value, text):
    assert brief(value) == text
