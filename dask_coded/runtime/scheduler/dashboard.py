"""The page ``/coded`` of the scheduler's dashboard: rounds, and a lane for each worker.

Imported only if the scheduler has a dashboard, which needs Bokeh.
"""

from __future__ import annotations

import html
import math
from time import time
from typing import Any
from weakref import ref

from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    DatetimeTicker,
    DatetimeTickFormatter,
    FactorRange,
    NumeralTickFormatter,
)
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from dask.utils import format_bytes

from dask_coded.runtime.scheduler.observer import BYTES, SHARE, SPEEDS, STRIPES, Observer
from dask_coded.summary import table

# Milliseconds between two looks of an open page at what is known.
_INTERVAL = 500
# Points of each curve, one a second; lanes, those of the slowest workers.
_POINTS = 300
_LANES = 40
_OWN, _MOVED, _WASTED, _PREDICTED = "#4c78a8", "#54a24b", "#e45756", "#222222"
_CURVES = ("rounds", "alone", "ratio", "milliseconds", "step", *BYTES)
_PARTS = ("own", "moved", "wasted")
_COLUMNS = ("worker", "state", SHARE, *SPEEDS, *STRIPES, "pieces", "bytes")
_EVENTS = {
    "lost": "workers lost",
    "made": "pieces rebuilt",
    "take-over": "coordinators taken over",
    "relieve": "pieces given to workers that joined",
    "corrupt": "wrong shares",
    "failed": "exceptions of workers",
}


def draw(observer: Observer, doc: Any) -> None:
    """Fill the document of a visitor, and keep it up to date while the visitor is there."""
    page = _Page(observer)
    page.update()
    doc.add_root(page.root)
    # The document keeps its page, and the callback does not, so that both go with the visitor.
    doc.coded_page = page
    there = ref(page)

    def update() -> None:
        if (found := there()) is not None:
            found.update()

    doc.add_periodic_callback(update, _INTERVAL)


