"""Fewer bytes per gradient."""

from dask_coded.compression._compression import EXACT, Codec, Compression, Compressor, Partial

__all__ = ["EXACT", "Codec", "Compression", "Compressor", "Partial"]
