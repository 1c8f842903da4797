"""Adaptive scaling that knows what more workers would gain."""

from __future__ import annotations

from typing import cast

import distributed

from dask_coded.runtime.spec import NAME


class Adaptive(distributed.Adaptive):
    """Scales a cluster by the waiting tasks, as Dask does, and by what coded arrays can use.

    An algorithm is a single task, and pieces lie in memory, so Dask's own adaptive scaling sees no
    reason for more workers. While an array is used, and for 30 s after it was encoded or its last
    round was planned, this one asks for one worker for each place of its code. If the rounds of a
    loop take 50 ms or more, it asks for one more for each worker that has been so slow for 50
    rounds that another one of usual speed, in its place, would make rounds shorter by 5 %. A worker
    that joins takes a piece from a worker that holds several, or from such a slow one, and works in
    the next round. While a training runs, it asks for as many workers as could take part in it when
    its last group was formed.

    Parameters
    ----------
    cluster : distributed.deploy.Cluster
        ``LocalCluster``, or a cluster of dask-jobqueue or dask-cloudprovider, for example. The
        operator of dask-kubernetes scales by itself and takes no such class.
    interval, minimum, maximum, wait_count, target_duration, worker_key, **kwargs
        As for ``distributed.Adaptive``. No number of workers below the minimum or above the maximum
        is asked for.

    Examples
    --------
    >>> from distributed import LocalCluster
    >>> with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster:
    ...     scaling = cluster.adapt(Adaptive=Adaptive, minimum=1, maximum=8)
    ...     scaling.maximum
    8
    """

    async def target(self) -> int:
        """Return how many workers there should be, before the limits."""
        usual = cast(int, await super().target())
        # A scheduler that is asked what it does not know logs an error.
        if await self.scheduler.get_metadata(keys=[NAME], default=None) is None:
            return usual  # nothing has been encoded on this cluster yet
        return max(usual, await self.scheduler.coded_wanted())
