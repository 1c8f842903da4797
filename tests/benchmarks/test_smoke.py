"""A smoke run of each benchmark, so that all of them keep working."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

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
        ("graphs", [], {"coded_over_stock", "coded_over_scipy"}),
        ("links", [], {"arrival_of_90_percent_over_bound"}),
        ("hessian", [], {"round_over_fluid", "worst_condition"}),
        ("encoding", [], {"bytes_over_mds", "time_over_mds", "decode_probability"}),
        ("numerics", [], {"row_error"}),
        (
            "verification",
            [],
            {"checking_over_computing", "verified_round_over_unverified"},
        ),
        ("memory", [], {"peak_over_piece"}),
        ("aggregation", [], {"step", "step_over_reference"}),
        ("clusters", [], {"step_over_reference"}),
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
        ("coordinators", [], {"longest_gap", "loops_on_slow_workers", "slowest_over_fastest"}),
        ("paper", ["--only", "prediction-error"], {"round_over_fluid"}),
        pytest.param(
            "paper",
            ["--only", "traces", "--only", "predictors"],
            {"round_over_fluid", "mean_round_over_fluid"},
            marks=needs_traces,
        ),
        pytest.param("prediction", [], {"mape", "rmse", "predict_ms"}, marks=needs_traces),
    ],
)
def test_smoke_sized_run(name: str, options: list[str], measures: set[str], tmp_path: Path) -> None:
    if name == "prediction":
        pytest.importorskip("statsmodels")
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
