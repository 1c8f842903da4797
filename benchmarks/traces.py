"""Read traces of real machines as speeds: one row per sample, one column per machine.

The files are in the folder that ``DASK_CODED_DATA`` names. For traces of utilisation, the speed is
the capacity that others leave: 100 - utilisation in per cent.
"""

from __future__ import annotations

import csv
import io
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import click
import numpy as np

from benchmarks.datasets import folder

#: Traces on which the LSTM is trained, by the name that reports use.
NAMES = (
    "azure2017",
    "google2011",
    "nab",
    "stream-triad",
    "all-reads",
    "cpu-cache",
    "matrix-math",
    "bytedance-SE",
)
#: All traces; nothing in the package was trained on the others.
ALL = (*NAMES, "cpu-stress", "memory-copying", "sysbench-cpu", "bytedance-ST")

#: Traces on which an autoregression beats the mean; there the LSTM must beat the autoregression.
LEARNABLE = ("azure2017", "google2011", "stream-triad")
#: Negative controls: the mean is about optimal.
CONTROLS = ("matrix-math", "bytedance-SE")

# Series of the virtual machine noise study, by a part of their names.
_NOISE = {
    "stream-triad": "stream-triad",
    "all-reads": "all reads",
    "cpu-cache": "cpu cache",
    "matrix-math": "matrix math",
    "cpu-stress": "cpu stress",
    "memory-copying": "memory copying",
    "sysbench-cpu": "sysbench",
}


def source(name: str) -> str:
    """Return where a trace comes from: several were measured on the same machines or jobs."""
    return "azure-noise" if name in _NOISE else name.partition("-")[0]


@cache
def load(name: str) -> np.ndarray:
    """Read a trace.

    Returns
    -------
    ndarray, shape (samples, machines)
        Speeds in the unit of the trace; NaN where a machine has no sample.

    Raises
    ------
    click.ClickException
        If the data are missing, or there is no such trace.
    """
    if name not in ALL:
        raise click.ClickException(f"There is no trace {name!r}: choose from {', '.join(ALL)}.")
    data = folder()
    if data is None:
        raise click.ClickException(
            "This needs the traces of real machines: set DASK_CODED_DATA to their folder."
        )
    if name == "azure2017":
        speeds = 100.0 - np.load(data / "trace_azure2017_avg_cpu_100vm.npz")["util_percent"]
    elif name == "google2011":
        speeds = 100.0 - np.load(data / "trace_google2011_vm_cpu_mem.npz")["cpu_percent"].T
    elif name == "nab":
        speeds = _nab(data / "trace_nab_cpu_utilization.zip")
    elif name.startswith("bytedance-"):
        speeds = _bytedance(data / f"trace_{name.replace('-', '_')}.parquet")
    else:
        speeds = _noise(data / "trace_azure_vm_noise_long.npz", _NOISE[name])
    return np.clip(speeds.astype(np.float64), 0.0, None)


Over = Literal["machine", "trace"]


@dataclass(frozen=True)
class Part:
    """A part of every trace: some of the machines, some of the time.

    Held-out machines are spread evenly over the file, because neighbours in it are similar (same
    region, size or job): machine i is held out if 3 i mod 10 < 3. There is no seed to choose.
    """

    first: float
    last: float
    held_out: bool
    description: str

    def has(self, machine: int) -> bool:
        """Return whether the machine of this number belongs to the part."""
        return (3 * machine % 10 < 3) == self.held_out

    def targets(self, length: int) -> range:
        """Return the samples to predict for a machine with ``length`` samples."""
        return range(max(8, int(self.first * length)), int(self.last * length))


PARTS = {
    "training": Part(0.0, 0.7, False, "70 % of the machines, first 70 % of the time"),
    "validation": Part(0.7, 0.8, False, "the same machines, the next 10 % of the time"),
    "test": Part(0.8, 1.0, True, "the other 30 % of the machines, last 20 % of the time"),
}


def series(name: str, over: Over = "machine") -> list[np.ndarray]:
    """Return the relative speeds of each machine.

    Parameters
    ----------
    name : str
    over : {"machine", "trace"}
        What speeds are divided by: the machine's own mean before the test (first 80 % of the time),
        or the mean of these over all machines, which keeps the differences between machines.

    Returns
    -------
    list of ndarray, shape (samples,)
        One array for each machine, without its missing samples.
    """
    out = [column[~np.isnan(column)] for column in load(name).T]
    means = np.array([values[: before_test(values)].mean() for values in out])
    if over == "trace":
        means[:] = means.mean()
    return [values / mean for values, mean in zip(out, means, strict=True)]


def before_test(values: np.ndarray) -> int:
    """Return the number of a machine's samples before those of the test."""
    return PARTS["test"].targets(len(values)).start


def _nab(file: Path) -> np.ndarray:
    """Return eight virtual machines' equally long traces, without databases and scaling group."""
    columns = []
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            if "ec2_cpu" not in name:
                continue
            with archive.open(name) as raw:
                rows = csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8"))
                columns.append([100.0 - float(row["value"]) for row in rows])
    return np.array(columns).T


def _noise(file: Path, metric: str) -> np.ndarray:
    """Return one benchmark on all machines; bandwidths and rates are speeds already."""
    archive = np.load(file)
    names = [" ".join(words).lower().replace("_", " ") for words in archive["series_name"]]
    columns = []
    for number, name in enumerate(names):
        if metric not in name:
            continue
        here = archive["series"] == number
        for machine in np.unique(archive["vm"][here]):
            mine = here & (archive["vm"] == machine)
            columns.append(archive["value"][mine][np.argsort(archive["t"][mine], kind="stable")])
    out = np.full((max(map(len, columns)), len(columns)), np.nan)
    for column, values in zip(out.T, columns, strict=True):
        column[: len(values)] = values
    return out


def _bytedance(file: Path) -> np.ndarray:
    """Return the computing speed of each rank in each step, as one over its seconds."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise click.ClickException(
            "Reading this trace needs pyarrow: pip install 'dask-coded[bench]'."
        ) from None
    table = parquet.read_table(file, columns=["optype", "rank", "step", "duration"])
    kind = np.array(table["optype"].to_pylist())
    computing = np.isin(kind, ["forward-compute", "backward-compute"])
    ranks, rank = np.unique(table["rank"].to_numpy()[computing], return_inverse=True)
    steps, step = np.unique(table["step"].to_numpy()[computing], return_inverse=True)
    seconds = np.zeros((len(steps), len(ranks)))
    np.add.at(seconds, (step, rank), table["duration"].to_numpy()[computing])
    return 1 / seconds
