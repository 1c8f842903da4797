"""Coded rounds on a Dask cluster.

Like distributed's P2P shuffle, this is a pair of plugins with a data plane of their own: the
scheduler plugin places pieces and plans rounds, the worker plugin computes, and a coordinator in a
task drives each round over channels from worker to worker.
"""
