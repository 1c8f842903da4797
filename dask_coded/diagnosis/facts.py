"""What can be known of a cluster without encoding anything on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

#: Versions that matter to coded arrays, as they are called on package indexes.
PACKAGES = ("dask-coded", "python", "dask", "distributed", "numpy", "scipy", "msgpack")


class Reply(Enum):
    """How a worker replies when the scheduler asks it."""

    ANSWERS = "answers"
    #: Its heartbeats arrive, but the scheduler's requests get no answer.
    UNREACHABLE = "unreachable"
    #: Nothing comes from it.
    SILENT = "silent"


@dataclass(frozen=True)
class Link:
    """A connection from one worker to another.

    Parameters
    ----------
    seconds : float or None
        Of a round trip of a short message; None if there is no connection.
    error : str
        Why there is none.
    """

    seconds: float | None
    error: str = ""


@dataclass(frozen=True)
class WorkerFacts:
    """The facts about a worker; None if a fact is unknown.

    Parameters
    ----------
    address, name, host : str
    status : str
        As Dask calls it, for example ``running`` or ``paused``.
    threads : int
    memory : int
        Limit of its memory in bytes; 0 without a limit.
    reply : Reply
    versions : mapping of str to str
        Of the packages in :data:`PACKAGES` that it has.
    asked : bool
        Whether it could be asked for the facts that follow, which needs the client's version of
        dask-coded.
    error : str
        Why it could not answer that.
    plugins : tuple of str or None
        Those of dask-coded's plugins that are installed: ``rounds``, ``training``.
    refused : str
        Why it has refused the plugin.
    memory_offered : bool or None
        Whether it can make memory that others may read.
    memory_wanted : bool or None
        What ``coded.shared-memory`` in its configuration says.
    readable : mapping of str to bool
        By the address of each other worker on its host: whether it can read that one's memory.
    links : mapping of str to Link
        By the address of each worker that it has tried to connect to.
    product : float or None
        Seconds that a small product takes.
    speed : float or None
        In the last rounds, relative to the fastest worker.
    """

    address: str
    name: str = ""
    host: str = ""
    status: str = "running"
    threads: int = 1
    memory: int = 0
    reply: Reply = Reply.ANSWERS
    versions: Mapping[str, str] = field(default_factory=dict)
    asked: bool = False
    error: str = ""
    plugins: tuple[str, ...] | None = None
    refused: str = ""
    memory_offered: bool | None = None
    memory_wanted: bool | None = None
    readable: Mapping[str, bool] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    product: float | None = None
    speed: float | None = None


@dataclass(frozen=True)
class ClusterFacts:
    """The facts about a cluster.

    Parameters
    ----------
    scheduler : str
        Its address.
    client_versions, scheduler_versions : mapping of str to str
        Of the packages in :data:`PACKAGES` that they have.
    plugins : tuple of str or None
        Those of dask-coded's plugins that the scheduler has; None if it could not be asked.
    workers : tuple of WorkerFacts
    """

    scheduler: str
    client_versions: Mapping[str, str]
    scheduler_versions: Mapping[str, str]
    plugins: tuple[str, ...] | None
    workers: tuple[WorkerFacts, ...]
