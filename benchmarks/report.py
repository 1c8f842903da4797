"""The harness that all benchmarks share: interleaved timing, one report, one set of options.

A benchmark times its cases with `side_by_side`, adds rows to a `Report` and finishes it::

    @click.command()
    @options
    def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
        timings = side_by_side({"dask": plain, "coded": ours}, repeats=3 if smoke else 30)
        report = Report("overhead")
        report.add(
            case="12 workers",
            measure="lazy_matmul_over_dask",
            value=timings.ratio("coded", over="dask"),
            goal=0.5,
        )
        report.finish(json_file)

Absolute times hold for one machine only. Ratios of cases that take turns in one process tree are
comparable across machines, so a row is normally a `Timings.ratio`: the median of the ratios of
neighbouring runs, with its quartiles.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

import click
import numpy as np
import psutil

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike, NDArray

Sense = Literal["at most", "at least"]
Spread = Literal["quartiles", "range"]
Command = TypeVar("Command", bound=Callable[..., Any])

#: Distributions whose versions a report names.
DISTRIBUTIONS = ("dask-coded", "dask", "distributed", "numpy", "scipy", "networkx", "tornado")

#: Environment variables that change the cost of a kernel.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


# ------------------------------------------------------------------------------------------ timing


@dataclass(frozen=True)
class Summary:
    """A measured number: the median of its repetitions, and their spread.

    Attributes
    ----------
    value
        Median.
    spread
        Lower and upper end of the range that ``spread_of`` names.
    spread_of
        ``"quartiles"`` (25 % and 75 %) or ``"range"`` (least and greatest).
    repetitions
        Number of samples.

    Examples
    --------
    >>> Summary.of([3.0, 1.0, 2.0])
    Summary(value=2.0, spread=(1.5, 2.5), spread_of='quartiles', repetitions=3)
    """

    value: float
    spread: tuple[float, float]
    spread_of: Spread
    repetitions: int

    @classmethod
    def of(cls, samples: ArrayLike, spread_of: Spread = "quartiles") -> Summary:
        """Summarise samples, a sequence of numbers."""
        values = np.asarray(samples, dtype=float).ravel()
        if values.size == 0:
            raise ValueError("Argument 'samples' must hold at least one number, it is empty.")
        ends = [25, 75] if spread_of == "quartiles" else [0, 100]
        low, high = np.percentile(values, ends)
        return cls(float(np.median(values)), (float(low), float(high)), spread_of, values.size)


@dataclass(frozen=True)
class Timings:
    """Seconds of each case; entry i of all cases that have one is from the same turn.

    Attributes
    ----------
    seconds
        For each case, an array with one entry per repetition. Some cases may have run more often.
    results
        For each case, the return value of its last run.
    """

    seconds: Mapping[str, NDArray[np.float64]]
    results: Mapping[str, object]

    def summary(self, case: str, spread_of: Spread = "quartiles") -> Summary:
        """Return the median seconds of a case."""
        return Summary.of(self.seconds[case], spread_of)

    def ratio(self, case: str, *, over: str, spread_of: Spread = "quartiles") -> Summary:
        """Return the median over the turns of the time of one case divided by that of another.

        The ratio is taken turn by turn, so a temporary slowdown of the machine affects both cases.
        """
        turns = min(len(self.seconds[case]), len(self.seconds[over]))
        return Summary.of(self.seconds[case][:turns] / self.seconds[over][:turns], spread_of)

    def extended(self, more: Timings) -> Timings:
        """Return these timings with further turns of some of the cases."""
        seconds = {**self.seconds}
        for case, added in more.seconds.items():
            seconds[case] = np.concatenate([seconds[case], added])
        return Timings(seconds, {**self.results, **more.results})


def side_by_side(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    *,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Run the cases in turns, A B C A B C ..., and time every run.

    Parameters
    ----------
    cases
        What to run, by name. Each callable takes no argument.
    repeats
        Timed turns.
    warmup
        Turns beforehand that are not counted.
    before
        Called before each run, outside of its time.
    clock
        Seconds since some fixed moment.

    Returns
    -------
    Timings
        Seconds of each case and turn.

    Examples
    --------
    >>> timings = side_by_side({"sum": lambda: sum(range(10)), "max": lambda: max(1, 2)}, repeats=3)
    >>> timings.results
    {'sum': 45, 'max': 2}
    >>> timings.seconds["sum"].shape
    (3,)
    """
    if not cases:
        raise ValueError("Argument 'cases' must hold at least one case, it is empty.")
    if repeats < 1:
        raise ValueError(f"Argument 'repeats' must be at least 1, it is {repeats}.")
    seconds = {name: np.empty(repeats) for name in cases}
    results: dict[str, object] = {}
    for turn in range(-warmup, repeats):
        for name, run in cases.items():
            before()
            start = clock()
            results[name] = run()
            elapsed = clock() - start
            if turn >= 0:
                seconds[name][turn] = elapsed
    return Timings(seconds, results)


