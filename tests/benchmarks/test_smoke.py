"""A tiny run of each benchmark, so that none rots."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner


@pytest.mark.parametrize(
    ("name", "measures"),
    [
        ("overhead", {"lazy_matmul_over_dask", "loop_round_over_dask"}),
        ("stragglers", {"round_over_fluid"}),
        ("memory", {"peak_over_piece"}),
    ],
)
def test_smoke_sized_run(name: str, measures: set[str], tmp_path: Path) -> None:
    main = importlib.import_module(f"benchmarks.{name}").main
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert measures <= {row["measure"] for row in rows}
    for row in rows:
        assert {"benchmark", "case", "measure", "value", "unit", "goal"} <= set(row)
        assert row["value"] > 0
