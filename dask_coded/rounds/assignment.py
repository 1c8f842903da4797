"""The first assignment: loads in proportion to predicted speeds, each stripe just often enough.

This is general S2C2 with real-valued speeds. For an MDS code with ``R`` stripes per piece, the
loads solve

    minimise T   subject to   sum_i min(u_i T, R) = k R,        l_i = min(u_i T, R)

(water filling; ``T`` is the fluid bound). They are laid end to end around a ring of ``R`` stripes.
No load is longer than the ring, so exactly ``k`` distinct pieces cover each stripe::

    stripes  0 . . . . . . . R
    piece 0  #####
    piece 1       ####|           k = 2 laps around the ring, cut where a load ends
    piece 2  ###
    piece 3     ######

For cyclic repetition the ring is the data itself. Place ``i`` computes one interval within the
``r`` blocks that it holds, and the speeds decide where the intervals meet.

If not every ``k`` pieces of a code suffice to decode, the stripes are first dealt as if they did.
Then pieces are exchanged for each stripe that could not be decoded.

References
----------
.. [1] Narra et al., "Slack squeeze coded computing for adaptive straggler mitigation", SC'19
   (the authors round speeds to integers 0 … 10; that costs 1.1 % on average, 33 % at worst).
.. [2] Woolsey, Chen, Ji, "Coded elastic computing on machines with heterogeneous storage and
   computation speed", arXiv 2008.05141 (the same load problem, solved exactly).
"""

from __future__ import annotations

import numpy as np

from dask_coded.codes import Code
from dask_coded.rounds.layout import Layout, StripeRange, ranges_of
from dask_coded.typing import Bools, Floats, Ints

# A worker counts as at least this share of the fastest. Otherwise sums of loads would lose digits,
# and the shares of slow workers with them.
_SLOWEST = 1e-6
# A worker that is needed but not expected to make progress counts as this share of the fastest.
_LEAST_SPEED = 1e-3


class InfeasibleError(ValueError):
    """Too few workers with a speed above zero hold the pieces that a round needs."""


def fluid_time(
    rates: Floats,
    need: float,
    size: float = 1.0,
    lags: Floats | None = None,
    pieces: Ints | None = None,
) -> float:
    """Return the shortest time in which the workers together can do the work needed.

    That is the smallest ``T`` with
    ``sum_i min(rates_i * max(T - lags_i, 0), pieces_i * size) = need * size``.

    Parameters
    ----------
    rates : ndarray, shape (workers,)
        Units of work per second, at least zero.
    need : float
        How many times each unit has to be computed.
    size : float
        Units of work in a piece.
    lags : ndarray, shape (workers,), optional
        Seconds before each worker starts; by default zero.
    pieces : ndarray of int, shape (workers,), optional
        How many pieces each worker holds; by default one.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    InfeasibleError
        If workers whose rates are above zero hold fewer than ``need`` pieces.

    Examples
    --------
    >>> float(fluid_time(np.array([1.0, 1.0, 1.0, 1.0]), need=2, size=100))
    50.0
    >>> float(fluid_time(np.array([9.0, 1.0, 1.0]), need=2, size=100))
    50.0
    >>> float(fluid_time(np.array([1.0, 1.0]), need=1, size=100, lags=np.array([0.0, 60.0])))
    80.0
    """
    active = rates > 0
    held = np.ones(len(rates), dtype=int) if pieces is None else pieces
    if (usable := held[active].sum()) < need:
        raise InfeasibleError(
            f"Workers with rates above zero must hold at least {need:g} pieces, they hold {usable}."
        )
    rate = rates[active]
    begin = np.zeros(len(rate)) if lags is None else lags[active]
    # Work done over time is piecewise linear: steeper when a worker starts, flatter when it ends.
    times = np.concatenate([begin, begin + held[active] * size / rate])
    order = np.argsort(times, kind="stable")
    times = times[order]
    steps = np.diff(times)
    slope = np.cumsum(np.concatenate([rate, -rate])[order])[:-1]
    done = np.concatenate([[0.0], np.cumsum(slope * steps)])
    # Rounding must not make the work needed exceed the work available.
    wanted = min(need * size, float(done[-1]))
    i = int(np.searchsorted(done, wanted * (1 - 1e-12))) - 1
    return float(min(times[i] + (wanted - done[i]) / slope[i], times[-1]))


def all_tried(speeds: Floats) -> Floats:
    """Return speeds above zero for a round that has to try all workers.

    Such a round is needed if the workers that are expected to make progress do not suffice. Each
    worker then counts as at least a thousandth of the fastest.
    """
    return np.asarray(np.maximum(speeds, _LEAST_SPEED * speeds.max(initial=_LEAST_SPEED)))