# ------------------------------------------------------------------------------------------ report


@dataclass
class Report:
    """The results of a benchmark: rows of numbers, and where they were measured.

    Parameters
    ----------
    name
        Name of the benchmark.

    Attributes
    ----------
    rows
        One dictionary per measured number, as written to JSON.
    machine
        The machine, and what the benchmark adds, such as how its workers were slowed.
    versions
        Versions of Python and the libraries in use.

    Examples
    --------
    >>> report = Report("overhead")
    >>> report.add("12 workers", "lazy_matmul_over_dask", 0.44, goal=0.5, workers=12)
    >>> {key: report.rows[0][key] for key in ("measure", "value", "goal", "met", "workers")}
    {'measure': 'lazy_matmul_over_dask', 'value': 0.44, 'goal': 0.5, 'met': True, 'workers': 12}
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    versions: dict[str, str] = field(default_factory=lambda: library_versions())

    def add(
        self,
        case: str,
        measure: str,
        value: float | Summary,
        unit: str = "ratio",
        *,
        goal: float | None = None,
        goal_sense: Sense = "at most",
        **keys: Any,
    ) -> None:
        """Add a row.

        Parameters
        ----------
        case
            What was measured, for readers: ``"(8, 6), 2 slowed"``.
        measure
            The number's name, for programs: ``"round_over_fluid"``.
        value
            The number, or its `Summary` over the repetitions.
        unit
            ``"ratio"``, ``"s"``, ``"MiB"``, ...
        goal
            Target for the number, if there is one.
        goal_sense
            Whether the goal is an upper or a lower bound.
        keys
            More entries of the row: ``policy="continuous", n=8``.
        """
        summary = value if isinstance(value, Summary) else None
        number = summary.value if summary else float(value)  # type: ignore[arg-type]
        row = {
            "benchmark": self.name,
            "case": case,
            "measure": measure,
            "value": number,
            "unit": unit,
            "goal": goal,
            "goal_sense": None if goal is None else goal_sense,
            "met": _met(number, goal, goal_sense),
            "spread": list(summary.spread) if summary else None,
            "spread_of": summary.spread_of if summary else None,
            "repetitions": summary.repetitions if summary else 1,
        }
        if taken := sorted(row.keys() & keys.keys()):
            raise ValueError(f"Row entries {taken} are reserved by the report: choose other names.")
        self.rows.append({**row, **keys})

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report as types that JSON can represent.

        Numbers that are not finite become None.
        """
        return {
            "machine": _plain(self.machine),
            "versions": _plain(self.versions),
            "rows": _plain(self.rows),
        }

    def write_json(self, file: Path) -> None:
        """Write the report to a file, each row on one line."""
        report = self.as_dict()
        lines = [json.dumps(row, allow_nan=False) for row in report.pop("rows")]
        head = json.dumps(report, indent=2, allow_nan=False).removesuffix("\n}")
        rows = ",\n    ".join(lines)
        file.write_text(f'{head},\n  "rows": [\n    {rows}\n  ]\n}}\n', encoding="utf-8")

    def print_table(self, file: TextIO | None = None) -> None:
        """Print the rows as a table, with rich if it is installed, otherwise as plain text.

        Parameters
        ----------
        file
            Output stream; standard output by default.
        """
        title = f"{self.name}: {_headline(self.machine, self.versions)}"
        header = ["case", "measure", "value", "spread", "runs", "goal"]
        cells = [_cells(row) for row in self.rows]
        stream = sys.stdout if file is None else file
        if importlib.util.find_spec("rich") is None:
            print(title, _plain_table(header, cells), sep="\n", file=stream)
        else:
            _print_rich_table(title, header, cells, stream)

    def finish(self, json_file: Path | None = None) -> None:
        """Print the table and, if asked for, write the JSON file."""
        self.print_table()
        if json_file is not None:
            self.write_json(json_file)
            print(f"wrote {json_file}")


