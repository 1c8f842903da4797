"""The harness of the benchmarks: order of runs, medians, table, JSON, options."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.report import Report, Summary, Timings, options, picture, side_by_side


class Clock:
    """A clock that cases move forward by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, *seconds: float):
        durations = iter(seconds)

        def run() -> float:
            duration = next(durations)
            self.now += duration
            return duration

        return run


def test_cases_run_in_turns_and_the_warm_up_is_not_counted():
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "AB"}
    timings = side_by_side(cases, repeats=2, warmup=1)
    assert order == ["A", "B", "A", "B", "A", "B"]
    assert {case: len(seconds) for case, seconds in timings.seconds.items()} == {"A": 2, "B": 2}


def test_each_case_is_timed_alone():
    clock = Clock()
    cases = {"A": clock.takes(100, 1, 2, 3), "B": clock.takes(100, 4, 4, 6)}
    timings = side_by_side(cases, repeats=3, clock=clock)
    assert timings.seconds["A"].tolist() == [1, 2, 3]
    assert timings.seconds["B"].tolist() == [4, 4, 6]
    assert timings.results == {"A": 3, "B": 6}
    assert timings.summary("A").value == 2


def test_a_ratio_is_taken_turn_by_turn():
    timings = Timings({"A": np.array([1.0, 20.0, 3.0]), "B": np.array([2.0, 40.0, 3.0])}, {})
    ratio = timings.ratio("A", over="B", spread_of="range")
    assert ratio == Summary(0.5, (0.5, 1.0), "range", 3)


def test_further_turns_of_one_case_leave_its_ratios_to_others():
    few = Timings({"A": np.array([1.0]), "B": np.array([2.0]), "C": np.array([4.0])}, {"A": 1})
    timings = few.extended(Timings({"A": np.array([3.0]), "B": np.array([3.0])}, {"A": 2}))
    assert timings.ratio("A", over="C", spread_of="range") == Summary(
        0.25, (0.25, 0.25), "range", 1
    )
    assert timings.ratio("A", over="B", spread_of="range") == Summary(0.75, (0.5, 1.0), "range", 2)
    assert timings.results == {"A": 2}


@pytest.mark.parametrize(("cases", "repeats"), [({}, 1), ({"A": int}, 0)])
def test_nothing_to_run_is_refused(cases, repeats):
    with pytest.raises(ValueError, match="must"):
        side_by_side(cases, repeats=repeats)


def test_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one number"):
        Summary.of([])


def test_row_has_the_agreed_entries():
    report = Report("stragglers")
    report.add(
        "(8, 6), 2 slowed",
        "round_over_fluid",
        Summary.of([1.0, 1.1, 1.5]),
        goal=1.2,
        policy="continuous",
        n=8,
    )
    assert report.rows == [
        {
            "benchmark": "stragglers",
            "case": "(8, 6), 2 slowed",
            "measure": "round_over_fluid",
            "value": 1.1,
            "unit": "ratio",
            "goal": 1.2,
            "goal_sense": "at most",
            "met": True,
            "spread": [1.05, 1.3],
            "spread_of": "quartiles",
            "repetitions": 3,
            "policy": "continuous",
            "n": 8,
        }
    ]


@pytest.mark.parametrize(
    ("value", "goal", "sense", "met"),
    [
        (1.0, None, "at most", None),
        (1.0, 1.0, "at most", True),
        (1.1, 1.0, "at most", False),
        (1.1, 1.0, "at least", True),
    ],
)
def test_goals_are_upper_or_lower_bounds(value, goal, sense, met):
    report = Report("any")
    report.add("case", "measure", value, goal=goal, goal_sense=sense)
    assert report.rows[0]["met"] is met


def test_reserved_entries_cannot_be_replaced():
    with pytest.raises(ValueError, match="spread"):
        Report("any").add("case", "measure", 1.0, spread=3)


def test_json_file_holds_machine_versions_and_rows(tmp_path: Path):
    report = Report("overhead")
    report.machine["throttle"] = "cgroup quota"
    report.add("12 workers", "ratio", np.float64(0.5), workers=np.int64(12), shape=(2, 3))
    report.add("12 workers", "hopeless", float("inf"), samples=np.array([1.0, np.nan]))
    file = tmp_path / "report.json"
    report.write_json(file)
    found = json.loads(file.read_text())
    assert list(found) == ["machine", "versions", "rows"]
    assert found["machine"]["throttle"] == "cgroup quota"
    assert found["machine"]["cores"] >= 1
    assert {"python", "numpy", "dask", "distributed"} <= found["versions"].keys()
    ratio, hopeless = found["rows"]
    assert (ratio["value"], ratio["workers"], ratio["shape"]) == (0.5, 12, [2, 3])
    assert (hopeless["value"], hopeless["samples"]) == (None, [1.0, None])


@pytest.mark.parametrize("rich", [True, False])
def test_table_shows_every_row(monkeypatch: pytest.MonkeyPatch, rich: bool):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = Report("stragglers")
    report.add("one slowed", "round_over_fluid", Summary.of([1.5, 1.5]), goal=1.2)
    report.add("none slowed", "seconds", 0.25, "s")
    stream = io.StringIO()
    report.print_table(stream)
    text = stream.getvalue()
    assert "stragglers" in text
    assert "at most 1.2: MISSED" in text
    assert "1.5 .. 1.5 (quartiles)" in text
    assert "0.25 s" in text


@click.command()
@options
def command(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    report = Report("tiny")
    report.add("smoke" if smoke else "whole", "measure", 1.0)
    if png_file is not None:
        with picture(png_file, figsize=(2, 1)) as figure:
            figure.subplots().plot([1, 2])
    report.finish(json_file)


def test_options_of_every_benchmark(tmp_path: Path):
    pytest.importorskip("matplotlib")
    json_file, png_file = tmp_path / "a.json", tmp_path / "a.png"
    arguments = ["--smoke", "--json", str(json_file), "--png", str(png_file)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "smoke" in result.output
    assert json.loads(json_file.read_text())["rows"][0]["case"] == "smoke"
    assert png_file.read_bytes().startswith(b"\x89PNG")


def test_missing_folder_is_reported_before_the_benchmark_runs(tmp_path: Path):
    result = CliRunner().invoke(command, ["--json", str(tmp_path / "no" / "a.json")])
    assert result.exit_code == 2
    assert "does not exist" in result.output
