"""Scores of a training's parameters, which a thread of its leader computes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.utils import sync

from dask_coded.storage import Background
from dask_coded.training.runtime.shards import fetch_rows
from dask_coded.training.runtime.spec import Scoring

if TYPE_CHECKING:
    from distributed.worker import Worker


class Scores:
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
        self.every = scoring.every
        self._worker = worker
        self._scoring = scoring
        self._scorer = scorer
        self._data: list[Any] = []
        self._background = Background("dask-coded-scores")
        self._error: BaseException | None = None
        #: Ends the thread.
        self.close = self._background.close

    def put(self, version: int, state: bytes) -> None:
        """Score a state, instead of one that still waits to be scored.

        Raises
        ------
        Exception
            What scoring an earlier one has raised.
        """
        scored = self._scorer(version)

        def work() -> None:
            try:
                self._score_state(scored, state)
            except BaseException as exc:  # whatever it is, the training is told
                self._error = exc

        self._check()
        self._background.do(work)

    def finish(self) -> None:
        """Wait until all is done; raise what scoring has raised."""
        self._background.wait()
        self._check()

    def _check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

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
