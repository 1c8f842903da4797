"""Data-parallel training of any model whose gradient is a sum over samples.

:func:`train` runs on the cluster that holds the data. How gradients become a sum, how they become
smaller on the way, and how computation and communication overlap, are three choices of their own.
"""

from dask_coded.training.aggregations import choose_aggregation
from dask_coded.training.optimizers import SGD, Adam, CosineDecay, Optimizer, StepDecay
from dask_coded.training.schedules import Pipelined, Schedule, Synchronous
from dask_coded.training._train import TrainingResult, train

__all__ = [
    "SGD",
    "Adam",
    "CosineDecay",
    "Optimizer",
    "Pipelined",
    "Schedule",
    "StepDecay",
    "Synchronous",
    "TrainingResult",
    "choose_aggregation",
    "train",
]
