"""Which peers are there: a state machine without I/O and clock, and all timeouts of the package.

Each worker has a :class:`Membership` for the workers at the other ends of its channels, and the
scheduler has one for all workers. Each peer is in one of three states::

                     owes an answer for too long, or another observer suspects it
        Alive ----------------------------------------------------------------------------> Suspect
          ^  <---------------------------------------------------------------------------      |
          |                              heard in the same epoch                               |
          |  opened again, in the next epoch                               closed              |
          +------------------------------------- Gone <----------------------------------------+

Only the end of a connection makes a peer Gone, never time. Silence takes away a peer's work, never
its data: what it sends late in the same epoch counts.

Time comes with each event. The machine's own time advances by at most two ticks from one event to
the next, and the first look after a longer gap suspects no peer: an observer that stood still has
not read the answers yet, and blames no peer for that. An observer that stands still before each of
its looks has read them by the second one, which is not excused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import ClassVar


@dataclass(frozen=True)
class Timeouts:
    """All timeouts of the package, in seconds.

    ==================  ==================================  ========================================
    timeout             value                               for what
    ==================  ==================================  ========================================
    ``silence``         T, `coded.coordinator.timeout`      a peer may owe an answer
    ``tick``            T / 5                               between two looks
    ``quiet(lag)``      T / 2 or 100 lags, at most 5 T      until a peer that has work is asked
    ``patience(s)``     T or 10 answer times, at most 5 T   until a peer that owes one is suspect
    ``answer``          2 T                                 a request that needs no work
    ``longest``         5 T                                 the slowest peer; to open a connection
    ``lease``           5 T                                 what may be needed again is kept
    ``joining``         10 T                                a worker that joins gets the plugin
    ``unclaimed``       30 T                                an operand without a round is kept
    ``unfinished``      30 T                                failed attempts at one round, until its
                                                            coordinator moves
    ``beats(s)``        4 heartbeat intervals               until a worker without one is suspect
    ``handshake``       `distributed.comm.timeouts.connect` the first message of a connection
    ``LOOK``            0.5                                 between attempts, or looks at itself;
                                                            until a request for pieces is answered
    ``PLANS``           0.05                                between the plans of short rounds
    ``REPORTS``         0.1                                 between reports of rounds to the client
    ``PROBES``          5                                   between measurements of a worker's speed
    ``USED``            30                                  an array counts as used after a round
    ``WATCH``           1                                   between questions for an open page
    ``WATCHED``         60                                  that they go on after a page was drawn
    ==================  ==================================  ========================================

    Parameters
    ----------
    silence : float
        For how long a peer may owe an answer.
    handshake : float
        How long Dask waits for a connection. Whatever listens at the address of a worker that has
        died may accept a connection and say nothing: an HTTP server, for example.

    Examples
    --------
    >>> timeouts = Timeouts(1.0)
    >>> [timeouts.quiet(lag) for lag in (0.0, 0.02, 1.0)]
    [0.5, 2.0, 5.0]
    >>> [timeouts.patience(seconds) for seconds in (0.0, 0.3, 60.0)]
    [1.0, 3.0, 5.0]
    """

    silence: float
    handshake: float = 30.0

    #: Attempts, and looks at the own process, which cost little, are this far apart, and the first
    #: ones less.
    FIRST_LOOK: ClassVar[float] = 0.01
    LOOK: ClassVar[float] = 0.5
    #: A loop does not ask for plans more often, unless it loses a worker: rounds may take 2 ms.
    PLANS: ClassVar[float] = 0.05
    #: A loop does not report rounds to its client more often, which shows them to a person.
    REPORTS: ClassVar[float] = 0.1
    #: A measurement takes about 8 ms: less than two thousandths of a core.
    PROBES: ClassVar[float] = 5.0
    #: Users look at a result before they compute the next one; workers should stay meanwhile.
    USED: ClassVar[float] = 30.0
    #: While a page is open, or metrics are read, coordinators are asked what they have done.
    WATCH: ClassVar[float] = 1.0
    #: Metrics are usually read a few times a minute.
    WATCHED: ClassVar[float] = 60.0

    # A call costs a peer two messages. After this many lags without a word, calls take it 1 or 2 %
    # of its time.
    _LAGS: ClassVar[int] = 100
    # A worker with a hundredth of a core may need 0.5 s for one answer and far less for the next. A
    # peer may owe one for this many times as long as it needed before.
    _ANSWERS: ClassVar[int] = 10
    # Heartbeats come late while a worker's event loop is busy.
    _BEATS: ClassVar[int] = 4

    @property
    def tick(self) -> float:
        """Between two looks: five within the time that a peer may be silent."""
        return self.silence / 5

    @property
    def answer(self) -> float:
        """For how long a request may take that needs no work, its connection included."""
        return 2 * self.silence

    @property
    def longest(self) -> float:
        """For how long the slowest peer may be silent, and a connection may take."""
        return 5 * self.silence

    @property
    def lease(self) -> float:
        """For how long results and memory are kept that may be asked for, or used again."""
        return 5 * self.silence

    @property
    def joining(self) -> float:
        """For how long a worker that joins may import the package, which it may also lack."""
        return 10 * self.silence

    @property
    def unclaimed(self) -> float:
        """For how long an operand is kept whose round has not begun, or has ended."""
        return 30 * self.silence

    @property
    def unfinished(self) -> float:
        """For how long attempts at one round may fail before its coordinator moves."""
        return 30 * self.silence

    def quiet(self, lag: float = 0.0) -> float:
        """Until a peer that has work is asked whether it runs.

        ``lag`` is what it needs to begin work and to report it, or to answer. It may include the
        time for which it was stopped, so it does not count beyond a limit.
        """
        return min(max(self.silence / 2, self._LAGS * lag), self.longest)

    def patience(self, seconds: float) -> float:
        """For how long a peer may owe an answer that needed some seconds for the last ones."""
        return min(max(self.silence, self._ANSWERS * seconds), self.longest)

    def beats(self, interval: float) -> float:
        """For how long a worker may send no heartbeat, which it sends at this interval."""
        return self._BEATS * interval


class Standing(Enum):
    """Whether a peer is there."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    GONE = "gone"


