"""Histories of worker speeds and lags, and predictors of the speeds of the next round."""

from __future__ import annotations

from dask_coded.prediction.histories import LagHistory, SpeedHistory, in_seconds
from dask_coded.prediction.predictors import PREDICTORS, Predictor
from dask_coded.prediction.records import Records

__all__ = ["PREDICTORS", "LagHistory", "Predictor", "Records", "SpeedHistory", "in_seconds"]