def deal(layout: Layout, speeds: Floats, lags: Floats | None = None) -> list[list[StripeRange]]:
    """Return S2C2's first assignment: each stripe just often enough, all workers end together.

    Parameters
    ----------
    layout : Layout
    speeds : ndarray, shape (workers,)
        Predicted work per second, in any common unit. A worker with speed zero gets no stripes.
    lags : ndarray, shape (workers,), optional
        Time that each worker needs to start and to report, in the unit of time of the speeds. A
        worker that could not start before the others are done gets no stripes.

    Returns
    -------
    list of lists of StripeRange
        For each worker, the ranges of stripes to compute, in order.

    Raises
    ------
    InfeasibleError
        If too few pieces are on workers with a speed above zero.
    """
    shared = np.bincount(layout.host[layout.host >= 0], minlength=layout.workers).clip(1)
    slowest = _SLOWEST * speeds.max(initial=0.0)
    speeds = np.where(speeds > 0, np.maximum(speeds, slowest), 0.0)
    speed = np.where(layout.host >= 0, speeds[layout.host] / shared[layout.host], 0.0)
    lag = np.zeros(layout.pieces) if lags is None else lags[layout.host]
    moving = np.bincount(layout.group[speed > 0], minlength=len(layout.need))
    if (moving < layout.need).any():
        group = int(np.argmax(layout.need - moving))
        raise InfeasibleError(
            f"{layout.need[group]} pieces must be on workers with a speed above zero, "
            f"{moving[group]} are: wait for lost workers to come back, "
            f"or use a code with more redundancy."
        )
    if len(layout.need) == 1:
        loads = _ring(speed * layout.stripes / layout.work.sum(axis=1), lag, layout)
    else:
        loads = _slide(speed, lag, layout)
    if layout.code is not None:
        loads = _decodable(layout.code, loads, speed, lag, layout)
    ranges: list[list[StripeRange]] = [[] for _ in range(layout.workers)]
    for part in loads:
        assert speed[part.piece] > 0, f"{part} was dealt, which no worker can compute"
        ranges[layout.host[part.piece]].append(part)
    return ranges


