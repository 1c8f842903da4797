"""The group of all commands, and the options that several of them have."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import click

from dask_coded import __version__
from dask_coded.codes import CODES

Command = Callable[..., Any]

_INTERRUPTED = 130


class _Commands(click.Group):
    """A group that prints one line for each error and for an interrupt."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.ctx = None  # with a context click prints the usage around the error
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dask-coded")
def coded() -> None:
    """Linear algebra on Dask clusters whose workers are uneven and may be lost."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As Python does on standard error: no line may end a command that has computed for hours.
        sys.stdout.reconfigure(errors="backslashreplace")


def layout_options(command: Command) -> Command:
    """Add the options that say how an edge list is written."""
    options = (
        click.option(
            "--delimiter",
            metavar="CHARACTER",
            help="What separates the columns of an edge list; '\\t' for tabs, ' ' for any white "
            "space.  [default: what its first line has]",
        ),
        click.option(
            "--comments",
            metavar="MARKS",
            default="# %",
            show_default=True,
            help="What begins comment lines, separated by blanks; '' to keep all lines.",
        ),
        click.option(
            "--header/--no-header",
            default=None,
            help="Whether the first line of an edge list is a header.  [default: recognised]",
        ),
    )
    return _with(command, *options)


def cluster_options(command: Command) -> Command:
    """Add the options that say where to compute; `steps.connected` takes them."""
    return _with(
        command,
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            help="Start a local cluster of this many one-thread processes.  "
            "[default: number of cores, from 2 to 8]",
        ),
        click.option(
            "--scheduler", metavar="ADDRESS", help="Use the cluster of this scheduler instead."
        ),
    )


def code_options(code: str, redundancy: str) -> Callable[[Command], Command]:
    """Return what adds the options that say how a matrix is coded, with these defaults."""

    def add(command: Command) -> Command:
        return _with(
            command,
            click.option(
                "--code",
                type=click.Choice(sorted(CODES)),
                help="Code for the matrix: 'mds' needs the least memory but fills in sparse "
                "matrices, 'random' fills them in too but moves less data, 'repetition' keeps "
                f"plain copies.  [default: {code}]",
            ),
            click.option(
                "--redundancy",
                type=click.IntRange(min=0),
                help="How many workers may be lost, whichever they are: of n workers, N gives the "
                "code MDS(n, n - N) or Repetition(n, N + 1).  "
                f"[default: {redundancy}]",
            ),
        )

    return add


def _with(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
