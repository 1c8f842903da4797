"""Which of scikit-learn's own checks need pandas."""

from __future__ import annotations

import pytest

_PANDAS = ("pandas", "dataframe", "data_not_an_array")
_GIVEN = ("LogisticRegression", "Ridge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them; the others need not run again once pandas is installed."""
    for item in items:
        if "test_scikit_learn_checks" in item.nodeid and any(n in item.nodeid for n in _PANDAS):
            item.add_marker(pytest.mark.extras)
        # How a cluster is given is the same for all estimators.
        elif "given client" in item.nodeid and not any(n in item.nodeid for n in _GIVEN):
            item.add_marker(pytest.mark.long)
