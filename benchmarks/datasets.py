"""Where real graphs, data sets and traces are: in the folder that ``DASK_CODED_DATA`` names."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path | None:
    """Return the folder of the data, None if there is none; an empty name means none."""
    path = os.environ.get("DASK_CODED_DATA")
    return Path(path) if path and Path(path).is_dir() else None


def data_file(name: str) -> Path | None:
    """Return the path of a file of the data, None if it is missing."""
    where = folder()
    return where / name if where and (where / name).exists() else None
