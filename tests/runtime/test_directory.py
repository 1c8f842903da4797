"""What the scheduler knows of arrays, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from dask_coded.codes import MDS
from dask_coded.runtime.scheduler.arrays import ArrayDirectory


class _Homes:
    """As much of the homes of pieces as is asked for."""

    def holders(self, key: str) -> list[str]:
        return []


def directory(**arrays: Any) -> ArrayDirectory:
    workers = dict.fromkeys("abcd")
    scheduler: Any = SimpleNamespace(handlers={}, stream_handlers={}, workers=workers)
    homes: Any = _Homes()
    found = ArrayDirectory(scheduler, {}, {}, {}, lambda names: np.ones(len(names)), homes)
    found._arrays.update(arrays)
    return found


def test_a_wrong_check_at_the_address_of_a_worker_that_has_left_is_news() -> None:
    spec = SimpleNamespace(keys=["p0", "p1"], check_keys=["c0", "c1"], code=MDS(2, 2))
    found = directory(array=SimpleNamespace(spec=spec, wrong_checks=set()))
    assert found.wrong_check("array", 0, "a", sound=False)
    assert found.wrong_check("array", 1, "b", sound=False)
    found.left("a")
    assert found.wrong_check("array", 0, "a", sound=False)
    assert not found.wrong_check("array", 1, "b", sound=False)