@dataclass(frozen=True)
class Ask:
    """Ask a peer whether it runs."""

    peer: str


@dataclass(frozen=True)
class Changed:
    """The standing of a peer has changed, or its epoch.

    Parameters
    ----------
    peer : str
    epoch : int
    standing : Standing
    """

    peer: str
    epoch: int
    standing: Standing


@dataclass
class _Peer:
    epoch: int
    standing: Standing = Standing.ALIVE
    #: Since when it has owed an answer, and whether it was called since then.
    owes: float | None = None
    reminded: bool = False
    #: When it got the first call that it has not answered.
    called: float | None = None
    #: When it was last heard.
    heard: float = -inf
    #: About the seconds that it needs for an answer; 0 before it has answered.
    answer: float = 0.0


class Membership:
    """Which peers are alive, suspect or gone.

    All times are seconds of one clock, which the caller reads; it never goes back.

    Parameters
    ----------
    timeouts : Timeouts

    Attributes
    ----------
    time : float
        The machine's own time, which an observer that stands still does not advance.
    suspects : set of str
        The peers that are suspect now; the same object for ever.
    gone : dict of str to None
        The peers that are gone and not forgotten, in the order in which they went.

    Examples
    --------
    >>> membership = Membership(Timeouts(1.0))
    >>> membership.opened("b", now=0.0)
    Changed(peer='b', epoch=1, standing=<Standing.ALIVE: 'alive'>)
    >>> membership.react(0.2, {"b": 0.0})
    [Ask(peer='b')]
    >>> [command for i in range(2, 8) for command in membership.react(i / 5, {"b": 0.0})]
    [Changed(peer='b', epoch=1, standing=<Standing.SUSPECT: 'suspect'>)]
    >>> membership.heard("b", now=1.5)
    [Changed(peer='b', epoch=1, standing=<Standing.ALIVE: 'alive'>)]
    """

    # A peer is called a second time if the first message that it owes an answer to is not a call:
    # once it has owed it for this share of the time that it may, so that the answer comes before.
    _OWED = 0.6
    # Answer times fall by this factor at most, with each answer and each end of a run: a slow peer
    # answers at once if it has used little of its quota, which says little about the next time.
    _FALL = 0.5

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self.time = 0.0
        self.suspects: set[str] = set()
        self.gone: dict[str, None] = {}
        self._peers: dict[str, _Peer] = {}
        self._owing: set[str] = set()  # those that are alive and owe an answer
        self._last: float | None = None
        self._stood_still = False  # since the last look
        self._excused = False  # whether it did so before the last look, too

    def _advance(self, now: float) -> None:
        gap = 0.0 if self._last is None else max(now - self._last, 0.0)
        self._last = now
        most = 2 * self.timeouts.tick
        self.time += min(gap, most)
        self._stood_still |= gap > most

    def _set(self, peer: str, standing: Standing) -> Changed:
        found = self._peers[peer]
        found.standing = standing
        if standing is Standing.SUSPECT:
            self.suspects.add(peer)
        else:
            self.suspects.discard(peer)
            found.owes = found.called = None
        if standing is Standing.GONE:
            self.gone[peer] = None
        else:
            self.gone.pop(peer, None)
        self._owing.discard(peer)
        return Changed(peer, found.epoch, standing)

    # -- events --------------------------------------------------------------------------------

    def opened(self, peer: str, now: float) -> Changed:
        """A connection to a peer is opened, or it has joined: its next epoch begins."""
        self._advance(now)
        epoch = self._peers[peer].epoch + 1 if peer in self._peers else 1
        self._peers[peer] = _Peer(epoch, heard=self.time)
        return self._set(peer, Standing.ALIVE)

    def closed(self, peer: str) -> list[Changed]:
        """The connection to a peer has ended, or it has left."""
        if self.standing(peer) is Standing.GONE or peer not in self._peers:
            return []
        return [self._set(peer, Standing.GONE)]

    def forget(self, peer: str) -> None:
        """Remember nothing of a peer."""
        self.closed(peer)
        self._peers.pop(peer, None)
        self.gone.pop(peer, None)

    def heard(self, peer: str, now: float, answers: bool = False) -> list[Changed]:
        """A peer has sent something; ``answers`` if it answers a call."""
        self._advance(now)
        found = self._peers.get(peer)
        if found is None or found.standing is Standing.GONE:
            return []
        if answers and found.called is not None:
            slowest = self.timeouts.silence / 2
            seconds = min(self.time - found.called, slowest)
            found.answer = max(seconds, self._FALL * found.answer)
            found.called = None
        found.heard, found.owes = self.time, None
        self._owing.discard(peer)
        return [self._set(peer, Standing.ALIVE)] if found.standing is Standing.SUSPECT else []

    def asked(self, peer: str, now: float, call: bool = False) -> None:
        """A peer was sent something that it answers; ``call`` if it does so at once."""
        self._advance(now)
        found = self._peers.get(peer)
        if found is None or found.standing is Standing.GONE:
            return
        if found.owes is None:
            found.owes, found.reminded = self.time, False
            if found.standing is Standing.ALIVE:
                self._owing.add(peer)
        if call:
            found.reminded = True
            if found.called is None:
                found.called = self.time

    def settled(self, peer: str, began: float) -> None:
        """A run has ended: what a peer has owed only since it ``began`` is not due any more.

        ``began`` is in the machine's time.
        """
        if (found := self._peers.get(peer)) is None:
            return
        found.answer *= self._FALL
        # Peers do not answer calls of a run that they have dropped.
        found.called, found.reminded = None, False
        if found.owes is not None and found.owes >= began:
            found.owes = None
            self._owing.discard(peer)

    def suspect(self, peer: str) -> list[Changed]:
        """Another observer suspects a peer, which stays so until it is heard."""
        if peer not in self._peers or self.standing(peer) is not Standing.ALIVE:
            return []
        return [self._set(peer, Standing.SUSPECT)]

    def react(self, now: float, watched: Mapping[str, float] | None = None) -> list[Ask | Changed]:
        """Look which peers are silent, and which to ask.

        Parameters
        ----------
        now : float
        watched : mapping of str to float, optional
            The peers of which something is expected, and for how long each may say nothing before
            it is asked; see :meth:`Timeouts.quiet`.
        """
        self._advance(now)
        excused = self._stood_still and not self._excused
        self._excused, self._stood_still = self._stood_still, False
        commands: list[Ask | Changed] = []
        for peer, quiet in (watched or {}).items():
            found = self._peers.get(peer)
            if found is None or found.standing is Standing.GONE:
                continue
            if found.owes is None:
                due = self.time - found.heard >= quiet
            else:
                due = not found.reminded and self.owes(peer, self._OWED * self.patience(peer))
            if due:
                self.asked(peer, now, call=True)
                commands.append(Ask(peer))
        if excused:
            return commands
        late = [peer for peer in self._owing if self.owes(peer, self.patience(peer))]
        return commands + [self._set(peer, Standing.SUSPECT) for peer in late]

    def unheard(self, seconds: float, now: float) -> list[Changed]:
        """Suspect the peers that have said nothing for so long, although they report unasked."""
        self._advance(now)
        late = [
            peer
            for peer, found in self._peers.items()
            if found.standing is Standing.ALIVE and self.time - found.heard > seconds
        ]
        return [self._set(peer, Standing.SUSPECT) for peer in late]

    # -- queries -------------------------------------------------------------------------------

    def at(self, now: float) -> float:
        """Return the machine's time, which is later than that of all events so far."""
        self._advance(now)
        return self.time

    @property
    def wake(self) -> float | None:
        """In how many seconds to look again, even if nothing is watched; None if never."""
        return self.timeouts.tick if self._owing else None

    def standing(self, peer: str) -> Standing:
        """Return the standing of a peer. A peer that never had a connection is alive."""
        found = self._peers.get(peer)
        return found.standing if found else Standing.ALIVE

    def owed(self, peer: str) -> float:
        """Return for how many seconds a peer has owed an answer; 0 if it owes none."""
        found = self._peers.get(peer)
        return 0.0 if found is None or found.owes is None else self.time - found.owes

    def owes(self, peer: str, seconds: float = 0.0) -> bool:
        """Whether a peer owes an answer, and has done so for that long."""
        # Looks are a tick apart, and come a little early or late.
        found = self._peers.get(peer)
        late = self.owed(peer) >= seconds - self.timeouts.tick / 2
        return found is not None and found.owes is not None and late

    def silent(self, peer: str) -> float:
        """Return for how many seconds a peer has said nothing; 0 if it is not known."""
        found = self._peers.get(peer)
        return self.time - found.heard if found else 0.0

    def answer_time(self, peer: str) -> float:
        """Return about how many seconds a peer needs for an answer; 0 if that is unknown."""
        found = self._peers.get(peer)
        return found.answer if found else 0.0

    def patience(self, peer: str) -> float:
        """Return for how many seconds a peer may owe an answer before it is suspect."""
        return self.timeouts.patience(self.answer_time(peer))
