"""What the scheduler knows of arrays, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dask_coded.codes import MDS
from dask_coded.runtime.scheduler import homes as homes_module
from dask_coded.runtime.scheduler.arrays import ArrayDirectory
from dask_coded.runtime.scheduler.homes import Homes


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


def test_an_array_without_pieces_to_give_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of workers may join, and there may be many arrays."""
    asked: list[str] = []
    relief = homes_module.relief

    def noted(code: Any, homes: Any, newcomer: str, *more: Any) -> int | None:
        asked.append(newcomer)
        return relief(code, homes, newcomer, *more)

    monkeypatch.setattr(homes_module, "relief", noted)
    scheduler: Any = SimpleNamespace(
        stream_handlers={}, workers={}, tasks={}, log_event=lambda *args: None
    )
    homes = Homes(scheduler, [], lambda names: np.ones(len(names)), len, set())  # type: ignore[arg-type]
    keys = ["p0", "p1", "p2"]
    state: Any = SimpleNamespace(
        spec=SimpleNamespace(id="array", keys=keys, code=MDS(3, 2)),
        sources=None,
        allowed=None,
        even=False,
    )
    homes.add(state, dict(zip(keys, "abc", strict=True)))
    for newcomer in ("a", "d", "e", "f"):
        assert homes.relieve(state, newcomer) == 0
    assert asked == ["a", "d"]  # of "a", which has a piece, nothing follows
    assert homes.relieve(state, "e", slow=["b"]) == 1
    assert homes.home("p1") == "e"
    homes._pin("p2", "e")
    assert homes.relieve(state, "f") == 1
    assert homes.home("p2") == "f"
