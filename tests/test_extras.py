"""The package without its optional dependencies."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["training", "linear_model"])
def test_all_can_be_imported_without_the_extras(package):
    program = (
        "import sys\n"
        "sys.modules.update(torch=None, sklearn=None)\n"
        f"from dask_coded.{package} import *\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
