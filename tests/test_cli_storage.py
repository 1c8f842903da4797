"""`dask-coded check-store`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import dask_coded as coded
from dask_coded.cli import coded as command

pytest.importorskip("zarr")
pytestmark = pytest.mark.extras


def run(*arguments):
    return CliRunner().invoke(command, ["check-store", *map(str, arguments)])


def test_a_store_that_is_whole_damaged_and_missing(client, tmp_path):
    store = tmp_path / "A"
    missing = run(store)
    assert missing.exit_code == 2
    assert missing.output == (
        f"Error: There is no coded array in {store}: check the place, and that this process can "
        "read it.\n"
    )
    coded.encode(np.ones((6, 2)), coded.MDS(4, 3), client, storage=store)
    whole = run(store)
    assert whole.exit_code == 0
    assert whole.output.splitlines()[1:] == ["4 of 4 pieces are whole."]
    [chunk] = store.glob("matrix-*/piece-1/c/0/0")
    chunk.unlink()
    damaged = run(store, "--json")
    assert damaged.exit_code == 1
    found = json.loads(damaged.output)
    assert (found["whole"], found["usable"]) == (False, True)
    assert [bool(piece["problem"]) for piece in found["pieces"]] == [False, True, False, False]
