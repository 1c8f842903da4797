"""Encoding: from an array, wherever it is, to pieces on distinct workers."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import scipy.sparse
from distributed import futures_of, wait
from distributed.protocol.serialize import ToPickle

from dask_coded._version import __version__
from dask_coded.codes import Code, Polynomial
from dask_coded.rounds import Geometry
from dask_coded.runtime.install import ClusterUnfitError, install
from dask_coded.runtime.pieces import make_piece
from dask_coded.runtime.spec import ArraySpec, CodedDataLostError, PairSpec, PieceTask

if TYPE_CHECKING:
    from distributed import Client, Future


# A product of matrices reads the whole right factor once per stripe: with fewer rows than this,
# BLAS would wait for memory.
_PRODUCT_ROWS = 64


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded array as its owner holds it: as long as this lives, so do the pieces.

    Attributes
    ----------
    spec : ArraySpec
    futures : tuple of Future
        One per piece.
    workers : tuple of str
        Where each piece was made.
    nbytes : int
        Bytes of all pieces together.
    bytes_moved : int
        Bytes that workers have fetched from each other to make the pieces, the new ones of
        :func:`extend` included. What it took beforehand to have the source in row blocks is not.
    transposed : Encoded or None
    """

    spec: ArraySpec
    futures: tuple[Future, ...]
    workers: tuple[str, ...]
    nbytes: int
    bytes_moved: int
    transposed: Encoded | None = field(default=None, repr=False)


async def encode_source(
    client: Client,
    source: Any,
    code: Code,
    *,
    oversubscribe: bool,
    check_finite: bool,
    workers: Sequence[str] | None = None,
    array_id: str = "",
    transposed: str | None = None,
) -> Encoded:
    """Make the pieces of one array.

    Raises
    ------
    ClusterUnfitError
        If there are too few workers, or packages or versions are lacking.
    """
    rows = block_rows(source, code)
    work = source.nnz if scipy.sparse.issparse(source) else source.shape[0] * source.shape[1]
    geometry = Geometry(rows, _stripes(rows, work / code.k), mixed=not code.exact)
    array_id = array_id or new_id()
    systematic = {piece: j for j, piece in enumerate(code.systematic_pieces)}
    spec = ArraySpec(
        id=array_id,
        code=code,
        geometry=geometry,
        columns=source.shape[1],
        dtype=np.dtype(source.dtype),
        sparse=sparse_type(source),
        keys=tuple(
            (array_id, systematic[i], 0) if i in systematic else (f"{array_id}-extra", i)
            for i in range(code.pieces)
        ),
        transposed=transposed,
        check_finite=check_finite,
    )
    return await _encode(client, spec, [_Blocks(source, rows)], oversubscribe, workers)


async def encode_factors(
    client: Client,
    A: Any,
    B: Any,
    code: Polynomial,
    *,
    oversubscribe: bool,
    check_finite: bool,
    workers: Sequence[str] | None = None,
) -> Encoded:
    """Make the pieces of a pair of matrices, dense and of equally many rows.

    Raises
    ------
    ClusterUnfitError
        If there are too few workers, or packages or versions are lacking.
    """
    left_rows, right_rows = block_rows(A.T, code.left), block_rows(B.T, code.right)
    rows = tuple(height for height in left_rows for _ in right_rows)
    work = max(left_rows) * A.shape[0] * max(right_rows)
    array_id = new_id()
    blocks = [_Blocks(A.T, left_rows)]
    # A matrix with itself, cut alike, is one source.
    if B is not A or left_rows != right_rows:
        blocks.append(_Blocks(B.T, right_rows))
    spec = PairSpec(
        id=array_id,
        code=code,
        geometry=Geometry(rows, _stripes(rows, work, _PRODUCT_ROWS), mixed=True),
        columns=A.shape[0],
        dtype=np.result_type(A.dtype, B.dtype),
        sparse=None,
        keys=tuple((array_id, i) for i in range(code.pieces)),
        check_finite=check_finite,
        right_rows=right_rows,
        right_source=code.a if len(blocks) == 2 else 0,
    )
    return await _encode(client, spec, blocks, oversubscribe, workers)


async def _encode(
    client: Client,
    spec: ArraySpec,
    sources: Sequence[_Blocks],
    oversubscribe: bool,
    workers: Sequence[str] | None,
) -> Encoded:
    """Bring source blocks into the cluster, have the pieces made of them, and let them go."""
    await install(client)
    scheduler: Any = client.scheduler
    answer = await scheduler.coded_register(
        spec=ToPickle(spec),
        sources=[key for blocks in sources for key in blocks.keys],
        allowed=None if workers is None else list(workers),
        version=__version__,
        oversubscribe=oversubscribe,
    )
    if answer["status"] != "OK":
        raise ClusterUnfitError(answer["message"])
    placed = answer["workers"]
    futures: list[Future] = []
    try:
        homes = iter(spec.homes)
        held = [
            await blocks.load(client, [placed[next(homes)] for _ in blocks.keys])
            for blocks in sources
        ]
        tasks = {key: PieceTask(key, make_piece, spec.id, i) for i, key in enumerate(spec.keys)}
        futures += client.get(tasks, list(spec.keys), sync=False)
        await _settled(client, futures)
    except BaseException:
        # The error's traceback, which the client keeps, would keep everything in the cluster.
        for future in (*futures, *(future for blocks in sources for future in blocks.futures)):
            future.release()
        await scheduler.coded_abandon(array=spec.id)
        raise
    received = await scheduler.coded_sealed(array=spec.id)
    for blocks in sources:
        blocks.futures.clear()
    del held
    sizes = await scheduler.nbytes(keys=list(spec.keys), summary=False)
    return Encoded(spec, tuple(futures), tuple(placed), sum(sizes.values()), received)


