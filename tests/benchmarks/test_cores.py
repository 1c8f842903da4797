"""A smoke run of the benchmark on many cores, and what it concludes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cores import main, verdict
from benchmarks.report import Report

pytest.importorskip("threadpoolctl")


@pytest.mark.slow
@pytest.mark.long
def test_smoke_sized_run(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {row["way"] for row in rows if row["measure"] == "seconds"} == {
        "one process",
        "dask.array",
        "coded",
    }
    assert "dense 100 x 100, full speed: coding is" in result.output


def test_coding_pays_where_it_beats_both_others() -> None:
    report = Report("cores")
    for cores, ratios in ((2, (1.5, 0.5)), (4, (0.8, 0.4))):
        for way, ratio in zip(("one process", "dask.array"), ratios):
            keys = {"part": "PageRank", "speed": "full speed", "cores": cores, "way": way}
            report.add(f"{cores}, {way}", "coded_over", ratio, **keys)
    assert verdict(report) == [
        "PageRank, full speed: coding is fastest on 4 cores (at best 0.80 of the faster of the "
        "others)."
    ]
