"""Judges the facts about a cluster: what must be fixed, what could be better, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dask_coded.diagnosis.facts import ClusterFacts, Reply, WorkerFacts
from dask_coded.rounds.placement import not_slow

_OWN = "dask-coded"
# A finding names at most this many other workers.
_LISTED = 5
_PORT = ", which 'dask worker --worker-port' fixes"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a cluster, or could be better.

    Parameters
    ----------
    severity : {"error", "advice"}
        An error keeps the cluster, or a worker, from taking part in coded rounds, or makes them
        fail. Advice is about speed, or about differences that may matter.
    address : str
        Of the worker or the scheduler that it is about.
    text : str
        What was found and what to do, in one line.
    """

    severity: Literal["error", "advice"]
    address: str
    text: str


def findings(cluster: ClusterFacts) -> list[Finding]:
    """Return what is wrong with a cluster, errors first.

    Examples
    --------
    >>> from dask_coded.diagnosis.facts import ClusterFacts, WorkerFacts
    >>> ours = {"dask-coded": "0.3", "python": "3.12.1"}
    >>> worker = WorkerFacts("tcp://10.0.0.2:4000", versions={"python": "3.12.1"})
    >>> cluster = ClusterFacts("tcp://10.0.0.1:8786", ours, ours, ("rounds",), (worker,))
    >>> [finding.text for finding in findings(cluster)]
    ['Worker tcp://10.0.0.2:4000 has no dask-coded: install version 0.3 there.']
    """
    found = list(_all(cluster))
    return sorted(found, key=lambda finding: finding.severity != "error")


def _all(cluster: ClusterFacts) -> Iterator[Finding]:
    ours = cluster.client_versions
    where = f"The scheduler at {cluster.scheduler}"
    yield from _versions(where, cluster.scheduler, cluster.scheduler_versions, ours)
    slow = _slow(cluster.workers)
    for worker in cluster.workers:
        name = _named(worker)
        if worker.reply is not Reply.ANSWERS:
            yield _unanswered(worker)
            continue
        yield from _versions(name, worker.address, worker.versions, ours)
        if worker.error:
            yield Finding(
                "error",
                worker.address,
                f"{name} cannot be examined: {worker.error}. Its log says more.",
            )
        if worker.refused:
            yield Finding(
                "error",
                worker.address,
                f"{name} has refused dask-coded's plugin: {worker.refused}. Fix that, then "
                "restart the worker.",
            )
        if worker.status != "running":
            yield Finding(
                "advice",
                worker.address,
                f"{name} is {worker.status}, so Dask gives it no tasks: a worker that is paused "
                "is short of memory.",
            )
        yield from _memory(worker)
        if worker.address in slow:
            yield Finding(
                "advice",
                worker.address,
                f"{name} is slow{slow[worker.address]}. Coded rounds give it less work, so nothing "
                "need be done. If it should be as fast as the others, look what else runs on its "
                "host, and at the limits of its processor time.",
            )
    yield from _one_cause(cluster, list(_links(cluster)))


def _named(worker: WorkerFacts) -> str:
    more = "" if worker.name in ("", worker.address) else f" ({worker.name})"
    return f"Worker {worker.address}{more}"


def _unanswered(worker: WorkerFacts) -> Finding:
    name = _named(worker)
    if worker.reply is Reply.UNREACHABLE:
        text = (
            f"{name} sends heartbeats but does not answer the scheduler. Either a firewall keeps "
            "connections from it, or its event loop is blocked: open the port, fix it with "
            "'dask worker --worker-port', or name the address that others can reach with "
            "'--contact-address'."
        )
    else:
        text = (
            f"{name} does not answer and sends no heartbeats, so it is stopped, blocked or "
            "has lost its network: look at its process, or restart it."
        )
    return Finding("error", worker.address, text)


def _versions(
    name: str, address: str, theirs: Mapping[str, str], ours: Mapping[str, str]
) -> Iterator[Finding]:
    own = ours.get(_OWN, "")
    if _OWN not in theirs:
        yield Finding("error", address, f"{name} has no dask-coded: install version {own} there.")
    elif theirs[_OWN] != own:
        yield Finding(
            "error",
            address,
            f"{name} has dask-coded {theirs[_OWN]}, this client has {own}: install the same "
            "version on all of them.",
        )
    here, there = ours.get("python", ""), theirs.get("python", "")
    if here.split(".")[:2] != there.split(".")[:2]:
        yield Finding(
            "error",
            address,
            f"{name} has Python {there}, this client has {here}: functions cannot be sent from one "
            "to the other. Use the same minor version.",
        )
    other = [
        f"{package} {theirs.get(package, 'missing')} (here {version})"
        for package, version in ours.items()
        if package not in (_OWN, "python") and theirs.get(package) != version
    ]
    if other:
        yield Finding(
            "advice",
            address,
            f"{name} has other versions: {', '.join(other)}. Dask is made for one environment "
            "everywhere.",
        )


