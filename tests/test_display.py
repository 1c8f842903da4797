"""The display of a loop's rounds."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from distributed import Client

import dask_coded as coded
from dask_coded import Display, PiecesMade, Progress
from dask_coded.linear_model import LinearRegression


@pytest.mark.parametrize(("workers", "words"), [(1, "1 worker used"), (3, "3 workers used")])
def test_plain_lines_without_a_terminal(capsys, workers, words):
    with Display() as display:
        display(Progress(7, 0.25, objective=2.0, seconds=0.012, workers=workers, score=0.875))
    display.summary()  # as it is there already
    first, last = capsys.readouterr().err.splitlines()
    line = "Round 7: objective 2, residual 2.50e-01, score 0.875, 12.0 ms per round"
    assert first == f"{line}, {words}"
    assert last == f"Done. {first}"


def test_a_line_is_never_longer_than_the_terminal(monkeypatch):
    console = pytest.importorskip("rich.console")
    narrow = console.Console(width=40, force_terminal=True, file=io.StringIO())
    monkeypatch.setattr("dask_coded.display.terminal", lambda: narrow)
    with Display() as display:
        display(Progress(123456, residual=0.25, objective=1 / 3, seconds=0.012, workers=3))
        assert len(narrow.render_lines(display._status.renderable)) == 1
        display.say("東" * 30)  # two columns each
        assert len(narrow.render_lines(display._status.renderable)) == 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_that_lacks_characters(monkeypatch, encoding):
    console = pytest.importorskip("rich.console")
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(
        "dask_coded.display.terminal", lambda: console.Console(force_terminal=True, file=file)
    )
    with Display() as display:
        display.say("Reading Кёльн [red].txt")
        assert str(display._status.status) == r"Reading \u041a\u0451\u043b\u044c\u043d [red].txt"
    file.flush()


def test_a_loop_that_fails_is_not_done(capsys):
    with pytest.raises(ZeroDivisionError), Display() as display:
        display(Progress(7, residual=0.25))
        raise ZeroDivisionError
    assert "Done" not in capsys.readouterr().err


def test_each_loop_has_its_own_summary(capsys):
    display = Display()
    for seconds in (0.5, 0.001):
        with display:
            display(Progress(1, residual=0.25, seconds=seconds))
    done = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Done")]
    assert [line.split(", ")[1] for line in done] == ["500.0 ms per round", "1.0 ms per round"]


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda A, **on: coded.linalg.power_iteration(1e4 * A, tol=1e-3, seed=0, **on),
        lambda A, **on: coded.graph.pagerank(sp.csr_array(A), tol=1e-3, **on),
        lambda A, **on: coded.graph.hits(sp.csr_array(1e4 * A), tol=1e-3, **on),
        lambda A, **on: coded.graph.katz_centrality(
            sp.csr_array(A), alpha=0.1, beta=1e4, tol=1e-3, **on
        ),
        lambda A, **on: coded.graph.eigenvector_centrality(sp.csr_array(1e4 * A), tol=1e-3, **on),
        lambda A, **on: coded.graph.filter(
            sp.csr_array(A), [1e4, 0, 0], lambda x: 1e4 * np.exp(-x), lmax=9, tol=1e-3, **on
        ),
        lambda A, **on: LinearRegression(tol=1e-3).fit(1e4 * A, 1e4 * A[0], **on),
    ],
    ids=["power", "pagerank", "hits", "katz", "eigenvector", "filter", "regression"],
)
def test_the_residual_that_is_shown_ends_below_the_tolerance(client, capsys, algorithm):
    A = np.array([[2.0, 1.0, 1.0], [1.0, 2.0, 0.5], [1.0, 0.5, 1.0]])
    with Display() as display:
        algorithm(A, client=client, callback=display)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("Done. Round ")
    assert float(last.partition("residual ")[2].partition(",")[0]) <= 1e-3


class Cell:
    """Stands for the output of a notebook cell."""

    def __init__(self):
        self.shown = []

    def update(self, line):
        self.shown.append(repr(line))


def test_a_notebook_replaces_one_line_and_prints_nothing(monkeypatch, capsys):
    cell = Cell()
    monkeypatch.setattr("dask_coded.display._notebook", lambda: cell)
    with Display() as display:
        display.say("<Reading>")
        for i in (1, 2):
            display(Progress(i, residual=0.25, seconds=0.012, workers=3))
    display.summary()
    line = "residual 2.50e-01, 12.0 ms per round, 3 workers used"
    assert cell.shown == [
        "<Reading>",
        *(f"Round {i}: {line}" for i in (1, 2)),
        f"Done. Round 2: {line}",
    ]
    assert capsys.readouterr() == ("", "")


def test_html_is_escaped():
    from dask_coded.display import _Line

    assert _Line("<b>")._repr_html_() == "<pre>&lt;b&gt;</pre>"


def test_the_output_of_a_kernel_is_found(monkeypatch):
    """IPython itself is not installed for the tests."""
    made = []

    def module(name, **names):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))

    def display(line, display_id):
        made.append((repr(line), display_id))
        return Cell()

    module("IPython", get_ipython=lambda: SimpleNamespace(kernel=None))
    module("IPython.display", display=display)
    assert isinstance(Display()._cell, Cell)
    assert made == [("", True)]
    module("IPython", get_ipython=lambda: SimpleNamespace())  # a terminal
    assert Display()._cell is None


def test_the_pieces_of_an_encoding_are_counted(capsys):
    options = {"n_workers": 3, "threads_per_worker": 1, "processes": False}
    with Client(**options, dashboard_address=None, set_as_default=False) as client:
        heard = []
        C = coded.encode(np.eye(6), coded.MDS(3, 2), client, transpose=True, callback=heard.append)
        assert [(p.made, p.pieces) for p in heard] == [(i, 6) for i in range(7)]
        assert heard[0] == PiecesMade(0, 6, 0)
        assert heard[-1].nbytes == C.encoded.nbytes + C.T.encoded.nbytes
        capsys.readouterr()
        heard.clear()
        coded.encode(np.eye(6), coded.MDS(3, 2), client, verbose=True, callback=heard.append)
        assert [p.made for p in heard] == [0, 1, 2, 3]
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "Encoding: 0 of 3 pieces, 0 B"
        assert lines[-1].startswith("Encoding: 3 of 3 pieces, ")
