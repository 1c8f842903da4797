"""Coded linear algebra for Dask clusters whose workers are slow, uneven or may fail."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dask_coded import config as _config  # noqa: F401  defaults first

# isort: split
from dask_coded._version import __version__
from dask_coded.adaptive import Adaptive
from dask_coded.array import CodedArray, encode
from dask_coded.codes import CODES, MDS, Code, Polynomial, RandomLinear, Repetition
from dask_coded.display import Display
from dask_coded.keeping import check, open
from dask_coded.loop import Loop, PiecesMade, Progress
from dask_coded.pair import CodedPair, encode_pair, gram
from dask_coded.reports import Report, WorkerStatus, report
from dask_coded.rounds.accuracy import AccuracyWarning
from dask_coded.runtime.client.install import ClusterUnfitError
from dask_coded.runtime.coordinator.operators import Operator, PairOperator
from dask_coded.runtime.spec import CodedDataLostError, CorruptSharesError
from dask_coded.storage import PieceCondition, StoreCondition, StoreError
from dask_coded.submission import submit
from dask_coded.uncoded import UncodedWarning

if TYPE_CHECKING:
    from dask_coded import aggregation, compression, graph, linalg, linear_model, training

# These are imported when first used: every worker imports this package while it starts, and needs
# none of them, nor networkx and scipy.optimize.
_LAZY = ("aggregation", "compression", "graph", "linalg", "linear_model", "training")

__all__ = [
    "CODES",
    "MDS",
    "AccuracyWarning",
    "Adaptive",
    "ClusterUnfitError",
    "Code",
    "CodedArray",
    "CodedDataLostError",
    "CodedPair",
    "CorruptSharesError",
    "Display",
    "Loop",
    "Operator",
    "PairOperator",
    "PieceCondition",
    "PiecesMade",
    "Polynomial",
    "Progress",
    "RandomLinear",
    "Repetition",
    "Report",
    "StoreCondition",
    "StoreError",
    "UncodedWarning",
    "WorkerStatus",
    "__version__",
    "aggregation",
    "check",
    "compression",
    "encode",
    "encode_pair",
    "gram",
    "graph",
    "linalg",
    "linear_model",
    "open",
    "report",
    "submit",
    "training",
]


if not TYPE_CHECKING:  # it would hide misspelt names from type checkers

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return importlib.import_module(f"dask_coded.{name}")
        raise AttributeError(f"module 'dask_coded' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
