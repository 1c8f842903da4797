"""Linear codes: encode blocks as pieces, and recover the blocks from enough of the pieces.

This package uses NumPy and SciPy only. Nothing here knows about Dask, the cluster or time.
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
