"""Time training steps beside those of PyTorch's DDP in the same worker processes.

Four workers compute 256 samples each in a step: of a dense network of 1.3 million weights, whose
gradient takes 5 MB, or of a convolutional one of 80 thousand. Each worker has 0.4 of a core, or one
of them has 0.1. Links have no limit, or 200 Mbit/s, also that of the leader. The methods take
turns. DDP sums by gloo, in tasks on the workers; it needs no leader, while that of the others is on
a worker of its own.

A row is the median of a method's steps over that of DDP's. Without a network lab nothing is run.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import dask.array as da
import numpy as np
import torch
from distributed import get_worker

import dask_coded as coded
from benchmarks import mnist
from benchmarks.network import NetworkLab, unavailable
from benchmarks.report import Report, Summary, options
from dask_coded.aggregation import Aggregation, GradientCoding, Ring, Squeeze
from dask_coded.training import SGD, TorchModule

#: What a worker may use of a core, and what a slow one may.
SHARE, SLOW = 0.4, 0.1
COLUMNS, CLASSES, RATE = 784, 10, 0.01
#: Batches that the data hold.
BATCHES = 4


MODELS: dict[str, Callable[[], torch.nn.Sequential]] = {
    "MLP": mnist.Net("wide").module,
    "CNN": mnist.Net("convolutional").module,
}
#: Units of a step: the smallest that pay, of 64 samples for dense layers and 32 for convolutions.
METHODS: dict[str, dict[str, Aggregation]] = {
    model: {"Squeeze": Squeeze(units=units), "Ring": Ring(), "gradient coding": GradientCoding(1)}
    for model, units in (("MLP", 16), ("CNN", 32))
}


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    workers: int = 4
    samples: int = 256
    #: Steps that are timed, and those before, in which speeds are learnt and data are fetched.
    steps: int = 8
    before: int = 4
    turns: int = 1
    models: tuple[str, ...] = tuple(MODELS)
    links: tuple[str | None, ...] = (None, "200mbit")


SMOKE = Size(workers=2, samples=8, steps=2, before=2, turns=1, models=("CNN",), links=(None,))


@click.command()
@options
@click.option("--only", multiple=True, help="A model and a link, as 'MLP none'. Other rows stay.")
def main(json_file: Path | None, png_file: Path | None, smoke: bool, only: tuple[str, ...]) -> None:
    """Time steps over those of PyTorch's DDP, with and without a slow worker."""
    if png_file is not None:
        raise click.UsageError("This benchmark draws no picture: leave out --png.")
    report = Report("ddp")
    if reason := unavailable():
        report.machine["without a network lab"] = reason
        print(f"Skipping all runs: {reason}")
        report.finish(json_file)
        return
    size = SMOKE if smoke else Size()
    # Convolutions of this size send little.
    cases = [(m, link) for link in size.links for m in size.models if link is None or m == "MLP"]
    if only:
        cases = [(m, link) for m, link in cases if f"{m} {link or 'none'}" in only]
        if json_file is not None and json_file.exists():
            rows = json.loads(json_file.read_text())["rows"]
            report.rows += [row for row in rows if (row["model"], row["link"]) not in cases]
    for link in dict.fromkeys(link for _, link in cases):
        with NetworkLab(size.workers, link, free_rate=link) as lab:
            for model in [m for m, rate in cases if rate == link]:
                for _ in measured(report, lab, size, model, link):
                    if json_file is not None:  # a whole run takes minutes
                        report.write_json(json_file)
    report.finish(json_file)


