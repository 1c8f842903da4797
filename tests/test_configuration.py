"""Options of Dask's configuration, wherever they are set."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import dask_coded
from dask_coded.runtime.client.source import stripes_of
from dask_coded.runtime.spec import round_options

print(stripes_of((100,), 10_000), round_options().reporting)
"""


def test_names_with_hyphens_in_environment_variables():
    """Where they have underscores."""
    names = {"STRIPE_WORK": "1000", "REPORT_INTERVAL": "3s", "REPORT_GROWTH": "2"}
    variables = {f"DASK_CODED__ROUND__{name}": value for name, value in names.items()}
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.split()[0] == "10"
    assert "3" in shown and "2.0" in shown