async def extend(encoded: Encoded, workers: Sequence[str] | None) -> Encoded:
    """Have workers that hold none make themselves new pieces, out of those that there are.

    Raises
    ------
    ClusterUnfitError
        If there is no such worker.
    CodedDataLostError
        If the pieces that are left do not suffice.
    """
    client = encoded.futures[0].client
    scheduler: Any = client.scheduler
    answer = await scheduler.coded_extend(
        array=encoded.spec.id, allowed=None if workers is None else list(workers)
    )
    if answer["status"] == "lost":
        raise CodedDataLostError(answer["message"])
    if answer["status"] != "OK":
        raise ClusterUnfitError(answer["message"])
    spec, added = answer["spec"], answer["workers"]
    pieces = range(len(spec.keys) - len(added), len(spec.keys))
    keys = [spec.keys[i] for i in pieces]
    tasks = {spec.keys[i]: PieceTask(spec.keys[i], make_piece, spec.id, i) for i in pieces}
    futures: list[Future] = client.get(tasks, keys, sync=False)
    try:
        await _settled(client, futures)
    except BaseException:
        for future in futures:
            future.release()
        raise
    sizes = await scheduler.nbytes(keys=keys, summary=False)
    return replace(
        encoded,
        spec=spec,
        futures=(*encoded.futures, *futures),
        workers=(*encoded.workers, *added),
        nbytes=encoded.nbytes + sum(sizes.values()),
        bytes_moved=await scheduler.coded_sealed(array=spec.id),
    )


def new_id() -> str:
    """A name for a coded array that nobody else has."""
    return f"coded-{uuid.uuid4().hex[:16]}"


async def _settled(client: Client, futures: Sequence[Future]) -> None:
    """Wait for all; the first error is raised."""
    with client.as_current():
        await wait(list(futures))
    for future in futures:
        if future.status != "finished":
            await future


class _Blocks:
    """A source as row blocks in the cluster's memory."""

    def __init__(self, source: Any, rows: tuple[int, ...]) -> None:
        self._rows = rows
        self.futures: list[Future] = []
        if isinstance(source, da.Array):
            source = source.rechunk((rows, (source.shape[1],)))
            self.keys = [(source.name, j, 0) for j in range(len(rows))]
        else:
            name = f"coded-source-{uuid.uuid4().hex[:16]}"
            self.keys = [(name, j, 0) for j in range(len(rows))]
        self._source = source

    async def load(self, client: Client, workers: Sequence[str]) -> Any:
        """Bring each block to a worker; keep what is returned."""
        if isinstance(self._source, da.Array):
            persisted = client.persist(self._source)
            self.futures += futures_of(persisted, client=client)
            await _settled(client, self.futures)
            return persisted
        ends = np.cumsum(self._rows)
        for key, end, size, worker in zip(self.keys, ends, self._rows, workers, strict=True):
            block = self._source[end - size : end]
            scattered = await client.scatter({key: block}, workers=[worker], hash=False)
            self.futures.append(scattered[key])
        return self.futures


def sparse_type(source: Any) -> type | None:
    """The CSR type that suits an array, or a dask array by its chunks; None if it is dense."""
    meta = getattr(source, "_meta", source)
    if isinstance(meta, scipy.sparse.sparray):
        return scipy.sparse.csr_array
    return scipy.sparse.csr_matrix if scipy.sparse.issparse(meta) else None


def block_rows(source: Any, code: Code) -> tuple[int, ...]:
    """Rows of each of the k blocks.

    Equal up to one row. Where blocks are not mixed, those of a SciPy sparse matrix hold equal
    numbers of non-zeros instead.
    """
    rows, k = source.shape[0], code.k
    if code.exact and scipy.sparse.issparse(source) and source.nnz:
        # A row costs its non-zeros, plus one for writing its result.
        cost = np.cumsum(np.diff(source.indptr) + 1)
        cuts = np.searchsorted(cost, cost[-1] * np.arange(1, k) / k, side="right")
    else:
        cuts = np.arange(1, k) * rows // k
    return tuple(np.diff(np.concatenate([[0], cuts, [rows]])).tolist())


def _stripes(rows: tuple[int, ...], work: float, least: int = 1) -> int:
    """How many stripes, of at least so many rows, a piece of so many multiply-adds is cut into."""
    limits = dask.config.get("coded.round")
    wanted = min(limits["stripes"], int(work / limits["stripe-work"]), max(rows) // least)
    return max(wanted, 1)