def measured(
    report: Report, lab: NetworkLab, size: Size, model: str, link: str | None
) -> Iterator[str]:
    """Add the rows of one model on links of one rate; yield which workers are slow after each."""
    rng = np.random.default_rng(0)
    rows = BATCHES * size.workers * size.samples
    X = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
    y = rng.integers(CLASSES, size=rows)
    chunk = rows // size.workers
    held = [da.from_array(part, chunks=(chunk, *part.shape[1:])) for part in (X, y)]
    data = lab.client.persist(held, workers=lab.workers)
    blocks = [lab.client.compute(list(part.to_delayed().ravel())) for part in data]
    try:
        for name, slow in (("nobody slow", SHARE), ("one at a quarter", SLOW)):
            lab.set_shares(np.inf)
            run(lab, size, model, data, blocks, "DDP", steps=1)  # imports PyTorch
            lab.set_shares([SHARE] * (size.workers - 1) + [slow])
            seconds: dict[str, list[float]] = {method: [] for method in ("DDP", *METHODS[model])}
            for _ in range(size.turns):
                for method, found in seconds.items():
                    found += run(lab, size, model, data, blocks, method, size.steps)
                    print(f"{model}, {link or 'no limit'}, {name}: {method} {found[-1]:.3f} s")
            keys: dict[str, Any] = {"model": model, "link": link, "slow": name}
            case = f"{model}, {link or 'no limit'}, {name}"
            for method, found in seconds.items():
                step = Summary.of(np.array(found) * 1e3)
                report.add(f"{case}: {method}", "step", step, "ms", method=method, **keys)
                if method != "DDP":
                    ratio = Summary.of(np.array(found) / np.median(seconds["DDP"]))
                    report.add(f"{case}: {method}", "step_over_ddp", ratio, method=method, **keys)
            yield name
    finally:
        lab.set_shares(np.inf)


def run(
    lab: NetworkLab,
    size: Size,
    model: str,
    data: list[Any],
    blocks: list[Any],
    method: str,
    steps: int,
) -> list[float]:
    """Return the seconds of each counted step of one training."""
    if method == "DDP":
        client = lab.client
        with tempfile.TemporaryDirectory() as folder:
            futures = [
                client.submit(
                    train_ddp,
                    model,
                    *(part[rank] for part in blocks),
                    rank,
                    size,
                    steps,
                    str(Path(folder) / "meeting"),
                    workers=[address],
                    pure=False,
                )
                for rank, address in enumerate(lab.workers)
            ]
            # A step has ended when it has on all workers.
            return np.max(client.gather(futures), axis=0).tolist()
    module = TorchModule(MODELS[model](), torch.nn.CrossEntropyLoss(reduction="sum"))
    found = coded.training.train(
        module.gradient,
        module.parameters,
        tuple(data),
        optimizer=SGD(RATE),
        layers=module.layers,
        batch_size=size.workers * size.samples,
        steps=size.before + steps,
        aggregation=METHODS[model][method],
        client=lab.client,
        workers=lab.workers,
        leader=lab.free,
    )
    seconds = [step.seconds for step in found.history[size.before :]]
    return [spent for spent in seconds if np.isfinite(spent)]


def train_ddp(
    model: str, X: np.ndarray, y: np.ndarray, rank: int, size: Size, steps: int, meeting: str
) -> list[float]:
    """Train by DDP, as one of the workers; return the seconds of each counted step."""
    # Gloo listens on the address of the host's name otherwise.
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(get_worker().state.nthreads)
    # Not by TCP: it looks up the names of peers, and the lab's hosts have no name server to ask.
    store = torch.distributed.FileStore(meeting, size.workers)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size.workers)
    try:
        return step_ddp(model, X, y, rank, size, steps)
    finally:
        # The module may be in a cycle. If it went after the group, the group's end would hold the
        # interpreter while it waits for threads that need it: one run of some twenty stood still.
        gc.collect()
        torch.distributed.destroy_process_group()


def step_ddp(
    model: str, X: np.ndarray, y: np.ndarray, rank: int, size: Size, steps: int
) -> list[float]:
    """Return the seconds of each counted step, in a process group that is there."""
    net = torch.nn.parallel.DistributedDataParallel(MODELS[model]())
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    samples, targets = torch.tensor(X), torch.tensor(y)
    rng = np.random.default_rng(rank)
    seconds = []
    for _ in range(size.before + steps):
        began = time.perf_counter()
        rows = torch.from_numpy(rng.choice(len(X), size.samples, replace=False))
        optimizer.zero_grad()
        loss(net(samples[rows]), targets[rows]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds[size.before :]


if __name__ == "__main__":
    main()
