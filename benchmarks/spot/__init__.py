"""Replay a recorded fleet of spot machines, with real worker processes that are killed and started.

A thread follows the recorded number of machines, faster than it was recorded: it kills workers with
SIGKILL, chosen at random, and starts others. Meanwhile three algorithms run:

- PageRank of a web graph, and gradient descent for logistic regression: an algorithm of the user
  over a coded array with a store, and over a dask array that is persisted, as the client computes
  each product;
- a training of the same logistic regression by `train`, and XGBoost's Dask interface, if it is
  installed: another model, of which only the time and the losses compare.

Blocks of the matrix are files, and what is read from them is counted. A round that took more than
three median rounds counts as a pause: the share of worker-seconds without pauses and without rounds
that were run again is what was useful.
"""
