"""Measure prediction errors one round ahead, on machines and days that no model has seen.

Every predictor of the package records the rounds of the held-out machines of a trace, one after the
other, and predicts the next, as in a cluster. Predictors that pool over workers pool over these
machines. The references know more than a new cluster can, see `benchmarks.references`.

The last section runs rounds in the simulator, to see what better predictions gain. ``--page``
writes the model card; with ``--from`` it is made from the JSON of an earlier run.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import click
import numpy as np

from benchmarks import traces
from benchmarks.evidence.s2c2 import sections
from benchmarks.evidence.s2c2.results import Results
from benchmarks.model_card import blocks, page, read
from benchmarks.references import OWN, PUBLISHED, RECENT, TRACE, references
from benchmarks.report import Report, Summary, options, picture, side_by_side
from benchmarks.traces import PARTS, before_test, series
from dask_coded.codes import MDS
from dask_coded.prediction import PREDICTORS, Records, records
from dask_coded.rounds import RoundOptions
from dask_coded.simulation import Simulation, constant

#: Rounds that the runtime remembers.
HISTORY = 64

#: Rounds of each held-out machine before the test, from which predictors learn.
WARM_UP = 256

#: Workers of the cluster for which the cost of a prediction is measured.
WORKERS = 10_000

#: Speeds below this share of the machine's mean are left out of relative errors.
LEAST = 0.05

MEAN = "mean of 64"
DEFAULT = RoundOptions.predictor
#: Predictors with which ours are compared one by one.
RIVALS = {
    "lstm": ("ar", OWN, TRACE, RECENT, MEAN, PUBLISHED),
    DEFAULT: (MEAN, "exponential", "ar", "lstm"),
}

#: Predictors that use only the rounds so far, as in a cluster.
ONLINE: dict[str, Callable[[Records, np.ndarray], np.ndarray]] = {
    **PREDICTORS,
    MEAN: lambda known, rows: np.nanmean(known.window(rows), axis=1),
}


@dataclass
class Trial:
    """Predictions and actual speeds on one trace: arrays with one entry per prediction."""

    truth: np.ndarray
    machine: np.ndarray
    predicted: dict[str, np.ndarray] = field(default_factory=dict)

    def rmse(self, name: str) -> float:
        """Return the root mean squared error, over the machine's mean speed."""
        return float(np.sqrt(np.mean((self.predicted[name] - self.truth) ** 2)))

    def percentage(self, name: str) -> float:
        """Return the mean absolute error in per cent of the speed, without standstills."""
        counts = self.truth >= LEAST
        error = np.abs(self.predicted[name] - self.truth)[counts]
        return float(100 * np.mean(error / self.truth[counts]))

    def ahead(self, name: str, other: str) -> tuple[int, int]:
        """Return on how many machines a predictor has the lesser squared error, and of how many."""
        gain = (self.predicted[other] - self.truth) ** 2 - (self.predicted[name] - self.truth) ** 2
        total = np.bincount(self.machine, gain)
        return int((total > 0).sum()), len(total)


def try_out(name: str, rounds: int | None = None) -> Trial:
    """Predict the test part, or its first rounds, by every predictor and every reference."""
    machines = series(name)
    held = [values for i, values in enumerate(machines) if PARTS["test"].has(i)]
    cuts = [before_test(values) for values in held]
    if rounds is not None:
        held = [values[: cut + rounds] for values, cut in zip(held, cuts)]
    tests = [values[cut:] for values, cut in zip(held, cuts)]
    lengths = [len(test) for test in tests]
    trial = Trial(np.concatenate(tests), np.repeat(np.arange(len(held)), lengths))
    trial.predicted = {key: np.empty(len(trial.truth)) for key in ONLINE}
    starts = np.cumsum([0, *lengths])
    # All tests begin in the same round of the cluster.
    speeds = np.full((len(held), WARM_UP + max(lengths)), np.nan)
    for row, values, cut in zip(speeds, held, cuts):
        before = values[max(cut - WARM_UP, 0) :]
        row[max(WARM_UP - cut, 0) :][: len(before)] = before
    known = Records(HISTORY)
    known.reserve(len(held))
    for number, column in enumerate(speeds.T, -WARM_UP):
        here = np.flatnonzero(~np.isnan(column))
        for key, predict in ONLINE.items() if number >= 0 else ():
            trial.predicted[key][starts[here] + number] = predict(known, here)
        known.record(here, column[here])
    taught = traces.NAMES if rounds is None else (name,)
    for key, model in references(machines, taught).items():
        trial.predicted[key] = np.concatenate([model(v, cut) for v, cut in zip(held, cuts)])
    return trial


def cost(repeats: int) -> dict[str, Summary]:
    """Return the CPU milliseconds that each predictor takes for a large cluster."""
    rng = np.random.default_rng(0)
    known = Records.of(rng.lognormal(sigma=0.2, size=(WORKERS, HISTORY)))
    rows, speeds = np.arange(WORKERS), rng.lognormal(sigma=0.2, size=WORKERS)
    cases: dict[str, Callable[[], object]] = {
        name: partial(predict, known, rows) for name, predict in PREDICTORS.items()
    }
    cases["to record a round"] = partial(known.record, rows, speeds)
    timings = side_by_side(cases, repeats, clock=process_time)
    return {name: Summary.of(1000 * seconds) for name, seconds in timings.seconds.items()}


