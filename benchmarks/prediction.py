"""Measure prediction errors one round ahead, on machines and days that no model has seen.

Every predictor of the package gets its input at run time, the last 64 speeds of the machines of one
cluster, and predicts the next. Predictors that pool over workers pool over all held-out machines of
the trace. The references know more than a new cluster can: they are fitted to each machine's own
past, or to other machines of the trace, up to the start of the test. ``--page`` writes the model
card.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import traces
from benchmarks.report import Report, Summary, options, picture, side_by_side
from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.prediction.predictors._lstm import record

#: Rounds that the runtime remembers.
HISTORY = 64

#: Workers of the cluster for which the cost of a prediction is measured.
WORKERS = 1000

#: Orders of the ARIMA models, and how many rounds before the test they are fitted to.
ARIMA = ((1, 0, 0), (2, 0, 0), (1, 1, 1))
FITTED_TO = 1000

#: Speeds below this share of the machine's mean are left out of relative errors.
LEAST = 0.05

#: Traces on which an autoregression beats the mean; there the LSTM must beat the autoregression.
LEARNABLE = ("azure2017", "google2011", "stream-triad")
#: Negative controls: the mean is about optimal.
CONTROLS = ("matrix-math", "bytedance-SE")

#: The model card. The text between its marks is generated, the rest is not.
CARD = Path(__file__).parents[1] / "docs" / "prediction.md"

OWN = "AR(8), own past"
TRACE = "AR(8), same trace"
RECENT = "AR(8), recent mean"
#: Predictors with which the LSTM is compared one by one.
RIVALS = ("ar", OWN, TRACE, RECENT, "mean of 64")


@dataclass(frozen=True)
class Part:
    """A part of every trace: some of the machines, some of the time.

    Held-out machines are spread evenly over the file, because neighbours in it are similar (same
    region, size or job): machine i is held out if 3 i mod 10 < 3. There is no seed to choose.
    """

    first: float
    last: float
    held_out: bool
    description: str

    def has(self, machine: int) -> bool:
        """Return whether the machine of this number belongs to the part."""
        return (3 * machine % 10 < 3) == self.held_out

    def targets(self, length: int) -> range:
        """Return the samples to predict for a machine with ``length`` samples."""
        return range(max(8, int(self.first * length)), int(self.last * length))


PARTS = {
    "training": Part(0.0, 0.7, False, "70 % of the machines, first 70 % of the time"),
    "validation": Part(0.7, 0.8, False, "the same machines, the next 10 % of the time"),
    "test": Part(0.8, 1.0, True, "the other 30 % of the machines, last 20 % of the time"),
}


def series(name: str) -> list[np.ndarray]:
    """Return the speeds of each machine over their mean before the test (first 80 % of the time).

    Returns
    -------
    list of ndarray, shape (samples,)
        One array for each machine, without its missing samples.
    """
    out = []
    for column in traces.load(name).T:
        values = column[~np.isnan(column)]
        out.append(values / values[: before_test(values)].mean())
    return out


def before_test(values: np.ndarray) -> int:
    """Return the number of a machine's samples before those of the test."""
    return PARTS["test"].targets(len(values)).start


def coefficients(samples: list[np.ndarray], order: int = 8, ridge: float = 0.01) -> np.ndarray:
    """Return AR coefficients of series with mean 0, by ridge regression."""
    gram, product = np.zeros((order, order)), np.zeros(order)
    for values in samples:
        inputs = np.lib.stride_tricks.sliding_window_view(values, order)[:-1]
        gram += inputs.T @ inputs
        product += inputs.T @ values[order:]
    penalty = ridge * np.trace(gram) / order + 1e-12
    return np.linalg.solve(gram + penalty * np.eye(order), product)


def autoregression(
    values: np.ndarray, cut: int, weights: np.ndarray | None = None, recent: bool = False
) -> np.ndarray:
    """Predict the samples from ``cut`` on by an AR(8), by default fitted to the samples before.

    It predicts deviations from the mean of the samples before or, if ``recent``, from the mean of
    the last rounds before each prediction.
    """
    mean = values[:cut].mean()
    if weights is None:
        weights = coefficients([values[:cut] - mean])
    if recent:
        mean = np.array([values[max(0, t - HISTORY) : t].mean() for t in range(cut, len(values))])
    inputs = np.lib.stride_tricks.sliding_window_view(values, len(weights))
    return mean + (inputs[cut - len(weights) : -1] - np.reshape(mean, (-1, 1))) @ weights


