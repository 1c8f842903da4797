"""The package without its optional dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["training", "linear_model"])
def test_all_can_be_imported_without_the_extras(package):
    program = (
        "import sys\n"
        "sys.modules.update(torch=None, sklearn=None)\n"
        f"from dask_coded.{package} import *\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_workers_import_only_what_they_need():
    """Each worker imports the package while it starts, and its event loop waits meanwhile."""
    program = (
        "import sys, dask_coded\n"
        "print(*{'networkx', 'scipy.optimize', 'dask_coded.training'} & set(sys.modules))\n"
        "assert set(dask_coded.__all__) <= set(dir(dask_coded))\n"
        "assert dask_coded.graph.pagerank and dask_coded.linear_model.Ridge\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.split() == []


def test_where_dask_array_plans_queries_one_sentence_names_the_setting():
    program = """
import dask.array as da, numpy as np
from distributed import Client
import dask_coded as coded

x = da.ones((4, 2))
with Client(n_workers=1, processes=False, dashboard_address=None) as client:
    for call in (
        lambda: coded.encode(x),
        lambda: coded.encode(np.eye(2)),
        lambda: coded.gram(np.eye(2)),
        lambda: coded.graph.pagerank([("a", "b")]),
        lambda: coded.training.train(print, np.zeros(2), (x, x), steps=1),
    ):
        try:
            call()
        except RuntimeError as error:
            print(error)
"""
    environment = os.environ | {"DASK_ARRAY__QUERY_PLANNING": "True"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all("unset `array.query-planning` in Dask's configuration" in line for line in lines)


def test_tests_that_need_extras_are_marked():
    """Those without the mark would be skipped in every environment."""
    here = Path(__file__)
    for file in here.parent.rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        packages = "torch|pandas|nbclient|xarray|pyarrow|statsmodels|zarr"
        if file != here and re.search(rf"""importorskip\(["']({packages})\b""", text):
            assert "mark.extras" in text, file