def add_rows(report: Report, trace: str, trial: Trial) -> None:
    """Add the errors of every predictor on one trace, and ours over those of their rivals."""
    where: dict[str, Any] = {"trace": trace, "split": PARTS["test"].description}
    machines = int(trial.machine.max()) + 1
    report.add(trace, "predictions", len(trial.truth), "samples", machines=machines, **where)
    for key in trial.predicted:
        for measure, value, unit in (
            ("mape", trial.percentage(key), "%"),
            ("rmse", trial.rmse(key), "ratio"),
        ):
            report.add(f"{trace}, {key}", measure, value, unit, predictor=key, **where)
    # On a control the LSTM should lose next to nothing to the mean of the last rounds, and the
    # default should lose next to nothing to it anywhere.
    goals = {(DEFAULT, MEAN): 1.01}
    if trace in traces.LEARNABLE:
        goals |= {("lstm", rival): 1.0 for rival in RIVALS["lstm"]}
    if trace in traces.CONTROLS:
        goals["lstm", MEAN] = 1.02
    for ours, rivals in RIVALS.items():
        for rival in rivals:
            better, _ = trial.ahead(ours, rival)
            report.add(
                f"{trace}, {ours} over {rival}",
                "rmse_over",
                trial.rmse(ours) / trial.rmse(rival),
                goal=goals.get((ours, rival)),
                predictor=ours,
                rival=rival,
                better_on=better,
                machines=machines,
                **where,
            )


def add_rounds(report: Report, smoke: bool) -> None:
    """Add simulated rounds with every predictor, as on the page about the paper."""
    results = Results(Report(report.name), smoke=smoke, processes=False)
    sections.predictors(results)
    report.rows += results.report.rows


def add_trials(report: Report, smoke: bool) -> None:
    """Add simulated rounds in which one of ten workers was a thousand times slower before.

    It still is, or it has recovered; and it is tried now and then, or never.
    """
    rounds = 3 if smoke else 66
    names = [str(worker) for worker in range(10)]
    before = dict.fromkeys(names, 1.0) | {"0": 1e-3}
    for policy, speed in product(("s2c2", "continuous"), (1e-3, 1.0)):
        for after in (records._TRIED_AFTER, 10**9):
            simulation = Simulation(MDS(10, 7), constant([speed] + [1.0] * 9), policy=policy)
            for _ in range(HISTORY):
                simulation.history.record(before)
            with patch.object(records, "_TRIED_AFTER", after):
                found = [round_.seconds / round_.bound for round_ in simulation.run(rounds)]
            state = "recovered" if speed == 1.0 else "still slow"
            trials = "never" if after == 10**9 else f"every {after} rounds"
            report.add(
                f"(10,7), {policy}, a slow worker has {state}, tried {trials}",
                "tried_round_over_fluid",
                float(np.mean(found[rounds // 2 :])),
                policy=policy,
                state=state,
                trials=trials,
            )


def draw(trials: dict[str, Trial], file: Path) -> None:
    """Plot the errors of the package's predictors over those of `ar`, trace by trace."""
    with picture(file, figsize=(9, 5)) as figure:
        axes = figure.subplots()
        for number, key in enumerate(name for name in ONLINE if name not in ("ar", "uniform")):
            ratios = [trial.rmse(key) / trial.rmse("ar") for trial in trials.values()]
            axes.bar(np.arange(len(trials)) + 0.15 * number - 0.3, ratios, 0.15, label=key)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(trials)), list(trials), rotation=20)
        axes.set_ylabel("RMSE over that of ar")
        axes.legend()


@click.command()
@options
@click.option(
    "--page",
    "page_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the model card to this Markdown file.",
)
@click.option(
    "--from",
    "earlier",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure nothing: make the page from the JSON of an earlier run.",
)
def main(
    json_file: Path | None,
    png_file: Path | None,
    smoke: bool,
    page_file: Path | None,
    earlier: Path | None,
) -> None:
    """Measure every predictor on the held-out part of the traces of real machines."""
    report = Report("prediction")
    trials = {}
    if earlier is not None:
        report = read(earlier)
    else:
        for name in ("stream-triad", "bytedance-SE") if smoke else traces.ALL:
            trials[name] = try_out(name, rounds=3 if smoke else None)
            add_rows(report, name, trials[name])
        report.versions["statsmodels"] = importlib.metadata.version("statsmodels")
        for name, found in cost(repeats=3 if smoke else 30).items():
            keys: dict[str, Any] = {"predictor": name, "workers": WORKERS}
            report.add(f"{WORKERS} workers, {name}", "predict_ms", found, "ms", **keys)
        add_rounds(report, smoke)
        add_trials(report, smoke)
    report.finish(json_file)
    if page_file is not None:
        page_file.write_text(page(blocks(report)), encoding="utf-8")
        print(f"wrote {page_file}")
    if png_file is not None:
        draw(trials, png_file)


if __name__ == "__main__":
    main()
