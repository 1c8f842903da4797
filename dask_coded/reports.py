"""Which worker is slow: reports of the rounds of coded arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distributed import Client

from dask_coded.array import CodedArray
from dask_coded.pair import CodedPair
from dask_coded.runtime.client.install import install
from dask_coded.runtime.client.waiting import current_client, outside_pool
from dask_coded.runtime.scheduler.state import RELEASED
from dask_coded.runtime.spec import CodedDataLostError
from dask_coded.summary import Summary, brief, table

_STRIPES = ("computed", "moved", "wasted")
_HEADINGS = ("worker", "state", "share", "predicted", "measured", *_STRIPES, "pieces")


class WorkerStatus(NamedTuple):
    """A worker in a :class:`Report`.

    Parameters
    ----------
    name, address : str
    standing : str
        ``alive``, ``silent``, ``gone``, ``unprepared`` (it has not got the worker plugin), or
        Dask's name for its state if it runs no tasks: ``paused``, ``closing_gracefully``.
    coordinates : bool
        Whether it runs a task now that coordinates rounds.
    keeps : bool
        Whether it keeps the state of a loop that runs on another worker.
    pieces, nbytes : int
        Pieces of the arrays that it holds, and their bytes.
    share : float
        Its share of the stripes that were computed in recent rounds; NaN before it was in any.
    predicted, measured : float
        Its speed in stripes per second, as expected before the last round, and as measured: a mean
        of recent rounds, of which the last one counts a tenth. NaN if it is not known, because a
        worker without work is not measured. Only stripes that have come back are measured: a worker
        that computes in bursts may be fast then, and is predicted to be slow.
    computed : int
        Stripes that have come back from this worker, in all rounds.
    moved : int
        Those of them that it has taken over during a round from slower workers.
    wasted : int
        Those of them that others had returned already.
    """

    name: str
    address: str
    standing: str
    coordinates: bool
    keeps: bool
    pieces: int
    nbytes: int
    share: float
    predicted: float
    measured: float
    computed: int
    moved: int
    wasted: int


@dataclass(frozen=True, repr=False)
class Report(Summary):
    """What the rounds of one coded array, or of all arrays of a cluster, have done so far.

    Its representation is a table, the slowest worker first: the one with the smallest share.

    Parameters
    ----------
    rounds : int
        Rounds that have ended.
    seconds : float
        Of all of them together.
    alone : int
        Products that coordinators have computed alone, because a round takes longer. They are no
        rounds.
    alone_seconds : float
        Of all of them together.
    last_seconds : float
        Of the last one; NaN before the first.
    bound : float
        Seconds that the last round would have taken at the measured speeds if all workers had been
        busy to the end and no stripe had been computed twice; NaN if too few speeds are known.
    coordinator : str
        Address of the worker that ran the last round.
    workers : tuple of WorkerStatus
        All workers of the cluster, and those that have left; the slowest one first.
    events : dict of str to int
        How often each action was logged in the topic ``dask-coded`` since the scheduler started;
        and how many workers were ``lost``: have left without being retired.
    """

    rounds: int
    seconds: float
    alone: int
    alone_seconds: float
    last_seconds: float
    bound: float
    coordinator: str
    workers: tuple[WorkerStatus, ...]
    events: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        rows = [_HEADINGS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return "\n".join((self._heading(), *lines))

    def _repr_html_(self) -> str:
        return f"<b>{self._heading()}</b>{table(_HEADINGS, self._rows())}"

    def _heading(self) -> str:
        text = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        if self.rounds:
            text += f", the last took {1e3 * self.last_seconds:.3g} ms"
        if self.bound > 0:
            text += f", {self.last_seconds / self.bound:.3g} times the fluid bound"
        if self.alone:
            mean = 1e3 * self.alone_seconds / self.alone
            text += f"; {self.alone} products alone, {mean:.3g} ms each"
        return text

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                w.name if w.name == w.address else f"{w.name} {w.address}",
                w.standing + ", coordinates" * w.coordinates + ", keeps a state" * w.keeps,
                "-" if math.isnan(w.share) else f"{w.share:.0%}",
                _speed(w.predicted),
                _speed(w.measured),
                *map(str, (w.computed, w.moved, w.wasted, w.pieces)),
            )
            for w in self.workers
        ]


def _speed(speed: float) -> str:
    return "-" if math.isnan(speed) else f"{brief(float(f'{speed:.3g}'))}/s"


def report(array: CodedArray | CodedPair | None = None, client: Client | None = None) -> Any:
    """Say what the rounds of a coded array have done, and how fast each worker is.

    Asks the scheduler, and the workers that have coordinated rounds. Rounds are not disturbed.

    Parameters
    ----------
    array : CodedArray or CodedPair, optional
        By default all coded arrays of the cluster together.
    client : distributed.Client, optional
        By default that of the array, or the current one.

    Returns
    -------
    Report
        With an asynchronous client, a coroutine that returns it.

    Raises
    ------
    CodedDataLostError
        If the array has been released.
    ClusterUnfitError
        If the scheduler lacks this package.

    Examples
    --------
    >>> import numpy as np, dask_coded as coded
    >>> from distributed import Client
    >>> client = Client(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> C = coded.encode(np.eye(400), coded.MDS(n=4, k=3))
    >>> y = (C @ np.ones(400)).compute()
    >>> found = coded.report(C)
    >>> found.rounds, len(found.workers)
    (1, 4)
    >>> sum(worker.computed - worker.wasted for worker in found.workers) > 0
    True
    >>> client.close()
    """
    ids: list[str] | None = None
    if array is not None and not hasattr(array, "encoded"):
        raise TypeError(
            f"Argument 'array' must be a coded array, it is a {type(array).__name__}: pass a "
            f"client as `client=`."
        )
    if array is not None:
        both = array.encoded, getattr(array, "_back", None)
        ids = [encoded.spec.id for encoded in both if encoded is not None]
        client = client or array.encoded.client
    chosen = current_client(client)

    async def ask() -> Report:
        await install(chosen)  # otherwise no plugin could answer before the first array
        scheduler: Any = chosen.scheduler
        found = await scheduler.coded_report(arrays=ids)
        if ids and found["lost"]:
            raise CodedDataLostError(RELEASED)
        return _report(found)

    with outside_pool():
        return chosen.sync(ask)


def _report(found: dict[str, Any]) -> Report:
    workers = [WorkerStatus(**row) for row in found["workers"]]
    # A worker without a share has been in no round yet.
    workers.sort(key=lambda w: (w.standing == "gone", w.share if w.share >= 0 else math.inf))
    names = ("rounds", "seconds", "alone", "alone_seconds", "last_seconds", "bound", "coordinator")
    numbers = {name: found[name] for name in names}
    return Report(**numbers, workers=tuple(workers), events=found["events"])