def _met(value: float, goal: float | None, sense: Sense) -> bool | None:
    if goal is None:
        return None
    return value <= goal if sense == "at most" else value >= goal


def _plain(thing: Any) -> Any:
    """Turn NumPy scalars and arrays, paths and tuples into types that JSON can represent."""
    match thing:
        case Mapping():
            return {str(key): _plain(value) for key, value in thing.items()}
        case np.ndarray() | np.generic():
            return _plain(thing.tolist())
        case list() | tuple() | set() | frozenset():
            return [_plain(value) for value in thing]
        case float():
            return thing if math.isfinite(thing) else None
        case None | bool() | int() | str():
            return thing
    return str(thing)


# ------------------------------------------------------------------------------------------- table


def _headline(machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    throttle = f", {machine['throttle']}" if "throttle" in machine else ""
    return (
        f"{machine.get('cores', '?')} cores{throttle}, Python {versions.get('python', '?')}, "
        f"distributed {versions.get('distributed', '?')}, NumPy {versions.get('numpy', '?')}"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    unit = "" if row["unit"] == "ratio" else f" {row['unit']}"
    spread = goal = ""
    if row["spread"] is not None:
        low, high = row["spread"]
        spread = f"{low:.3g} .. {high:.3g} ({row['spread_of']})"
    if row["goal"] is not None:
        goal = f"{row['goal_sense']} {row['goal']:g}: {'met' if row['met'] else 'MISSED'}"
    value = f"{row['value']:.4g}{unit}"
    return [row["case"], row["measure"], value, spread, str(row["repetitions"]), goal]


def _plain_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [header, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def _print_rich_table(
    title: str, header: Sequence[str], cells: Sequence[Sequence[str]], stream: TextIO
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="right" if name in ("value", "runs") else "left")
    for line in cells:
        table.add_row(*line)
    # For a file or a pipe rich assumes a width of 80, which would truncate numbers.
    width = None if stream.isatty() else 240
    Console(file=stream, width=width, markup=False, highlight=False).print(table)


# -------------------------------------------------------------------------------- where it was run


def describe_machine() -> dict[str, Any]:
    """Return what a reader must know about the machine to interpret absolute times."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": _cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(psutil.getloadavg()),
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cores() -> int | None:
    """Return the number of cores that this process may use, or of all if that is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the distributions that are installed."""
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


# ---------------------------------------------------------------------------- pictures and options


@contextmanager
def picture(file: Path, **figure_keywords: Any) -> Iterator[Figure]:
    """Provide a matplotlib figure, and save it as a PNG at the end of the block.

    Parameters
    ----------
    file
        PNG file to write.
    figure_keywords
        Arguments of `matplotlib.figure.Figure`, such as ``figsize=(9, 5)``.

    Yields
    ------
    matplotlib.figure.Figure
        An empty figure that belongs to no window: ``axes = figure.subplots()``.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "A picture needs matplotlib: pip install 'dask-coded[complete]'."
        ) from error
    figure = Figure(**{"layout": "constrained", **figure_keywords})
    yield figure
    figure.savefig(file, format="png", dpi=150)


def _in_existing_folder(
    context: click.Context, parameter: click.Parameter, file: Path | None
) -> Path | None:
    """Reject a file in a missing folder before a long benchmark, not after it."""
    if file is not None and not file.absolute().parent.is_dir():
        raise click.BadParameter(f"folder {file.absolute().parent} does not exist")
    return file


def options(command: Command) -> Command:
    """Add the options of every benchmark to a click command.

    The command is called with ``json_file`` and ``png_file`` (paths or None) and ``smoke`` (whether
    to do a tiny run that only shows that the benchmark works).
    """
    output = click.Path(dir_okay=False, writable=True, path_type=Path)
    decorators = [
        click.option(
            "--json",
            "json_file",
            type=output,
            metavar="FILE",
            callback=_in_existing_folder,
            help="Write rows, machine and versions to this JSON file.",
        ),
        click.option(
            "--png",
            "png_file",
            type=output,
            metavar="FILE",
            callback=_in_existing_folder,
            help="Draw the result to this PNG file.",
        ),
        click.option("--smoke", is_flag=True, help="A tiny run that only shows that it works."),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command
