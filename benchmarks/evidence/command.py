"""The command line: measure sections of papers, and make their pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.evidence.kept import Kept
from benchmarks.evidence.page import write_page
from benchmarks.evidence.papers import Paper
from benchmarks.report import Report

Command = TypeVar("Command", bound=Callable[..., Any])

#: The modules of the papers, imported only where they are needed.
PAPERS = {
    "s2c2": "s2c2",
    "pipe-sgd": "pipe_sgd",
    "gradiveq": "gradiveq",
    "gc-dc": "gc_dc",
    "coded-reduce": "coded_reduce",
    "rlnc": "rlnc",
}

_ROOT = Path(__file__).parents[2]
RESULTS, PAGES = _ROOT / "benchmarks" / "results", _ROOT / "docs" / "evidence"


def paper_of(name: str) -> Paper:
    """Return a paper by name."""
    paper: Paper = import_module(f"benchmarks.evidence.{PAPERS[name]}").PAPER
    return paper


def _folder(name: str, text: str) -> Callable[[Command], Command]:
    kind = click.Path(file_okay=False, path_type=Path)
    return click.option(name, type=kind, metavar="FOLDER", help=text)


@click.command()
@click.argument("papers", nargs=-1, type=click.Choice(sorted(PAPERS)), metavar="[PAPER]...")
@click.option("--section", "sections", multiple=True, help="Measure only this section.")
@click.option("--simulation-only", is_flag=True, help="Skip the measurements on processes.")
@click.option("--page", is_flag=True, help="Make the page; measures nothing without --section.")
@click.option("--again", is_flag=True, help="Measure again what has been saved.")
@click.option("--minutes", type=float, help="Begin no piece after so many minutes.")
@_folder("--keep", "Where sections are kept; by default benchmarks/results, for whole runs.")
@_folder("--pages", "Where pages are written; by default docs/evidence.")
@_folder("--plots", "Draw plots.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--smoke", is_flag=True, help="A tiny run that only shows that it works.")
def main(
    papers: tuple[str, ...],
    sections: tuple[str, ...],
    simulation_only: bool,
    page: bool,
    again: bool,
    minutes: float | None,
    keep: Path | None,
    pages: Path | None,
    plots: Path | None,
    json_file: Path | None,
    smoke: bool,
) -> None:
    """Measure what papers claim, and make the pages that compare the two."""
    until = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    only_pages = page and not sections
    for name in papers or sorted(PAPERS):
        paper = paper_of(name)
        if unknown := sorted(set(sections) - paper.sections.keys()):
            raise click.UsageError(
                f"{paper.name} has no section {unknown[0]!r}: choose of "
                f"{', '.join(paper.sections)}."
            )
        folder = keep / name if keep else None
        # A part of a section must not replace the whole of it.
        if folder is None and not smoke and not simulation_only:
            folder = RESULTS / name
        found = paper.kept(Report(name), smoke=smoke)
        for section in paper.sections:
            kept = _kept(paper, section, folder, smoke)
            if not only_pages and (not sections or section in sections):
                fresh = paper.kept(Report(name), smoke=smoke, processes=not simulation_only)
                kept = fresh if again or not kept else kept
                kept.processes = not simulation_only
                kept.known = found.report.rows
                _measure(paper, section, folder, kept, until)
            if kept and kept.pieces:
                _merge(found, kept, section)
        if page:
            write_page((pages or PAGES) / f"{name}.md", paper, found)
        if plots and paper.plot:
            paper.plot(plots, found)
        if not only_pages or json_file:
            found.report.finish(json_file)


def _kept(paper: Paper, section: str, folder: Path | None, smoke: bool) -> Kept | None:
    """Return the saved results of a section."""
    file = folder / f"{section}.json" if folder else None
    return paper.kept.read(file, paper.name) if file and file.exists() else None


def _measure(paper: Paper, name: str, folder: Path | None, kept: Kept, until: float) -> None:
    """Measure the pieces of a section that are not kept yet."""
    for piece, run in paper.sections[name].pieces.items():
        if kept.has(piece):
            click.echo(f"{paper.name}, {name}: {piece or 'all'} is kept; see --again.", err=True)
            continue
        if time.monotonic() > until:
            click.echo(f"{paper.name}, {name}: {piece} is left for the next run.", err=True)
            break
        began = time.monotonic()
        found = paper.kept(Report(paper.name), smoke=kept.smoke, processes=kept.processes)
        found.known = [*kept.known, *kept.report.rows]
        run(found)
        found.pieces[piece] = {
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(time.monotonic() - began, 1),
            "command": paper.command(name) + " --simulation-only" * (not kept.processes),
        }
        if not found.report.rows:  # nothing of it is simulated
            continue
        _merge(kept, found)
        if folder:
            kept.write(folder / f"{name}.json")


def _merge(into: Kept, found: Kept, section: str = "") -> None:
    try:
        into.merge(found, section)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
