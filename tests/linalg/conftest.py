from __future__ import annotations

import pytest
from distributed import Client


@pytest.fixture(scope="package")
def client():
    with Client(
        n_workers=4,
        threads_per_worker=1,
        processes=False,
        dashboard_address=None,
        set_as_default=False,
    ) as client:
        yield client
