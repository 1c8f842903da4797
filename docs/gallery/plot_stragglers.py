"""
Straggler tolerance in a simulated cluster
==========================================

How long does a round take when workers differ in speed and one of them suddenly becomes slow? The
simulator runs the same rounds as a cluster, in virtual time. This example simulates a hundred
rounds for each policy, with a (10, 7) code and no prior knowledge of the workers.
"""

import matplotlib.pyplot as plt
import numpy as np

import dask_coded as coded
from dask_coded.simulation import Simulation, changed, drifting

# %%
# Speeds change by a few percent from round to round, and worker 0 is five times slower in the
# second half.

speeds = changed(drifting(10, 100), workers=[0], first=50, last=100, factor=1 / 5)

# %%
# Times are relative to the *fluid bound*: the time of a round in which all workers are busy to the
# end and no work is wasted. ``static`` is the conventional use of such a code: every worker
# computes a whole piece. ``s2c2`` divides the work by predicted speed. ``continuous``, the default,
# also moves remaining work during the round.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for policy in ["static", "s2c2", "continuous"]:
    simulation = Simulation(coded.MDS(10, 7), speeds, policy=policy)
    over = [round_.seconds / round_.bound for round_ in simulation.run(100)]
    axes.plot(over, label=f"{policy}, median {np.median(over):.2f}")
axes.axvline(50, color="grey", linestyle="dotted")
axes.annotate("worker 0 slows down", (50, 0.97), xycoords=("data", "axes fraction"), va="top")
axes.set(xlabel="round", ylabel="time over the fluid bound", ylim=(0.95, None))
axes.legend()