class _Page:
    """What one visitor sees."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._asked = observer.asked
        self._before: tuple[float, dict[str, Any]] | None = None
        self.curves = ColumnDataSource(
            {name: [] for name in ("time", *_CURVES)},
            name="curves",
        )
        self.workers = Div(name="workers", sizing_mode="stretch_width")
        self.lanes = ColumnDataSource(
            {name: [] for name in ("worker", *_PARTS, *SPEEDS)}, name="lanes"
        )
        self.heading = Div(name="heading", sizing_mode="stretch_width")
        self.events = Div(name="events", sizing_mode="stretch_width")
        self._names = FactorRange(factors=[])
        self._steps = self._curve("Milliseconds of a training step", "step")
        self.root = column(
            self.heading,
            row(
                self._rounds(),
                self._curve("Milliseconds of a round", "milliseconds"),
                self._curve("Time of a round over the fluid bound", "ratio"),
                self._moved(),
                self._steps,
                sizing_mode="stretch_width",
            ),
            row(
                column(
                    _title("Stripes per second", own_part=_OWN, taken_over=_MOVED, wasted=_WASTED),
                    self._stripes(),
                    sizing_mode="stretch_width",
                ),
                column(
                    _title("Speed in stripes per second", measured=_OWN, predicted=_PREDICTED),
                    self._speeds(),
                    sizing_mode="stretch_width",
                ),
                sizing_mode="stretch_width",
            ),
            self.workers,
            self.events,
            sizing_mode="stretch_width",
        )

    # -- figures -------------------------------------------------------------------------------

    def _curve(self, title: str, name: str) -> Any:
        plot = figure(
            title=title, height=180, y_range=DataRange1d(start=0), tools="", toolbar_location=None,
            sizing_mode="stretch_width",
        )  # fmt: skip
        plot.line("time", name, source=self.curves, color=_OWN, line_width=2)
        plot.scatter("time", name, source=self.curves, color=_OWN, size=3)
        plot.xaxis.formatter = DatetimeTickFormatter(
            seconds="%H:%M:%S", minsec="%H:%M:%S", minutes="%H:%M", hourmin="%H:%M"
        )
        plot.xaxis.ticker = DatetimeTicker(desired_num_ticks=3)
        return plot

    def _rounds(self) -> Any:
        plot = self._curve("Rounds/s; green: alone", "rounds")
        plot.line("time", "alone", source=self.curves, color=_MOVED, line_width=2)
        return plot

    def _moved(self) -> Any:
        operands, shares = BYTES
        plot = self._curve("Operand bytes/s; green: shares", operands)
        plot.line("time", shares, source=self.curves, color=_MOVED, line_width=2)
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]b")
        return plot

    def _lane_figure(self) -> Any:
        plot = figure(
            height=270, x_range=DataRange1d(start=0), y_range=self._names, tools="",
            toolbar_location=None, sizing_mode="stretch_width",
        )  # fmt: skip
        plot.ygrid.grid_line_color = None
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[0]a")
        return plot

    def _stripes(self) -> Any:
        plot = self._lane_figure()
        plot.hbar_stack(
            list(_PARTS),
            y="worker",
            source=self.lanes,
            height=0.8,
            color=[_OWN, _MOVED, _WASTED],
        )
        return plot

    def _speeds(self) -> Any:
        plot = self._lane_figure()
        plot.hbar("worker", right="measured", source=self.lanes, height=0.6, color=_OWN)
        plot.scatter(
            "predicted", "worker", source=self.lanes, marker="dash", angle=math.pi / 2, size=22,
            line_width=3, color=_PREDICTED,
        )  # fmt: skip
        return plot

    # -- data ----------------------------------------------------------------------------------

    def update(self) -> None:
        """Show what the scheduler knows now, and have it ask for more."""
        self._observer.want()
        if self.workers.text and self._asked == self._observer.asked:
            return
        found = self._observer.overview()
        workers = sorted(found["workers"], key=_slowness)
        self.workers.text = table(_COLUMNS, map(_cells, workers))
        now = time()
        totals = self._observer.totals()
        self._steps.visible = bool(totals["steps"])
        each = {w["address"]: [w[name] for name in STRIPES] for w in workers}
        if self._before is not None:
            then, before = self._before
            seconds, rounds = now - then, totals["rounds"] - before["rounds"]
            steps = totals["steps"] - before["steps"]
            mean = (totals["seconds"] - before["seconds"]) / rounds if rounds else math.nan
            step = totals["step_seconds"] - before["step_seconds"]
            point = {
                "time": 1e3 * now,
                "rounds": rounds / seconds,
                "alone": (totals["alone"] - before["alone"]) / seconds,
                "milliseconds": 1e3 * mean,
                "ratio": found["last_seconds"] / found["bound"] if rounds else math.nan,
                "step": 1e3 * step / steps if steps else math.nan,
                **{name: (totals[name] - before[name]) / seconds for name in BYTES},
            }
            self.curves.stream({name: [value] for name, value in point.items()}, _POINTS)
            if rounds:  # otherwise the last numbers stay
                self._draw_lanes(workers, each, before["stripes"], seconds)
        if self._before is None or not self.lanes.data["worker"]:
            self._draw_lanes(workers, {}, {}, 1.0)
        if self._asked != self._observer.asked:  # before the first answer, old numbers are there
            self._asked = self._observer.asked
            self._before = now, {**totals, "stripes": each}
        self._say(found, totals)

    def _draw_lanes(
        self,
        workers: list[dict[str, Any]],
        now: dict[str, list[int]],
        before: dict[str, list[int]],
        seconds: float,
    ) -> None:
        lanes: dict[str, list[Any]] = {name: [] for name in ("worker", *_PARTS, *SPEEDS)}
        for w in sorted(workers[:_LANES], key=_order):
            address = w["address"]
            stripes, old = now.get(address, [0] * 3), before.get(address, [0] * 3)
            computed, moved, wasted = (
                max(a - b, 0) / seconds for a, b in zip(stripes, old, strict=True)
            )
            lanes["worker"].append(_lane(w))
            lanes["own"].append(max(computed - moved - wasted, 0))
            lanes["moved"].append(moved)
            lanes["wasted"].append(wasted)
            for name in SPEEDS:
                lanes[name].append(w[name])
        names = lanes["worker"][::-1]  # the first one at the top
        if names != self._names.factors:
            self._names.factors = names
        self.lanes.data = lanes

    def _say(self, found: dict[str, Any], totals: dict[str, float]) -> None:
        states = [w["standing"] for w in found["workers"]]
        parts = [
            f"{totals['rounds']:,.0f} rounds",
            *([f"{totals['alone']:,.0f} products computed alone"] if totals["alone"] else []),
            *([f"{totals['steps']:,.0f} training steps"] if totals["steps"] else []),
            f"{states.count('alive')} workers",
            *(f"<b>{states.count(s)} {s}</b>" for s in ("silent", "paused", "gone") if s in states),
        ]
        if found["coordinator"]:
            parts.append(f"last coordinator {html.escape(found['coordinator'])}")
        self.heading.text = "<b>Coded rounds:</b> " + ", ".join(parts)
        events = [
            f"{text}: {found['events'][name]}"
            for name, text in _EVENTS.items()
            if found["events"].get(name)
        ]
        self.events.text = ", ".join(events + [_training(each) for each in found["trainings"]])


def _training(found: dict[str, Any]) -> str:
    """Say how long a training's step took, and for how much of it its workers have computed."""
    task, seconds, workers = html.escape(str(found["task"])), found["seconds"], found["workers"]
    text = f"training {task}: step {found['step']}, {1e3 * seconds:.3g} ms"
    if workers and seconds > 0:
        useful = sum(workers.values()) / (len(workers) * seconds)
        text += f", of which the {len(workers)} workers that were done computed {useful:.0%}"
    if found["units"]:
        text += f", {found['moved']} of {found['units']} units moved"
    return text


