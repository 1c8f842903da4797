"""
Fitting a logistic regression
=============================

:class:`dask_coded.linear_model.LogisticRegression` follows scikit-learn's conventions. The data are
encoded once; each iteration of the solver is two coded rounds, ``X @ w`` and ``X.T @ r``.
"""

import matplotlib.pyplot as plt
import numpy as np
from dask.distributed import Client
from sklearn.datasets import make_moons
from sklearn.preprocessing import PolynomialFeatures

from dask_coded.linear_model import LogisticRegression

client = Client(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)

# %%
# The data are two half moons; the features are cubic polynomials of their coordinates.

points, labels = make_moons(2000, noise=0.2, random_state=0)
features = PolynomialFeatures(3, include_bias=False).fit(points)
model = LogisticRegression(C=10.0).fit(features.transform(points), labels, client=client)
print(f"{model.n_iter_[0]} iterations, {model.score(features.transform(points), labels):.1%} right")

# %%

x, y = np.meshgrid(np.linspace(-1.8, 2.8, 200), np.linspace(-1.4, 1.9, 150))
grid = features.transform(np.column_stack([x.ravel(), y.ravel()]))
figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
probability = model.predict_proba(grid)[:, 1].reshape(x.shape)
drawn = axes.contourf(x, y, probability, levels=np.linspace(0, 1, 11), cmap="coolwarm", alpha=0.7)
axes.scatter(*points[::4].T, c=labels[::4], s=8, cmap="coolwarm", edgecolor="black", linewidth=0.3)
figure.colorbar(drawn, label="probability of the second moon")

# %%

client.close()
