"""Asks the scheduler and all workers of a cluster for the facts, through a client.

Each worker is asked separately, so that a stopped or unreachable worker delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from distributed.comm import get_address_host
from distributed.versions import get_versions

from dask_coded._version import __version__
from dask_coded.diagnosis import remote
from dask_coded.diagnosis.facts import PACKAGES, ClusterFacts, Link, Reply, WorkerFacts

if TYPE_CHECKING:
    from distributed import Client

_OWN = "dask-coded"
# Beside what Dask says anyway. Old releases import what they are asked for.
_ASKED = ["dask_coded", "scipy"]
# Says as text, which needs no package there, which version of it runs; None without the package.
_RUNNING = (
    "__import__('importlib.util').util.find_spec('dask_coded')"
    " and __import__('dask_coded._version')._version.__version__"
)
# Connecting to peers takes one timeout, and as much for the round trips; the answer comes after.
_TOWARDS = 3
# Workers that are asked at once.
_AT_ONCE = 64


async def collect(client: Client, *, timeout: float, peers: int) -> ClusterFacts:
    """Return what can be known of a cluster; runs on the client's event loop.

    Parameters
    ----------
    client : distributed.Client
    timeout : float
        Seconds for which each answer is waited for.
    peers : int
        To how many others each worker tries to connect, at most.
    """
    return await _Collector(client, timeout).facts(peers)


class _Collector:
    def __init__(self, client: Client, timeout: float) -> None:
        self._client = client
        self._scheduler: Any = client.scheduler
        self._timeout = timeout
        self._ours = _versions(get_versions(packages=_ASKED))
        # Of the code that runs, whatever an installer has noted.
        self._ours[_OWN] = __version__

    async def facts(self, peers: int) -> ClusterFacts:
        before = await self._workers()
        theirs = _versions(await self._scheduler.versions(packages=_ASKED))
        message = {"op": "versions", "packages": _ASKED}
        versions = await self._each(before, lambda address: self._request(address, message))
        silent = [address for address, answer in versions.items() if answer is None]
        after = await self._workers() if silent else before
        packages = {address: _versions(answer) for address, answer in versions.items() if answer}
        await self._correct(theirs, packages)
        known = await self._known_to_scheduler(theirs)

        # Others may have no such functions.
        able = [a for a, has in packages.items() if has.get(_OWN) == __version__]
        hold = (_TOWARDS + 1) * self._timeout
        answers = await self._each(able, lambda a: self._run(a, remote.on_worker, hold))
        # It imports the package first, which takes seconds, and many times more on a busy host.
        late = (
            f"it gave no answer within {self._timeout:g} seconds, perhaps because it was still "
            "importing dask-coded; try again, or raise --timeout"
        )
        errors = {a: late for a, x in answers.items() if x is None}
        errors |= {a: repr(x) for a, x in answers.items() if isinstance(x, Exception)}
        own = {a: x for a, x in answers.items() if isinstance(x, dict)}
        places = {a: x["place"] for a, x in own.items() if x["place"] is not None}
        answering = list(packages)

        def towards(address: str) -> Awaitable[Any]:
            others = _spread(answering, address, peers)
            near = {a: places[a] for a in places if a != address and _near(a, address)}
            waited = _TOWARDS * self._timeout
            return self._run(address, remote.towards, others, near, self._timeout, timeout=waited)

        outward = await self._each(own, towards)
        found = []
        for address, info in before.items():
            mine, seen = own.get(address, {}), outward.get(address)
            # A worker on its host that offers nothing cannot be read either.
            near = [a for a in own if a != address and _near(a, address)]
            if not isinstance(seen, dict):
                seen, near = {"links": {}, "readable": {}}, []
            found.append(
                WorkerFacts(
                    address=address,
                    name=str(info["name"]),
                    host=info["host"],
                    status=info["status"],
                    threads=info["nthreads"],
                    memory=info["memory_limit"] or 0,
                    reply=_reply(address, packages, before, after),
                    versions=packages.get(address, {}),
                    asked=bool(mine),
                    error=errors.get(address, ""),
                    plugins=tuple(mine["plugins"]) if mine else None,
                    refused=known.get("refused", {}).get(address, ""),
                    memory_wanted=mine.get("wanted"),
                    memory_offered=address in places if mine else None,
                    readable={a: bool(seen["readable"].get(a)) for a in near},
                    links={a: _link(x) for a, x in seen["links"].items()},
                    product=mine.get("product"),
                    speed=known.get("speeds", {}).get(address),
                )
            )
        plugins = tuple(known["plugins"]) if "plugins" in known else None
        return ClusterFacts(self._scheduler.address, self._ours, theirs, plugins, tuple(found))

    async def _workers(self) -> Mapping[str, Any]:
        identity = await self._scheduler.identity()
        workers: Mapping[str, Any] = identity["workers"]
        return workers

    async def _correct(self, theirs: dict[str, str], packages: dict[str, dict[str, str]]) -> None:
        """Name the versions that run, where an installer has noted others, or none."""
        if theirs.get(_OWN) != __version__:
            asked: Any = self._client.run_on_scheduler
            with suppress(Exception):  # it may fail to import the package
                async with asyncio.timeout(self._timeout):
                    if version := await asked(eval, _RUNNING):
                        theirs[_OWN] = version
        odd = [address for address, has in packages.items() if has.get(_OWN) != __version__]
        for address, version in (await self._each(odd, self._running_version)).items():
            if isinstance(version, str):
                packages[address][_OWN] = version

    async def _running_version(self, address: str) -> Any:
        return await self._run(address, eval, _RUNNING)

    async def _known_to_scheduler(self, versions: Mapping[str, str]) -> dict[str, Any]:
        if versions.get(_OWN) != __version__:
            return {}
        ask: Any = self._client.run_on_scheduler
        found: dict[str, Any] = await ask(remote.on_scheduler)
        return found

    async def _each(self, addresses: Any, ask: Callable[[str], Awaitable[Any]]) -> dict[str, Any]:
        """Ask some workers, not too many at once; the answer of a silent worker is None."""
        addresses = list(addresses)
        # Each takes connections of the scheduler, which must not run out of them.
        some = asyncio.Semaphore(_AT_ONCE)

        async def one(address: str) -> Any:
            async with some:
                return await ask(address)

        answers = await asyncio.gather(*map(one, addresses))
        return dict(zip(addresses, answers, strict=True))

    async def _request(self, address: str, message: Mapping[str, Any]) -> Any:
        """Return a worker's answer to a request of Dask's; None without one."""
        try:
            async with asyncio.timeout(self._timeout):
                found = await self._scheduler.broadcast(
                    msg=message, workers=[address], on_error="return"
                )
        except TimeoutError:
            return None
        answer = found.get(address)
        return None if isinstance(answer, Exception) else answer

    async def _run(
        self, address: str, function: Any, *args: Any, timeout: float | None = None
    ) -> Any:
        """Return what a function returns on a worker, or its exception; None without an answer."""
        run: Any = self._client.run
        try:
            async with asyncio.timeout(timeout or self._timeout):
                found = await run(function, *args, workers=[address], on_error="return")
        except TimeoutError:
            return None
        return found.get(address)


def _versions(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages that matter."""
    host, packages = found["host"], dict(found["packages"])
    packages[_OWN] = packages.get("dask_coded")
    python = ".".join(host["python"].split(".")[:3])
    versions = {name: packages.get(name) for name in PACKAGES} | {"python": python}
    return {name: version for name, version in versions.items() if version}


def _spread(addresses: Sequence[str], own: str, count: int) -> list[str]:
    """Return to which others a worker connects: evenly spread, so that each is tried as often."""
    at = addresses.index(own)
    others = [*addresses[at + 1 :], *addresses[:at]]
    count = min(count, len(others))
    return [others[i * len(others) // count] for i in range(count)]


def _near(address: str, other: str) -> bool:
    return _host(address) == _host(other)


@cache  # all pairs are compared
def _host(address: str) -> str:
    return str(get_address_host(address))


def _link(found: float | str) -> Link:
    return Link(None, found) if isinstance(found, str) else Link(found)


def _reply(
    address: str, answered: Any, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Reply:
    if address in answered:
        return Reply.ANSWERS
    beats = [at[address]["last_seen"] for at in (before, after) if address in at]
    return Reply.UNREACHABLE if len(beats) == 2 and beats[1] > beats[0] else Reply.SILENT
