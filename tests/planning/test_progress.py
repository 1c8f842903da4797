"""What is thought of workers while a round goes on."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.codes import MDS
from dask_coded.planning import Layout, Progress, Reporting, Run


def begun(unit: float) -> Progress:
    """Two workers have been dealt a piece each, at predicted speeds in some unit."""
    layout = Layout.of(MDS(2, 1), [0, 1], np.full((1, 8), 100.0))
    progress = Progress(layout, np.ones(2) * unit, 0.0, Reporting(interval=0.02))
    for worker in range(2):
        progress.assign(worker, [Run(worker, 0, 8)])
    return progress


@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_workers_of_which_none_answers_are_late_whatever_the_unit_of_speeds(unit: float) -> None:
    progress = begun(unit)
    before = progress.estimate()
    progress.now = 1.0
    after = progress.estimate()
    assert (after.speed < before.speed).all()
    assert (after.eta > before.eta).all()


def test_a_worker_is_not_late_before_half_of_its_list_can_be_done() -> None:
    progress = begun(unit=1.0)
    progress.now = 0.1
    for worker in range(2):
        progress.record(worker, [Run(worker, 0, 1)], seconds=0.1)
    progress.now = 0.4  # 3 of 7 stripes later
    assert progress.estimate().speed == pytest.approx(1000.0)
    progress.now = 10.0
    assert (progress.estimate().speed < 500.0).all()
