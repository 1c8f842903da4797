"""The leader's part in squeezed steps: which turn of which step is dealt, and what was seen of it.

The leader deals the units of a step once those of the step before are computed, while they are
added up. So no worker waits for its deal. The step begins once a worker has the sum; other workers
may still be waiting for theirs. If a unit did not fit its grid, the same step is dealt once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_coded.aggregation._machine import Send, Tag
from dask_coded.aggregation._squeeze import TURNS, SqueezePlan
from dask_coded.prediction import SpeedHistory
from dask_coded.squeeze import Dealer, Ledger
from dask_coded.squeeze.grants import Answer, Close, Deal, Done, pack, unpack
from dask_coded.squeeze.ledger import Letter

# Seconds from one worker to another before any lag is known, as in one room.
_LATENCY = 1e-3
#: Of so many turns, the present one among them, the leader cares that all workers get the sum.
KEPT = 2 * TURNS

#: A step, and a message about it to a worker.
Order = tuple[int, Send]


@dataclass
class SeenStep:
    """What the leader has seen of a step, over its turns.

    Attributes
    ----------
    units : dict of int to int
        Of each worker that has any in the sum.
    moved : int
        Units granted to another worker than at first.
    speeds : dict of str to float
        Units per second of each worker, by name.
    computing : dict of int to float
        Seconds that each worker has computed.
    """

    units: dict[int, int] = field(default_factory=dict)
    moved: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    computing: dict[int, float] = field(default_factory=lambda: defaultdict(float))


class SqueezedSteps:
    """The steps of a group. Every method takes the time of its event and returns messages.

    After each event, call :meth:`react` at :attr:`wake` if nothing else happens.

    Parameters
    ----------
    plan : SqueezePlan
    names : sequence of str
        Of the workers.
    history : SpeedHistory
        The speeds that were measured so far.
    first, end : int
        The first step, and the one after the last.

    Attributes
    ----------
    wake : float or None
    failed : str or None
        Why the present step cannot end.
    """

    def __init__(
        self, plan: SqueezePlan, names: Sequence[str], history: SpeedHistory, first: int, end: int
    ) -> None:
        self._dealer = Dealer(plan.layout, names, _LATENCY, history)
        self._end = end
        self._ledgers: dict[tuple[int, int], Ledger] = {}
        self._present = first, 0
        # Whether the speeds of the present turn are recorded.
        self._recorded = False
        # Messages about the next step that workers have already been sent.
        self._ahead: list[Letter] = []
        self._lost: set[int] = set()
        self._seen: dict[int, SeenStep] = defaultdict(SeenStep)

    @property
    def wake(self) -> float | None:
        wakes = [ledger.wake for ledger in self._ledgers.values() if ledger.wake is not None]
        return min(wakes, default=None)

    @property
    def failed(self) -> str | None:
        # Of an earlier one, too: after the last step no other would tell.
        found = (ledger.failed for ledger in self._ledgers.values())
        return next((failed for failed in found if failed is not None), None)

    def take(self, step: int) -> SeenStep:
        """Return what was seen of a step that has ended, and forget it."""
        return self._seen.pop(step, SeenStep())

    def start(self, now: float) -> list[Order]:
        """Deal the first step."""
        return self._deal(now)

    def received(self, step: int, tag: Tag, payload: Any, now: float) -> list[Order]:
        """Handle an answer of a worker."""
        turn = step, tag.segment
        ledger = self._ledgers.get(turn)
        if ledger is None:
            return []
        answer = unpack(payload)
        assert isinstance(answer, Answer)
        if answer.worker in self._lost:  # the others do not ask it for anything any more
            return []
        if isinstance(answer, Done) and turn == self._present:
            self._seen[step].computing[answer.worker] += answer.seconds
        orders = self._orders(turn, ledger.receive([answer], now))
        return orders + self._go_on(now)

    def lost(self, nodes: Iterable[int], now: float) -> list[Order]:
        """Record that workers are lost for this group."""
        gone = set(nodes) - self._lost
        self._lost |= gone
        orders = []
        for turn, ledger in self._ledgers.items():
            orders += self._orders(turn, ledger.lost(gone, now))
        return orders + self._go_on(now)

    def react(self, now: float) -> list[Order]:
        """React to time that has passed."""
        orders = []
        for turn, ledger in self._ledgers.items():
            orders += self._orders(turn, ledger.react(now))
        return orders + self._go_on(now)

    def _go_on(self, now: float) -> list[Order]:
        """Deal the next step once the units of this turn are computed; begin it with the sum."""
        step, turn = self._present
        ledger = self._ledgers.get(self._present)
        if ledger is None or not (ledger.over or ledger.computed):
            return []
        seen = self._seen[step]
        again = ledger.overflow and turn + 1 < TURNS
        if not self._recorded:
            self._recorded = True
            seen.speeds |= self._dealer.ended(ledger, now)
            if not (ledger.over or again or self._ahead or step + 1 >= self._end):
                return self._deal_ahead(now)
        if not ledger.over:
            return []
        seen.units = ledger.shares
        seen.moved += ledger.moved
        self._present = (step, turn + 1) if again else (step + 1, 0)
        return self._deal(now)

    def _deal_ahead(self, now: float) -> list[Order]:
        """Deal the next step, without its ledger: its time has yet to begin."""
        # It is closed later if units of workers that are lost have to be granted to others.
        kinds = Deal if self._lost else Deal | Close
        letters = self._dealer.begin(0, now).start()
        self._ahead = [letter for letter in letters if isinstance(letter[1], kinds)]
        return self._orders((self._present[0] + 1, 0), self._ahead)

    def _deal(self, now: float) -> list[Order]:
        step, turn = self._present
        self._recorded = False
        if step >= self._end:
            return []
        ledger = self._ledgers[self._present] = self._dealer.begin(turn, now)
        for old in [*self._ledgers][:-KEPT]:
            del self._ledgers[old]
        dealt: dict[int, tuple[int, ...]] = {}
        closed = False
        if turn == 0:
            for worker, message in self._ahead:
                if isinstance(message, Deal):
                    dealt[worker] = dealt.get(worker, ()) + message.units
                closed |= isinstance(message, Close)
            self._ahead = []
        letters = ledger.start(dealt, closed)
        if self._lost:
            letters += ledger.lost(self._lost, now)
        return self._orders(self._present, letters)

    def _orders(self, turn: tuple[int, int], letters: Iterable[Letter]) -> list[Order]:
        step, number = turn
        return [
            (step, Send(worker, Tag("grant", number), pack(message)))
            for worker, message in letters
            if worker not in self._lost
        ]
