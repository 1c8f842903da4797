"""Make a paper's page of the manual from its kept sections.

The first screen is a list of the claims, each with its verdict. Tables and the origin of all
figures follow. A list is used because a phone shows it without scrolling sideways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.evidence.kept import WHOLE, Kept
from benchmarks.evidence.papers import Claim, Finding, Paper
from benchmarks.evidence.tables import table
from benchmarks.evidence.verdicts import Interval, Published

_READING = """\
In parentheses: where the paper says it and how sure we are, because the full text was not
available; 95 % intervals. Time saved has two figures: *less time*, in per cent of the other
method's time / *faster*, in per cent of one's own; papers seldom say which they mean. "Reproduced":
the measured value reaches the published one. "Cluster" is worker processes. A star marks runs that
something disturbed."""


def write_page(file: Path, paper: Paper, kept: Kept) -> None:
    """Write the page of a paper."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines(paper, kept)).rstrip() + "\n", encoding="utf-8")


def lines(paper: Paper, kept: Kept) -> Iterator[str]:
    """Yield the lines of the page of a paper."""
    yield f"# {paper.title}\n"
    yield f"% Made by `python -m benchmarks.evidence {paper.name} --page`; do not edit.\n"
    yield f"{paper.intro}\n"
    found = [(claim, claim.find(kept)) for claim in paper.claims]
    for claim, findings in found:
        yield _entry(paper, claim, findings)
    yield f"\n{_READING}\n"
    for claim, findings in found:
        if len(findings) > 1:
            yield from _cases(claim, findings)
    for part in paper.parts:
        yield from part(kept)
    yield from _origins(paper, kept)


def _entry(paper: Paper, claim: Claim, findings: list[Finding]) -> str:
    """Return the entry of a claim on the first screen."""
    said = f"{claim.text}: {claim.published} ({claim.place}, {claim.sure})."
    if not findings:
        return f"- **Not measured yet.** {said} To measure it: `{paper.command(*claim.sections)}`."
    if len(findings) == 1:
        (finding,) = findings
        verdict = verdict_of(claim.published, finding)
        parts = [
            f"{where}: {claim.published.show(value)}."
            for where, value in (("Cluster", finding.cluster), ("Simulated", finding.simulated))
            if value
        ]
        reason = f" {finding.reason}." if finding.reason else ""
        return f"- **{verdict[0].upper()}{verdict[1:]}.** {said} {' '.join(parts)}{reason}"
    return f"- **{_counted(claim, findings)}.** {said} {_span(claim, findings)}"


def verdict_of(published: Published, finding: Finding) -> str:
    """Return the verdict of a case, which says where it is from simulation only."""
    assert finding.best is not None
    verdict = published.verdict(finding.best)
    if finding.cluster is None:
        verdict += ", simulated only"
    return verdict + " *" * finding.disturbed


def _counted(claim: Claim, findings: list[Finding]) -> str:
    """Return in how many cases a claim is reproduced, by each measure."""
    reached: dict[str, int] = {}
    for finding in findings:
        assert finding.best is not None
        for name, yes in claim.published.reached(finding.best).items():
            reached[name] = reached.get(name, 0) + yes
    counts = " and ".join(
        f"{count} of {len(findings)}{f' ({name})' if name else ''}"
        for name, count in reached.items()
    )
    simulated = ", simulated only" if not any(finding.cluster for finding in findings) else ""
    return f"Reproduced in {counts} cases{simulated}"


def _span(claim: Claim, findings: list[Finding]) -> str:
    """Return the least and the greatest of the measured cases, and where to find the others."""
    parts = []
    for where in ("cluster", "simulated"):
        values = sorted(value for f in findings if (value := getattr(f, where)))
        if values:
            ends = [Interval(value.value, value.value, value.value) for value in values]
            least, most = (claim.published.show(end) for end in (ends[0], ends[-1]))
            parts.append(f"{where.capitalize()}: from {least} to {most}.")
    return f"{' '.join(parts)} Each case is in a table below."


def _cases(claim: Claim, findings: list[Finding]) -> Iterator[str]:
    """Yield the table of a claim with several cases."""
    yield f"## {claim.text}, case by case"
    rows = [
        [
            finding.case,
            *(claim.published.show(v) if v else "–" for v in (finding.cluster, finding.simulated)),
            verdict_of(claim.published, finding),
            finding.reason,
        ]
        for finding in findings
    ]
    header = ["", "cluster", "simulated", "verdict", "reason"]
    yield from table(*_without_empty(header, rows))


def _without_empty(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Leave out columns in which no row has anything."""
    columns = [i for i in range(len(header)) if any(row[i] not in ("", "–") for row in rows)]
    return [header[i] for i in columns], [[row[i] for i in columns] for row in rows]


def _origins(paper: Paper, kept: Kept) -> Iterator[str]:
    """Yield date, machine and versions of each section, and the command that measures it."""
    yield "## Where the figures come from\n"
    yield (
        f"`{paper.command('NAME')}` measures a section. Each was measured alone on its "
        "machine, and the package may have changed since. Single figures are in "
        f"`benchmarks/results/{paper.name}`."
    )
    rows: dict[tuple[str, str], list[str]] = {}
    for name, section in paper.sections.items():
        when, machine = "not measured yet", "–"
        if origin := kept.origins.get(name):
            when = " and ".join(origin.dates)
            if WHOLE not in origin.pieces and (missing := section.pieces.keys() - origin.pieces):
                when += f", without {len(missing)} of {len(section.pieces)} pieces"
            machine = _machine(origin.machine, origin.versions)
        rows.setdefault((when, machine), []).append(f"`{name}`")
    lines = [[", ".join(names), *origin] for origin, names in rows.items()]
    yield from table(["sections", "measured", "on"], lines)


def _machine(machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    packages = ("distributed", "numpy", "torch")
    found = [f"{name} {versions[name]}" for name in packages if name in versions]
    throttle = [str(machine["throttle"])] if "throttle" in machine else []
    return ", ".join(
        [
            f"{machine.get('cores')} cores ({machine.get('processor')})",
            *throttle,
            f"Python {versions.get('python')}",
            *found,
        ]
    )
