"""Plot single rounds, and where coding pays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.evidence.s2c2 import storage
from benchmarks.evidence.s2c2.results import Results
from benchmarks.report import picture


def write_plots(folder: Path, results: Results) -> None:
    """Plot rounds over the bound: one picture per case, one line per contender."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in results.rows(section="storage"):
        points = stored.setdefault(row["regime"], {}).setdefault(row["policy"], [])
        points.append((row["stored"], row["value"]))
    if stored:
        storage.plot(folder / "storage.png", stored)
    grouped: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for (case, contender, where), ratios in results.rounds.items():
        quiet = results.quiet((case, contender, where))
        # A line has gaps where rounds were disturbed.
        grouped.setdefault((case, where), {})[contender] = np.where(quiet, ratios, np.nan)
    for (case, where), lines in grouped.items():
        if len(lines) < 2:
            continue
        name = "".join(c if c.isalnum() else "-" for c in f"{case} {where}").strip("-").lower()
        with picture(folder / f"{name}.png", figsize=(8, 4)) as figure:
            axes = figure.subplots()
            for contender, ratios in lines.items():
                axes.plot(np.arange(1, len(ratios) + 1), ratios, label=contender, marker=".")
            axes.axhline(1, color="black", linewidth=1)
            axes.set_title(f"{case}, {where}")
            axes.set_xlabel("round")
            axes.set_ylabel("seconds over the fluid bound")
            axes.legend(fontsize="small")
