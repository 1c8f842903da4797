"""Read traces of real machines as speeds: one row per sample, one column per machine.

The files are in the folder that ``DASK_CODED_DATA`` names. For traces of utilisation, the speed is
the capacity that others leave: 100 - utilisation in per cent. Every machine's speed is divided by
its own mean.
"""

from __future__ import annotations

import csv
import io
import os
import zipfile
from functools import cache
from pathlib import Path

import click
import numpy as np

#: Traces by the name that reports use.
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

# Series of the virtual machine noise study, by a part of their names.
_NOISE = {
    "stream-triad": "stream-triad",
    "all-reads": "all reads",
    "cpu-cache": "cpu cache",
    "matrix-math": "matrix math",
}


def folder() -> Path | None:
    """Return the folder of the data, or None if there is none."""
    path = os.environ.get("DASK_CODED_DATA")
    return Path(path) if path and Path(path).is_dir() else None


@cache
def load(name: str) -> np.ndarray:
    """Read a trace.

    Returns
    -------
    ndarray, shape (samples, machines)
        Speeds, each machine's over its own mean; NaN where a machine has no sample.

    Raises
    ------
    click.ClickException
        If the data are missing, or there is no such trace.
    """
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
    elif name == "bytedance-SE":
        speeds = _bytedance(data / "trace_bytedance_SE.parquet")
    elif name in _NOISE:
        speeds = _noise(data / "trace_azure_vm_noise_long.npz", _NOISE[name])
    else:
        raise click.ClickException(f"There is no trace {name!r}: choose from {', '.join(NAMES)}.")
    speeds = np.clip(speeds.astype(np.float64), 0.0, None)
    return speeds / np.nanmean(speeds, axis=0)


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
