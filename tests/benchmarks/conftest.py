"""Worker processes of the benchmarks are forked by the same server as others."""

from __future__ import annotations

import pytest

from tests.processes import start_server


@pytest.fixture(autouse=True, scope="module")
def forked_workers() -> None:
    start_server()
