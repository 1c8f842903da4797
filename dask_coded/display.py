"""Progress of a running loop: a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from typing import Any, Self

import click

from dask_coded.loop import Progress


class Display:
    """Shows the rounds of a loop that it is passed to as ``callback``.

    On a terminal it updates one line (with ``rich``). Elsewhere, as in notebooks, it prints lines
    to standard error, at most one per second.

    Examples
    --------
    ::

        with coded.Display() as display:
            coded.graph.pagerank(G, callback=display)
        display.summary()
    """

    def __init__(self) -> None:
        self.console = _terminal()
        self._status: Any = None
        self._last: Progress | None = None
        self._seconds: list[float] = []
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self.console is not None:
            self._status = self.console.status("")
            self._status.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, text: str) -> None:
        """Show what is being done now."""
        if self._status is not None:
            # A wrapped line would flicker.
            self._status.update(text[: self.console.width - 3])
        else:
            click.echo(text, err=True)

    def __call__(self, progress: Progress) -> None:
        """Show a finished round and record it for the summary."""
        self._last = progress
        if progress.seconds is not None:
            self._seconds.append(progress.seconds)
        if self._status is not None or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + 1
            self.say(_line(progress, progress.seconds))

    def summary(self) -> None:
        """Print the last round, with the median time of the reported rounds."""
        if self._last is not None:
            median = statistics.median(self._seconds) if self._seconds else None
            click.echo(f"Done. {_line(self._last, median)}", err=True)


def _terminal() -> Any:
    """Return rich's console, or None without rich or without a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return console if console.is_terminal else None


def _line(progress: Progress, seconds: float | None) -> str:
    text = f"Round {progress.round}: "
    if progress.objective is not None:
        text += f"objective {progress.objective:.8g}, "
    text += f"residual {progress.residual:.2e}"
    if seconds is not None:
        text += f", {seconds * 1e3:.1f} ms per round"
    if progress.workers is not None:
        text += f", {progress.workers} worker{'s' * (progress.workers != 1)} used"
    return text