def arima(values: np.ndarray, cut: int, order: tuple[int, int, int]) -> np.ndarray:
    """Predict the samples from ``cut`` on by a model that is fitted once, to those before."""
    try:
        from statsmodels.tsa.arima.model import ARIMA as Model
    except ModuleNotFoundError:
        raise click.ClickException(
            "ARIMA needs statsmodels: pip install 'dask-coded[bench]'."
        ) from None
    start = max(0, cut - FITTED_TO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about starting values and slow convergence
        fitted = Model(values[start:cut], order=order).fit()
        return np.asarray(fitted.apply(values[start:]).fittedvalues[cut - start :])


def references(machines: list[np.ndarray]) -> dict[str, Callable[..., np.ndarray]]:
    """Return models that know a machine's past or the trace; call ``model(values, cut)``."""
    training = [v[: before_test(v)] for i, v in enumerate(machines) if PARTS["training"].has(i)]
    pooled = coefficients([values - 1 for values in training])
    found: dict[str, Callable[..., np.ndarray]] = {
        "mean": lambda values, cut: np.full(len(values) - cut, values[:cut].mean()),
        OWN: autoregression,
        TRACE: partial(autoregression, weights=pooled),
        RECENT: partial(autoregression, weights=pooled, recent=True),
    }
    for order in ARIMA:
        found["ARIMA({},{},{})".format(*order)] = partial(arima, order=order)
    return found


#: Predictors that use only the last 64 rounds, as in a cluster.
ONLINE: dict[str, Callable[..., np.ndarray]] = {
    **PREDICTORS,
    "mean of 64": lambda h: h.mean(axis=1),
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


def clusters(
    held: list[np.ndarray], cuts: list[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield every round from ``cuts`` on: its number, its machines, their histories."""
    for number in range(max(len(values) - cut for values, cut in zip(held, cuts))):
        here = [i for i, values in enumerate(held) if cuts[i] + number < len(values)]
        length = min(HISTORY, *(cuts[i] + number for i in here))
        rows = [held[i][cuts[i] + number - length : cuts[i] + number] for i in here]
        yield number, np.array(here), np.stack(rows)


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
    for number, here, history in clusters(held, cuts):
        for key, predict in ONLINE.items():
            trial.predicted[key][starts[here] + number] = predict(history)
    for key, model in references(machines).items():
        trial.predicted[key] = np.concatenate([model(v, cut) for v, cut in zip(held, cuts)])
    return trial


def cost(repeats: int) -> dict[str, Summary]:
    """Return the milliseconds that each predictor of the package takes for a large cluster."""
    history = np.random.default_rng(0).lognormal(sigma=0.2, size=(WORKERS, HISTORY))
    timings = side_by_side({n: partial(p, history) for n, p in PREDICTORS.items()}, repeats)
    return {name: Summary.of(1000 * seconds) for name, seconds in timings.seconds.items()}


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def quoted(name: str) -> str:
    """Return a predictor's name, as code if it is a name in the configuration."""
    return f"`{name}`" if name in PREDICTORS else name


def by_trace(trials: dict[str, Trial], measure: str, digits: int) -> str:
    """Return a table of one measure for all predictors and traces; a trace's best is bold."""
    values = {n: {k: getattr(t, measure)(k) for k in t.predicted} for n, t in trials.items()}
    rows = []
    for key in next(iter(values.values())):
        cells = []
        for found in values.values():
            text, best = (f"{x:.{digits}f}" for x in (found[key], min(found.values())))
            cells.append(f"**{text}**" if text == best else text)
        rows.append([quoted(key), *cells])
    return table(["predictor", *values], rows)


def compared(trial: Trial, rival: str) -> str:
    """Compare the errors of the LSTM and a rival in words; below 1 % they count as equal."""
    ratio = trial.rmse("lstm") / trial.rmse(rival)
    said = f"{100 * abs(ratio - 1):.1f} % {'below' if ratio < 1 else '**above**'}"
    if abs(ratio - 1) < 0.01:
        said = "no different"
    return f"{said} ({'{} of {}'.format(*trial.ahead('lstm', rival))})"


def verdict(trials: dict[str, Trial], names: Iterable[str]) -> str:
    """Return a table that compares the LSTM with its rivals, one row per trace."""
    rows = [[n, *(compared(trials[n], rival) for rival in RIVALS)] for n in names if n in trials]
    return table(["trace", *map(quoted, RIVALS)], rows)


def blocks(trials: dict[str, Trial], report: Report) -> dict[str, str]:
    """Return the generated parts of the model card, by their marks."""
    trained = record()
    run, losses = trained["losses"], trained["losses"]["validation"]
    line = run["validation of the line before training"]
    facts = {
        "trained by": f"`{trained['trained by']}`",
        **{f"{name} version": version for name, version in trained["versions"].items()},
        **trained["settings"],
        "epochs run": run["epochs run"],
        "epoch kept": run["epoch kept"],
    }
    steps = [[name, f"{line[name]:.3f}", f"{losses[name]:.3f}"] for name in losses]
    windows = run["training windows"]
    sizes = [
        [name, windows.get(name, 0), len(trial.truth), trial.machine.max() + 1]
        for name, trial in trials.items()
    ]
    others = [name for name in trials if name not in LEARNABLE + CONTROLS]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    milliseconds = [
        [quoted(r["predictor"]), f"{r['value']:.3f}", "{:.3f} .. {:.3f}".format(*r["spread"])]
        for r in report.rows
        if r["measure"] == "predict_ms"
    ]
    return {
        "machine": f"Run on {report.machine['processor']}, {report.machine['cores']} cores, "
        f"{report.machine['time']}; {versions}.",
        "split": table(["part", "what"], [[n, p.description] for n, p in PARTS.items()]),
        "data": table(["trace", "training windows", "predictions", "machines held out"], sizes),
        "record": table(["setting", "value"], list(facts.items())),
        "losses": table(["trace", "line", "trained"], steps),
        "rmse": by_trace(trials, "rmse", 4),
        "percentage": by_trace(trials, "percentage", 2),
        "learnable": verdict(trials, LEARNABLE),
        "controls": verdict(trials, CONTROLS),
        "others": verdict(trials, others),
        "cost": table(["predictor", f"ms for {WORKERS} workers", "quartiles"], milliseconds),
    }


def page(generated: dict[str, str]) -> str:
    """Return the model card in ``docs/`` with its generated parts replaced."""
    text = CARD.read_text(encoding="utf-8")
    for name, block in generated.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise click.ClickException(f"{CARD} lacks the marks {begin} and {end}.")
        text = f"{before}{begin}\n\n{block}\n\n{end}{after}"
    return text


def add_rows(report: Report, trace: str, trial: Trial) -> None:
    """Add the errors of every predictor on one trace, and the LSTM's over those of its rivals."""
    where: dict[str, Any] = {"trace": trace, "split": PARTS["test"].description}
    for key in trial.predicted:
        for measure, value, unit in (
            ("mape", trial.percentage(key), "%"),
            ("rmse", trial.rmse(key), "ratio"),
        ):
            report.add(f"{trace}, {key}", measure, value, unit, predictor=key, **where)
    # On a control the LSTM should lose next to nothing to the mean of the last rounds.
    goals = {
        **(dict.fromkeys(RIVALS, 1.0) if trace in LEARNABLE else {}),
        **({"mean of 64": 1.02} if trace in CONTROLS else {}),
    }
    for rival in RIVALS:
        case, ratio = f"{trace}, lstm over {rival}", trial.rmse("lstm") / trial.rmse(rival)
        keys: dict[str, Any] = {"goal": goals.get(rival), "predictor": "lstm", "rival": rival}
        report.add(case, "rmse_over", ratio, **keys, **where)


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
def main(
    json_file: Path | None, png_file: Path | None, smoke: bool, page_file: Path | None
) -> None:
    """Measure every predictor on the held-out part of the traces of real machines."""
    report = Report("prediction")
    trials = {}
    for name in ("stream-triad", "bytedance-SE") if smoke else traces.NAMES:
        trials[name] = try_out(name, rounds=3 if smoke else None)
        add_rows(report, name, trials[name])
    report.versions["statsmodels"] = importlib.metadata.version("statsmodels")
    for name, found in cost(repeats=3 if smoke else 30).items():
        keys: dict[str, Any] = {"predictor": name, "workers": WORKERS}
        report.add(f"{WORKERS} workers, {name}", "predict_ms", found, "ms", **keys)
    report.finish(json_file)
    if page_file is not None:
        page_file.write_text(page(blocks(trials, report)), encoding="utf-8")
        print(f"wrote {page_file}")
    if png_file is not None:
        draw(trials, png_file)


if __name__ == "__main__":
    main()
