"""The commands and their options."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from dask.system import CPU_COUNT

from dask_coded import __version__
from dask_coded.bench import compare
from dask_coded.cli.printing import Printer
from dask_coded.cli.steps import (
    STANDARD,
    BadInput,
    code_of,
    computed,
    connected,
    read_input,
    read_matrix,
    writer,
)
from dask_coded.codes import CODES
from dask_coded.demo import run_demo
from dask_coded.diagnosis import tables
from dask_coded.diagnosis.collect import collect
from dask_coded.diagnosis.findings import findings
from dask_coded.graph import pagerank
from dask_coded.keeping import check
from dask_coded.storage import StoreError

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


def _layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
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
    for option in reversed(options):
        command = option(command)
    return command


@coded.command("pagerank")
@click.argument("file", type=click.Path(path_type=Path))
@_layout_options
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Start a local cluster of this many one-thread processes.  "
    "[default: number of cores, from 2 to 8]",
)
@click.option("--scheduler", metavar="ADDRESS", help="Use the cluster of this scheduler instead.")
@click.option(
    "--code",
    type=click.Choice(sorted(CODES)),
    help="Code for the matrix: 'mds' needs the least memory but fills in sparse matrices, 'random' "
    "fills them in too but moves less data, 'repetition' keeps plain copies.  "
    "[default: repetition]",
)
@click.option(
    "--redundancy",
    type=click.IntRange(min=0),
    help="How many workers may be lost, whichever they are: of n workers, N gives the code "
    "MDS(n, n - N) or Repetition(n, N + 1).  [default: a quarter of them; 1 without --code]",
)
@click.option(
    "--damping",
    type=click.FloatRange(0, 1),
    default=0.85,
    show_default=True,
    help="Probability of following an edge.",
)
@click.option(
    "--tol",
    type=click.FloatRange(min=0),
    default=1e-10,
    show_default=True,
    help="Stop when the scores change by less than this in a round, summed over all nodes; "
    "0 for exactly --max-iter rounds.",
)
@click.option(
    "--max-iter",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Maximum number of rounds.",
)
@click.option("--undirected", is_flag=True, help="Take every edge in both directions.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Number of nodes to print, highest score first.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write all scores to this file, highest first: as .csv, .tsv, .txt (tabs), .json or "
    ".parquet. '-' writes CSV to standard output, instead of --top.",
)
def pagerank_command(
    file: Path,
    delimiter: str | None,
    comments: str,
    header: bool | None,
    workers: int | None,
    scheduler: str | None,
    code: str | None,
    redundancy: int | None,
    damping: float,
    tol: float,
    max_iter: int,
    undirected: bool,
    top: int,
    output: Path | None,
) -> None:
    """Compute the PageRank of the graph in FILE.

    FILE is an edge list (text: source, target and optionally a weight on each line), a Matrix
    Market file or a SciPy sparse matrix (.npz); files of gzip and bzip2 are unpacked. '-' is
    standard input.
    """
    if workers is not None and scheduler is not None:
        raise click.UsageError(
            "--workers starts a cluster and --scheduler uses a running one: give only one."
        )
    write = None if output is None else writer(output)
    with Printer() as display:
        display.say("Reading standard input" if file == STANDARD else f"Reading {file}")
        graph = read_input(file, undirected, delimiter, comments, header)
        with connected(workers, scheduler, display.say) as client:
            display.say(f"Encoding {len(graph.nodes):,} nodes, {graph.adjacency.nnz:,} edges")
            scores: Any = computed(
                pagerank,
                graph,
                damping=damping,
                tol=tol,
                max_iter=max_iter,
                code=code_of(code, redundancy, len(client.nthreads())),
                client=client,
                callback=display,
            )
            nodes, values = list(scores), np.array(list(scores.values()))
            order = np.argsort(-values, kind="stable").tolist()
            ranking = [(nodes[i], float(values[i])) for i in order]
            if write is not None:
                # Before anything else can fail, such as the end of the cluster or the terminal.
                write(ranking)
    if top and output != STANDARD:
        display.table(ranking[:top])


@coded.command("demo")
@click.option(
    "--workers",
    type=click.IntRange(min=2),
    help="Number of worker processes.  [default: number of cores, from 4 to 8]",
)
@click.option(
    "--slow",
    type=click.IntRange(min=0),
    help="How many of the workers are slowed down.  [default: a quarter of them]",
)
@click.option(
    "--factor",
    type=click.FloatRange(min=1, min_open=True),
    default=5.0,
    show_default=True,
    help="How many times slower they are.",
)
@click.option(
    "--graph",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Multiply by the matrix that PageRank uses for the graph in this file, in any format of "
    "'dask-coded pagerank', instead of a random dense matrix.",
)
@_layout_options
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("dask-coded-demo.png"),
    show_default=True,
    help="Image file for the timelines of plain and coded rounds.",
)
def demo_command(
    workers: int | None,
    slow: int | None,
    factor: float,
    graph: Path | None,
    delimiter: str | None,
    comments: str,
    header: bool | None,
    output: Path,
) -> None:
    """Compare plain dask.array and coded rounds of A @ x with slow workers."""
    if not output.parent.is_dir():
        raise BadInput(f"--output {output}: expected a file in a folder that exists.")
    workers = workers or max(4, min(8, CPU_COUNT))
    if slow is not None and slow >= workers:
        raise BadInput(
            f"--slow {slow} must be less than the number of workers, {workers}: lower --slow or "
            "raise --workers."
        )
    read = None if graph is None else read_input(graph, False, delimiter, comments, header)
    computed(run_demo, workers, output, slow=slow, factor=factor, graph=read)


@coded.command("check")
@click.argument("address")
@click.option("--json", "as_json", is_flag=True, help="Write everything as JSON instead.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds to wait for each answer of a worker, which imports the package for the first.",
)
@click.option(
    "--peers",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="To how many others each worker tries to connect.",
)
def check_command(address: str, as_json: bool, timeout: float, peers: int) -> None:
    """Check whether all workers of a cluster can take part in coded rounds.

    ADDRESS is that of the scheduler. The table shows for each worker: versions that differ from
    those here; dask-coded's plugins, which the first encoding installs; how many others on its
    host have memory that it can read; how many of the others that tried have reached it, and how
    long a round trip takes; its speed relative to the fastest worker, in a small product now and
    in the last rounds. Below stands what must be fixed, and what could be better. The exit code
    is 1 if something must be fixed.
    """
    with connected(None, address, lambda text: click.echo(text, err=True)) as client:
        # Asking is all that the client does: nothing is installed on the cluster.
        cluster = client.sync(collect, client, timeout=timeout, peers=peers)
    found = findings(cluster)
    if as_json:
        click.echo(json.dumps(tables.as_json(cluster, found), indent=2))
    else:
        click.echo(tables.heading(cluster))
        Printer().columns(tables.COLUMNS, tables.rows(cluster))
        for finding in found:
            click.echo(f"{finding.severity.capitalize()}: {finding.text}")
        click.echo(tables.summary(found))
    if not tables.is_fit(found):
        click.get_current_context().exit(1)


@coded.command("check-store")
@click.argument("storage")
@click.option("--json", "as_json", is_flag=True, help="Write everything as JSON instead.")
def check_store_command(storage: str, as_json: bool) -> None:
    """Check whether the files of a coded array are whole.

    STORAGE is the folder or the address that the array was kept in. All pieces are read and
    compared with their checksums. The exit code is 1 if any is not whole.
    """
    try:
        found = check(storage)
    except (ImportError, OSError, StoreError, TypeError) as error:
        raise BadInput(str(error)) from error
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        click.echo(str(found))
    if not found.whole:
        click.get_current_context().exit(1)


@coded.command("bench")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--scheduler", metavar="ADDRESS", help="Use the cluster of this scheduler instead.")
@click.option(
    "--workers",
    type=click.IntRange(min=2),
    help="Number of local worker processes to start.  [default: number of cores, up to 8]",
)
@click.option(
    "--shape",
    type=click.IntRange(min=1),
    nargs=2,
    default=(4000, 4000),
    show_default=True,
    help="Rows and columns of a matrix of random numbers, if no FILE is given.",
)
@click.option(
    "--width",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Columns of the operand.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How often to compute each product.",
)
@click.option("--json", "as_json", is_flag=True, help="Write all times as JSON instead.")
def bench_command(
    file: Path | None,
    scheduler: str | None,
    workers: int | None,
    shape: tuple[int, int],
    width: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Say whether coding pays for products of a matrix, on this machine or on a cluster.

    FILE holds the matrix: a NumPy array (.npy) or a SciPy sparse matrix (.npz). One process,
    dask.array, single coded products and a loop of coded products compute it in turn.
    """
    matrix = None if file is None else read_matrix(file)
    rows, columns = shape if matrix is None else matrix.shape

    def say(text: str) -> None:
        click.echo(text, err=True)

    with connected(workers, scheduler, say) as client:
        found = computed(compare, client, matrix, (rows, columns), width, rounds, say)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    click.echo(f"{found.workers} workers, A: {rows} x {columns}, x: {width} columns, {found.code}")
    click.echo(f"encoding: {found.encoding:.2f} s")
    Printer().columns(
        ("milliseconds per product", "median", "least", "most"),
        [
            (
                way.name,
                *(f"{t * 1e3:.1f}" for t in (way.median, min(way.seconds), max(way.seconds))),
            )
            for way in found.ways
        ],
    )
    click.echo(found.verdict)
