"""Commands on graphs, clusters and stores, and the demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from dask.system import CPU_COUNT

from dask_coded.cli.group import cluster_options, code_options, coded, layout_options
from dask_coded.cli.printing import Printer
from dask_coded.cli.steps import (
    STANDARD,
    BadInput,
    code_of,
    computed,
    connected,
    read_input,
    writer,
)
from dask_coded.demo import run_demo
from dask_coded.diagnosis import tables
from dask_coded.diagnosis.collect import collect
from dask_coded.diagnosis.findings import findings
from dask_coded.graph import pagerank
from dask_coded.keeping import check
from dask_coded.scores import FORMATS
from dask_coded.storage import StoreError


@coded.command("pagerank")
@click.argument("file", type=click.Path(path_type=Path))
@layout_options
@cluster_options
@code_options("repetition", "a quarter of them; 1 without --code")
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
    ".parquet, each also with .gz after it. '-' is standard output, instead of --top.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Format of --output, whatever its name.  [default: its ending; csv for '-']",
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
    form: str | None,
) -> None:
    """Compute the PageRank of the graph in FILE.

    FILE is an edge list (text: source, target and optionally a weight on each line), a Matrix
    Market file or a SciPy sparse matrix (.npz); files of gzip and bzip2 are unpacked. '-' is
    standard input.
    """
    if form is not None and output is None:
        raise click.UsageError("--format needs --output, which '-' sends to standard output.")
    write = None if output is None else writer(output, form)
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
@layout_options
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
        try:
            cluster = computed(client.sync, collect, client, timeout=timeout, peers=peers)
        except click.ClickException as error:
            raise BadInput(
                f"The cluster at {address} cannot be checked, see whether its scheduler still "
                f"runs: {error.message}"
            ) from error
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
