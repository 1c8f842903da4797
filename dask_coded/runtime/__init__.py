"""Coded rounds on a Dask cluster, divided by where the code runs.

Like distributed's P2P shuffle, this is a pair of plugins with a data plane of their own: the
scheduler plugin places pieces and plans rounds, the worker plugin computes, and a coordinator in a
task drives each round over channels from worker to worker.

- :mod:`~dask_coded.runtime.client` runs in the user's process, and encodes arrays.
- :mod:`~dask_coded.runtime.scheduler` runs in the scheduler.
- :mod:`~dask_coded.runtime.worker` runs in every worker.
- :mod:`~dask_coded.runtime.coordinator` runs in the worker that has a task which needs rounds.

All of them use two more modules: ``spec`` says what a coded array is, and ``answers`` what the
scheduler plugin answers.
"""
