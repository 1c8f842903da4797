"""PyTorch's DistributedDataParallel on the workers of a lab, with its hooks for compression."""

from __future__ import annotations

import gc
import itertools
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distributed import Client
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from benchmarks.evidence.asynchronous import batches
from benchmarks.mnist import Net, scaled
from dask_coded.training import SGD

#: Ports of successive trainings, because a closed one stays taken for a while.
_PORTS = itertools.count(29_500)


@dataclass(frozen=True)
class Trained:
    """Seconds of each step at the first worker, and its parameters after some of the steps."""

    seconds: np.ndarray
    snapshots: dict[int, np.ndarray]


def train(
    client: Client,
    workers: list[str],
    net: Net,
    data: tuple[list[Any], list[Any]],
    *,
    optimizer: SGD,
    batch: int,
    steps: int,
    hook: str = "",
    every: int = 0,
    seed: int = 0,
) -> Trained:
    """Train by PyTorch alone, over Gloo.

    Parameters
    ----------
    data : (samples, targets)
        Futures of each worker's rows, in the order of the workers.
    batch : int
        Samples of a step, over all workers.
    hook : str
        Empty, ``"16 bits"``, or ``"PowerSGD R"`` with the rank R.
    every : int
        Steps from one snapshot to the next; none by default.
    """
    address = workers[0].rpartition(":")[0]  # tcp://HOST
    where = f"{address}:{next(_PORTS)}"
    share = batch // len(workers)
    running = [
        client.submit(
            _worker,
            *(i, len(workers), where, net, *rows, optimizer, share, steps, hook, every, seed),
            workers=[worker],
            pure=False,
        )
        for i, (worker, *rows) in enumerate(zip(workers, *data, strict=True))
    ]
    found = client.gather(running)
    return Trained(*found[0])


def _worker(
    rank: int,
    world: int,
    where: str,
    net: Net,
    samples: np.ndarray,
    targets: np.ndarray,
    optimizer: SGD,
    batch: int,
    steps: int,
    hook: str,
    every: int,
    seed: int,
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    torch.set_num_threads(1)
    if os.path.exists("/sys/class/net/eth0"):  # the link of a lab's worker
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    try:
        return _trained(rank, net, samples, targets, optimizer, batch, steps, hook, every, seed)
    finally:
        # Before the group, whose end holds the interpreter while it waits for the module's threads.
        gc.collect()
        dist.destroy_process_group()


def _trained(
    rank: int,
    net: Net,
    samples: np.ndarray,
    targets: np.ndarray,
    optimizer: SGD,
    batch: int,
    steps: int,
    hook: str,
    every: int,
    seed: int,
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    module = net.module()
    # With several buckets, the hook's callbacks start their sums in an order that differs between
    # workers, and Gloo aborts.
    model = DistributedDataParallel(module, bucket_cap_mb=1000 if "PowerSGD" in hook else None)
    _register(model, hook)
    rule = torch.optim.SGD(
        model.parameters(), lr=optimizer.learning_rate, momentum=optimizer.momentum
    )
    snapshots, ends = {}, [time.perf_counter()]
    for step, rows in enumerate(batches(len(targets), batch, seed, rank), start=1):
        if step > steps:
            break
        rule.zero_grad()
        found = model(scaled(samples[rows]))
        cross_entropy(found, torch.tensor(targets[rows])).backward()
        rule.step()
        ends.append(time.perf_counter())
        if every and not step % every and not rank:
            snapshots[step] = parameters_to_vector(module.parameters()).detach().numpy().copy()
    dist.barrier()
    return np.diff(ends), snapshots


def _register(model: DistributedDataParallel, hook: str) -> None:
    if hook == "16 bits":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)
    elif hook:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        name, rank = hook.split()
        assert name == "PowerSGD"
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
