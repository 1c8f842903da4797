"""What workers say to Prometheus about the rounds that they take part in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import dask
from dask.typing import Key

if TYPE_CHECKING:
    from distributed.worker import Worker


#: The stripes of all workers that this process has had: counters of Prometheus never fall.
_STRIPES = Counter(computed=0, moved=0)


@dataclass(eq=False)
class WorkerMetrics:
    """Counts what one worker has done.

    Parameters
    ----------
    worker : Worker

    Attributes
    ----------
    pieces : set of Key
        Pieces that rounds have used here.
    """

    worker: Worker
    pieces: set[Key] = field(default_factory=set)

    @property
    def stored(self) -> int:
        """Bytes of the pieces that the worker holds, in memory or on the disk."""
        tasks = self.worker.state.tasks
        found = (tasks.get(key) for key in tuple(self.pieces))
        return sum(ts.get_nbytes() for ts in found if ts is not None and ts.state == "memory")

    def count(self, *, computed: int = 0, moved: int = 0) -> None:
        """Count stripes that it has computed, or was given while a round was running."""
        _STRIPES.update(computed=computed, moved=moved)

    def show(self) -> None:
        """Have the worker's ``/metrics`` show it, if ``prometheus_client`` is installed."""
        _Collector.add(self)


class _Collector:
    """The numbers of all workers of this process, whose registry ``/metrics`` writes."""

    only: ClassVar[_Collector | None] = None

    def __init__(self) -> None:
        self.shown: WeakSet[WorkerMetrics] = WeakSet()

    @classmethod
    def add(cls, metrics: WorkerMetrics) -> None:
        try:
            from prometheus_client import REGISTRY
        except ImportError:
            return
        if cls.only is None:
            cls.only = cls()
            REGISTRY.register(cls.only)
        cls.only.shown.add(metrics)

    def describe(self) -> list[Any]:
        """Name no metrics beforehand: the registry would collect them to find out."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if not (shown := list(self.shown)):
            return
        space = dask.config.get("distributed.dashboard.prometheus.namespace")
        start = "_".join((space, "coded_worker", "")) if space else "coded_worker_"
        stripes = CounterMetricFamily(
            start + "stripes",
            "Stripes that this worker has computed, and that it was given during rounds",
            labels=["kind"],
        )
        for kind, number in _STRIPES.items():
            stripes.add_metric([kind], number)
        yield stripes
        yield GaugeMetricFamily(
            start + "stored_bytes",
            "Bytes of the pieces of coded arrays on this worker that rounds have used",
            value=sum(each.stored for each in shown),
        )
