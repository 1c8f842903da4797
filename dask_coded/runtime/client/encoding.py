"""Encoding: from an array, wherever it is, to pieces on distinct workers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import dask
import numpy as np
import scipy.sparse
from dask.typing import Key
from distributed import span
from distributed.protocol.serialize import ToPickle

from dask_coded._version import __version__
from dask_coded.codes import Code, Polynomial
from dask_coded.compat import count_workers
from dask_coded.rounds import PRODUCT_ROWS, Geometry
from dask_coded.runtime.answers import Extended, Lost, Placed, Stored, Unfit, ask
from dask_coded.runtime.client.blocks import Blocks, chunks_ahead
from dask_coded.runtime.client.install import ClusterUnfitError, install
from dask_coded.runtime.client.source import (
    PieceCount,
    block_rows,
    settled,
    sparse_type,
    stripes_of,
)
from dask_coded.runtime.client.waiting import current_client
from dask_coded.runtime.spec import (
    NAME,
    ArraySpec,
    CodedDataLostError,
    CodedSpec,
    PairSpec,
    PieceTask,
)
from dask_coded.runtime.worker.checks import make_check
from dask_coded.runtime.worker.pieces import make_piece
from dask_coded.storage import Location, Storage

if TYPE_CHECKING:
    from distributed import Client, Future


# The annotation of the span that all arrays of a client are in.
_spans: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@contextmanager
def in_one_span(client: Client) -> Iterator[None]:
    """Submit graphs within the span that all arrays of a client share, or the caller's.

    The scheduler makes another span for each graph that has none, and keeps all of them, and each
    worker keeps what it measures of each. Their memory would grow with every array.
    """
    if "span" in dask.get_annotations():
        yield
        return
    if client not in _spans:
        with span(NAME):
            _spans[client] = dask.get_annotations()["span"]
    with dask.annotate(span=_spans[client]):
        yield


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded array as its owner holds it: the pieces live as long as this object.

    Attributes
    ----------
    spec : CodedSpec
    futures : tuple of Future
        One per piece.
    workers : tuple of str
        Where each piece was made.
    nbytes : int
        Bytes of all pieces together.
    bytes_moved : int
        Bytes that workers have fetched from each other to make the pieces, including the new ones
        of :func:`extend`, but not the bytes moved before to cut the source into row blocks.
    checks : tuple of Future
        The checks of all blocks, if shares are verified.
    storage : Storage or None
        Where pieces are kept in files, if they are.
    """

    spec: Any
    futures: tuple[Future, ...]
    workers: tuple[str, ...]
    nbytes: int
    bytes_moved: int
    checks: tuple[Future, ...] = ()
    storage: Storage | None = None

    @property
    def client(self) -> Client:
        """The client that holds the pieces; in a task that got the array, the worker's."""
        return current_client(self.futures[0].client)

    def release(self, since: Encoded | None = None) -> None:
        """Release the pieces at once, because an error's traceback would keep them.

        With ``since``, the array before it was extended, only the new pieces are released.
        """
        kept = set() if since is None else {*since.futures, *since.checks}
        for future in {*self.futures, *self.checks} - kept:
            future.release()


