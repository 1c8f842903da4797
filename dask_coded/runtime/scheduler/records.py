"""What rounds have found out about each worker: its speed, wrong results, exceptions."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_coded.prediction import SpeedHistory
from dask_coded.runtime.spec import NAME
from dask_coded.typing import Floats

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("distributed.dask_coded")

# A worker that has sent wrong shares in this many rounds gets no more work. One wrong share may be
# the last of a fault that has passed, such as a flipped bit in memory.
_DISTRUSTED = 3


class WorkerRecords:
    """Says how fast workers are, and which of them compute wrongly.

    Parameters
    ----------
    scheduler : Scheduler
    speeds : SpeedHistory
    suspects : collection of str
        Addresses of workers that may not be there; it changes.
    """

    def __init__(
        self, scheduler: Scheduler, speeds: SpeedHistory, suspects: Collection[str]
    ) -> None:
        self._scheduler = scheduler
        self._speeds = speeds
        self._suspects = suspects
        # Rounds in which a worker has sent wrong shares.
        self._corrupt: dict[str, int] = {}
        # The last exception of each worker that has raised one.
        self._errors: dict[str, str] = {}

    # -- learning ------------------------------------------------------------------------------

    def measured(self, speeds: Mapping[str, float], planned: Iterable[str]) -> None:
        """Record the work per second of workers, in a round that was planned over others, too."""
        here = {w: s for w, s in speeds.items() if w in self._scheduler.workers}
        self._speeds.record(here, planned)

    def corrupt(self, array: str, workers: Sequence[str]) -> None:
        """Record that workers have sent wrong shares in a round."""
        for address in workers:
            if address not in self._scheduler.workers:
                continue
            if address not in self._corrupt:
                logger.warning(
                    "Worker %s has sent a wrong share, which was computed again elsewhere: "
                    "check its memory and its processor.",
                    address,
                )
            rounds = self._wrong(address)
            self._log("corrupt", array=array, worker=address, rounds=rounds)

    def corrupt_check(self, array: str, block: int, address: str) -> None:
        """Record that a worker holds a wrong check of a block."""
        logger.warning(
            "Worker %s has a wrong check of block %d of a coded array, which is not used: "
            "check its memory and its processor.",
            address,
            block,
        )
        self._wrong(address)
        self._log("corrupt-check", array=array, worker=address, block=block)

    def _wrong(self, address: str) -> int:
        self._corrupt[address] = found = self._corrupt.get(address, 0) + 1
        return found

    def failed(self, array: str, errors: Mapping[str, str]) -> None:
        """Record the exceptions of workers whose stripes others have computed."""
        for address, error in errors.items():
            if address not in self._scheduler.workers:
                continue
            if self._errors.get(address) != error:  # once, not in each round
                logger.warning(
                    "Worker %s has raised an exception in its part of a product, which was "
                    "computed elsewhere: %s",
                    address,
                    error,
                )
            self._errors[address] = error
            self._log("failed", array=array, worker=address, error=error)

    def _log(self, action: str, **fields: Any) -> None:
        self._scheduler.log_event(NAME, {"action": action, **fields})

    def forget(self, worker: str) -> None:
        """Forget a worker that has left."""
        self._speeds.forget(worker)
        self._corrupt.pop(worker, None)
        self._errors.pop(worker, None)

    # -- saying --------------------------------------------------------------------------------

    def trusts(self, address: str) -> bool:
        """Whether a worker has computed wrongly in few rounds, if any."""
        return self._corrupt.get(address, 0) < _DISTRUSTED

    def predict(self, addresses: Sequence[str], predictor: str | None = None) -> Floats:
        """Return predicted speeds; without a predictor, those to place coordinators and pieces by.

        Zero for a worker that is suspect, or that is not trusted.
        """
        if predictor is None:
            speeds = self._speeds.assured(addresses)
        else:
            speeds = self._speeds.predict(addresses, predictor)
        for i, address in enumerate(addresses):
            if not self.trusts(address) or address in self._suspects:
                speeds[i] = 0.0
        return speeds

    def lasting(self, addresses: Sequence[str]) -> Floats:
        """Return speeds as they have been for many rounds; zero for a worker not trusted."""
        return self._speeds.lasting(addresses) * [self.trusts(address) for address in addresses]

    def best(self, addresses: Sequence[str]) -> list[str]:
        """Sort workers by predicted speed, the fastest first."""
        order = np.argsort(-self.predict(addresses), kind="stable")
        return [addresses[i] for i in order]
