"""Linear codes: how blocks become pieces, and which pieces give the blocks back.

NumPy and SciPy only; nothing here knows of Dask, of workers or of time.
"""

from __future__ import annotations

from dask_coded.codes._gradient import (
    Clustered,
    CyclicMDS,
    FractionalRepetition,
    GradientCode,
)
from dask_coded.codes._linear import CODES, Code, DecodeError
from dask_coded.codes._mds import MDS
from dask_coded.codes._polynomial import Polynomial
from dask_coded.codes._random import RandomLinear
from dask_coded.codes._repetition import Repetition
from dask_coded.codes._subsets import DecodeProbability

__all__ = [
    "CODES",
    "MDS",
    "Clustered",
    "Code",
    "CyclicMDS",
    "DecodeError",
    "DecodeProbability",
    "FractionalRepetition",
    "GradientCode",
    "Polynomial",
    "RandomLinear",
    "Repetition",
]
