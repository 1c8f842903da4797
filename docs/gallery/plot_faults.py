"""
A loop in which workers stop and die
====================================

What does a loop notice if one worker hangs and another one is lost? The simulator runs the same
rounds as a cluster, in virtual time: 12 workers of which any 9 suffice, and 90 rounds.
"""

import matplotlib.pyplot as plt
import numpy as np

import dask_coded as coded
from dask_coded.simulation import Simulation, Speeds, drifting

# %%
# Worker 3 computes nothing from round 30 to round 59, and says nothing about it, as a process does
# that waits for a disk. Worker 7 is lost in round 60: its connections break, so the others know.

values = drifting(12, 90).values.copy()
values[30:60, 3] = 0
values[60:, 7] = np.nan
rounds = list(Simulation(coded.MDS(12, 9), Speeds(values)).run(90))

# %%
# The round in which a worker stops or dies takes longer, because it had work that others have to
# begin again. The rounds after that go on without it: they are as fast as those that are left
# allow. No result is lost, and none is wrong.

seconds = np.array([round_.seconds for round_ in rounds])
bounds = np.array([round_.bound for round_ in rounds])
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
axes.plot(seconds, label="coded rounds")
axes.plot(bounds, color="black", linestyle="dotted", label="fluid bound")
for at, text in ((30, "worker 3 stops"), (60, "worker 3 goes on,\nworker 7 is lost")):
    axes.axvline(at, color="grey", linewidth=0.8)
    axes.annotate(text, (at + 1, 0.98), xycoords=("data", "axes fraction"), va="top")
axes.set(xlabel="round", ylabel="seconds", ylim=(0, None))
axes.legend(loc="lower left")
