"""Worker processes of the benchmarks are forked as well, by the same server."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest

from tests.processes import start_server


@pytest.fixture(autouse=True, scope="module")
def forked_workers() -> Iterator[None]:
    start_server()
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        yield
