"""The machinery of evidence: verdicts, kept sections, pages, the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.evidence.command import PAPERS, main, paper_of
from benchmarks.evidence.kept import Kept
from benchmarks.evidence.page import lines, write_page
from benchmarks.evidence.papers import Claim, Finding, Paper, Section
from benchmarks.evidence.verdicts import Interval, Published, Ranged, from_ranges, mean, ratio
from benchmarks.report import Report

# ---------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Interval(6.0, 5.5, 6.5), "exceeded"),
        (Interval(6.0, 5.2, 6.5), "reproduced"),  # the interval holds the published figure
        (Interval(5.4, 5.4, 5.4), "reproduced"),
        (Interval(5.3, 5.0, 5.6), "within the interval, 0.1 times short"),
        (Interval(3.0, 2.5, 3.5), "not reproduced, 2.4 times short"),
        (Interval(6.0, math.nan, math.nan), "reproduced"),  # one run exceeds nothing
        (Interval(5.0, math.nan, math.nan), "not reproduced, 0.4 times short"),
    ],
)
def test_a_figure_is_reproduced_only_if_its_value_reaches_the_published_one(found, verdict):
    assert Published(5.4, 5.4, "times").verdict(found) == verdict


def test_more_than_has_no_upper_end():
    published = Published(5, math.inf, "times")
    assert str(published) == "more than 5 times"
    assert published.verdict(Interval(50, 40, 60)) == "reproduced"
    assert published.verdict(Interval(4.99, 4.9, 4.995)) == "not reproduced, 0.01 times short"


def test_at_most_is_missed_from_above():
    published = Published(0, 1, "level", "points", at_most=True)
    assert str(published) == "at most 1 points"
    assert published.verdict(Interval(-2, -3, 0.5)) == "reproduced"
    assert published.verdict(Interval(1.5, 0.5, 2.5)) == "within the interval, 0.5 points above"
    assert published.verdict(Interval(3, 2, 4)) == "not reproduced, 2.0 points above"


def test_time_saved_is_judged_by_both_measures():
    published = Published(39.3, 39.3)
    found = Interval(1.416, 1.38, 1.452)
    assert published.show(found) == "29.4 (27.5 to 31.1) / 41.6 (38.0 to 45.2) %"
    assert published.verdict(found) == (
        "less time: not reproduced, 9.9 points short; faster: reproduced"
    )
    assert published.reached(found) == {"less time": False, "faster": True}
    assert published.verdict(Interval(1.8, 1.7, 1.9)) == "exceeded"
    assert published.verdict(Interval(1.1, 1.05, 1.15)).startswith("not reproduced, 30.2 / 29.3")


def test_there_is_no_grace():
    assert Published(19, 39).verdict(ratio([1.18] * 9, [1.0] * 9)) != "reproduced"


def test_an_interval_is_as_wide_as_turns_differ():
    steady = ratio([3.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0])
    assert steady == (1.5, 1.5, 1.5)
    value, low, high = ratio([3.0, 5.0, 2.0, 4.0], [2.0, 2.5, 2.0, 1.5])
    assert low < value < high
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        _, low, high = mean(rng.normal(5, 1, 20))
        inside += low <= 5 <= high
    assert 0.85 < inside / 200 <= 1


def test_an_interval_of_medians_can_be_told_from_their_ranges():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        runs = [np.exp(rng.normal(math.log(m), 0.05, 9)) for m in (1.3, 1.0)]
        found = [Ranged(float(np.median(r)), r.min(), r.max(), 9) for r in runs]
        _, low, high = from_ranges(*found)
        inside += low <= 1.3 <= high
    assert 0.88 < inside / 300 <= 1


# -------------------------------------------------------------------------- kept sections and pages


def measure(kept: Kept) -> None:
    kept.report.add("some case", "speed_up", 5.5, where="processes")


def find(kept: Kept) -> list[Finding]:
    rows = kept.rows(measure="speed_up")
    return [
        Finding(row.get("seed", ""), Interval(row["value"], row["value"] - 0.05, row["value"]))
        for row in rows
    ]


def some_paper(**pieces) -> Paper:
    claims = (Claim("As fast", Published(5.4, 5.4, "times"), "abstract", "sure", ("one",), find),)
    section = Section(pieces or {"only": measure}, 1)
    return Paper("some", "Evidence: some", "It says much.", claims, {"one": section}, ())


def page_of(paper: Paper, kept: Kept) -> str:
    return "\n".join(lines(paper, kept))


def test_what_is_not_measured_says_so_and_how_to_measure_it():
    text = page_of(some_paper(), Kept(Report("some")))
    assert "- **Not measured yet.** As fast: 5.4 times (abstract, sure). " in text
    assert "To measure it: `python -m benchmarks.evidence some --section one`." in text


def test_a_page_has_verdict_date_machine_and_command(tmp_path):
    paper, kept = some_paper(), Kept(Report("some"))
    measure(kept)
    kept.pieces["only"] = {"date": "2026-11-28"}
    kept.write(tmp_path / "one.json")
    found = Kept(Report("some"))
    found.merge(Kept.read(tmp_path / "one.json", "some"), "one")
    write_page(tmp_path / "page.md", paper, found)
    text = (tmp_path / "page.md").read_text()
    assert "- **Exceeded.** As fast" in text
    assert "Cluster: 5.50 (5.45 to 5.50) times." in text
    assert "| `one` | 2026-11-28 | " in text
    assert f"Python {kept.report.versions['python']}" in text


def test_a_verdict_from_simulation_says_so():
    def simulated(kept: Kept) -> list[Finding]:
        return [Finding("", None, Interval(5.4, 5.4, 5.4), "workers sleep", True)]

    claim = Claim("As fast", Published(5.4, 5.4, "times"), "abstract", "sure", ("one",), simulated)
    paper = Paper("some", "Evidence: some", "", (claim,), some_paper().sections, ())
    text = page_of(paper, Kept(Report("some")))
    assert "- **Reproduced, simulated only *.**" in text
    assert text.count("workers sleep.") == 1


def test_several_cases_are_counted_and_listed():
    kept = Kept(Report("some"))
    for seed, value in (("a", 5.5), ("b", 2.0)):
        kept.report.add("some case", "speed_up", value, seed=seed)
    text = page_of(some_paper(), kept)
    assert "- **Reproduced in 1 of 2 cases.** As fast: 5.4 times (abstract, sure)." in text
    assert "Cluster: from 2.00 times to 5.50 times." in text
    assert "## As fast, case by case" in text
    assert "| b | 2.00 (1.95 to 2.00) times | not reproduced, 3.4 times short |" in text


def test_a_section_resumes_after_its_last_piece(tmp_path, monkeypatch):
    ran = []

    def piece(name):
        def run(kept: Kept) -> None:
            ran.append(name)
            if name == "b" and ran.count("b") == 1:
                raise OSError("the network lab is gone")
            kept.report.add(name, "speed_up", 5.5, seed=name)

        return run

    paper = some_paper(a=piece("a"), b=piece("b"))
    monkeypatch.setitem(PAPERS, "s2c2", "s2c2")
    monkeypatch.setattr("benchmarks.evidence.command.paper_of", lambda name: paper)
    options = ["s2c2", "--section", "one", "--keep", str(tmp_path)]
    assert isinstance(CliRunner().invoke(main, options).exception, OSError)
    result = CliRunner().invoke(main, [*options, "--page", "--pages", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert ran == ["a", "b", "b"]
    kept = json.loads((tmp_path / "s2c2" / "one.json").read_text())
    assert list(kept["pieces"]) == ["a", "b"]
    assert kept["pieces"]["a"]["command"] == paper.command("one")
    assert "Reproduced" in (tmp_path / "s2c2.md").read_text()
    result = CliRunner().invoke(main, options)
    assert ran == ["a", "b", "b"] and "is kept" in result.output
    result = CliRunner().invoke(main, [*options, "--again", "--minutes", "0"])
    assert ran == ["a", "b", "b"] and "left for the next run" in result.output


def test_a_tiny_run_is_not_mixed_with_whole_ones(tmp_path):
    kept = Kept(Report("some"), smoke=True)
    with pytest.raises(ValueError, match="must have the same size"):
        Kept(Report("some")).merge(kept, "one")


@pytest.mark.parametrize("paper", sorted(PAPERS))
def test_an_unknown_section_is_refused(paper):
    result = CliRunner().invoke(main, [paper, "--section", "nothing"])
    assert result.exit_code == 2
    assert f"{paper} has no section 'nothing'" in result.output


def test_an_unknown_paper_is_refused():
    assert CliRunner().invoke(main, ["nothing"]).exit_code == 2


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_the_page_in_the_manual_is_the_one_of_the_kept_sections(name, tmp_path):
    result = CliRunner().invoke(main, [name, "--page", "--pages", str(tmp_path)])
    assert result.exit_code == 0, result.output
    manual = Path(__file__).parents[2] / "docs" / "evidence" / f"{name}.md"
    assert (tmp_path / f"{name}.md").read_text() == manual.read_text()


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_a_paper_declares_where_each_claim_is_from_and_what_measures_it(name):
    paper = paper_of(name)
    for claim in paper.claims:
        assert claim.place and claim.sure
        assert set(claim.sections) <= paper.sections.keys()
    assert all(section.minutes <= 20 for section in paper.sections.values())
