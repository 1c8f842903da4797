"""Rounds in virtual time, one after the other; speeds are learnt as in a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dask_coded.codes import Code
from dask_coded.planning import (
    POLICIES,
    Continuous,
    InfeasibleError,
    LagHistory,
    Layout,
    Pace,
    Policy,
    Reporting,
    SpeedHistory,
    fluid_time,
    in_seconds,
)
from dask_coded.planning.layout import Floats
from dask_coded.rounds import Round
from dask_coded.simulation._cluster import Network, VirtualRound
from dask_coded.simulation.speeds import Speeds


@dataclass(frozen=True)
class SimulatedRound:
    """What one round came to.

    Attributes
    ----------
    seconds : float
        Virtual time from the operand to the decoded result.
    bound : float
        The fluid bound: how long it takes workers of these speeds that are all busy to the end and
        compute nothing in vain, without any message.
    computed : float
        Work done, over the work needed.
    messages : int
        Sent and received by the coordinator.
    """

    seconds: float
    bound: float
    computed: float
    messages: int


class Simulation:
    """A coded operand on simulated workers.

    Parameters
    ----------
    code : Code
    speeds : Speeds
        One column for each place of the code.
    policy : str or callable() -> Policy
        A key of ``POLICIES``, or what makes a policy for one round.
    predictor : str
        A key of ``PREDICTORS``.
    foresight : callable(ndarray) -> ndarray, optional
        Replaces the predictor: from the speeds that the workers will really have to those that are
        predicted. The identity is a perfect prediction.
    stripes : int
        Stripes per piece.
    piece_seconds : float
        Seconds that a worker of speed 1 needs for one whole piece.
    network : Network
    reporting : Reporting, optional
        How often workers report.
    decode_seconds : float
        Added to every round.

    Raises
    ------
    ValueError
        If the numbers of workers of code and speeds differ.

    Examples
    --------
    >>> from dask_coded.codes import MDS
    >>> from dask_coded.simulation import constant
    >>> simulation = Simulation(MDS(10, 7), constant([1.0] * 8 + [0.2] * 2))
    >>> first, second = simulation.run(2)
    >>> first.seconds < 1.1 * first.bound
    True
    """

    def __init__(
        self,
        code: Code,
        speeds: Speeds,
        *,
        policy: str | Callable[[], Policy] = "continuous",
        predictor: str = "exponential",
        foresight: Callable[[Floats], Floats] | None = None,
        stripes: int = 40,
        piece_seconds: float = 1.0,
        network: Network | None = None,
        reporting: Reporting | None = None,
        decode_seconds: float = 0.0,
    ) -> None:
        places = int(code.place.max()) + 1
        if speeds.workers != places:
            raise ValueError(
                f"Code {code!r} needs speeds of {places} workers, there are {speeds.workers}."
            )
        self.code = code
        self.speeds = speeds
        self.now = 0.0
        self.rounds = 0
        self.history = SpeedHistory()
        self._lags = LagHistory()
        self._measured: dict[str, float] = {}
        self._policy = POLICIES[policy] if isinstance(policy, str) else policy
        self._predictor = predictor
        self._foresight = foresight
        self._network = network or Network()
        self._pace = Pace(Continuous().lead, reporting or Reporting())
        self._decode_seconds = decode_seconds
        work = np.full((1, stripes), piece_seconds / stripes)
        self.layout = Layout.of(code, code.place.tolist(), work)
        self._names = [str(worker) for worker in range(places)]

    def run(self, rounds: int) -> list[SimulatedRound]:
        """Play so many rounds, each begun when the one before has ended."""
        return [self.step() for _ in range(rounds)]

    def step(self) -> SimulatedRound:
        """Play one round.

        Raises
        ------
        RuntimeError
            If too many workers have stopped or are gone for the round to end.
        """
        number, began = self.rounds, self.now
        actual, _ = self.speeds.at(number, began)
        if self._foresight is not None:
            expected = self._foresight(np.nan_to_num(actual))
        else:
            expected = self.history.predict(self._names, self._predictor)
        expected, delays = in_seconds(self._names, expected, self._measured, self._lags.known)
        round_ = Round(self.layout, self._policy(), expected, began, self._pace.reporting, delays)
        virtual = VirtualRound(
            round_,
            lambda time: self.speeds.at(number, time),
            self._network,
            self._pace.reporting,
            self._pace.lead,
        )
        try:
            virtual.play()
        except InfeasibleError:
            raise RuntimeError(
                f"Round {number} cannot begin: too few workers are expected to make progress."
            ) from None
        self._record(round_, virtual.now - began)
        self.now = virtual.now + self._decode_seconds
        self.rounds += 1
        needed = float((self.layout.need * self.layout.work.mean(axis=0).sum()).sum())
        return SimulatedRound(
            seconds=self.now - began,
            bound=self.bound(number, began),
            computed=virtual.computed / needed,
            messages=virtual.messages,
        )

    def bound(self, round_: int, time: float) -> float:
        """The fluid bound of a round that begins at a time."""
        size = float(self.layout.work[0].sum())
        mixed = len(self.layout.need) == 1
        # Copies are bounded by what lies anywhere: the work there is, shared by all speeds.
        need = int(self.layout.need[0]) if mixed else len(self.layout.need)
        capacity = size if mixed else np.inf
        done = np.zeros(self.speeds.workers)
        now = time
        while True:
            speeds, until = self.speeds.at(round_, now)
            rates = np.nan_to_num(speeds)
            if np.isinf(until) and not done.any():
                return _time_to(need * size, rates, capacity)
            if np.minimum(done + rates * (until - now), capacity).sum() >= need * size:
                low, high = 0.0, until - now
                while high - low > 1e-9 * (now + high - time):
                    middle = (low + high) / 2
                    enough = np.minimum(done + rates * middle, capacity).sum() >= need * size
                    low, high = (low, middle) if enough else (middle, high)
                return now + high - time
            done, now = done + rates * (until - now), until

    def _record(self, round_: Round, elapsed: float) -> None:
        """Enter what was learnt, as the runtime's coordinator does."""
        progress = round_.progress
        measured = {self._names[w]: s for w, s in progress.measured_speeds(elapsed).items()}
        self.history.record(measured)
        self._measured |= measured
        self._lags.record({self._names[w]: s for w, s in progress.measured_lags(elapsed).items()})
        self._pace.record(elapsed, progress.lag)


def _time_to(work: float, rates: Floats, capacity: float) -> float:
    if np.isfinite(capacity):
        return fluid_time(rates, work / capacity, capacity)
    return work / float(rates.sum())
