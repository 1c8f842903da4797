"""What scikit-learn's tools do with the estimators."""

from __future__ import annotations

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

from dask_coded.linear_model import LogisticRegression, RBFSampler, Ridge  # noqa: E402

X = np.random.default_rng(0).standard_normal((80, 3))
y = X @ [1.0, -2.0, 0.5]
WEIGHTS = np.linspace(0, 1, 80)


def test_weights_are_routed_through_a_search_and_a_pipeline():
    with sklearn.config_context(enable_metadata_routing=True):
        ridge = Ridge().set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        scaler = StandardScaler().set_fit_request(sample_weight=False)
        search = GridSearchCV(make_pipeline(scaler, ridge), {"ridge__alpha": [0.1]}, cv=2)
        search.fit(X, y, sample_weight=WEIGHTS)
    scaled = StandardScaler().fit_transform(X)
    expected = Ridge(alpha=0.1).fit(scaled, y, sample_weight=WEIGHTS).coef_
    np.testing.assert_allclose(search.best_estimator_[-1].coef_, expected)
    assert not np.allclose(expected, Ridge(alpha=0.1).fit(scaled, y).coef_)


def test_weights_that_nobody_asked_for_are_refused():
    with sklearn.config_context(enable_metadata_routing=True):
        with pytest.raises(ValueError, match="not explicitly set as requested or not requested"):
            GridSearchCV(LogisticRegression(), {"C": [1.0]}).fit(X, y > 0, sample_weight=WEIGHTS)


@pytest.mark.extras
def test_the_output_of_a_transformer_is_a_frame_if_asked():
    pandas = pytest.importorskip("pandas")
    sampler = RBFSampler(n_components=4, random_state=0).set_output(transform="pandas")
    found = sampler.fit_transform(X)
    assert isinstance(found, pandas.DataFrame)
    assert list(found.columns) == [f"rbfsampler{i}" for i in range(4)]
