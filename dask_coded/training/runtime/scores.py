"""Scores of a training's parameters, which a thread of its leader computes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.utils import sync

from dask_coded.training.runtime.shards import fetch_rows
from dask_coded.training.runtime.spec import Scoring
from dask_coded.training.runtime.storage import StateTaker

if TYPE_CHECKING:
    from distributed.worker import Worker


class Scores(StateTaker):
    """Scores the parameters of states.

    Parameters
    ----------
    worker : Worker
        Of the leader.
    scoring : Scoring
    scorer : callable(int) -> callable(float)
        Called with the number of updates when a state comes. What it returns is called in a thread
        with the mean score of the samples.
    """

    def __init__(
        self, worker: Worker, scoring: Scoring, scorer: Callable[[int], Callable[[float], None]]
    ) -> None:
        super().__init__("dask-coded-scores", scoring.every)
        self._worker = worker
        self._scoring = scoring
        self._scorer = scorer
        self._data: list[Any] = []

    def _taking(self, version: int) -> Callable[[bytes], None]:
        return partial(self._score_state, self._scorer(version))

    def _score_state(self, scored: Callable[[float], None], state: bytes) -> None:
        scoring, worker = self._scoring, self._worker
        try:
            rows = sum(scoring.samples.rows)
            if not self._data:
                avoid: set[str] = set()
                self._data = [
                    sync(worker.loop, fetch_rows, worker, blocks, 0, rows, avoid)
                    for blocks in (scoring.samples, scoring.targets)
                ]
                self._score = pickle.loads(scoring.score)
            total = self._score(pickle.loads(state)["parameters"], *self._data)
            if np.ndim(total):
                raise TypeError(
                    f"The score must be a number, the sum over the samples; its shape is "
                    f"{np.shape(total)}."
                )
        except Exception as exc:
            exc.add_note(f"Raised in the validation of the training, on worker {worker.address}")
            raise
        scored(float(total) / rows)