async def encode_source(
    client: Client,
    source: Any,
    code: Code,
    *,
    oversubscribe: bool,
    check_finite: bool,
    verify: bool,
    workers: Sequence[str] | None = None,
    array_id: str = "",
    transposed: str | None = None,
    tally: PieceCount | None = None,
    location: Location | None = None,
    group: str = "matrix",
) -> Encoded:
    """Make the pieces of one array, and write them to a group of a store if there is a location.

    Raises
    ------
    ClusterUnfitError
        If there are too few workers, or the package is missing or of another version on some.
    """
    rows = block_rows(source, code)
    work = source.nnz if scipy.sparse.issparse(source) else source.shape[0] * source.shape[1]
    # Pieces may be as long as their blocks if those that replace each other are of one block.
    apart = code.exact and np.array_equal(code.group, code.block_of)
    geometry = Geometry(rows, stripes_of(rows, work / code.k), mixed=not apart)
    array_id = array_id or new_id()
    spec = ArraySpec(
        id=array_id,
        code=code,
        geometry=geometry,
        columns=source.shape[1],
        dtype=np.dtype(source.dtype),
        sparse=sparse_type(source),
        keys=piece_keys(array_id, code),
        transposed=transposed,
        check_finite=check_finite,
        check_keys=tuple((f"{array_id}-check", j) for j in range(code.k)) if verify else (),
    )
    # In a thread, because the graph of a dask array may have many thousand chunks.
    blocks = await asyncio.to_thread(Blocks, source, rows, await chunks_ahead(client, len(rows)))
    storage = None if location is None else Storage(location, group, array_id, code.pieces)
    return await _encode(client, spec, [blocks], oversubscribe, workers, tally, storage)


async def encode_factors(
    client: Client,
    A: Any,
    B: Any,
    code: Polynomial,
    *,
    oversubscribe: bool,
    check_finite: bool,
    workers: Sequence[str] | None = None,
    tally: PieceCount | None = None,
) -> Encoded:
    """Make the pieces of a pair of matrices, dense and of equally many rows.

    Raises
    ------
    ClusterUnfitError
        If there are too few workers, or the package is missing or of another version on some.
    """
    left_rows, right_rows = block_rows(A.T, code.left), block_rows(B.T, code.right)
    rows = tuple(height for height in left_rows for _ in right_rows)
    work = max(left_rows) * A.shape[0] * max(right_rows)
    array_id = new_id()
    ahead = await chunks_ahead(client, len(left_rows))
    blocks = [await asyncio.to_thread(Blocks, A.T, left_rows, ahead)]
    # If both factors are one matrix, cut alike, they are one source.
    if B is not A or left_rows != right_rows:
        blocks.append(await asyncio.to_thread(Blocks, B.T, right_rows, ahead))
    spec = PairSpec(
        id=array_id,
        code=code,
        geometry=Geometry(rows, stripes_of(rows, work, PRODUCT_ROWS), mixed=True),
        columns=A.shape[0],
        dtype=np.result_type(A.dtype, B.dtype),
        keys=tuple((array_id, i) for i in range(code.pieces)),
        check_finite=check_finite,
        right_rows=right_rows,
        right_source=code.a if len(blocks) == 2 else 0,
    )
    return await _encode(client, spec, blocks, oversubscribe, workers, tally)


