"""Worker speeds and lags: histories of what was measured, and predictors of what comes next."""

from __future__ import annotations

from dask_coded.prediction.histories import LagHistory, SpeedHistory, in_seconds
from dask_coded.prediction.predictors import PREDICTORS, Predictor

__all__ = ["PREDICTORS", "LagHistory", "Predictor", "SpeedHistory", "in_seconds"]
