"""Data-parallel training of any model whose gradient is a sum over samples.

:func:`train` runs on the cluster that holds the data. How gradients are summed, how they are
compressed, and how computation and communication overlap are independent choices.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dask_coded.training._train import train
from dask_coded.training.aggregations import choose_aggregation
from dask_coded.training.checkpoints import Checkpoint
from dask_coded.training.costs import measure_costs
from dask_coded.training.loaders import from_loader
from dask_coded.training.optimizers import SGD, Adam, CosineDecay, Optimizer, StepDecay
from dask_coded.training.result import TrainingResult, WorkerReport
from dask_coded.training.runtime.spec import Step
from dask_coded.training.schedules import Pipelined, Schedule, Synchronous
from dask_coded.training.validation import Validation

if TYPE_CHECKING:
    from dask_coded.training.estimator import GradientEstimator as GradientEstimator
    from dask_coded.training.pytorch import TorchModule as TorchModule

# Optional names are left out, so that `import *` works without the packages that they need.
__all__ = [
    "SGD",
    "Adam",
    "Checkpoint",
    "CosineDecay",
    "Optimizer",
    "Pipelined",
    "Schedule",
    "Step",
    "StepDecay",
    "Synchronous",
    "TrainingResult",
    "Validation",
    "WorkerReport",
    "choose_aggregation",
    "from_loader",
    "measure_costs",
    "train",
]

#: Names that need another package: module, imported package, its title, the extra that has it.
_OPTIONAL = {
    "GradientEstimator": ("estimator", "sklearn", "scikit-learn", "linear-model"),
    "TorchModule": ("pytorch", "torch", "PyTorch", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _OPTIONAL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where, package, title, extra = _OPTIONAL[name]
    try:
        module = import_module(f"{__name__}.{where}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(f"{name} needs {title}: pip install 'dask-coded[{extra}]'.") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, *_OPTIONAL]
