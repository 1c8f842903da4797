"""Results on standard output: tables on a terminal, with ``rich``, and plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from dask_coded.arguments import printable
from dask_coded.display import Display, terminal
from dask_coded.scores import Ranking


class Printer(Display):
    """Shows progress, and prints results."""

    def __init__(self) -> None:
        super().__init__()
        self._output: Any = terminal(stderr=False)

    def columns(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table of words."""
        if self._output is None:
            widths = [max(map(len, column)) for column in zip(titles, *rows)]
            for row in (titles, *rows):
                cells = (f"{cell:<{width}}" for cell, width in zip(row, widths))
                click.echo("  ".join(cells).rstrip())
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(*titles)
        for row in rows:
            table.add_row(
                *(Text(printable(c, self._output.encoding), overflow="fold") for c in row)
            )
        self._output.print(table)

    def table(self, ranking: Ranking) -> None:
        """Print nodes and scores."""
        if self._output is None:
            names = [printable(str(node), sys.stdout.encoding) for node, _ in ranking]
            width = max(map(len, names))
            for name, (_, score) in zip(names, ranking):
                click.echo(f"{name:<{width}}  {score:.10f}")
            return
        from rich.table import Table
        from rich.text import Text

        table = Table("", "node", "score")
        for i, (node, score) in enumerate(ranking, 1):
            name = printable(str(node), self._output.encoding)
            table.add_row(str(i), Text(name, overflow="fold"), f"{score:.10f}")
        self._output.print(table)
