"""A smoke run of the accuracy benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner


@pytest.mark.long
def test_smoke_sized_run(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from benchmarks.accuracy import linear_models, main, parts

    assert linear_models in parts()
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {"objective_relative_error", "accuracy_difference"} <= {row["measure"] for row in rows}
    assert all(row["met"] for row in rows if row.get("set") == "synthetic")
