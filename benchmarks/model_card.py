"""The model card in ``docs/prediction.md``: its generated parts, from the rows of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.report import Report
from benchmarks.traces import CONTROLS, LEARNABLE, PARTS
from dask_coded.prediction import PREDICTORS
from dask_coded.prediction.predictors._lstm import record
from dask_coded.rounds import RoundOptions

#: The page. The text between its marks is generated, the rest is not.
CARD = Path(__file__).parents[1] / "docs" / "prediction.md"

#: What the paper reports of its network on its own speeds, which are not public (recalled).
PUBLISHED_MAPE = 16.7


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def quoted(name: str) -> str:
    """Return a predictor's name, as code if it is a name in the configuration."""
    return f"`{name}`" if name in PREDICTORS else name


def rows_of(report: Report, measure: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows of a measure whose entries have the values wanted."""
    wanted["measure"] = measure
    return [row for row in report.rows if all(row.get(k) == v for k, v in wanted.items())]


def by_trace(report: Report, measure: str, digits: int) -> str:
    """Return a table of one measure for all predictors and traces; a trace's best is bold."""
    values: dict[str, dict[str, float]] = {}
    for row in rows_of(report, measure):
        values.setdefault(row["predictor"], {})[row["trace"]] = row["value"]
    names = next(iter(values.values()))
    best = {name: min(found.get(name, np.inf) for found in values.values()) for name in names}
    lines = []
    for key, found in values.items():
        cells = []
        for name in names:
            if name not in found:
                cells.append("–")
                continue
            text, least = (f"{x:.{digits}f}" for x in (found[name], best[name]))
            cells.append(f"**{text}**" if text == least else text)
        lines.append([quoted(key), *cells])
    return table(["predictor", *names], lines)


def compared(row: dict[str, Any]) -> str:
    """Compare the errors of two predictors in words; below 1 % they count as equal."""
    ratio = row["value"]
    said = f"{100 * abs(ratio - 1):.1f} % {'below' if ratio < 1 else '**above**'}"
    if abs(ratio - 1) < 0.01:
        said = "no different"
    return f"{said} ({row['better_on']} of {row['machines']})"


def verdict(report: Report, ours: str, names: Iterable[str]) -> str:
    """Return a table that compares a predictor with its rivals, one row per trace."""
    found = rows_of(report, "rmse_over", predictor=ours)
    rivals = list(dict.fromkeys(row["rival"] for row in found))
    cells = {(row["trace"], row["rival"]): compared(row) for row in found}
    lines = [[n, *(cells[n, r] for r in rivals)] for n in names if (n, rivals[0]) in cells]
    return table(["trace", *map(quoted, rivals)], lines)


def published(report: Report) -> str:
    """Return the mean absolute percentage errors of the published network and of ours."""
    keys = ["LSTM as published", "lstm", RoundOptions.predictor]
    lines = []
    for row in rows_of(report, "predictions"):
        found = [rows_of(report, "mape", trace=row["trace"], predictor=k)[0] for k in keys]
        lines.append([row["trace"], *(f"{r['value']:.2f}" for r in found)])
    return table(
        ["trace", *map(quoted, keys)], [["the paper's own", PUBLISHED_MAPE, "", ""], *lines]
    )


def rounds(report: Report) -> str:
    """Return a table of simulated rounds: predictors down, policies and kinds of speeds across."""
    found = rows_of(report, "mean_round_over_fluid")
    columns = list(dict.fromkeys((row["policy"], row["on"]) for row in found))
    cells = {(r["predictor"], r["policy"], r["on"]): f"{r['value']:.4f}" for r in found}
    names = dict.fromkeys(row["predictor"] for row in found)
    lines = [[quoted(n), *(cells.get((n, *c), "–") for c in columns)] for n in names]
    return table(["predictor", *(f"{policy}, {on}" for policy, on in columns)], lines)


def trials(report: Report) -> str:
    """Return a table of simulated rounds with and without trials of a worker that was slow."""
    found = rows_of(report, "tried_round_over_fluid")
    columns = list(dict.fromkeys((row["state"], row["trials"]) for row in found))
    cells = {(r["policy"], r["state"], r["trials"]): f"{r['value']:.4f}" for r in found}
    lines = [[f"`{p}`", *(cells[p, *c] for c in columns)] for p in ("s2c2", "continuous")]
    return table(["policy", *(f"{state}, tried {when}" for state, when in columns)], lines)


def blocks(report: Report) -> dict[str, str]:
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
        [r["trace"], windows.get(r["trace"], 0), f"{r['value']:.0f}", r["machines"]]
        for r in rows_of(report, "predictions")
    ]
    every = [row[0] for row in sizes]
    others = [name for name in every if name not in LEARNABLE + CONTROLS]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    timed = rows_of(report, "predict_ms")
    milliseconds = [
        [quoted(r["predictor"]), f"{r['value']:.3f}", "{:.3f} .. {:.3f}".format(*r["spread"])]
        for r in timed
    ]
    return {
        "machine": table(
            ["measured", "on"],
            [
                [
                    str(report.machine["time"])[:10],
                    f"{report.machine['processor']}, {report.machine['cores']} cores; {versions}",
                ]
            ],
        ),
        "split": table(["part", "what"], [[n, p.description] for n, p in PARTS.items()]),
        "data": table(["trace", "training windows", "predictions", "machines held out"], sizes),
        "record": table(["setting", "value"], list(facts.items())),
        "losses": table(["trace", "line", "trained"], steps),
        "rmse": by_trace(report, "rmse", 4),
        "percentage": by_trace(report, "mape", 2),
        "published": published(report),
        "default": verdict(report, RoundOptions.predictor, every),
        "learnable": verdict(report, "lstm", LEARNABLE),
        "controls": verdict(report, "lstm", CONTROLS),
        "others": verdict(report, "lstm", others),
        "rounds": rounds(report),
        "trials": trials(report),
        "cost": table(["", f"ms for {timed[0]['workers']} workers", "quartiles"], milliseconds),
    }


def chosen(report: Report) -> dict[str, str]:
    """Return the parts about the default's constants, by their marks; see `constants`."""
    variants = dict.fromkeys(row["variant"] for row in rows_of(report, "mean_error"))
    lines = [
        [name]
        + [
            f"{rows_of(report, measure, variant=name, part=part)[0]['value']:.4f}"
            for measure in ("mean_error", "worst_error")
            for part in ("training", "test")
        ]
        for name in variants
    ]
    header = ["constants", "mean, training", "mean, test", "worst, training", "worst, test"]
    found: dict[str, list[str]] = {}
    for row in rows_of(report, "chosen_over_mean"):
        found.setdefault(row["trace"], []).append(f"{row['value']:.4f} ({row['variant']})")
    return {
        "constants": table(header, lines),
        "choices": table(
            ["trace", "chosen on other machines", "chosen on other sources"],
            [[name, *cells] for name, cells in found.items()],
        ),
    }


def read(file: Path) -> Report:
    """Read the report of an earlier run."""
    found = json.loads(file.read_text(encoding="utf-8"))
    name = found["rows"][0]["benchmark"]
    return Report(name, found["rows"], found["machine"], found["versions"])


def page(generated: dict[str, str]) -> str:
    """Return the page with some of its generated parts replaced, by their marks."""
    text = CARD.read_text(encoding="utf-8")
    for name, block in generated.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise click.ClickException(f"{CARD} lacks the marks {begin} and {end}.")
        text = f"{before}{begin}\n\n{block}\n\n{end}{after}"
    return text
