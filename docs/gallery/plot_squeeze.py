"""
A training step with a slow worker
==================================

What do workers do while one of them is slow? In data-parallel training as usual, such as PyTorch's
DDP, each computes the gradient of its own share of the batch, and all wait for the slowest. With
`Squeeze` the work flows to those that are fast. The simulator runs the same steps as a cluster, in
virtual time.
"""

import matplotlib.pyplot as plt

from dask_coded.aggregation.timing import Costs
from dask_coded.simulation import SqueezeSimulation, changed, constant

# %%
# Four workers take 0.1 s for the batch, and 7.5 ms for the sum of 1 MB over their links. In
# the fourth of eight steps, worker 3 becomes four times slower without notice.

costs = Costs(latency=5e-4, bandwidth=2e8, computation=0.4)
speeds = changed(constant([1.0] * 4), workers=[3], first=3, last=8, factor=1 / 4)
simulation = SqueezeSimulation(speeds, costs, nbytes=1_000_000, units=64)
steps = simulation.run(8)
before, sudden, later = steps[2], steps[3], steps[-1]

# %%
# Each box is a unit of samples. In the step in which the worker slows down, the others take over
# units that it has not begun. In the following steps, it gets fewer and fewer units from the start,
# until it gets as many as its speed allows.

usual = [(worker, 0.1 / speed) for worker, speed in enumerate([1, 1, 1, 1 / 4])]
own = {span.unit: span.worker for span in before.spans}

figure, axes = plt.subplots(3, figsize=(8, 6), sharex=True, layout="constrained")
computed = max(seconds for _, seconds in usual)
end = computed + 2 * 3 / 4 * 1_000_000 / costs.bandwidth
for worker, seconds in usual:
    axes[0].barh(worker, seconds, color="C0", edgecolor="white")
    axes[0].barh(worker, computed - seconds, left=seconds, color="0.9")
axes[0].axvline(end, color="black")
axes[0].set_title(f"as usual: {end:.3f} s, most of it waiting", loc="left")
for panel, step, title in [
    (axes[1], sudden, "slow without notice"),
    (axes[2], later, "four steps later"),
]:
    for span in step.spans:
        colour = "C0" if own[span.unit] == span.worker else "C1"
        panel.barh(
            span.worker, span.end - span.begin, left=span.begin, color=colour, edgecolor="white"
        )
    panel.axvline(step.seconds, color="black")
    panel.axvline(step.bound, color="black", linestyle="dotted")
    panel.set_title(f"Squeeze, {title}: {step.seconds:.3f} s", loc="left")
for panel in axes:
    panel.set(yticks=range(4), ylabel="worker")
    panel.invert_yaxis()
axes[1].annotate("orange: taken over", (0.98, 0.1), xycoords="axes fraction", ha="right")
text = "dotted: the fluid bound\nline: all have the sum"
axes[2].annotate(text, (0.98, 0.1), xycoords="axes fraction", ha="right")
axes[2].set_xlabel("seconds")

# %%
# The fluid bound is the time of a step in which all workers are busy to the end and messages cost
# nothing.

for number, step in enumerate(steps, start=1):
    over = step.seconds / step.bound
    print(f"step {number}: {over:.2f} of the bound, units {step.units}, moved {step.moved}")