async def _encode(
    client: Client,
    spec: CodedSpec,
    sources: Sequence[Blocks],
    oversubscribe: bool,
    workers: Sequence[str] | None,
    tally: PieceCount | None,
    storage: Storage | None = None,
) -> Encoded:
    """Bring source blocks into the cluster, make the pieces from them, and release the blocks."""
    await install(client)
    scheduler: Any = client.scheduler
    futures: list[Future] = []
    checks: list[Future] = []

    async def count(piece: Future) -> None:
        if tally is not None:
            tally.add(*await _sizes(scheduler, spec, [spec.keys.index(piece.key)]))

    try:
        answer = await ask(
            scheduler.coded_register,
            spec=ToPickle(spec),
            sources=[key for blocks in sources for key in blocks.keys],
            steps=[keys for blocks in sources for keys in blocks.steps],
            allowed=None if workers is None else list(workers),
            version=__version__,
            oversubscribe=oversubscribe,
            client=client.id,
            storage=ToPickle(storage),
        )
        match answer:
            case Unfit(message):
                raise ClusterUnfitError(message)
            case Placed(workers=placed):
                pass
        homes = iter(spec.homes)
        with in_one_span(client):
            held = [
                await blocks.load(client, [placed[next(homes)] for _ in blocks.keys])
                for blocks in sources
            ]
        tasks = {key: PieceTask(key, make_piece, spec.id, i) for i, key in enumerate(spec.keys)}
        with in_one_span(client):
            futures += client.get(tasks, list(spec.keys), sync=False)
        await settled(client, futures, count if tally is not None else None)
        received = await scheduler.coded_sealed(array=spec.id)
        if storage is not None:
            match await ask(scheduler.coded_stored, array=spec.id):
                case Lost(message):
                    raise CodedDataLostError(message)
                case Stored(sealed):
                    spec = sealed  # it has the exponents and footprints, which are stored as well
        if spec.check_keys:
            makers = {
                k: PieceTask(k, make_check, spec.id, j) for j, k in enumerate(spec.check_keys)
            }
            with in_one_span(client):
                checks += client.get(makers, list(spec.check_keys), sync=False)
            await settled(client, checks)
    except BaseException:
        # The client keeps the error's traceback, and with it these futures: release them here.
        for future in (
            *futures,
            *checks,
            *(future for blocks in sources for future in blocks.futures),
        ):
            future.release()
        # Without a client the scheduler forgets the array by itself.
        if client.status == "running":
            await scheduler.coded_abandon(array=spec.id)
        raise
    for blocks in sources:
        blocks.futures.clear()
    del held
    sizes = await _sizes(scheduler, spec, range(len(spec.keys)))
    await count_workers(client)
    return Encoded(
        spec, tuple(futures), tuple(placed), sum(sizes), received, tuple(checks), storage
    )


async def _sizes(scheduler: Any, spec: CodedSpec, pieces: Iterable[int]) -> list[int]:
    """Return the bytes of pieces. Dask does not know those of pieces in files."""
    if spec.sparse_type:
        keys = [spec.keys[piece] for piece in pieces]
        return list((await scheduler.nbytes(keys=keys, summary=False)).values())
    row = spec.columns * spec.dtype.itemsize
    return [spec.piece_rows(piece) * row for piece in pieces]


async def extend(encoded: Encoded, workers: Sequence[str] | None) -> Encoded:
    """Have workers that hold no piece make new ones for themselves, from the existing pieces.

    Raises
    ------
    ClusterUnfitError
        If there is no such worker.
    CodedDataLostError
        If the pieces that are left do not suffice.
    """
    client = encoded.client
    scheduler: Any = client.scheduler
    allowed = None if workers is None else list(workers)
    match await ask(scheduler.coded_extend, array=encoded.spec.id, allowed=allowed):
        case Lost(message):
            raise CodedDataLostError(message)
        case Unfit(message):
            raise ClusterUnfitError(message)
        case Extended(spec, pieces, added):
            pass
    keys = [spec.keys[i] for i in pieces]
    tasks = {spec.keys[i]: PieceTask(spec.keys[i], make_piece, spec.id, i) for i in pieces}
    with in_one_span(client):
        futures: list[Future] = client.get(tasks, keys, sync=False)
    try:
        await settled(client, futures)
    except BaseException:
        for future in futures:
            future.release()
        raise
    sizes = await _sizes(scheduler, spec, pieces)
    return replace(
        encoded,
        spec=spec,
        futures=(*encoded.futures, *futures),
        workers=(*encoded.workers, *added),
        nbytes=encoded.nbytes + sum(sizes),
        bytes_moved=await scheduler.coded_sealed(array=spec.id),
    )


def piece_keys(array_id: str, code: Code) -> tuple[Key, ...]:
    """Return the Dask keys of the pieces of an array; those of its blocks are a dask array's."""
    systematic = {piece: j for j, piece in enumerate(code.systematic_pieces)}
    return tuple(
        (array_id, systematic[i], 0) if i in systematic else (f"{array_id}-extra", i)
        for i in range(code.pieces)
    )


def new_id() -> str:
    """Return a unique name for a coded array."""
    return f"coded-{uuid.uuid4().hex[:16]}"
