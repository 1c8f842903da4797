"""A smoke run of all contests: every method reaches its error limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.algorithms import least, main


@pytest.mark.long
def test_smoke_sized_run(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {row["measure"] for row in rows} == {"time_over_peer"}
    assert {"power iteration", "randomized SVD"} <= {row["algorithm"] for row in rows}
    for row in rows:
        assert row["value"] > 0
        assert {"algorithm", "data", "peer", "slowed"} <= set(row)


def test_least_number_of_iterations() -> None:
    assert least(lambda m: 1 / m, target=0.1) == 10
