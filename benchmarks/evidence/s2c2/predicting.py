"""The network that the paper published, as a predictor of this package."""

from __future__ import annotations

import numpy as np

from benchmarks.references import published_lstm
from benchmarks.traces import NAMES
from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.prediction.predictors._predictor import carried, over_window
from dask_coded.typing import Floats

#: Name of the published network among the predictors.
PUBLISHED = "lstm as published"
#: Predictors that are compared on processes.
SHOWN = (PUBLISHED, "lstm", "adaptive", "last", "uniform")


def register_published() -> None:
    """Have `coded.predictor` select the published network; the scheduler must be in this process.

    It is trained on the machines and times of all traces that no case replays. Its input is the
    last speed of a worker over the mean of all workers.
    """
    if PUBLISHED in PREDICTORS:
        return
    network = published_lstm(NAMES)

    @over_window(PUBLISHED)
    def predict(history: Floats) -> Floats:
        if not history.shape[1]:
            return np.full(history.shape[0], np.nan)
        last = carried(history)[:, -1]
        usual = np.nanmean(last)
        found: Floats = usual * network(last / usual)
        return found
