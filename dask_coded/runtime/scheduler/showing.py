"""Where else what the observer knows is shown: the scheduler's dashboard, and Prometheus.

Both are optional: without Bokeh, or without a dashboard, there is no page; without
``prometheus_client`` there are no metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

import dask

from dask_coded.compat import add_page
from dask_coded.runtime.scheduler.observer import BYTES, STRIPES, Observer

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("distributed.dask_coded")


def show(scheduler: Scheduler, observer: Observer) -> None:
    """Add the page ``/coded`` and the metrics, as far as what they need is there."""

    def draw(doc: Any) -> None:
        from dask_coded.runtime.scheduler import dashboard

        dashboard.draw(observer, doc)

    try:
        add_page(scheduler, "/coded", "Coded rounds", draw)
    except Exception:  # rounds do not need it
        logger.exception("The dashboard has no page of coded rounds")
    _Metrics.read(observer)


class _Metrics:
    """The numbers for Prometheus, in the registry that the scheduler's ``/metrics`` writes.

    That registry belongs to the process. If several schedulers run in it, one after another, the
    numbers are those of the last one, as with Dask's own.
    """

    only: _Metrics | None = None

    def __init__(self) -> None:
        self.observer: Any = None

    @classmethod
    def read(cls, observer: Observer) -> None:
        """Take the numbers from this observer from now on."""
        try:
            from prometheus_client import REGISTRY
        except ImportError:
            return
        if cls.only is None:
            cls.only = cls()
            REGISTRY.register(cls.only)
        cls.only.observer = ref(observer)

    def describe(self) -> list[Any]:
        """Name no metrics beforehand: the registry would collect them to find out."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if (observer := self.observer()) is None:
            return
        observer.want()  # for the next time
        space = dask.config.get("distributed.dashboard.prometheus.namespace")
        start = "_".join((space, "coded", "")) if space else "coded_"
        totals, found = observer.totals(), observer.overview()
        for name, text in [
            ("rounds", "Coded rounds that have ended"),
            ("round_seconds", "Seconds of all coded rounds"),
            ("products_alone", "Products that coordinators have computed alone, without a round"),
            ("product_alone_seconds", "Seconds of all products that were computed alone"),
            ("training_steps", "Steps of trainings that have ended"),
            ("training_step_seconds", "Seconds of all training steps"),
        ]:
            number = totals[_TOTALS.get(name, name)]
            yield CounterMetricFamily(start + name, text, value=number)
        stripes = CounterMetricFamily(
            start + "stripes",
            "Stripes that workers have computed; of these, moved and wasted ones",
            labels=["kind"],
        )
        for kind in STRIPES:
            stripes.add_metric([kind], totals[kind])
        yield stripes
        moved = CounterMetricFamily(
            start + "bytes",
            "Bytes of operands and of shares of all rounds, also those in shared memory",
            labels=["kind"],
        )
        for kind in BYTES:
            moved.add_metric([kind.removesuffix("_bytes")], totals[kind])
        yield moved
        events = CounterMetricFamily(
            start + "events", "Events of the topic dask-coded, and workers lost", labels=["action"]
        )
        for action, count in sorted(observer.events.items()):
            events.add_metric([action], count)
        yield events
        workers = GaugeMetricFamily(
            start + "workers", "Workers by their standing in coded rounds", labels=["state"]
        )
        states = [worker["standing"] for worker in found["workers"]]
        for state in sorted(set(states)):
            workers.add_metric([state], states.count(state))
        yield workers
        speeds = GaugeMetricFamily(
            start + "worker_speed",
            "Measured speed of each worker in recent rounds, in stripes per second",
            labels=["worker"],
        )
        for worker in found["workers"]:
            if worker["measured"] > 0 and worker["standing"] != "gone":
                speeds.add_metric([worker["address"]], worker["measured"])
        yield speeds
        stored = GaugeMetricFamily(
            start + "worker_pieces_bytes",
            "Bytes of the pieces that each worker holds",
            labels=["worker"],
        )
        for worker in found["workers"]:
            if worker["standing"] != "gone":
                stored.add_metric([worker["address"]], worker["nbytes"])
        yield stored


#: Metrics whose names say more than those of the totals.
_TOTALS = {
    "round_seconds": "seconds",
    "products_alone": "alone",
    "product_alone_seconds": "alone_seconds",
    "training_steps": "steps",
    "training_step_seconds": "step_seconds",
}
