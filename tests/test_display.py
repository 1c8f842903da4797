"""The display of a loop's rounds."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client

import dask_coded as coded
from dask_coded import Display, PiecesMade, Progress


@pytest.mark.parametrize(("workers", "words"), [(1, "1 worker used"), (3, "3 workers used")])
def test_plain_lines_without_a_terminal(capsys, workers, words):
    with Display() as display:
        display(Progress(7, residual=0.25, objective=2.0, seconds=0.012, workers=workers))
    display.summary()
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"Round 7: objective 2, residual 2.50e-01, 12.0 ms per round, {words}"
    assert last == f"Done. {first}"


def test_a_line_is_never_longer_than_the_terminal(monkeypatch):
    console = pytest.importorskip("rich.console")
    narrow = console.Console(width=40, force_terminal=True, file=io.StringIO())
    monkeypatch.setattr("dask_coded.display._terminal", lambda: narrow)
    with Display() as display:
        display(Progress(123456, residual=0.25, objective=1 / 3, seconds=0.012, workers=3))
        assert len(narrow.render_lines(display._status.renderable)) == 1


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
