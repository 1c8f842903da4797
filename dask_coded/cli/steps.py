"""The steps that commands share: read the input, reach a cluster, compute, write the result."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, TypeVar
from zipfile import BadZipFile

import click
import dask
import numpy as np
import scipy.sparse
from dask.system import CPU_COUNT
from distributed import Client, rpc
from distributed.comm import parse_address, parse_host_port
from distributed.comm.registry import get_backend
from distributed.security import Security

from dask_coded.arguments import printable, to_csr
from dask_coded.codes import CODES, Code
from dask_coded.graph import ConvergenceError, Graph, read_graph
from dask_coded.local import local_client
from dask_coded.scores import Ranking, writer_for

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

#: Standard input or output.
STANDARD = Path("-")

_CONNECT_SECONDS = 5


class BadInput(click.ClickException):
    """The user's input is invalid."""

    exit_code = 2


def read_input(
    file: Path, undirected: bool, delimiter: str | None, comments: str, header: bool | None
) -> Graph:
    source = sys.stdin.buffer if file == STANDARD else file
    mark = "\t" if delimiter == "\\t" else delimiter
    try:
        graph = read_graph(source, delimiter=mark, comments=comments.split() or None, header=header)
    except (OSError, ValueError) as error:
        raise BadInput(str(error)) from error
    return graph.to_undirected() if undirected else graph


#: What NumPy, SciPy and scikit-learn raise when they read a damaged file, packed or not.
_DAMAGED = (
    *(OSError, ValueError, KeyError, EOFError, RuntimeError, OverflowError),
    *(BadZipFile, TokenError, zlib.error),
)


def _brief(error: Exception) -> str:
    """Return the first line of an error, without bytes of the file that it may contain."""
    lines = printable(str(error)).splitlines() or [repr(error)]
    return lines[0] if len(lines[0]) <= 200 else f"{lines[0][:200]} …"


def read_matrix(file: Path) -> Any:
    """Read a matrix of numbers."""
    try:
        found = scipy.sparse.load_npz(file) if file.suffix == ".npz" else np.load(file)
        if scipy.sparse.issparse(found):
            found = to_csr(found)
        elif not isinstance(found, np.ndarray):
            raise ValueError(f"it holds a {type(found).__name__}")
    except _DAMAGED as error:
        # NumPy takes any other file for a pickle.
        reason = "it is neither" if "pickle" in str(error) else _brief(error)
        raise BadInput(
            f"{file}: expected a NumPy array (.npy) or a SciPy sparse matrix (.npz): {reason}"
        ) from error
    if found.ndim != 2 or 0 in found.shape or found.dtype.kind not in "fciub":
        raise BadInput(
            f"{file}: expected a matrix of numbers, it has the shape {found.shape} and the dtype "
            f"{found.dtype}."
        )
    return found


def read_samples(file: Path, targets: Path | None) -> tuple[Any, Any]:
    """Read samples and their targets."""
    if file.suffix in (".npy", ".npz"):
        if targets is None:
            raise BadInput(f"{file} has no targets: give a NumPy array of them by --targets.")
        samples = read_matrix(file)
        try:
            wanted = np.load(targets)
            if not isinstance(wanted, np.ndarray):
                raise ValueError(f"it holds a {type(wanted).__name__}")
        except _DAMAGED as error:
            raise BadInput(f"{targets}: expected a NumPy array (.npy): {_brief(error)}") from error
        return samples, wanted
    if targets is not None:
        raise BadInput(f"{file}: only .npy and .npz files need --targets, svmlight has its own.")
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError as error:
        raise BadInput(
            "This command needs scikit-learn: pip install 'dask-coded[linear-model]'."
        ) from error
    try:
        found = load_svmlight_file(sys.stdin.buffer if file == STANDARD else str(file))
    except _DAMAGED as error:
        raise BadInput(
            f"{file}: expected samples in the format of svmlight, or .npy or .npz with --targets: "
            f"{_brief(error)}"
        ) from error
    return found[0], found[1]


async def _ask(scheduler: str) -> None:
    """Ask a scheduler who it is: a client waits for ever for what is none, such as a dashboard."""
    arguments = Security().get_connection_args("client")
    async with asyncio.timeout(_CONNECT_SECONDS):
        async with rpc(scheduler, connection_args=arguments) as found:
            await found.identity()


