"""Gradient compression: codecs and linear compressors that send fewer bytes per gradient."""

from dask_coded.compression._codecs import Quantization, Truncation
from dask_coded.compression._compression import (
    EXACT,
    Codec,
    Compression,
    Compressor,
    Partial,
    sum_dtype,
)
from dask_coded.compression._gradiveq import GradiVeQ, Projection

__all__ = [
    "EXACT",
    "Codec",
    "Compression",
    "Compressor",
    "GradiVeQ",
    "Partial",
    "Projection",
    "Quantization",
    "Truncation",
    "sum_dtype",
]
