"""A campaign of random faults while everything that the package does runs, and is checked.

Twelve workers run lazy rounds whose shares are verified, products of pairs, loops with and without
a state, and coded and squeezed trainings, and beside them products of stock Dask. Meanwhile workers
are stopped (SIGSTOP), killed (SIGKILL), slowed down, retired, paused, made to compute wrongly or to
spill their pieces, cut off (all packets are dropped) or put behind a thin link, whatever they are
at that moment: coordinator, leader of a training, keeper of a loop's state, or only a participant.
Several are hit at once, but no more than the codes tolerate.

Seeds with even numbers run on workers on hosts of their own (see `benchmarks.network`), the others
on workers that share memory, some of them under nannies. With ``--json`` seeds that the file has
already are left out, so a campaign can go on where it was interrupted. ``--page`` writes the table
of the documentation.

``--broadcasts`` runs a loop with operands of 8 MB instead, on workers on hosts of their own. They
are stopped, killed and cut off while an operand goes from host to host.

``--trainings`` runs squeezed trainings alone on six workers, with a fault every three seconds: all
must end with the same bits.

The report has the number of results and of wrong ones, the longest time without a result, and
what is left behind at the end of a seed in comparison with its beginning.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import dask
import numpy as np
from distributed import Client

from benchmarks.faults.campaign import STILL, BroadcastCampaign, Campaign, TrainingCampaign
from benchmarks.faults.loads import (
    LOADS,
    Arrays,
    KeptLoop,
    Load,
    SqueezedTrainings,
    StockProducts,
    start_all,
)
from benchmarks.faults.machines import Cluster, LocalCluster, NetworkCluster
from benchmarks.faults.page import table
from benchmarks.faults.residue import Counts, grown, residue, unsent
from benchmarks.network import unavailable
from benchmarks.report import Report, options

_WORKERS, _FEW = 12, 6
# Seconds that everything runs before the first fault, and after the last.
_QUIET = 4.0
# A process may have grown by this many MiB: memory is not returned to the system at once.
_MIB = 64


def run(
    report: Report,
    seed: int,
    faults: int,
    workers: int = _WORKERS,
    longest: float = 30.0,
    quiet: float = _QUIET,
    large: int = 60_000,
    broadcasts: bool = False,
    trainings: bool = False,
) -> None:
    """Run one seed on a fresh cluster.

    Parameters
    ----------
    report
    seed, faults, workers
    longest
        Seconds that a fault lasts at most.
    quiet
        Seconds without faults, before and after.
    large
        Rows of the sparse matrix.
    broadcasts
        Whether faults happen during broadcasts only.
    trainings
        Whether squeezed trainings run alone.
    """
    tolerance = workers // 3
    kind: type[Cluster] = LocalCluster if seed % 2 or unavailable() else NetworkCluster
    causes, kinds = Campaign, LOADS
    if broadcasts:
        kind, causes, kinds = NetworkCluster, BroadcastCampaign, (KeptLoop, StockProducts)
    if trainings:
        causes, kinds = TrainingCampaign, (SqueezedTrainings,)
    config = {
        # Dask gives up a task after the loss of three workers that ran it.
        "distributed.scheduler.allowed-failures": 10**6,
        "distributed.comm.timeouts.connect": "5s",
        # Half of the seeds of each kind of cluster, as most products are rounds without it.
        "coded.round.alone": seed % 4 >= 2,
    }
    with dask.config.set(config), kind(workers) as cluster:
        client = cluster.client
        arrays = partial(Arrays, client, workers, tolerance, large)
        _work(client, arrays(), kinds, quiet)  # what is made once is there now
        before = _settled(client, None)
        campaign = causes(cluster, seed, tolerance, longest)
        loads = _work(client, arrays(), kinds, quiet, lambda running: campaign.run(faults, running))
        after = _settled(client, before)
        waiting = client.run(unsent)
    more = grown(before, after)
    keys: dict[str, Any] = {"seed": seed, "cluster": kind.__name__, "workers": workers}
    case = f"seed {seed}"
    events = campaign.events(loads)
    names = [load.name for load in loads]
    report.add(case, "faults", len(events), unit="faults", loads=names, events=events, **keys)
    for load in loads:
        gap = float(np.diff(load.times).max()) if len(load.times) > 1 else 0.0
        ours = load.name != "Dask alone"
        row = keys | {"load": load.name}
        where = f"{case}, {load.name}"
        report.add(where, "results", len(load.times) - 1, unit="results", **row)
        report.add(where, "wrong", load.wrong, unit="results", goal=0, **row)
        if isinstance(load, SqueezedTrainings):
            report.add(where, "trainings", load.ended, unit="trainings", **row)
        report.add(
            where, "errors", len(load.errors), unit="errors", goal=0 if ours else None, **row
        )
        report.add(where, "longest_gap", gap, unit="s", goal=STILL if ours else None, **row)
        for error in load.errors if ours else ():
            print(f"{where}: {error}")
    report.add(case, "troubles", len(campaign.troubles), unit="cases", goal=0, **keys)
    left = {name: n for name, n in more.items() if not name.endswith("MiB")}
    report.add(case, "left_behind", sum(left.values()), unit="objects", goal=0, left=left, **keys)
    report.add(case, "grown", more.get("MiB", 0.0), unit="MiB", goal=_MIB, **keys)
    if left:
        print(f"{case} leaves {left}")
        for address, messages in waiting.items():
            print(*(f"{address} holds {message}" for message in messages), sep="\n")


def _work(
    client: Client,
    arrays: Arrays,
    kinds: tuple[type[Load], ...],
    seconds: float,
    meanwhile: Callable[[list[Load]], None] | None = None,
) -> list[Load]:
    """Let all loads run for a while, and while a function runs; then end them."""
    loads = start_all(client, arrays, kinds)
    time.sleep(seconds)
    if meanwhile is not None:
        meanwhile(loads)
        time.sleep(seconds)
    for load in loads:
        load.over.set()
    for load in loads:
        load.join(60)
        if load.is_alive():
            load.errors.append("It does not end.")
        load.release()
    return loads


def _settled(client: Client, before: Counts | None) -> Counts:
    """Return what is left, once it is no more than before, or after some seconds."""
    for _ in range(200):  # chunks of an operand whose round never came are kept for 30 s
        gc.collect()
        left = residue(client)
        if before is None and left["scheduler"]["tasks"] == 0:
            time.sleep(1.0)  # what the last tasks leave on workers is dropped by now
            return residue(client)
        if before is not None and all(name.endswith("MiB") for name in grown(before, left)):
            break
        time.sleep(0.2)
    return left


@click.command()
@click.option("--faults", default=100, show_default=True, help="Faults of each seed.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--seeds", default=2, show_default=True, help="How many.")
@click.option("--broadcasts", is_flag=True, help="Only while a large operand is on its way.")
@click.option("--trainings", is_flag=True, help="Only squeezed trainings, a fault every 3 seconds.")
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path), help="Write the table of all faults."
)
@click.option(
    "--timed", default=0, show_default=True, help="The first seed whose times the table shows."
)
@options
def main(
    faults: int,
    first: int,
    seeds: int,
    broadcasts: bool,
    trainings: bool,
    page: Path | None,
    timed: int,
    json_file: Path | None,
    png_file: Path | None,
    smoke: bool,
) -> None:
    """Cause random faults while rounds and trainings run."""
    if broadcasts and (reason := unavailable()):
        raise click.UsageError(f"--broadcasts needs hosts with links. {reason}")
    report = Report("faults")
    if json_file is not None and json_file.exists():
        report.rows += json.loads(json_file.read_text())["rows"]
    done = {row["seed"] for row in report.rows}
    if smoke:
        run(report, seed=1, faults=4, workers=_FEW, longest=0.5, quiet=0.5, large=20_000)
    for seed in () if smoke else range(first, first + seeds):
        if seed not in done:
            if broadcasts:
                run(report, seed, faults, longest=10.0, large=1_000_000, broadcasts=True)
            elif trainings:
                run(report, seed, faults, workers=_FEW, longest=5.0, trainings=True)
            else:
                run(report, seed, faults)
            if json_file is not None:  # a longer campaign may be interrupted
                report.write_json(json_file)
    report.finish(json_file)
    if page is not None:
        page.write_text(table(report.rows, timed))