def _memory(worker: WorkerFacts) -> Iterator[Finding]:
    if not worker.readable:
        return  # no other worker is on this host
    name = _named(worker)
    if worker.memory_wanted is False:
        text = "is told not to: `coded.shared-memory` is false in its configuration"
    elif worker.memory_offered is False:
        text = "cannot: it needs Linux, and a container that allows `memfd_create`"
    elif hidden := [address for address, seen in worker.readable.items() if not seen]:
        text = (
            f"cannot read that of {_some(hidden)}: give them the same user and the same process "
            "namespace, for example in one container or with a shared one"
        )
    else:
        return
    yield Finding(
        "advice",
        worker.address,
        f"{name} shares no memory with other workers on its host, so operands and results are "
        f"copied. It {text}.",
    )


def _slow(workers: tuple[WorkerFacts, ...]) -> dict[str, str]:
    """Return by what measure each slow worker is slow; the rule is that for coordinators."""
    probed = [w for w in workers if w.product is not None]
    products = np.array([w.product for w in probed], dtype=np.float64)
    now = not_slow(np.ones(len(probed)), products).tolist()
    slow = {
        worker.address: f": {products.min() / products[i]:.0%} of the fastest worker's speed in a "
        "small product"
        for i, worker in enumerate(probed)
        if not now[i]
    }
    rounds = [w for w in workers if w.speed is not None]
    speeds = np.array([w.speed for w in rounds], dtype=np.float64)
    for worker, fast in zip(rounds, not_slow(speeds).tolist(), strict=True):
        if not fast:
            usual = worker.product is not None and worker.address not in slow
            more = ", but not in a small product now" * usual
            slow[worker.address] = (
                f": {worker.speed:.0%} of the fastest worker's speed in its last rounds{more}"
            )
    return slow


def _links(cluster: ClusterFacts) -> Iterator[Finding]:
    tried = [(a.address, b, link) for a in cluster.workers for b, link in a.links.items()]
    failed = [(a, b, link.error) for a, b, link in tried if link.seconds is None]
    if not failed:
        return
    if len(failed) == len(tried) > 1:
        yield Finding(
            "error",
            cluster.scheduler,
            f"No worker can connect to any other ({failed[0][2]}), which coded rounds need: open "
            f"the ports of the workers to each other{_PORT}.",
        )
        return
    reaching = {a for a, _, link in tried if link.seconds is not None}
    reached = {b for _, b, link in tried if link.seconds is not None}
    for worker in cluster.workers:
        name, address = _named(worker), worker.address
        # A failure is the fault of the end that fails with all others, if the other end does not.
        out = [(b, error) for a, b, error in failed if a == address and b in reached]
        if out and address not in reaching:
            yield Finding(
                "error",
                address,
                f"{name} can connect to none of the {len(worker.links)} workers that it tried "
                f"({out[0][1]}): a firewall keeps its connections from going out.",
            )
        into = [(a, error) for a, b, error in failed if b == address]
        into = [(a, error) for a, error in into if a in reaching or address not in reached]
        if not into:
            continue
        if address not in reached and any(a in reaching for a, _ in into):
            yield Finding(
                "error",
                address,
                f"{name}: none of the workers that tried can connect to it ({into[0][1]}). A "
                "firewall keeps them out, or its address is not known to them: open its "
                f"port{_PORT}, or name an address that they know with '--contact-address'.",
            )
        else:
            yield Finding(
                "error",
                address,
                f"{name}: {_some([a for a, _ in into])} cannot connect to it ({into[0][1]}). Look "
                "at the firewalls and routes between them.",
            )


def _one_cause(cluster: ClusterFacts, found: list[Finding]) -> list[Finding]:
    """Return a single finding instead of several if all links that fail end at one worker."""
    failed = [
        (a.address, b, link.error)
        for a in cluster.workers
        for b, link in a.links.items()
        if link.seconds is None
    ]
    ends = set.intersection(*({a, b} for a, b, _ in failed)) if failed else set()
    if len(found) < 2 or len(ends) != 1:
        return found
    [address] = ends
    others = sorted({end for a, b, _ in failed for end in (a, b)} - ends)
    worker = next(w for w in cluster.workers if w.address == address)
    return [
        Finding(
            "error",
            address,
            f"{_named(worker)}: connections between it and {_some(others)} fail "
            f"({failed[0][2]}), those between other workers do not. Look at its firewall and its "
            "routes.",
        )
    ]


def _some(addresses: Sequence[str]) -> str:
    more = len(addresses) - _LISTED
    return ", ".join(addresses[:_LISTED]) + f" and {more} more" * (more > 0)
