"""Repeat the comparisons of the S2C2 paper, in simulation and on processes, over the fluid bound.

``python -m benchmarks.paper`` runs all sections, ``--only NAME`` one of them. ``--page FILE``
writes the documentation's page of results, ``--plots FOLDER`` plots of all rounds. All of it takes
over an hour. With ``--keep FOLDER`` sections can be run one by one, and the page includes all
results kept there.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.paper.page import write_page
from benchmarks.paper.plots import write_plots
from benchmarks.paper.results import Results
from benchmarks.paper.sections import SECTIONS
from benchmarks.report import Report


@click.command()
@click.option(
    "--only", type=click.Choice(sorted(SECTIONS)), multiple=True, help="Run only this section."
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path), help="Write the page of results."
)
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Write plots.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the results of sections, and include those that were kept before.",
)
@click.option("--simulation-only", is_flag=True, help="Skip the measurements on processes.")
@click.option("--smoke", is_flag=True, help="A tiny run that only shows that it works.")
def main(
    only: tuple[str, ...],
    json_file: Path | None,
    page: Path | None,
    plots: Path | None,
    keep: Path | None,
    simulation_only: bool,
    smoke: bool,
) -> None:
    """Reproduce the measurements of the S2C2 paper."""
    results = Results(Report("paper"), smoke=smoke)
    for name, section in SECTIONS.items():
        file = keep / f"{name}.json" if keep else None
        if not only or name in only:
            found = Results(Report("paper"), smoke=smoke, processes=not simulation_only)
            section(found)
            if file:
                found.write(file)
            results.merge(found, name)
        elif file and file.exists():
            try:
                results.merge(Results.read(file), name)
            except ValueError as error:
                raise click.ClickException(f"{file}: {error}") from None
    if page:
        write_page(page, results)
    if plots:
        write_plots(plots, results)
    results.report.finish(json_file)
