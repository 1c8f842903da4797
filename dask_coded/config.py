"""Defaults of the ``coded:`` section of Dask's configuration."""

from __future__ import annotations

from pathlib import Path

import dask
import yaml

_FILE = Path(__file__).with_name("dask_coded.yaml")

with _FILE.open() as file:
    dask.config.update_defaults(yaml.safe_load(file))
dask.config.ensure_file(source=str(_FILE))
