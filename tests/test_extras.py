"""The package without its optional dependencies."""

from __future__ import annotations

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


def test_tests_that_need_extras_are_marked():
    """Those without the mark would be skipped in every environment."""
    here = Path(__file__)
    for file in here.parent.rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        packages = "torch|pandas|nbclient|xarray"
        if file != here and re.search(rf"""importorskip\(["']({packages})\b""", text):
            assert "mark.extras" in text, file
