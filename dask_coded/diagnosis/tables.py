"""The facts about a cluster as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dask.utils import format_bytes

from dask_coded.diagnosis.facts import ClusterFacts, Reply, WorkerFacts
from dask_coded.diagnosis.findings import Finding

#: The columns of the table.
COLUMNS = (
    "worker",
    "versions",
    "plugins",
    "shared memory",
    "reached by",
    "round trip",
    "product",
    "rounds",
    "threads",
    "memory",
)


def rows(cluster: ClusterFacts) -> list[tuple[str, ...]]:
    """Return the cells of the table, one row for each worker."""
    products = [w.product for w in cluster.workers if w.product is not None]
    fastest = min(products, default=None)
    return [_row(worker, cluster, fastest) for worker in cluster.workers]


def _row(worker: WorkerFacts, cluster: ClusterFacts, fastest: float | None) -> tuple[str, ...]:
    links = [w.links[worker.address] for w in cluster.workers if worker.address in w.links]
    open_ones = [link.seconds for link in links if link.seconds is not None]
    shared = "-"
    if worker.readable:
        shared = f"{sum(worker.readable.values())} of {len(worker.readable)}"
    return (
        worker.address,
        _versions(worker, cluster),
        "-" if worker.plugins is None else ", ".join(worker.plugins) or "none",
        shared,
        f"{len(open_ones)} of {len(links)}" if links else "-",
        f"{statistics.median(open_ones) * 1e3:.1f} ms" if open_ones else "-",
        "-" if worker.product is None or fastest is None else f"{fastest / worker.product:.0%}",
        "-" if worker.speed is None else f"{worker.speed:.0%}",
        str(worker.threads),
        format_bytes(worker.memory) if worker.memory else "no limit",
    )


def _versions(worker: WorkerFacts, cluster: ClusterFacts) -> str:
    if worker.reply is not Reply.ANSWERS:
        return worker.reply.value
    differing = [
        f"{package} {worker.versions.get(package, 'missing')}"
        for package, version in cluster.client_versions.items()
        if worker.versions.get(package) != version
    ]
    return ", ".join(differing) or "as here"


def heading(cluster: ClusterFacts) -> str:
    """Return one line about the client and the scheduler."""
    ours = ", ".join(f"{name} {version}" for name, version in cluster.client_versions.items())
    return f"Scheduler {cluster.scheduler}, {len(cluster.workers)} workers. Versions here: {ours}."


def is_fit(found: Sequence[Finding]) -> bool:
    """Return whether nothing must be fixed."""
    return all(finding.severity != "error" for finding in found)


def summary(found: Sequence[Finding]) -> str:
    """Return the last line: whether something must be fixed."""
    if is_fit(found):
        return "All workers can take part in coded rounds."
    errors = sum(finding.severity == "error" for finding in found)
    return f"{errors} thing{'s' * (errors != 1)} to fix."


def as_json(cluster: ClusterFacts, found: Sequence[Finding]) -> dict[str, Any]:
    """Return facts and findings as what JSON can hold; what is not known is null."""
    facts = asdict(cluster)
    for worker, original in zip(facts["workers"], cluster.workers, strict=True):
        worker["reply"] = original.reply.value
    return {"fit": is_fit(found), "findings": [asdict(f) for f in found], **facts}
