"""A smoke run of each benchmark, so that all of them keep working."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import datasets

needs_traces = pytest.mark.skipif(
    datasets.folder() is None, reason="needs the traces of real machines"
)


@pytest.mark.parametrize(
    ("name", "options", "measures"),
    [
        ("overhead", [], {"lazy_matmul_over_dask", "loop_round_over_dask"}),
        pytest.param("stragglers", [], {"round_over_fluid"}, marks=pytest.mark.long),
        ("kernels", [], {"striped_over_whole"}),
        ("graphs", [], {"coded_over_stock", "coded_over_scipy"}),
        ("links", [], {"arrival_of_90_percent_over_bound"}),
        pytest.param(
            "hessian", [], {"round_over_fluid", "worst_condition"}, marks=pytest.mark.long
        ),
        (
            "encoding",
            [],
            {"bytes_over_mds", "time_over_mds", "encoding_over_copying"},
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
        pytest.param(
            "storage",
            [],
            {"encoding_over_encoding_and_writing", "opening_over_reading", "wrong_results"},
            marks=pytest.mark.extras,
        ),
        pytest.param(
            "spot.command",
            [],
            {"relative_error", "source_read_again", "useful_worker_seconds", "resumed_after"},
            marks=[pytest.mark.extras, pytest.mark.long],
        ),
        pytest.param("aggregation", [], {"step", "step_over_reference"}, marks=pytest.mark.long),
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
        pytest.param(
            "small",
            [],
            {"round", "messages_per_worker", "time_over_best"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "coordinators",
            [],
            {"longest_gap", "loops_on_slow_workers", "slowest_over_fastest"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "faults",
            [],
            {"faults", "wrong", "errors", "longest_gap", "left_behind"},
            marks=pytest.mark.long,
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
    for needs, package in (("constants", "pyarrow"), ("storage", "zarr"), ("spot.command", "zarr")):
        if name == needs:
            pytest.importorskip(package)
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


@needs_traces
@pytest.mark.extras
@pytest.mark.long
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
