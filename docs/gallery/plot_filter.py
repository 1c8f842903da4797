"""
Filtering signals on a graph
============================

:func:`dask_coded.graph.filter` applies a function of the Laplacian's eigenvalues to signals on the
nodes of a graph, without computing an eigenvector. It takes one coded round per Chebyshev term.
"""

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
from dask.distributed import Client

import dask_coded as coded

client = Client(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)

# %%
# A network of sensors that are linked to their neighbours and measure a temperature with noise.

graph = nx.random_geometric_graph(400, 0.1, seed=3)
places = np.array(list(nx.get_node_attributes(graph, "pos").values()))
true = np.sin(3 * places[:, 0]) + np.cos(4 * places[:, 1])
measured = true + np.random.default_rng(0).normal(scale=0.7, size=len(true))

# %%
# A heat filter removes what changes from neighbour to neighbour, as diffusion does over time.

smooth = coded.graph.filter(graph, measured, coded.graph.Heat(0.5))
for name, signal in [("measured", measured), ("filtered", smooth)]:
    print(f"{name}: root mean square error {np.sqrt(np.mean((signal - true) ** 2)):.2f}")

# %%
# The kernel can be any function of the eigenvalues. This one keeps the lowest frequencies.

low = coded.graph.filter(graph, measured, lambda eigenvalue: 1 / (1 + eigenvalue**2))

# %%

figure, parts = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained", sharey=True)
for axes, title, signal in zip(
    parts, ["measured", "Heat(0.5)", "low pass"], [measured, smooth, low]
):
    nx.draw_networkx_edges(graph, places, ax=axes, width=0.2, alpha=0.4)
    drawn = axes.scatter(*places.T, c=signal, s=14, vmin=-2, vmax=2, cmap="coolwarm", zorder=2)
    axes.set(title=title, aspect="equal")
    axes.set_axis_off()
figure.colorbar(drawn, ax=parts, shrink=0.8)

# %%

client.close()
