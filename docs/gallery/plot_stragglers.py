"""
Rounds among uneven workers
===========================

How long does a round take when workers differ, and one of them is suddenly slow? The simulator
plays the same rounds as a cluster does, in virtual time: here a hundred of them for each policy,
with a (10, 7) code and nothing known of the workers beforehand.
"""

import matplotlib.pyplot as plt
import numpy as np

import dask_coded as coded
from dask_coded.simulation import Simulation, changed, drifting

# %%
# Speeds wander by a few percent from round to round, and worker 0 is five times slower for the
# second half.

speeds = changed(drifting(10, 100), workers=[0], first=50, last=100, factor=1 / 5)

# %%
# Times are given over the *fluid bound*: workers of these speeds, all busy to the end, nothing
# computed in vain. ``static`` is the conventional use of such a code: everybody computes a whole
# piece. ``s2c2`` deals out the work by predicted speed. ``continuous``, the default, also moves
# what is left during the round.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for policy in ["static", "s2c2", "continuous"]:
    simulation = Simulation(coded.MDS(10, 7), speeds, policy=policy)
    over = [played.seconds / played.bound for played in simulation.run(100)]
    axes.plot(over, label=f"{policy}, median {np.median(over):.2f}")
axes.axvline(50, color="grey", linestyle="dotted")
axes.annotate("worker 0 slows down", (50, 0.97), xycoords=("data", "axes fraction"), va="top")
axes.set(xlabel="round", ylabel="time over the fluid bound", ylim=(0.95, None))
axes.legend()
