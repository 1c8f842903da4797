"""
Ranking the nodes of a graph with PageRank
==========================================

:func:`dask_coded.graph.pagerank` encodes the transition matrix on the cluster once and iterates
there, one coded round per iteration. It takes networkx graphs, sparse matrices and edge lists.
"""

import matplotlib.pyplot as plt
import networkx as nx
from dask.distributed import Client

import dask_coded as coded

# %%
# Any Dask cluster will do; this one runs in the process that builds these pages.

client = Client(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)

# %%
# In this graph new nodes link to popular ones. The callback gets at most ten rounds a second, and
# always the last one.

links = nx.barabasi_albert_graph(200, 2, seed=0).edges
graph = nx.DiGraph((newer, older) for older, newer in links)
history = []
scores = coded.graph.pagerank(graph, callback=history.append)
print(f"{history[-1].round} rounds, the last one changed {history[-1].residual:.1e}")

# %%
# networkx gives the same scores if its default tolerance is tightened.

reference = nx.pagerank(graph, tol=1e-12)
print(f"largest difference: {max(abs(scores[n] - reference[n]) for n in graph):.1e}")

# %%

sizes = [4000 * scores[node] for node in graph]
places = nx.spring_layout(graph, seed=0)
figure, axes = plt.subplots(figsize=(7, 6), layout="constrained")
nx.draw_networkx_edges(graph, places, ax=axes, width=0.3, alpha=0.4, arrows=False)
axes.scatter(*zip(*(places[node] for node in graph)), sizes, c=sizes, cmap="viridis", zorder=2)
axes.set_axis_off()

# %%

client.close()
