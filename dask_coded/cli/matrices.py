"""Commands on matrices: encode them, factorize them, fit models to them, time their products."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from dask_coded import linear_model
from dask_coded.array import CodedArray, encode
from dask_coded.bench import compare
from dask_coded.cli.group import cluster_options, code_options, coded
from dask_coded.cli.printing import Printer
from dask_coded.cli.steps import (
    BadInput,
    computed,
    connected,
    output_file,
    read_matrix,
    read_samples,
    saved,
)
from dask_coded.keeping import open as open_kept
from dask_coded.linalg import randomized_svd
from dask_coded.loop import Progress
from dask_coded.storage import StoreError

_MODELS = {
    "logistic": "LogisticRegression",
    "svm": "LinearSVC",
    "linear": "LinearRegression",
    "ridge": "Ridge",
    "lasso": "Lasso",
    "elastic-net": "ElasticNet",
}


_BY_KIND = code_options(
    "mds; repetition for sparse matrices and whole numbers",
    "a quarter of them; 1 for sparse matrices and whole numbers without --code",
)


def say(text: str) -> None:
    click.echo(text, err=True)


@coded.command("encode")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("storage")
@cluster_options
@_BY_KIND
@click.option(
    "--transpose",
    is_flag=True,
    help="Encode the transpose, too, which x @ A, fits and decompositions need.",
)
def encode_command(
    file: Path,
    storage: str,
    workers: int | None,
    scheduler: str | None,
    code: str | None,
    redundancy: int | None,
    transpose: bool,
) -> None:
    """Encode the matrix in FILE, and keep its pieces in STORAGE.

    FILE holds a NumPy array (.npy) or a SciPy sparse matrix (.npz). STORAGE is an empty folder, or
    an address such as s3://bucket/name, that all workers can write to. `dask_coded.open(STORAGE)`
    opens the coded array on any cluster, and `dask-coded check-store STORAGE` examines it.
    """
    matrix = read_matrix(file)
    with Printer() as display, connected(workers, scheduler, display.say) as client:
        made = _stored(
            encode,
            matrix,
            code,
            client,
            redundancy=redundancy,
            transpose=transpose,
            storage=storage,
            callback=display,
        )
        rows, columns = made.shape
        found = f"{storage}: {rows} x {columns}, {made.dtype}, {made.code}"
    click.echo(found)


@coded.command("svd")
@click.argument("file")
@cluster_options
@_BY_KIND
@click.option(
    "-k",
    "--count",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    help="Number of singular values, largest first.",
)
@click.option(
    "--power-iterations",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="More of them make the result more accurate, at two products each: many are needed if the "
    "singular values fall slowly.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the random start.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write U, s and Vh to this NumPy archive (.npz); A is about (U * s) @ Vh.",
)
@click.option("--json", "as_json", is_flag=True, help="Write the singular values as JSON instead.")
def svd_command(
    file: str,
    workers: int | None,
    scheduler: str | None,
    code: str | None,
    redundancy: int | None,
    count: int,
    power_iterations: int,
    seed: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Approximate the largest singular values of the matrix in FILE.

    A random block is multiplied a few times by the matrix and by its transpose, which finds values
    that fall quickly. The last line says by how much the last pass has changed them.

    FILE holds a NumPy array (.npy) or a SciPy sparse matrix (.npz), or is a folder or an address to
    which 'dask-coded encode --transpose' has written.
    """
    if output is not None:
        output_file(output, ".npz")
    opened = _opener(file, code, redundancy)
    passes: list[float] = []
    with Printer() as display, connected(workers, scheduler, display.say) as client:

        def callback(progress: Progress) -> None:
            passes.append(progress.residual)
            display(progress)

        U, s, Vh = computed(
            randomized_svd,
            opened(client, display),
            count,
            power_iterations=power_iterations,
            seed=seed,
            client=client,
            callback=callback,
        )
        if output is not None:
            U = computed(lambda: client.compute(U, sync=True))
    change = passes[-1] * float(s[0])
    if as_json:
        click.echo(json.dumps({"singular_values": s.tolist(), "last_change": change}))
    else:
        Printer().columns(
            ("", "singular value"), [(str(i), f"{value:.10g}") for i, value in enumerate(s, 1)]
        )
        click.echo(f"The last pass changed them by up to {change:.2g}.")
    if output is not None:
        saved(output, lambda file: np.savez(file, U=U, s=s, Vh=Vh))


