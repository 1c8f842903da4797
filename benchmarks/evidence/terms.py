"""The complete timing model of a training step: each term is measured, the step is predicted.

With ``p`` workers, ``n`` numbers of 4 bytes, latency ``a``, ``b`` seconds and ``g`` seconds of
summing per byte, codec seconds ``c`` to pack and ``d`` to unpack a gradient, a codec's ratio ``r``,
update ``u`` and synchronisation ``s`` [1]_::

    ring              2 (p-1) a + (p-1)/p 4n (2 b/r + g) + c + 2 (p-1)/p d + s
    halving-doubling  2 log2(p) a + (p-1)/p 4n (2 b/r + g) + c + 2 (p-1)/p d + s
    server            2 a + p 4n (2 b/r + g) + 2 c + (p + 1) d + s

A synchronous step takes computation and update besides, a pipelined one the longer of the two.

References
----------
.. [1] Li, Yu, Li, Avestimehr, Kim and Schwing, "Pipe-SGD", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

import dask_coded as coded
from benchmarks.evidence.trainings import COMPRESSIONS
from benchmarks.network import NetworkLab
from dask_coded.aggregation import Ring
from dask_coded.compression import Codec, Partial
from dask_coded.training import SGD, measure_costs

#: Bytes of a number over those that a codec sends.
RATIOS = {"none": 1.0, "16 bits": 2.0, "8 bits": 4.0}


def measure_terms(lab: NetworkLab, numbers: int, repetitions: int = 5) -> dict[str, float]:
    """Return the terms, in seconds: those of bytes and codecs for a whole gradient.

    Parameters
    ----------
    lab : NetworkLab
    numbers : int
        Length of a gradient.
    """
    workers, client = lab.workers, lab.client
    costs = measure_costs(
        client=client, workers=workers, leader=[lab.free], repetitions=repetitions
    )
    latency = client.run(_empty, workers[1], repetitions, workers=workers[:1])[workers[0]]
    tiny = coded.training.train(
        _nothing,
        np.zeros(len(workers), np.float32),
        (np.zeros((len(workers), 1), np.float32), np.zeros(len(workers), np.float32)),
        steps=2 * repetitions + 1,
        aggregation=Ring(),
        client=client,
        workers=workers,
        leader=lab.free,
    )
    step = float(np.median([found.seconds for found in tiny.history[1:]]))
    nbytes = 4 * numbers
    found = {
        "numbers": float(numbers),
        "latency": latency,
        "transfer": nbytes / costs.bandwidth,
        "summation": nbytes * costs.summation,
        "synchronisation": max(step - 2 * (len(workers) - 1) * latency, 0.0),
        "update": _median(client.run(_update, numbers, repetitions, workers=workers)),
    }
    for name in ("16 bits", "8 bits"):
        codec = COMPRESSIONS[name]
        assert isinstance(codec, Codec)
        for what in ("pack", "unpack"):
            times = client.run(_coded, codec, what, numbers, repetitions, workers=workers)
            found[f"{what}, {name}"] = _median(times)
    return found


def predicted(
    rows: Sequence[Mapping[str, Any]], terms: Mapping[str, float], numbers: int
) -> float | None:
    """Return the predicted seconds of a step from its measured computation; None without terms.

    Parameters
    ----------
    rows : sequence of mapping
        Measured steps of one method, with ``computing``, ``workers``, ``aggregation``,
        ``compression`` and ``width``.
    terms : mapping of str to float
        As `measure_terms` returns them.

    Examples
    --------
    >>> row = {"computing": 0.1, "workers": 4, "aggregation": "ring", "compression": "none"}
    >>> terms = {"latency": 0.0, "transfer": 0.2, "summation": 0.0, "synchronisation": 0.01}
    >>> terms["update"] = 0.02
    >>> [round(predicted([row | {"width": width}], terms, 1), 2) for width in (1, 2)]
    [0.43, 0.31]
    """
    first = rows[0]
    if not terms or first["computing"] is None:
        return None
    computing = float(np.median([row["computing"] for row in rows])) + terms["update"]
    moving = communication(first["aggregation"], first["compression"], first["workers"], terms)
    if moving is None:
        return None
    return computing + moving if first["width"] == 1 else max(computing, moving)


def communication(
    aggregation: str, compression: str, workers: int, terms: Mapping[str, float]
) -> float | None:
    """Return the seconds from the end of computing until all workers have the sum.

    None if the model does not have the aggregation or the codec.
    """
    if compression not in RATIOS:
        return None
    a, s, g = terms["latency"], terms["synchronisation"], terms["summation"]
    b = terms["transfer"] / RATIOS[compression]
    pack, unpack = (terms.get(f"{what}, {compression}", 0.0) for what in ("pack", "unpack"))
    share = (workers - 1) / workers
    around = share * (2 * b + g) + pack + 2 * share * unpack + s
    if aggregation == "ring":
        return 2 * (workers - 1) * a + around
    if aggregation == "halving-doubling":
        return 2 * math.log2(workers) * a + around
    if aggregation == "server":
        return 2 * a + workers * (2 * b + g) + 2 * pack + (workers + 1) * unpack + s
    return None


async def _empty(peer: str, repetitions: int, dask_worker: Any) -> float:
    """Return the seconds of an empty message to a peer, half of the round trip."""
    times = []
    for _ in range(repetitions + 1):  # the first connects
        began = perf_counter()
        await dask_worker.rpc(peer).echo(data=b"")
        times.append(perf_counter() - began)
    return min(times[1:]) / 2


def _nothing(parameters: Any, samples: Any, targets: Any) -> Any:
    return np.zeros_like(parameters)


def _update(numbers: int, repetitions: int) -> float:
    """Return the seconds of an update with momentum."""
    optimizer = SGD(0.01, momentum=0.9)
    parameters, gradient = np.zeros((2, numbers), np.float32)
    state = optimizer.start(parameters)
    return _seconds(lambda: optimizer.update(parameters, gradient, state, 0), repetitions)


def _coded(codec: Codec, what: str, numbers: int, repetitions: int) -> float:
    """Return the seconds to pack or to unpack a gradient."""
    partial = Partial(np.random.default_rng(0).standard_normal(numbers).astype(np.float32))
    packed = codec.pack(partial)
    if what == "pack":
        return _seconds(lambda: codec.pack(partial), repetitions)
    return _seconds(lambda: codec.unpack(packed), repetitions)


def _seconds(call: Any, repetitions: int) -> float:
    call()
    times = []
    for _ in range(repetitions):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return float(np.median(times))


def _median(times: Mapping[str, float]) -> float:
    return float(np.median([*times.values()]))
