"""Scores of a training's parameters, which a thread of its leader computes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
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
    scored : callable(int, float)
        Called in a thread with the number of updates, and the mean score of the samples.
    """

    def __init__(
        self, worker: Worker, scoring: Scoring, scored: Callable[[int, float], None]
    ) -> None:
        super().__init__("dask-coded-scores", scoring.every)
        self._worker = worker
        self._scoring = scoring
        self._scored = scored
        self._data: list[Any] = []

    def _take(self, version: int, state: bytes) -> None:
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
        self._scored(version, float(total) / rows)
