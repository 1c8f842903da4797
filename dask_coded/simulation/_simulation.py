"""Rounds in virtual time, one after another; speeds are learnt as in a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dask_coded.arguments import check_positive, check_whole
from dask_coded.codes import Code
from dask_coded.prediction import PREDICTORS, SpeedHistory, in_seconds
from dask_coded.rounds import (
    POLICIES,
    Layout,
    LoopHistory,
    Policy,
    Reporting,
    Round,
    RoundOptions,
    StripeRange,
)
from dask_coded.rounds.capacity import Capacity
from dask_coded.simulation._cluster import Network, VirtualRound
from dask_coded.simulation.speeds import Speeds
from dask_coded.typing import Floats

#: Maps a layout and predicted speeds to a first assignment and to the seconds before each worker
#: can start on its part, shape (workers,).
Assigner = Callable[[Layout, Floats], tuple[list[list[StripeRange]], Floats]]


@dataclass(frozen=True)
class SimulatedRound:
    """The outcome of one round.

    Attributes
    ----------
    seconds : float
        Virtual time from the operand to the decoded result.
    bound : float
        The fluid bound: the seconds that workers of these speeds take without messages, if all are
        busy to the end and no work is wasted.
    computed : float
        Work done divided by work needed.
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
        A key of ``POLICIES``, or a function that makes a policy for one round.
    assigner : callable(Layout, ndarray) -> (assignment, ndarray), optional
        Replaces the policy's first assignment: maps the layout and predicted speeds to an
        assignment and to the seconds before each worker can start. For systems that move data
        between rounds.
    predictor : str
        A key of ``PREDICTORS``.
    foresight : callable(ndarray) -> ndarray, optional
        Replaces the predictor: maps the speeds that the workers will really have to predicted
        speeds. The identity is a perfect prediction.
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
        If code and speeds have different numbers of workers, no policy has that name, or a number
        is out of range.

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
        assigner: Assigner | None = None,
        predictor: str = "adaptive",
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
                f"Code {code!r} needs speeds of {places} workers, got those of {speeds.workers}."
            )
        check_whole("stripes", stripes)
        check_positive("piece_seconds", piece_seconds)
        check_positive("decode_seconds", decode_seconds, or_zero=True)
        for name, value, known in (
            ("policy", policy, POLICIES),
            ("predictor", predictor, PREDICTORS),
        ):
            if isinstance(value, str) and value not in known:
                raise ValueError(
                    f"Argument {name!r} must be one of {sorted(known)}, it is {value!r}."
                )
        self.code = code
        self.speeds = speeds
        self.now = 0.0
        self.rounds = 0
        self.history = SpeedHistory()
        options = RoundOptions(reporting=reporting or Reporting())
        self._loop = LoopHistory(options.lead, options.reporting)
        if isinstance(policy, str):
            self._policy: Callable[[], Policy] = partial(POLICIES[policy].from_options, options)
        else:
            self._policy = policy
        self._assigner = assigner
        self._predictor = predictor
        self._foresight = foresight
        self._network = network or Network()
        self._decode_seconds = decode_seconds
        work = np.full((1, stripes), piece_seconds / stripes)
        self.layout = Layout.of(code, code.place.tolist(), work)
        self._names = [str(worker) for worker in range(places)]

    def run(self, rounds: int) -> list[SimulatedRound]:
        """Run ``rounds`` rounds, each started when the previous one has ended."""
        check_whole("rounds", rounds, least=0)
        return [self.step() for _ in range(rounds)]

    def step(self) -> SimulatedRound:
        """Run one round.

        Raises
        ------
        RuntimeError
            If too many workers have stopped or are gone for the round to finish.
        """
        number, began = self.rounds, self.now
        actual, _ = self.speeds.at(number, began)
        if self._foresight is not None:
            expected = self._foresight(np.nan_to_num(actual))
        else:
            expected = self.history.predict(self._names, self._predictor)
            expected = self.history.with_trials(self._names, expected, self.layout.even_share)
        loop = self._loop
        expected, lags = in_seconds(self._names, expected, loop.speeds, loop.lags.known)
        round_ = Round(self.layout, self._policy(), expected, began, loop.pace.reporting, lags)
        virtual = VirtualRound(
            round_,
            lambda time: self.speeds.at(number, time),
            self._network,
            loop.pace.reporting,
            loop.pace.lead,
            self.speeds.ever(number),
        )
        first, delays = self._assigner(self.layout, expected) if self._assigner else (None, None)
        virtual.run(first, delays)
        self.history.record(loop.record(round_, self._names, virtual.now - began))
        self.now = virtual.now + self._decode_seconds
        self.rounds += 1
        return SimulatedRound(
            seconds=self.now - began,
            bound=self.bound(number, began),
            computed=virtual.computed / self.layout.needed,
            messages=virtual.messages,
        )

    def bound(self, round_: int, time: float) -> float:
        """Return the fluid bound of a round that starts at a time and can finish."""
        size = float(self.layout.work[0].sum())
        # A little less, because the work of exactly the needed pieces adds up with rounding errors.
        needed = int(self.layout.need.sum()) * size * (1 - 1e-12)
        pieces = np.bincount(self.layout.host, minlength=self.speeds.workers)
        # With several groups, the bound is total work over total speed, see Capacity.
        capacity = pieces * size if len(self.layout.need) == 1 else np.inf
        done = np.zeros(self.speeds.workers)
        now = time
        while True:
            speeds, until = self.speeds.at(round_, now)
            rates = np.nan_to_num(speeds)
            if np.isinf(until):
                return float(Capacity.of(self.layout).seconds(rates * self.layout.stripes / size))
            if np.minimum(done + rates * (until - now), capacity).sum() >= needed:
                low, high = 0.0, until - now
                while high - low > 1e-9 * (now + high - time):
                    middle = (low + high) / 2
                    enough = np.minimum(done + rates * middle, capacity).sum() >= needed
                    low, high = (low, middle) if enough else (middle, high)
                return now + high - time
            done, now = done + rates * (until - now), until