def _ring(rates: Floats, lags: Floats, layout: Layout) -> list[StripeRange]:
    """Lay loads end to end, ``need`` times around a ring; ``rates`` are in stripes per second."""
    need, stripes = int(layout.need[0]), layout.stripes
    time = fluid_time(rates, need, stripes, lags)
    loads = np.minimum(rates * np.maximum(time - lags, 0.0), stripes)
    # Round to whole stripes by largest remainders: the laps stay whole, and no load becomes longer
    # than the ring.
    lengths = np.floor(loads + 1e-9).astype(np.intp)
    left = need * stripes - int(lengths.sum())
    lengths[np.argsort(lengths - loads, kind="stable")[:left]] += 1
    order = np.flatnonzero(lengths)
    if len(order) != 2 * need or stripes % 2:
        return _lay(order, lengths, 0, stripes)
    # Equal loads of half a ring would fall on only two windows, and workers with the same window
    # cannot take over from each other. In two rings, the second with every other pair of neighbours
    # swapped, most workers can. Odd loads are rounded up and down in turn in the first ring.
    odd = lengths & 1
    first = (lengths + (odd & np.cumsum(odd))) // 2
    turn = np.arange(len(order))
    return [
        *_lay(order, first, 0, stripes // 2),
        *_lay(order[turn ^ (turn >> 1 & 1)], lengths - first, stripes // 2, stripes),
    ]


def _decodable(
    code: Code, loads: list[StripeRange], speed: Floats, lags: Floats, layout: Layout
) -> list[StripeRange]:
    """Exchange pieces for each stripe that could not be decoded.

    Of the pieces that can be spared, the one expected to finish last is replaced with the useful
    piece expected to finish first. The number of pieces stays the same, so no work is wasted. A
    stripe stays as it is if the workers that make progress do not suffice, because the round then
    asks the others too.
    """
    dealt: Bools = np.zeros(layout.work.shape, dtype=bool)
    for part in loads:
        dealt[part.piece, part.start : part.stop] = True
    able = speed > 0
    pace = np.maximum(speed, 1e-300)
    load = (layout.work * dealt).sum(axis=1)
    for stripe in range(layout.stripes):
        have, cost = dealt[:, stripe].copy(), layout.work[:, stripe]
        found = code.span(have)
        while found.rank < code.k:
            adds = np.flatnonzero(found.adds & able & ~have)
            if not len(adds):
                break
            best = adds[np.argmin((load + cost)[adds] / pace[adds] + lags[adds])]
            more = have.copy()
            more[best] = True
            spare = np.flatnonzero(code.span(more).spare & have)
            if not len(spare):
                break
            worst = spare[np.argmax(load[spare] / pace[spare] + lags[spare])]
            more[worst] = False
            exchanged = code.span(more)
            if exchanged.rank <= found.rank:  # no piece adds more than rounding
                break
            load[best] += cost[best]
            load[worst] -= cost[worst]
            have, found = more, exchanged
        dealt[:, stripe] = have
    return [part for piece, mask in enumerate(dealt) for part in ranges_of(piece, mask)]


def _lay(order: Ints, lengths: Ints, first: int, last: int) -> list[StripeRange]:
    """Lay loads end to end around the ring of stripes ``first … last - 1``."""
    size = last - first
    ranges = []
    begin = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        end = begin + length
        if length:
            ranges.append(StripeRange(piece, first + begin, first + min(end, size)))
        if end > size:
            ranges.append(StripeRange(piece, first, first + end - size))
        begin = end % size
    return ranges


def _slide(speed: Floats, lags: Floats, layout: Layout) -> list[StripeRange]:
    """Give each place one interval within its blocks, so that the longest time is minimal.

    Place ``i`` may work on the arc from the start of block ``i`` to the end of its last block. For
    a given time ``T`` the best boundaries follow from one scan: each place goes as far as its speed
    and its arc allow, ``b[i+1] = min(b[i] + T u_i, end_i)``, which unrolls into a running minimum.
    """
    places = int(layout.place.max()) + 1
    copies = layout.pieces // places
    if not _is_cyclic(layout, places, copies):
        return _split_each_group(speed, lags, layout)
    piece_of = np.arange(layout.pieces).reshape(places, copies)
    # Lost pieces are rebuilt one by one on any worker with room. The pieces of a place may then be
    # on several workers, and the place has no single speed.
    home = layout.host[piece_of]
    if (home != home[:, :1]).any():
        return _split_each_group(speed, lags, layout)
    rates = speed[piece_of].sum(axis=1)
    lag = lags[piece_of[:, 0]]
    size = layout.before[piece_of[:, 0], -1]  # work in block i
    edges = np.concatenate([[0.0], np.cumsum(np.tile(size, 2))])  # the ring, laid out twice
    total = edges[places]
    start, end = edges[:places], edges[copies : copies + places]
    if total == 0:
        return _split_each_group(speed, lags, layout)

    def boundaries(time: float) -> Floats | None:
        # Without a limit, the sums of a fast place would swallow the differences between slow ones.
        work = np.minimum(rates * np.maximum(time - lag, 0.0), end - start)
        reach = np.concatenate([[0.0], np.cumsum(work)])
        if reach[-1] < total * (1 - 1e-12):
            return None
        limit = np.minimum.accumulate(end - reach[1:])
        origin = reach[-1] + limit[-1] - total  # the latest start from which one lap closes
        steps = np.minimum(origin, np.concatenate([[np.inf], limit])) + reach
        return steps if (steps[:-1] >= start - total * 1e-12).all() else None

    low = high = total / rates.sum()
    while (best := boundaries(high)) is None:  # ends: a holder of each block makes progress
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        if (found := boundaries(middle)) is None:
            low = middle
        else:
            high, best = middle, found
        if high - low <= 1e-6 * high:
            break
    return _cut(best, piece_of, edges, layout)


def _is_cyclic(layout: Layout, places: int, copies: int) -> bool:
    """Whether pieces are ordered by place, and by block around the ring (codes.Repetition)."""
    if places * copies != layout.pieces or not copies <= places == len(layout.need):
        return False
    place, copy = np.divmod(np.arange(layout.pieces), copies)
    cyclic = (layout.place == place) & (layout.group == (place + copy) % places)
    return bool(cyclic.all() and (layout.need == 1).all())


def _cut(bounds: Floats, piece_of: Ints, edges: Floats, layout: Layout) -> list[StripeRange]:
    """Round boundaries on the ring, in units of work, to whole stripes of pieces."""
    places, copies = piece_of.shape
    stripes = layout.stripes
    # Each boundary as a stripe number counted along the doubled ring.
    block = np.clip(np.searchsorted(edges, bounds, side="right") - 1, 0, 2 * places - 1)
    within = bounds - edges[block]
    before = layout.before[piece_of[block % places, 0]]  # one row for each boundary
    above = np.clip((before < within[:, None]).sum(axis=1), 1, stripes)
    rows = np.arange(len(above))
    down = within - before[rows, above - 1] < before[rows, above] - within
    marks = block * stripes + above - down
    marks[-1] = marks[0] + places * stripes
    marks = np.maximum.accumulate(marks)
    offset = (np.arange(places)[:, None] + np.arange(copies)) * stripes
    first = np.maximum(marks[:-1, None] - offset, 0)
    last = np.minimum(marks[1:, None] - offset, stripes)
    dealt = first < last
    return [
        StripeRange(*part)
        for part in zip(
            piece_of[dealt].tolist(), first[dealt].tolist(), last[dealt].tolist(), strict=True
        )
    ]


def _split_each_group(speed: Floats, lags: Floats, layout: Layout) -> list[StripeRange]:
    """Deal any other code group by group, with a worker's speed split over its pieces."""
    ranges = []
    for g, need in enumerate(layout.need.tolist()):
        members = np.flatnonzero(layout.group == g)
        alone = Layout(
            host=layout.host[members],
            work=layout.work[members],
            group=np.zeros(len(members), dtype=np.intp),
            place=np.arange(len(members)),
            need=np.array([need]),
            workers=layout.workers,
        )
        rates = speed[members] * layout.stripes / np.maximum(alone.work.sum(axis=1), 1e-300)
        ranges += [
            part._replace(piece=int(members[part.piece]))
            for part in _ring(rates, lags[members], alone)
        ]
    return ranges
