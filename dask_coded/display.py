"""Progress of a running loop or an encoding.

A status line on a terminal, a line that is replaced in a notebook, plain lines elsewhere. All but
the notebook's go to standard error.
"""

from __future__ import annotations

import html
import statistics
import sys
import time
from typing import Any, Self

import click
from dask.utils import format_bytes

from dask_coded.arguments import printable
from dask_coded.loop import PiecesMade, Progress


class Display:
    """Shows the rounds of a loop, or the pieces of an encoding, that get it as ``callback``.

    On a terminal (with ``rich``) and in a notebook it updates one line. Elsewhere it prints lines
    to standard error, at most one per second. If a ``with`` block ends without an error, the
    summary of its last loop follows.

    Examples
    --------
    ::

        with coded.Display() as display:
            C = coded.encode(A, callback=display)
            coded.linalg.power_iteration(C, callback=display)
    """

    def __init__(self) -> None:
        self._cell = _notebook()
        self.console: Any = None if self._cell else terminal()
        self._status: Any = None
        self._last: Progress | None = None
        self._seconds: list[float] = []
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self.console is not None:
            # The usual spinner is of characters that other encodings lack.
            spinner = "line" if self.console.options.ascii_only else "dots"
            self._status = self.console.status("", spinner=spinner)
            self._status.start()
        return self

    def __exit__(self, exc_type: object, *exc_info: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if exc_type is None:
            self.summary()

    def say(self, text: str) -> None:
        """Show what is being done now."""
        if self._status is not None:
            from rich.text import Text

            line = Text(printable(text, self.console.encoding))
            line.truncate(self.console.width - 3)  # a wrapped line would flicker
            self._status.update(line)
        else:
            self._print(text)

    def __call__(self, progress: Progress | PiecesMade) -> None:
        """Show a finished round and record it for the summary; or show how far an encoding is."""
        if isinstance(progress, PiecesMade):
            self.say(
                f"Encoding: {progress.made} of {progress.pieces} pieces, "
                f"{format_bytes(progress.nbytes)}"
            )
            return
        self._last = progress
        if progress.seconds is not None:
            self._seconds.append(progress.seconds)
        if (
            self._status is not None
            or self._cell is not None
            or time.monotonic() >= self._next_line
        ):
            self._next_line = time.monotonic() + 1
            self.say(_line(progress, progress.seconds))

    def summary(self) -> None:
        """Print the last round, with the median time of the reported rounds, unless it is there."""
        if self._last is not None:
            median = statistics.median(self._seconds) if self._seconds else None
            self._print(f"Done. {_line(self._last, median)}")
            self._last, self._seconds = None, []

    def _print(self, text: str) -> None:
        if self._cell is not None:
            self._cell.update(_Line(text))
        else:
            click.echo(printable(text, getattr(sys.stderr, "encoding", None)), err=True)


def _notebook() -> Any:
    """Return the handle of a new output of this notebook cell, or None outside of notebooks."""
    # A notebook has imported this already; importing it elsewhere would take a second.
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display(_Line(""), display_id=True)


class _Line:
    """A line of text as the output of a notebook cell."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


def terminal(stderr: bool = True) -> Any:
    """Return rich's console on standard error or output, or None without rich or a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=stderr)
    return console if console.is_terminal else None


def _line(progress: Progress, seconds: float | None) -> str:
    text = f"Round {progress.round}: "
    if progress.objective is not None:
        text += f"objective {progress.objective:.8g}, "
    text += f"residual {progress.residual:.2e}"
    if progress.score is not None:
        text += f", score {progress.score:.4g}"
    if seconds is not None:
        text += f", {seconds * 1e3:.1f} ms per round"
    if progress.workers is not None:
        text += f", {progress.workers} worker{'s' * (progress.workers != 1)} used"
    return text
