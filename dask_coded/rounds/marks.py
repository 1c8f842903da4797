"""Which stripes of which pieces have a mark: asked by piece, or by stripe.

Questions about one piece come with each message, and Python's integers answer them faster than
NumPy. Questions about one stripe go to all pieces at once. One matrix of booleans for both would
spread the stripes of a piece over as many pages of memory: at 10,000 workers a message then takes
three times as long as at 1,000.
"""

from __future__ import annotations

import numpy as np

from dask_coded.rounds.layout import StripeRange
from dask_coded.typing import Bools, Words

_WORD = (1 << 64) - 1


def bits_of(part: StripeRange) -> int:
    """Return the stripes of a range as bits of an integer, the first stripe as the lowest bit.

    Examples
    --------
    >>> bits_of(StripeRange(0, 1, 3))
    6
    """
    return (1 << part.stop) - (1 << part.start)


def ranges_of_bits(piece: int, bits: int) -> list[StripeRange]:
    """Return the ranges of stripes that are set in ``bits``, in ascending order.

    Examples
    --------
    >>> ranges_of_bits(5, 0b110010)
    [StripeRange(piece=5, start=1, stop=2), StripeRange(piece=5, start=4, stop=6)]
    """
    ranges = []
    while bits:
        start = (bits & -bits).bit_length() - 1
        # Adding the lowest bit clears its run, and sets the bit after it.
        carried = bits + (1 << start)
        stop = (carried & ~bits).bit_length() - 1
        ranges.append(StripeRange(piece, start, stop))
        bits &= carried
    return ranges


def words_of(bits: int, words: int) -> Words:
    """Return bits of an integer as 64-bit words, the lowest bits first.

    Examples
    --------
    >>> words_of(11 + (5 << 64), 2)
    array([11,  5], dtype=uint64)
    """
    return np.array([bits >> 64 * word & _WORD for word in range(words)], dtype=np.uint64)


class Marks:
    """Marks of stripes, none at first.

    Parameters
    ----------
    pieces, stripes : int

    Attributes
    ----------
    of : list of int
        The marked stripes of each piece, as bits. Change them with :meth:`set`.
    words : ndarray of uint64, shape (words, pieces)
        The same, 64 stripes in a word.

    Examples
    --------
    >>> marks = Marks(2, 3)
    >>> marks.set(1, bits_of(StripeRange(1, 0, 2)))
    >>> marks.of, marks.at(0), marks.array().astype(int).tolist()
    ([0, 3], array([False,  True]), [[0, 0, 0], [1, 1, 0]])
    """

    def __init__(self, pieces: int, stripes: int) -> None:
        self.of = [0] * pieces
        self.words: Words = np.zeros((-(-stripes // 64), pieces), dtype=np.uint64)
        self._stripes = stripes

    def set(self, piece: int, bits: int) -> None:
        """Mark exactly these stripes of a piece."""
        if bits != self.of[piece]:
            self.of[piece] = bits
            for word in range(len(self.words)):
                self.words[word, piece] = bits >> 64 * word & _WORD

    def at(self, stripe: int) -> Bools:
        """Return which pieces have a mark at a stripe, shape (pieces,)."""
        word, bit = divmod(stripe, 64)
        return np.asarray(self.words[word] & np.uint64(1 << bit), dtype=bool)

    def array(self, stripes: slice | list[int] = slice(None)) -> Bools:
        """Return the marks of some stripes, shape (pieces, stripes).

        The pieces of a stripe lie next to each other in memory, because most searches are for them.
        """
        word, bit = divmod(np.arange(self._stripes)[stripes], 64)
        found = self.words[word] >> bit.astype(np.uint64)[:, None] & np.uint64(1)
        return found.astype(bool).T
