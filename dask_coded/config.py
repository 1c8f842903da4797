"""Defaults of the ``coded:`` section of Dask's configuration."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import dask
import yaml
from dask.utils import parse_timedelta

from dask_coded.membership import Timeouts

_FILE = Path(__file__).with_name("dask_coded.yaml")

with _FILE.open() as file:
    dask.config.update_defaults(yaml.safe_load(file))
dask.config.ensure_file(source=str(_FILE))


def timeouts() -> Timeouts:
    """Return the timeouts of this process."""
    return _timeouts(
        dask.config.get("coded.coordinator.timeout"),
        dask.config.get("distributed.comm.timeouts.connect"),
    )


@cache
def _timeouts(silence: Any, handshake: Any) -> Timeouts:
    return Timeouts(parse_timedelta(silence), parse_timedelta(handshake))
