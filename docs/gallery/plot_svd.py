"""
Computing a truncated SVD
=========================

:func:`dask_coded.linalg.randomized_svd` finds the largest singular values and their vectors with a
handful of coded products, each with a block of vectors.
"""

import matplotlib.pyplot as plt
import numpy as np
from dask.distributed import Client

import dask_coded as coded

client = Client(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)

# %%
# A matrix whose singular values decay geometrically, plus noise.

rng = np.random.default_rng(0)
left, _ = np.linalg.qr(rng.standard_normal((600, 200)))
right, _ = np.linalg.qr(rng.standard_normal((200, 200)))
A = (left * 0.9 ** np.arange(200)) @ right + 1e-4 * rng.standard_normal((600, 200))

# %%
# Power iterations sharpen the result where singular values are close.

exact = np.linalg.svd(A, compute_uv=False)
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for iterations, marker in [(0, "x"), (1, "+"), (3, ".")]:
    _, s, _ = coded.linalg.randomized_svd(A, 20, power_iterations=iterations, seed=0)
    error = np.abs(s - exact[:20]) / exact[:20]
    axes.semilogy(range(1, 21), error, marker, label=f"{iterations} power iterations")
axes.set(xlabel="singular value", ylabel="relative error")
axes.legend()

# %%

client.close()
