"""One training step after another: each is dealt by what the steps before have taught."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dask_coded.prediction import SpeedHistory, in_seconds
from dask_coded.rounds.history import LoopHistory
from dask_coded.rounds.policies import Continuous
from dask_coded.rounds.reporting import Reporting
from dask_coded.rounds.workers import Forecast
from dask_coded.squeeze.ledger import Ledger
from dask_coded.squeeze.units import UnitLayout

# Steps whose errors of prediction say how far the next prediction may be off.
_ERRORS = 3


class Dealer:
    """Makes the ledger of each step, and learns the speeds of workers from it.

    The leader of a group drives it, or :class:`dask_coded.simulation.SqueezeSimulation`.

    Parameters
    ----------
    units : UnitLayout
    names : sequence of str
        Of the workers, by which their speeds are remembered.
    latency : float
        Seconds from one worker to another, as far as is known.
    history : SpeedHistory, optional
        What is known of these workers, and others.
    predictor : str
        A key of ``PREDICTORS``.

    Attributes
    ----------
    steps : int
        Steps that have ended.

    Examples
    --------
    >>> dealer = Dealer(UnitLayout(units=8, seats=[0, 1]), ["a", "b"], latency=0.001)
    >>> ledger = dealer.begin(step=0, now=0.0)
    >>> [(worker, message.units) for worker, message in ledger.start()]
    [(0, (4, 5, 6, 7)), (1, (0, 1, 2, 3))]
    """

    def __init__(
        self,
        units: UnitLayout,
        names: Sequence[str],
        latency: float,
        history: SpeedHistory | None = None,
        predictor: str = "adaptive",
    ) -> None:
        self.steps = 0
        self._units = units
        self._names = names
        self._latency = latency
        self._predictor = predictor
        self._history = SpeedHistory() if history is None else history
        self._loop = LoopHistory(2 * latency, Reporting(0.0, 0.0))
        self._errors: deque[float] = deque(maxlen=_ERRORS)

    @property
    def doubt(self) -> float:
        """The worst error of the last predictions, as far as they are known."""
        return max(self._errors, default=1.0)

    def forecast(self) -> Forecast:
        """Return what is predicted for the next step."""
        relative = self._history.predict(self._names, self._predictor)
        stripes = self._units.units / len(self._names)
        relative = self._history.with_trials(self._names, relative, stripes)
        loop = self._loop
        speeds, lags = in_seconds(self._names, relative, loop.speeds, loop.lags.known)
        return Forecast(speeds, lags, self.doubt)

    def begin(self, step: int, now: float, forecast: Forecast | None = None) -> Ledger:
        """Return the ledger of the next step.

        Parameters
        ----------
        step : int
        now : float
            Seconds on the caller's clock.
        forecast : Forecast, optional
            In units per second; by default :meth:`forecast`.
        """
        lead = gain = 4 * self._latency  # moving a unit takes four messages
        if forecast is not None or self._loop.speeds:
            # A worker is fed when it begins its last unit.
            forecast = forecast or self.forecast()
            lead += 1 / float(forecast.speeds.mean())
        policy = Continuous(lead, gain)
        forecast = forecast or self.forecast()
        return Ledger(self._units, policy, forecast, now, step=step)

    def ended(self, ledger: Ledger, now: float) -> dict[str, float]:
        """Record a step that has ended; return the units per second that it has measured."""
        state = ledger.round.state
        elapsed = now - state.started
        measured = self._loop.record(ledger.round, self._names, elapsed)
        self._history.record(measured)
        self._errors.append(state.misprediction(elapsed))
        self.steps += 1
        return measured
