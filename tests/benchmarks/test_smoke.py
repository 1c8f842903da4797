"""A smoke run of each benchmark, so that all of them keep working."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

needs_traces = pytest.mark.skipif(
    "DASK_CODED_DATA" not in os.environ, reason="needs the traces of real machines"
)


@pytest.mark.parametrize(
    ("name", "options", "measures"),
    [
        ("overhead", [], {"lazy_matmul_over_dask", "loop_round_over_dask"}),
        ("stragglers", [], {"round_over_fluid"}),
        ("kernels", [], {"striped_over_whole"}),
        ("graphs", [], {"coded_over_stock", "coded_over_scipy"}),
        ("links", [], {"arrival_of_90_percent_over_bound"}),
        ("hessian", [], {"round_over_fluid", "worst_condition"}),
        (
            "encoding",
            [],
            {"bytes_over_mds", "time_over_mds", "encoding_over_copying", "decode_probability"},
        ),
        ("numerics", [], {"row_error"}),
        ("defaults", [], {"error_over_scikit_learn"}),
        (
            "verification",
            [],
            {"checking_over_computing", "verified_round_over_unverified"},
        ),
        (
            "memory",
            [],
            {"peak_over_pieces", "pauses", "restarts", "wrong_results", "round_over_reading"},
        ),
        ("aggregation", [], {"step", "step_over_reference"}),
        ("clusters", [], {"step_over_reference"}),
        pytest.param("squeeze", [], {"step_over_fluid"}, marks=needs_traces),
        (
            "scale",
            [],
            {
                "plan_ms",
                "predict_ms",
                "simulated_rounds_per_second",
                "engine_per_share",
                "engine_memory",
                "messages_per_worker",
                "coordinator_rounds_per_second",
            },
        ),
        ("small", [], {"round", "messages_per_worker", "time_over_best"}),
        ("coordinators", [], {"longest_gap", "loops_on_slow_workers", "slowest_over_fastest"}),
        ("faults", [], {"faults", "wrong", "errors", "longest_gap", "left_behind"}),
        ("paper", ["--only", "prediction-error"], {"round_over_fluid"}),
        pytest.param(
            "paper",
            ["--only", "support-vector-machine"],
            {"time_over_continuous"},
            marks=needs_traces,
        ),
        pytest.param(
            "paper",
            ["--only", "traces", "--only", "predictors"],
            {"round_over_fluid", "mean_round_over_fluid"},
            marks=needs_traces,
        ),
        pytest.param(
            "constants",
            [],
            {"mean_error", "worst_error", "chosen_over_mean"},
            marks=[needs_traces, pytest.mark.extras],
        ),
    ],
)
def test_smoke_sized_run(name: str, options: list[str], measures: set[str], tmp_path: Path) -> None:
    if name == "constants":
        pytest.importorskip("pyarrow")
    main = importlib.import_module(f"benchmarks.{name}").main
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file), *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert measures <= {row["measure"] for row in rows}
    for row in rows:
        assert {"benchmark", "case", "measure", "value", "unit", "goal"} <= set(row)
        # A condition number that a machine's LAPACK finds to be infinite is written as null.
        singular = row["measure"] == "worst_condition" and row["value"] is None
        assert singular or row["value"] >= 0


def test_table_of_faults() -> None:
    from benchmarks.faults.page import table

    event = {"kind": "stopped", "role": "leader", "seconds": 1.0}
    gaps = [
        {"lazy rounds": 0.5, "training": 1.5, "Dask alone": 3.0},
        {"training": 1.0, "Dask alone": 1.0},
    ]
    rows = [
        {
            "measure": "faults",
            "seed": 1,
            "value": 1,
            "loads": list(found),
            "events": [event | {"gaps": list(found.values())}],
        }
        for found in gaps
    ]
    rows += [
        {"measure": "results", "value": 10, "load": "pairs"},
        {"measure": "wrong", "value": 1, "load": "pairs"},
        {"measure": "results", "value": 5, "load": "Dask alone"},
    ]
    text = table(rows)
    assert "| 0 | 2 | 0 | 0 | 0.5 s | 0.5 s | 3.0 s | 3.0 s | 1.5 s | 1.5 s |" in text
    assert text.endswith("2 faults, 10 results and 0 steps of trainings, 1 of them wrong.\n")


def test_page_and_plots_of_the_comparison(tmp_path: Path) -> None:
    from benchmarks.paper import main

    page, plots = tmp_path / "paper.md", tmp_path / "plots"
    options = ["--smoke", "--simulation-only", "--only", "controlled"]
    result = CliRunner().invoke(main, [*options, "--page", str(page), "--plots", str(plots)])
    assert result.exit_code == 0, result.output
    assert "| continuous | 1." in page.read_text()
    assert len(list(plots.glob("*.png"))) == 1


def test_kept_sections_are_on_the_page_of_later_runs(tmp_path: Path) -> None:
    from benchmarks.paper import main

    page, kept = tmp_path / "paper.md", tmp_path / "kept"
    for section in ("controlled", "prediction-error"):
        options = ["--smoke", "--simulation-only", "--only", section, "--keep", str(kept)]
        result = CliRunner().invoke(main, [*options, "--page", str(page)])
        assert result.exit_code == 0, result.output
    assert "## Controlled cluster" in page.read_text()
    assert "## Sensitivity to prediction errors" in page.read_text()
    assert "## Simulation compared with processes" not in page.read_text()
    result = CliRunner().invoke(
        main, ["--only", "regimes", "--simulation-only", "--keep", str(kept)]
    )
    assert result.exit_code == 1
    assert "must have the same size" in result.output


def test_what_workers_without_a_code_come_to_hold() -> None:
    from benchmarks.paper.storage import held

    steady = held(np.ones((20, 4)))
    np.testing.assert_allclose(steady, 0.25)
    turns = np.ones((40, 4))
    turns[10:, 0] = 0.01
    shares = held(turns)
    assert shares[0] == 0.25  # what it has held before
    assert (shares[1:] > 0.3).all()


def test_verdicts_rest_on_processes_where_there_are_any() -> None:
    from benchmarks.paper.claims import summary
    from benchmarks.paper.results import Results
    from benchmarks.report import Report

    results = Results(Report("paper"))
    case = {"policy": "S2C2", "versus": "MDS", "n": 10, "k": 7, "over": "trace"}
    for level, where, gain in (
        ("low", "simulation", 38.0),
        ("low", "processes", 30.0),
        ("high", "simulation", 30.0),
    ):
        for measure in ("gain_over_theirs", "gain_over_ours"):
            row = {**case, "misprediction": level, "where": where}
            results.report.add(level, measure, gain, "%", **row)
    times = {"uncoded": 1.2, "replication": 1.4, "MDS": 1.0, "S2C2": 1.0, "continuous": 1.0}
    for policy, value in times.items():
        row = {"section": "algorithms", "algorithm": "logistic regression", "policy": policy}
        results.report.add(policy, "time_over_continuous", value, misprediction="low", **row)
    found = {claim: verdict for claim, *_, verdict, _ in summary(results)}
    assert found == {
        "rounds, (10,7), low misprediction, against MDS": "not reproduced, 9 points short",
        "rounds, (10,7), high misprediction, against MDS": "exceeded, simulated only",
        "logistic regression, (10,7), low misprediction, against replication": "reproduced",
        "logistic regression, (10,7), low misprediction, against MDS": (
            "not reproduced, 19 points short"
        ),
    }


def test_rounds_do_not_replace_others_of_the_same_name() -> None:
    from benchmarks.paper.cases import CONTENDERS, Case
    from benchmarks.paper.results import Results
    from benchmarks.report import Report

    case = Case("some case", 4, 3, np.ones((2, 4)))
    results, others = (Results(Report("paper"), smoke=True) for _ in range(2))
    for kept in (results, others):
        kept.add(case, CONTENDERS["MDS"], "simulation", np.array([1.0, 1.1]))
    with pytest.raises(ValueError, match="already"):
        results.add(case, CONTENDERS["MDS"], "simulation", np.array([1.2, 1.3]))
    with pytest.raises(ValueError, match="already"):
        results.merge(others, "traces")


@needs_traces
@pytest.mark.extras
def test_the_page_about_prediction_is_made_from_json(tmp_path: Path) -> None:
    pytest.importorskip("statsmodels")
    pytest.importorskip("pyarrow")
    from benchmarks.prediction import main

    file, page = tmp_path / "report.json", tmp_path / "prediction.md"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file)])
    assert result.exit_code == 0, result.output
    measures = {row["measure"] for row in json.loads(file.read_text())["rows"]}
    assert {"mape", "rmse", "rmse_over", "predict_ms", "mean_round_over_fluid"} <= measures
    result = CliRunner().invoke(main, ["--from", str(file), "--page", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "| LSTM as published | " in text
    assert "| `adaptive` | " in text


@needs_traces
def test_traces_keep_the_differences_between_machines_if_wanted() -> None:
    from benchmarks.paper.cases import replayed
    from benchmarks.traces import before_test, series

    for over, differ in (("machine", False), ("trace", True)):
        means = [values[: before_test(values)].mean() for values in series("nab", over)]
        assert np.mean(means) == pytest.approx(1)
        assert (np.std(means) > 0.2) == differ
    kept, removed = (np.std(replayed("nab", 10, 50, over=o).mean(0)) for o in ("trace", "machine"))
    assert kept > removed
