"""The page of results: rounds that something else on the machine has disturbed."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.paper.cases import CONTENDERS, Case
from benchmarks.paper.page import write_page
from benchmarks.paper.processes import Measured, disturbed
from benchmarks.paper.results import Results
from benchmarks.report import Report

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
    results = Results(Report("paper"))
    results.add(case, CONTENDERS["continuous"], "processes", ours)
    results.add(case, CONTENDERS["MDS"], "processes", theirs)
    results.gains(case, "continuous", "MDS", "processes")
    results.write(tmp_path / "regimes.json")
    kept = Results.read(tmp_path / "regimes.json")
    median, _ = kept.rows(measure="round_over_fluid")
    assert (median["value"], median["repetitions"]) == (1.1, 3)
    (gain,) = kept.rows(measure="gain_over_ours")
    assert gain["value"] == pytest.approx(100)
    write_page(tmp_path / "page.md", kept)
    page = (tmp_path / "page.md").read_text()
    assert "3 of 10 rounds" in page
    assert "| (3,2), some trace: continuous | 1.70, 1.80 | 1.200 | 1.80 |" in page


def test_policies_in_turns_are_compared_without_disturbed_rounds(tmp_path):
    fields = {"section": "controlled", "slowed": 0, "factor": 5, "shape": "some shape"}
    case = Case("(3,2), some case", 3, 2, QUOTAS, fields=fields)
    ours = Measured(np.array([1.0, 1.0, 2.0, 1.0, 9.0]), np.array([0, 0, 0, 0, 1], bool))
    theirs = Measured(np.array([9.0, 1.5, 2.0, 1.2, 1.0]), np.array([1, 0, 0, 0, 0], bool))
    results = Results(Report("paper"))
    results.add(case, CONTENDERS["continuous"], "processes", ours)
    results.add(case, CONTENDERS["MDS"], "processes", theirs)
    results.in_turns(case, ["MDS", "continuous"], "continuous")
    row = results.rows(measure="time_in_turns", policy="MDS")[0]
    assert (row["value"], row["repetitions"]) == (pytest.approx(1.2), 3)
    write_page(tmp_path / "page.md", results)
    assert "| (3,2), 0 slowed | 1.200 (1.10 to 1.35) |" in (tmp_path / "page.md").read_text()
