"""
A loop in which workers stop and die
====================================

What does a loop notice if one worker hangs and another one is lost? The simulator runs the same
rounds as a cluster, in virtual time: 12 workers of which any 9 suffice, and 90 rounds.
"""

import matplotlib.pyplot as plt
import numpy as np

import dask_coded as coded
from dask_coded.simulation import Simulation, Speeds

# %%
# Worker 3 computes nothing from round 30 to round 59, and says nothing about it, as a process does
# that waits for a disk. Worker 7 is lost in round 60: its connections break, so the others know.

values = np.random.default_rng(0).uniform(0.9, 1.1, (90, 12))
values[30:60, 3] = 0
values[60:, 7] = np.nan
rounds = list(Simulation(coded.MDS(12, 9), Speeds(values)).run(90))

# %%
# The fluid bound is what those workers that still compute could do at best. The rounds stay close
# to it, also those in which a worker stops or dies: the others compute its part in the same round.
# No result is lost, and none is wrong.

seconds = np.array([round_.seconds for round_ in rounds])
bounds = np.array([round_.bound for round_ in rounds])
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
axes.plot(seconds, label="coded rounds")
axes.plot(bounds, color="black", linestyle="dotted", label="fluid bound")
for at, text in ((30, "worker 3 stops"), (60, "worker 3 goes on,\nworker 7 is lost")):
    axes.axvline(at, color="grey", linewidth=0.8)
    axes.annotate(text, (at + 1, 0.4), xycoords=("data", "axes fraction"))
axes.set(xlabel="round", ylabel="seconds", ylim=(0, None))
axes.legend(loc="lower left")
