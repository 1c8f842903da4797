"""The sections of S2C2: tiny runs, disturbed rounds, what claims rest on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import datasets
from benchmarks.evidence.command import main
from benchmarks.evidence.page import write_page
from benchmarks.evidence.s2c2 import PAPER
from benchmarks.evidence.s2c2.cases import CONTENDERS, Case
from benchmarks.evidence.s2c2.claims import algorithm, rounds
from benchmarks.evidence.s2c2.processes import Measured, disturbed
from benchmarks.evidence.s2c2.results import Results
from benchmarks.evidence.verdicts import Published
from benchmarks.report import Report

needs_traces = pytest.mark.skipif(
    datasets.folder() is None, reason="needs the traces of real machines"
)
QUOTAS = np.array([[0.1, 0.1, 0.02]] * 5)


@pytest.mark.parametrize("factor", [0.6, 1.5])
@pytest.mark.parametrize("when", [0, 1])
def test_a_round_is_disturbed_if_the_machine_was_not_as_usual_before_or_after_it(factor, when):
    speeds = np.repeat(QUOTAS[:, None] * 300, 2, axis=1)
    speeds[:, 1] *= 0.9
    speeds[3, when] *= factor
    assert disturbed(speeds, QUOTAS).tolist() == [False, False, False, True, False]


def test_a_round_is_not_disturbed_by_other_speeds_of_its_workers():
    quotas = QUOTAS * np.array([1, 1, 1, 0.2, 3])[:, None]
    speeds = np.repeat(quotas[:, None] * 300, 2, axis=1)
    speeds[2, :, 2] /= 3  # of one worker only
    assert not disturbed(speeds, quotas).any()


def test_no_round_is_disturbed_if_most_would_be():
    speeds = np.repeat(QUOTAS[:, None], 2, axis=1) * np.array([1, 2, 4, 8, 16])[:, None, None]
    assert not disturbed(speeds, QUOTAS).any()


def test_disturbed_rounds_are_left_out_and_listed(tmp_path):
    case = Case("(3,2), some trace", 3, 2, QUOTAS, fields={"section": "regimes"})
    ours = Measured(np.array([1.0, 1.1, 1.7, 1.8, 1.2]), np.array([0, 0, 1, 1, 0], bool))
    theirs = Measured(np.array([9.0, 2.2, 9.0, 2.4, 2.4]), np.array([1, 0, 0, 0, 0], bool))
    results = Results(Report("s2c2"))
    results.add(case, CONTENDERS["continuous"], "processes", ours)
    results.add(case, CONTENDERS["MDS"], "processes", theirs)
    results.gains(case, "continuous", "MDS", "processes")
    results.pieces["whole"] = {"date": "2026-11-28"}
    results.write(tmp_path / "regimes.json")
    kept = Results.read(tmp_path / "regimes.json", "s2c2")
    median, _ = kept.rows(measure="round_over_fluid")
    assert (median["value"], median["repetitions"]) == (1.1, 3)
    (gain,) = kept.rows(measure="gain_over_ours")
    assert gain["value"] == pytest.approx(100)
    write_page(tmp_path / "page.md", PAPER, kept)
    assert "3 of 10 rounds" in (tmp_path / "page.md").read_text()


def test_policies_in_turns_are_compared_without_disturbed_rounds(tmp_path):
    fields = {"section": "controlled", "slowed": 0, "factor": 5, "shape": "some shape"}
    case = Case("(3,2), some case", 3, 2, QUOTAS, fields=fields)
    ours = Measured(np.array([1.0, 1.0, 2.0, 1.0, 9.0]), np.array([0, 0, 0, 0, 1], bool))
    theirs = Measured(np.array([9.0, 1.5, 2.0, 1.2, 1.0]), np.array([1, 0, 0, 0, 0], bool))
    results = Results(Report("s2c2"))
    results.add(case, CONTENDERS["continuous"], "processes", ours)
    results.add(case, CONTENDERS["MDS"], "processes", theirs)
    results.in_turns(case, ["MDS", "continuous"], "continuous")
    row = results.rows(measure="time_in_turns", policy="MDS")[0]
    assert (row["value"], row["repetitions"]) == (pytest.approx(1.2), 3)
    write_page(tmp_path / "page.md", PAPER, results)
    assert "| (3,2), 0 slowed | 1.200 (1.10 to 1.35) |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("sections", "measures"),
    [
        (["prediction-error"], {"round_over_fluid"}),
        pytest.param(
            ["support-vector-machine"],
            {"time_over_continuous"},
            marks=[needs_traces, pytest.mark.extras, pytest.mark.long],
        ),
        pytest.param(
            ["over-decomposition"],
            {"round_over_fluid", "gain_over_ours"},
            marks=[needs_traces, pytest.mark.extras, pytest.mark.long],
        ),
        pytest.param(
            [
                "hessian",
                "slowed-support-vector-machine",
                "predictors-on-processes-low",
                "web-graph-filter",
            ],
            {"round_over_fluid", "time_over_s2c2", "time_over_continuous"},
            marks=[needs_traces, pytest.mark.extras, pytest.mark.long],  # some 80 processes
        ),
        pytest.param(
            ["traces", "predictors"],
            {"round_over_fluid", "mean_round_over_fluid"},
            marks=[needs_traces, pytest.mark.extras, pytest.mark.long],
        ),
    ],
)
def test_tiny_run_of_a_section(sections: list[str], measures: set[str], tmp_path: Path) -> None:
    if sections != ["prediction-error"]:
        pytest.importorskip("pyarrow")
    file = tmp_path / "report.json"
    options = [option for name in sections for option in ("--section", name)]
    result = CliRunner().invoke(main, ["s2c2", "--smoke", "--json", str(file), *options])
    assert result.exit_code == 0, result.output
    assert measures <= {row["measure"] for row in json.loads(file.read_text())["rows"]}


def test_page_and_plots_of_a_section(tmp_path: Path) -> None:
    options = ["--smoke", "--simulation-only", "--section", "controlled", "--page"]
    folders = ["--pages", str(tmp_path), "--plots", str(tmp_path / "plots")]
    result = CliRunner().invoke(main, ["s2c2", *options, *folders])
    assert result.exit_code == 0, result.output
    assert "| (12,6), 5 times slower, simulation | – | 1." in (tmp_path / "s2c2.md").read_text()
    assert len(list((tmp_path / "plots").glob("*.png"))) == 1


def test_kept_sections_are_on_the_page_of_later_runs(tmp_path: Path) -> None:
    common = ["s2c2", "--smoke", "--simulation-only", "--keep", str(tmp_path)]
    for section in ("controlled", "prediction-error", "regimes"):
        options = ["--section", section, "--page", "--pages", str(tmp_path)]
        result = CliRunner().invoke(main, [*common, *options])
        assert result.exit_code == 0, result.output
    page = (tmp_path / "s2c2.md").read_text()
    assert "## Controlled cluster" in page
    assert "## Sensitivity to prediction errors" in page
    assert "## Plain dask.array" not in page  # nothing of it is simulated
    assert not (tmp_path / "s2c2" / "regimes.json").exists()
    result = CliRunner().invoke(main, [*common[:1], *common[2:], "--section", "regimes"])
    assert result.exit_code == 1
    assert "must have the same size" in result.output


def test_what_workers_without_a_code_come_to_hold() -> None:
    from benchmarks.evidence.s2c2.storage import held

    steady = held(np.ones((20, 4)))
    np.testing.assert_allclose(steady, 0.25)
    turns = np.ones((40, 4))
    turns[10:, 0] = 0.01
    shares = held(turns)
    assert shares[0] == 0.25  # what it has held before
    assert (shares[1:] > 0.3).all()


def cloud_of(section: str = "cloud", **times: float) -> Results:
    """Return results of single rounds, of which each contender takes so many bounds."""
    results = Results(Report("s2c2"))
    for where in ("simulation", "processes") if section == "cloud" else ("processes",):
        for name, seconds in times.items():
            fields = {"section": section, "misprediction": "low", "over": "trace"}
            case = Case(f"(10,7), low, {section}", 10, 7, np.ones((6, 10)), fields=fields)
            found = np.full(6, seconds)
            if where == "processes":
                found = found + np.array([0, 0.1, -0.1, 0, 0.1, -0.1])
            results.bounds[case.name] = np.ones(6)
            results.add(case, CONTENDERS[name.replace("_", "-")], where, found)
    return results


def test_rounds_are_judged_on_processes_and_over_decomposition_in_its_own_section() -> None:
    results = cloud_of(S2C2=1.0, MDS=1.4, over_decomposition=1.1)
    about = {"n": 10, "k": 7, "level": "low", "published": Published(39.3, 39.3)}
    [found] = rounds(results, versus="MDS", **about)
    assert found.cluster and found.simulated and found.best == found.cluster
    assert found.cluster.value == pytest.approx(1.4)
    assert found.cluster.low < found.cluster.high
    [found] = rounds(results, versus="over-decomposition", **about)
    assert found.simulated
    results.merge(cloud_of("over-decomposition", S2C2=1.0, over_decomposition=1.2), "dealt")
    [found] = rounds(results, versus="over-decomposition", **about)
    assert found.cluster
    assert found.cluster.value == pytest.approx(1.2)
    wanted = "It takes 1.20 (processes) and 1.10 (simulation) of the fluid bound here; what"
    assert found.reason.startswith(wanted)
    assert rounds(results, versus="MDS", **about | {"level": "high"}) == []


def test_algorithms_are_judged_by_their_turns_or_by_ranges_of_older_runs() -> None:
    results = Results(Report("s2c2"))
    times = {"uncoded": 0.9, "MDS": 1.4, "S2C2": 1.0}
    for level in ("low", "high"):
        for policy, value in times.items():
            row = {"section": "algorithms", "algorithm": "some", "misprediction": level}
            if level == "high":
                row["turns"] = [value, value * 1.01, value * 0.99]
            results.report.add(policy, "time_over_continuous", value, policy=policy, **row)
            spread = [value * 0.95, value * 1.05]
            results.report.rows[-1] |= {"spread": spread, "repetitions": 3}
    low, high = algorithm(results, names=("some",), versus="MDS", published=Published(45, 50))
    assert low.cluster and high.cluster
    assert low.cluster.value == pytest.approx(1.4)
    assert high.cluster.value == pytest.approx(1.4)
    assert high.cluster.high - high.cluster.low < low.cluster.high - low.cluster.low
    assert low.reason == "uncoded takes 0.90: the code costs what it saves"


def test_rounds_do_not_replace_others_of_the_same_name() -> None:
    case = Case("some case", 4, 3, np.ones((2, 4)))
    results, others = (Results(Report("s2c2"), smoke=True) for _ in range(2))
    for kept in (results, others):
        kept.add(case, CONTENDERS["MDS"], "simulation", np.array([1.0, 1.1]))
    with pytest.raises(ValueError, match="already"):
        results.add(case, CONTENDERS["MDS"], "simulation", np.array([1.2, 1.3]))
    with pytest.raises(ValueError, match="already"):
        results.merge(others, "traces")


@needs_traces
def test_traces_keep_the_differences_between_machines_if_wanted() -> None:
    from benchmarks.evidence.s2c2.cases import replayed
    from benchmarks.traces import before_test, series

    for over, differ in (("machine", False), ("trace", True)):
        means = [values[: before_test(values)].mean() for values in series("nab", over)]
        assert np.mean(means) == pytest.approx(1)
        assert (np.std(means) > 0.2) == differ
    kept, removed = (np.std(replayed("nab", 10, 50, over=o).mean(0)) for o in ("trace", "machine"))
    assert kept > removed
