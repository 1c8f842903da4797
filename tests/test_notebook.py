"""In a notebook: README's programs, progress below the cell that asked for it, no red text."""

from __future__ import annotations

import re

import pytest

from tests.test_readme import ENDINGS, PROGRAMS

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("sklearn")

pytestmark = [pytest.mark.extras, pytest.mark.slow]

CLUSTER = """
import asyncio
import networkx as nx
import numpy as np
from dask.distributed import Client
import dask_coded as coded
from dask_coded.linear_model import LogisticRegression
from dask_coded.training import train

options = {"n_workers": 3, "processes": False, "dashboard_address": ":0"}
client = Client(**options)
X = np.random.default_rng(0).standard_normal((60, 60))
y = X[:, 0] > 0
G = nx.karate_club_graph()

def squares(w, X, y):
    error = X @ w - y
    return error @ error / 2, X.T @ error
"""
# Each cell with the text that it shows.
CELLS = [
    ("C = coded.encode(X, verbose=True)", r"Encoding: 3 of 3 pieces, \S+ kiB"),
    (
        "with coded.Display() as display:\n    _ = coded.graph.pagerank(G, callback=display)",
        r"Done\. Round \d+: residual .* workers? used",
    ),
    ("_ = coded.graph.pagerank(G, callback=print)", r"(Progress\(round=\d+, .*\)\n)+"),
    ("_ = LogisticRegression(verbose=1).fit(X, y, client=client)", r"Done\. Round \d+: .*"),
    (
        "_ = LogisticRegression(verbose=1).fit(X, y)",
        r"Fitting in this process, because 3,600 .*Done\. Round \d+: .*",
    ),
    ("_ = train(squares, X[0], (X, y), steps=3, verbose=True)", r"Done\. Round 3: .*"),
    ("client.close()", ""),
    ("client = await Client(**options, asynchronous=True)", ""),
    ("C = await coded.encode(X, client=client)", ""),
    ("print(await client.compute((C @ X[0]).sum()))", r"-?\d+\.\d+\n"),
    (
        "_ = await asyncio.to_thread(coded.graph.pagerank, G, callback=print)",
        r"(Progress\(round=\d+, .*\)\n)+",
    ),
    ("await client.close()", ""),
]


def test_programs_of_the_readme(tmp_path):
    """The last: all of them run as scripts."""
    cells = executed(PROGRAMS[-1:], tmp_path)
    for cell, ending in zip(cells, ENDINGS[-1:], strict=True):
        assert re.search(ending + r"\Z", shown(cell, "stdout")), cell.outputs


def test_progress_appears_below_its_cell_and_not_as_an_error(tmp_path):
    _, *cells = executed([CLUSTER, *(source for source, _ in CELLS)], tmp_path)
    for cell, (_, text) in zip(cells, CELLS, strict=True):
        assert re.fullmatch(text, shown(cell), re.DOTALL), cell
        assert not shown(cell, "stderr"), cell


def executed(sources: list[str], folder) -> list:
    """Run a notebook and return its cells; the first error ends it."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook.cells


def shown(cell, stream: str | None = None) -> str:
    """Return what a cell shows: all of it, or one stream."""
    return "".join(
        output.text if "text" in output else output.data["text/plain"]
        for output in cell.outputs
        if stream in (None, output.get("name"))
    )
