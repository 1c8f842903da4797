"""The drawing of the package in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import dask_coded

ROOT = Path(__file__).parent.parent


def test_the_drawing_shows_every_module():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawing = re.search(r"```text\n(.*?)```", text, re.S)[1]
    package = Path(dask_coded.__file__).parent
    modules = {
        path.stem
        for path in package.rglob("*.py")
        if path.stem != "__init__" and path.parent.name not in ("policies", "predictors")
    }
    folders = {path.parent.name for path in package.rglob("__init__.py")} - {"dask_coded"}
    words = set(re.findall(r"[\w/]+", drawing))
    assert modules - words == {"_version"}
    assert {folder for folder in folders if not any(f"{folder}/" in w for w in words)} == set()
