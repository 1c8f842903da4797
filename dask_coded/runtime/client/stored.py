"""Coded arrays in stores: describing an array that was encoded, and opening one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
from distributed.protocol.serialize import ToPickle

from dask_coded._version import __version__
from dask_coded.codes import Code
from dask_coded.labels import Labels
from dask_coded.rounds import Geometry
from dask_coded.rounds.footprint import Footprints
from dask_coded.runtime.answers import Placed, Unfit, ask
from dask_coded.runtime.client.encoding import Encoded, in_one_span, piece_keys
from dask_coded.runtime.client.install import ClusterUnfitError, install
from dask_coded.runtime.spec import ArraySpec, PieceTask
from dask_coded.runtime.worker.checks import make_check
from dask_coded.runtime.worker.pieces import make_piece
from dask_coded.storage import (
    ArrayDescription,
    Description,
    Location,
    Storage,
    StoreError,
    check_dtype,
    check_storable,
    marked,
    write_description,
)

if TYPE_CHECKING:
    from distributed import Client, Future


def check_kept(code: Code, dtype: np.dtype[Any], labels: Labels) -> None:
    """Check that a matrix with its code and its labels can be kept in a store.

    Raises
    ------
    TypeError
        If it cannot.
    """
    check_storable(code)
    check_dtype(dtype)
    if any(axis.index is not None or not axis.known for axis in labels):
        raise TypeError(
            "A store cannot hold the labels of rows and columns: pass the matrix without them, as "
            "`A.data` or `A.to_numpy()`."
        )
    if any(not isinstance(axis.name, str | None) for axis in labels):
        raise TypeError(
            f"A store holds names of dimensions that are strings, these are "
            f"{[axis.name for axis in labels]}: rename them."
        )


def complete(location: Location, encoded: Mapping[str, Encoded], names: tuple[Any, Any]) -> None:
    """Write the description of an array whose pieces are all in a store.

    Raises
    ------
    StoreError
        If this process does not see the pieces that workers have written.
    """
    for group, each in encoded.items():
        assert each.storage is not None
        lacking = [i for i in range(each.storage.pieces) if not marked(each.storage, i)]
        if lacking:
            raise StoreError(
                f"Workers have written pieces {lacking} of the {group} to {location}, but this "
                "process does not see them: pass a place that is the same for all of them."
            )
    arrays = {group: _described(each) for group, each in encoded.items()}
    code = next(iter(encoded.values())).spec.code
    write_description(location, Description(code, arrays, names))


def _described(encoded: Encoded) -> ArrayDescription:
    spec = encoded.spec
    return ArrayDescription(
        token=spec.id,
        rows=spec.geometry.rows,
        stripes=spec.geometry.stripes,
        mixed=spec.geometry.mixed,
        columns=spec.columns,
        dtype=spec.dtype.newbyteorder("=").name,
        sparse=spec.sparse and spec.sparse.__name__,
        check_finite=spec.check_finite,
        verify=bool(spec.check_keys),
        nbytes=encoded.nbytes,
        exponents=spec.exponents or (),
        typical=spec.typical,
        sizes=spec.sizes,
        footprints=spec.footprints.packed if spec.footprints else (),
    )


def _spec(found: ArrayDescription, code: Code, array_id: str, transposed: str | None) -> ArraySpec:
    return ArraySpec(
        id=array_id,
        code=code,
        geometry=Geometry(found.rows, found.stripes, found.mixed),
        columns=found.columns,
        dtype=np.dtype(found.dtype),
        keys=piece_keys(array_id, code),
        check_finite=found.check_finite,
        exponents=found.exponents or None,
        typical=found.typical,
        sizes=found.sizes,
        check_keys=tuple((f"{array_id}-check", j) for j in range(code.k)) if found.verify else (),
        footprints=Footprints(found.footprints) if found.footprints else None,
        sparse=getattr(scipy.sparse, found.sparse) if found.sparse else None,
        transposed=transposed,
    )


async def open_stored(
    client: Client,
    found: ArrayDescription,
    code: Code,
    storage: Storage,
    array_id: str,
    transposed: str | None,
    workers: Sequence[str] | None,
) -> Encoded:
    """Have workers read the pieces of an array, and return it at once.

    Raises
    ------
    ClusterUnfitError
        If there are no workers, or the package is missing or of another version on some.
    """
    await install(client)
    scheduler: Any = client.scheduler
    spec = _spec(found, code, array_id, transposed)
    futures: list[Future] = []
    checks: list[Future] = []
    try:
        match await ask(
            scheduler.coded_register,
            spec=ToPickle(spec),
            sources=None,
            steps=[],
            allowed=None if workers is None else list(workers),
            version=__version__,
            oversubscribe=True,
            client=client.id,
            storage=ToPickle(storage),
        ):
            case Unfit(message):
                raise ClusterUnfitError(message)
            case Placed(workers=placed):
                pass
        tasks = {key: PieceTask(key, make_piece, array_id, i) for i, key in enumerate(spec.keys)}
        makers = {k: PieceTask(k, make_check, array_id, j) for j, k in enumerate(spec.check_keys)}
        with in_one_span(client):
            futures += client.get(tasks, list(spec.keys), sync=False)
            if makers:
                checks += client.get(makers, list(spec.check_keys), sync=False)
    except BaseException:
        # The client keeps the error's traceback, and with it these futures: release them here.
        for future in (*futures, *checks):
            future.release()
        if client.status == "running":
            await scheduler.coded_abandon(array=array_id)
        raise
    return Encoded(spec, tuple(futures), placed, found.nbytes, 0, tuple(checks), storage)
