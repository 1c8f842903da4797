"""Costs that are measured on a running cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client

from dask_coded.aggregation.timing import recommend
from dask_coded.training.costs import measure_costs


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client(
        n_workers=4,
        threads_per_worker=1,
        processes=False,
        dashboard_address=None,
        set_as_default=False,
    ) as client:
        yield client


def test_costs_are_measured_and_lead_to_a_recommendation(client):
    costs = measure_costs(lambda: sum(range(1000)), client=client, repetitions=2)
    assert costs.latency > 0 and costs.bandwidth > 0 and costs.computation > 0
    assert "predicted" in str(recommend(costs, 4, 40_000))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repetitions": 0}, "'repetitions' must be a whole number of at least 1, it is 0"),
        ({"repetitions": 2.5}, "'repetitions' must be a whole number of at least 1, it is 2.5"),
        ({"nbytes": 0}, "'nbytes' must be a whole number of at least 4, it is 0"),
    ],
)
def test_counts_are_checked(options, expected, client):
    with pytest.raises(ValueError, match=expected):
        measure_costs(client=client, **options)


def test_measuring_needs_two_workers(client):
    one = list(client.nthreads())[:1]
    with pytest.raises(ValueError, match="needs at least 2 workers, there are 1"):
        measure_costs(client=client, workers=one)