def _title(text: str, **colours: str) -> Div:
    keys = (
        f"<span style='color:{colour}'>&#9632;</span> {name.replace('_', ' ')}"
        for name, colour in colours.items()
    )
    return Div(text=f"<b>{text}</b>: {' '.join(keys)}", margin=(5, 5, 0, 30))


def _label(worker: dict[str, Any]) -> str:
    name, address = worker["name"], worker["address"]
    return str(address if name == address else f"{name} {address}")


def _cells(worker: dict[str, Any]) -> list[str]:
    """Return the row of the table; Bokeh's own table shows only the first numbers that it gets."""
    state = ", ".join([worker["standing"], *_roles(worker)])
    speeds = ["-" if math.isnan(worker[name]) else f"{worker[name]:,.0f}" for name in SPEEDS]
    numbers = [f"{worker[name]:,}" for name in (*STRIPES, "pieces")]
    share = "-" if math.isnan(worker[SHARE]) else f"{worker[SHARE]:.0%}"
    return [_label(worker), state, share, *speeds, *numbers, format_bytes(worker["nbytes"])]


def _roles(worker: dict[str, Any]) -> list[str]:
    return ["coordinates"] * worker["coordinates"] + ["keeps a state"] * worker["keeps"]


def _lane(worker: dict[str, Any]) -> str:
    """Return a short name, with the state of the worker if it is not usual."""
    name = str(worker["name"]).rpartition("//")[2]
    if worker["standing"] == "gone":  # another one may have its name now
        name += f" :{worker['address'].rpartition(':')[2]}"
    states = _roles(worker)
    states += [worker["standing"]] * (worker["standing"] != "alive")
    return f"{name} ({', '.join(states)})" if states else name


def _slowness(worker: dict[str, Any]) -> tuple[bool, float]:
    share = worker[SHARE]
    return worker["standing"] == "gone", math.inf if math.isnan(share) else share


def _order(worker: dict[str, Any]) -> tuple[bool, int, str]:
    """Sort lanes by name, 10 after 9; the order by speed would change each second."""
    return worker["standing"] == "gone", len(worker["name"]), worker["name"]
