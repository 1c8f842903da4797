"""Coded rounds on a Dask cluster: the only code that talks to distributed.

A pair of plugins and a data plane of their own, as distributed's P2P shuffle is: the scheduler
plugin places and plans, the worker plugin computes, and a coordinator task drives each round over
channels from worker to worker.
"""
