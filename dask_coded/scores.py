"""Files of a score per node, in the format that the ending of their name says.

================  =================================================================
ending            what is written, highest score first
================  =================================================================
``.csv``, none    lines ``node,score`` below a header
``.tsv, .txt``    the same, separated by tabs
``.json``         a list of objects ``{"node": …, "score": …}``
``.parquet``      a table of these two columns; needs ``pyarrow``
================  =================================================================

Text is in UTF-8. ``.gz`` after the ending, or alone, packs the file by gzip.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import numpy as np

#: Nodes with their scores.
Ranking = Sequence[tuple[Any, float]]


def writer_for(path: Path, form: str | None = None) -> Callable[[Ranking, IO[bytes]], None]:
    """Return the function that writes a ranking to a file of this name.

    Parameters
    ----------
    path : Path
    form : str, optional
        One of `FORMATS`, whatever the name's ending.

    Returns
    -------
    callable
        Takes the ranking and a file that is open for bytes.

    Raises
    ------
    ValueError
        If no format has this ending.
    ImportError
        If the format needs a package that is not installed.

    Examples
    --------
    >>> import io
    >>> file = io.BytesIO()
    >>> writer_for(Path("ranks.csv"))([("ada", 0.75), ("cy", 0.25)], file)
    >>> print(file.getvalue().decode())
    node,score
    ada,0.75
    cy,0.25
    <BLANKLINE>
    """
    packed = path.suffix.lower() == ".gz"
    name = path.with_suffix("") if packed else path
    ending = f".{form}" if form else name.suffix.lower()
    if ending not in _WRITERS:
        *others, last = filter(None, _WRITERS)
        raise ValueError(
            f"expected a name that ends in {', '.join(others)} or {last}, not in {name.suffix!r}."
        )
    if ending == ".parquet":
        import pyarrow.parquet  # noqa: F401  fails before the scores are computed
    write = _WRITERS[ending]
    return partial(_write_packed, write=write) if packed else write


def _write_packed(
    ranking: Ranking, file: IO[bytes], write: Callable[[Ranking, IO[bytes]], None]
) -> None:
    with gzip.open(file, "wb") as packed:
        write(ranking, packed)  # type: ignore[arg-type]


def _write_lines(ranking: Ranking, file: IO[bytes], separator: str) -> None:
    # Whatever the names are, scores that took long to compute must not be lost.
    text = TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    writer.writerow(["node", "score"])
    writer.writerows(ranking)
    text.detach()


def _write_json(ranking: Ranking, file: IO[bytes]) -> None:
    file.write(json.dumps([{"node": node, "score": score} for node, score in ranking]).encode())
    file.write(b"\n")


def _write_parquet(ranking: Ranking, file: IO[bytes]) -> None:
    import pyarrow
    import pyarrow.parquet

    nodes, scores = zip(*ranking)
    large = isinstance(nodes[0], int) and max(nodes) > np.iinfo(np.int64).max
    columns = pyarrow.array(nodes, pyarrow.uint64() if large else None), pyarrow.array(scores)
    pyarrow.parquet.write_table(pyarrow.table(columns, ["node", "score"]), file)


_WRITERS: dict[str, Callable[[Ranking, IO[bytes]], None]] = {
    "": partial(_write_lines, separator=","),
    ".csv": partial(_write_lines, separator=","),
    ".tsv": partial(_write_lines, separator="\t"),
    ".txt": partial(_write_lines, separator="\t"),
    ".json": _write_json,
    ".parquet": _write_parquet,
}
#: The formats by name.
FORMATS = tuple(ending[1:] for ending in _WRITERS if ending)
