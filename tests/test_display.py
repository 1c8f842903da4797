"""The display of a loop's rounds."""

from __future__ import annotations

import io

import pytest

from dask_coded import Display, Progress


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