@contextmanager
def connected(
    workers: int | None, scheduler: str | None, say: Callable[[str], None]
) -> Iterator[Client]:
    if workers is not None and scheduler is not None:
        raise click.UsageError(
            "--workers starts a cluster and --scheduler uses a running one: give only one."
        )
    if scheduler is None:
        n = workers or max(2, min(8, CPU_COUNT))
        say(f"Starting {n} workers")
        with local_client(n) as client:
            yield client
        return
    say(f"Connecting to {scheduler}")
    scheme, place = parse_address(scheduler)
    try:
        get_backend(scheme)  # which other packages may add
    except (ValueError, ImportError) as error:
        raise BadInput(
            f"Expected the address of a scheduler, such as tcp://10.0.0.1:8786, not {scheduler}: "
            f"{error}."
        ) from error
    if scheme in ("tcp", "tls"):
        try:
            parse_host_port(place)
        except ValueError as error:
            raise BadInput(
                f"Expected the address of a scheduler, such as tcp://10.0.0.1:8786, not "
                f"{scheduler}: {error}."
            ) from error
    try:
        if not dask.config.get("distributed.client.security-loader", None):
            asyncio.run(_ask(scheduler))
        client = Client(scheduler, timeout=_CONNECT_SECONDS)
    except (TypeError, RuntimeError, ImportError) as error:  # without certificates, for example
        if "identity()" in str(error):
            raise BadInput(
                f"What answers at {scheduler} is no scheduler, but perhaps a worker: give the "
                "address of the scheduler, whose port is 8786 by default."
            ) from error
        raise BadInput(f"No connection to {scheduler} is possible: {error}") from error
    # A MemoryError if what answers is read as a length, such as the text of a web server.
    except (OSError, ValueError, MemoryError) as error:
        raise BadInput(
            f"No scheduler answered at {scheduler} within {_CONNECT_SECONDS} seconds: "
            "check the address, whose port is not that of the dashboard, and that the scheduler "
            "is running."
        ) from error
    with client:
        if not client.nthreads():
            raise BadInput(
                f"The scheduler at {scheduler} has no workers: start some, "
                f"with 'dask worker {scheduler}'."
            )
        yield client


def code_of(name: str | None, redundancy: int | None, workers: int) -> Code | str | None:
    if redundancy is None:
        if workers > 1:
            return name
        redundancy = 0  # the only choice, which needs no warning
    if redundancy >= workers:
        raise BadInput(
            f"--redundancy {redundancy} needs at least {redundancy + 1} workers, "
            f"the cluster has {workers}: lower --redundancy or add workers."
        )
    try:
        return CODES[name or "repetition"].with_redundancy(workers, redundancy)
    except ValueError as error:
        raise BadInput(str(error)) from error


def computed(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Return what a function of the library returns; say what went wrong in one line."""
    try:
        return function(*args, **kwargs)
    except ConvergenceError as error:
        raise click.ClickException(str(error)) from error
    except click.ClickException:
        raise
    except Exception as error:
        logger.debug("The computation failed.", exc_info=True)
        # NumPy's error of a factorisation is a ValueError, too.
        if isinstance(error, ValueError) and not isinstance(error, np.linalg.LinAlgError):
            raise BadInput(str(error)) from error
        first_line = next(iter(str(error).splitlines()), "")
        raise click.ClickException(f"{type(error).__name__}: {first_line}") from error


def output_file(path: Path, ending: str | None = None) -> None:
    """Refuse a file that could not be written, or whose name has another ending."""
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"--output {path}: expected a file in a folder that exists.")
    if ending is not None and path.suffix != ending:
        raise BadInput(f"--output {path}: expected a name that ends in {ending}.")
    # Now, because afterwards the result would be lost.
    if path != STANDARD and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"--output {path}: you may not write there. Give another file or folder.")


def saved(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file in one piece, or say in one line why that is not possible."""
    # What a link leads to is replaced, and not the link.
    whole = path.resolve()
    partial = whole.with_name(f".{whole.name}.{os.getpid()}")
    # A pipe is not replaced, nor a file whose folder may not be written.
    special = path == STANDARD or (path.exists() and not path.is_file())
    try:
        if special or not os.access(whole.parent, os.W_OK):
            with click.open_file(str(path), "wb") as file:
                write(file)
            return
        try:
            with partial.open("wb") as file:
                write(file)
            partial.replace(whole)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise click.ClickException(f"--output {path}: {error.strerror or error}.") from error


def writer(path: Path, form: str | None = None) -> Callable[[Ranking], None]:
    """Return the function that writes all scores; refuse a path that it could not write to."""
    output_file(path)
    try:
        write_to = writer_for(path, form)
    except ValueError as error:
        raise BadInput(f"--output {path}: {error}") from error
    except ImportError as error:
        raise BadInput(
            f"--output {path}: this format needs pyarrow: pip install pyarrow, or write a .csv."
        ) from error
    return lambda ranking: saved(path, lambda file: write_to(ranking, file))