@coded.command("fit")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--targets",
    type=click.Path(path_type=Path),
    help="A NumPy array (.npy) with the target of each row; files of svmlight have theirs.",
)
@click.option(
    "--model",
    type=click.Choice(list(_MODELS)),
    default="logistic",
    show_default=True,
    help="Which of the estimators of dask_coded.linear_model.",
)
@click.option(
    "-p",
    "--parameter",
    "parameters",
    metavar="NAME=VALUE",
    multiple=True,
    help="A parameter of the estimator, such as C=0.1 or alpha=10; may be repeated.",
)
@cluster_options
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write the fitted estimator to this file (.joblib), which joblib.load reads.",
)
@click.option("--json", "as_json", is_flag=True, help="Write everything as JSON instead.")
def fit_command(
    file: Path,
    targets: Path | None,
    model: str,
    parameters: tuple[str, ...],
    workers: int | None,
    scheduler: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Fit a linear model to the samples in FILE.

    FILE is a text file in the format of svmlight and LIBSVM, which may be packed by gzip or bzip2,
    or holds a NumPy array (.npy) or a SciPy sparse matrix (.npz) with a sample in each row. The
    score is that of the same samples: the share that is classified right, or R squared.
    """
    if output is not None:
        output_file(output, ".joblib")
    estimator = computed(_estimator, model, parameters)
    X, y = read_samples(file, targets)
    with Printer() as display, connected(workers, scheduler, display.say) as client:
        computed(estimator.fit, X, y, client=client, callback=display)
    found = {
        "model": str(estimator),
        "samples": X.shape[0],
        "features": X.shape[1],
        "iterations": int(np.max(estimator.n_iter_)),
        "score": float(estimator.score(X, y)),
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(f"{found['model']}: {found['samples']} samples of {found['features']} features")
        click.echo(f"{found['iterations']} iterations, score {found['score']:.4f}")
    if output is not None:
        import joblib

        saved(output, lambda file: joblib.dump(estimator, file))


def _estimator(model: str, parameters: tuple[str, ...]) -> Any:
    """Return an estimator with its parameters."""
    chosen: dict[str, Any] = {}
    for parameter in parameters:
        name, sign, value = parameter.partition("=")
        if not (name and sign):
            raise BadInput(f"--parameter {parameter}: expected NAME=VALUE, such as C=0.1.")
        try:
            chosen[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            chosen[name] = value  # a word, such as l1
    return getattr(linear_model, _MODELS[model])().set_params(**chosen)


def _stored(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `computed` does; what is wrong with a store, or how to have one, is bad input."""

    def call() -> Any:
        try:
            return function(*args, **kwargs)
        except (ImportError, FileExistsError, FileNotFoundError, StoreError, TypeError) as error:
            raise BadInput(str(error)) from error

    return computed(call)


def _opener(
    file: str, code: str | None, redundancy: int | None
) -> Callable[[Any, Any], CodedArray]:
    """Return what makes a coded array, with its transpose, of a file or a kept array."""
    if "://" in file or Path(file).is_dir():
        if code is not None or redundancy is not None:
            raise BadInput(f"{file} is coded already: give neither --code nor --redundancy.")

        def opened(client: Any, display: Any) -> CodedArray:
            found: CodedArray = _stored(open_kept, file, client)
            if found._back is None:
                raise BadInput(
                    f"{file} was encoded without its transpose: encode it with --transpose."
                )
            return found

        return opened
    matrix = read_matrix(Path(file))
    return lambda client, display: _stored(
        encode,
        matrix,
        code,
        client,
        redundancy=redundancy,
        transpose=True,
        callback=display,
    )


@coded.command("bench")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@cluster_options
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
    workers: int | None,
    scheduler: str | None,
    shape: tuple[int, int],
    width: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Say whether coding pays for products of a matrix, on this machine or on a cluster.

    FILE holds the matrix: a NumPy array (.npy) or a SciPy sparse matrix (.npz). One process,
    dask.array with a chunk for each thread and with four, single coded products and a loop of
    coded products compute it in turn.
    """
    matrix = None if file is None else read_matrix(file)
    rows, columns = shape if matrix is None else matrix.shape
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
