"""The programs of a page of the manual, one after the other, as in a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

DOCS = Path(__file__).parents[2] / "docs"
#: What is to be filled in, or needs a lab, is compiled only; the script in JAX has its own test.
UNFINISHED = ("...", "NetworkLab", "import jax\n")
#: Pages that take a few seconds run in each run of the tests; the others are run every night.
EACH_TIME = (
    "coded-arrays",
    "coded-reduce",
    "gradient-coding",
    "how-it-works",
    "pipe-sgd",
    "rlnc",
    "squeeze",
)
PAGES = (
    *EACH_TIME,
    "gradiveq",
    "graphs",
    "linear-algebra",
    "linear-models",
    "prediction",
    "pairs",
    "timing",
    "training",
)


def programs(page: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.S | re.M)
    assert found
    return found


def test_no_page_is_left_out():
    """Those of `test_pages` are complete scripts."""
    scripts = {"deploying", "diagnostics", "keeping", "quick-start", "tutorial"}
    having = {page.stem for page in DOCS.glob("*.md") if "\n```python\n" in page.read_text()}
    assert having == scripts | set(PAGES)


def of_this_process(n_workers: int = 4, **options: Any) -> Client:
    return Client(
        n_workers=n_workers, threads_per_worker=1, processes=False, dashboard_address=None
    )


@pytest.mark.filterwarnings("default")  # as for a reader
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.long] * (p not in EACH_TIME)) for p in PAGES]
)
def test_the_programs_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dask.distributed.Client", of_this_process)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, program in enumerate(programs(page)):
            code = compile(program, f"{page}.md, program {number}", "exec")
            if any(word in program for word in UNFINISHED):
                continue
            for package in re.findall(r"^(?:import|from) (torch|dask_glm)\b", program, re.M):
                pytest.importorskip(package)
            exec(code, names)
    finally:
        if "client" in names:
            names["client"].close()
