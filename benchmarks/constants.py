"""How the constants of the default predictor were chosen, and whether they suit other traces.

Variants of the constants run over all traces, one round after the other. Two splits show whether a
choice carries over to data that it was not made on:

- by machine: the variant that is best on the training part, on the test part of the same traces;
- by source: for each source of traces, the variant that is best on the training parts of all other
  sources, on the test part of this one.

"Best" is the least geometric mean, over sources and then over their traces, of the root mean
squared error over that of the mean of the last 64 rounds.

The 30 % from which on a speed has changed is not among the constants that vary: smaller changes are
left to the other means, because they cost a round little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np

from benchmarks import traces
from benchmarks.model_card import chosen, page, read
from benchmarks.report import Report, options
from benchmarks.traces import PARTS, series, source
from dask_coded.prediction import Records, records
from dask_coded.prediction.predictors import _adaptive
from dask_coded.prediction.predictors._adaptive import adaptive

#: Constants of each variant that differ from the package's: attributes of the two modules.
VARIANTS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "fast means 0.5": {"_GAINS": np.array([[0.5]])},
    "fast means 0.6, 0.15": {"_GAINS": np.array([[0.6], [0.15]])},
    "fast means 0.9, 0.5, 0.25, 0.1": {"_GAINS": np.array([[0.9], [0.5], [0.25], [0.1]])},
    "memory 32": {"_MEMORY": 32},
    "memory 128": {"_MEMORY": 128},
    "change beyond 4": {"_BEYOND": 4.0},
    "change beyond 8": {"_BEYOND": 8.0},
    "handicap 1": {"_HANDICAP": 1.0},
    "handicap 1.2": {"_HANDICAP": 1.2},
    "power 4": {"_DOUBLINGS": 2},
    "power 8": {"_DOUBLINGS": 3},
    "power 32": {"_DOUBLINGS": 5},
}


@contextmanager
def changed(constants: dict[str, Any]) -> Iterator[None]:
    """Change constants of the predictor, while the context is open."""
    if (gains := constants.get("_GAINS")) is not None:
        constants = {**constants, "_MEANS": 2 + len(gains)}
    with ExitStack() as stack:
        for name, value in constants.items():
            module = records if hasattr(records, name) else _adaptive
            stack.enter_context(patch.object(module, name, value))
        yield


class Machines:
    """The machines of some traces, side by side from their first sample on.

    Parameters
    ----------
    names : sequence of str
    rounds : int, optional
        Rounds to run; by default all.
    """

    def __init__(self, names: tuple[str, ...], rounds: int | None = None) -> None:
        self.names = names
        found = [(name, number, v) for name in names for number, v in enumerate(series(name))]
        # The longest first, so that the machines of every round are the first rows.
        found.sort(key=lambda entry: -len(entry[2]))
        lengths = [len(values[:rounds]) for _, _, values in found]
        self.trace = np.array([names.index(name) for name, _, _ in found])
        self.speeds = np.full((lengths[0], len(found)), np.nan)
        self.parts = {part: np.zeros(self.speeds.shape, dtype=bool) for part in PARTS}
        for column, (length, (_, number, values)) in enumerate(zip(lengths, found, strict=True)):
            self.speeds[:length, column] = values[:length]
            for name, part in PARTS.items():
                targets = part.targets(length)
                self.parts[name][targets.start : targets.stop, column] = part.has(number)

    def errors(self, constants: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Return errors over those of the mean of 64 rounds, by part and trace."""
        squares = {key: np.zeros(self.speeds.shape) for key in ("ours", "mean")}
        with changed(constants):
            known = Records()
            known.reserve(self.speeds.shape[1])
            for number, row in enumerate(self.speeds):
                here = np.arange(int((~np.isnan(row)).sum()))
                actual = row[here]
                if number:
                    mean = np.nanmean(known.window(here), axis=1)
                    squares["ours"][number, here] = (adaptive(known, here) - actual) ** 2
                    squares["mean"][number, here] = (mean - actual) ** 2
                known.record(here, actual)
        found: dict[str, dict[str, float]] = {}
        for part, mask in self.parts.items():
            found[part] = {}
            for number, name in enumerate(self.names):
                ours, mean = (
                    squares[key][:, self.trace == number][mask[:, self.trace == number]].mean()
                    for key in ("ours", "mean")
                )
                found[part][name] = float(np.sqrt(ours / mean))
        return found


def score(errors: dict[str, float]) -> float:
    """Return the geometric mean over sources of that over their traces."""
    logs: dict[str, list[float]] = {}
    for name, value in errors.items():
        logs.setdefault(source(name), []).append(float(np.log(value)))
    return float(np.exp(np.mean([np.mean(values) for values in logs.values()])))


def best(errors: dict[str, dict[str, dict[str, float]]], without: str = "") -> str:
    """Return the variant that is best on the training parts of all sources but one."""
    return min(
        errors,
        key=lambda variant: score(
            {n: e for n, e in errors[variant]["training"].items() if source(n) != without}
        ),
    )


def add_choices(report: Report, errors: dict[str, dict[str, dict[str, float]]]) -> None:
    """Add which variant each split chooses, and how good it is on what it was not chosen on."""
    names = list(errors["as shipped"]["test"])
    choices = {name: (f"without {source(name)}", best(errors, source(name))) for name in names}
    chosen = best(errors)
    for name in names:
        for split, variant in (("all sources", chosen), choices[name]):
            report.add(
                f"{name}, chosen on {split}: {variant}",
                "chosen_over_mean",
                errors[variant]["test"][name],
                goal=1.01,
                trace=name,
                split=split,
                variant=variant,
            )


def measured(smoke: bool) -> Report:
    """Run all variants over all traces."""
    report = Report("constants")
    names = ("stream-triad", "bytedance-SE") if smoke else traces.ALL
    variants = dict(list(VARIANTS.items())[: 2 if smoke else None])
    machines = Machines(names, rounds=100 if smoke else None)
    errors = {name: machines.errors(constants) for name, constants in variants.items()}
    for name, found in errors.items():
        for part in ("training", "test"):
            common: dict[str, Any] = {"variant": name, "part": part}
            report.add(f"{name}, {part}", "mean_error", score(found[part]), **common)
            worst = max(found[part].values())
            report.add(f"{name}, {part}", "worst_error", worst, goal=1.01, **common)
    add_choices(report, errors)
    return report


@click.command()
@options
@click.option(
    "--page",
    "page_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the page about prediction to this Markdown file.",
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
    """Compare constants of the default predictor on traces that they were not chosen on."""
    if png_file is not None:
        raise click.UsageError("This benchmark draws nothing: leave out --png.")
    report = measured(smoke) if earlier is None else read(earlier)
    report.finish(json_file)
    if page_file is not None:
        page_file.write_text(page(chosen(report)), encoding="utf-8")
        print(f"wrote {page_file}")


if __name__ == "__main__":
    main()
