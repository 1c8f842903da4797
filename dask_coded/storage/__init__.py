"""Coded arrays in files: a documented format on Zarr v3, which outlives clusters.

A store holds a coded array as follows. Each piece is an array or, if sparse, a group of three
arrays, ``data``, ``indices`` and ``indptr``, as in SciPy's CSR format. Chunks are some rows of a
piece and end with their CRC-32C. ::

    zarr.json                   names the encoding; written last, the description of the array
    matrix-TOKEN/piece-0 …      the pieces of A
    matrix-TOKEN/exponents      powers of two by which rows were scaled before they were combined
    matrix-TOKEN/typical        those of their typical entries
    matrix-TOKEN/sizes          how large the entries of each column are, once rows are scaled
    matrix-TOKEN/footprints     the columns that blocks of a sparse array touch
    transposed-TOKEN/…          the same of A.T, if it was encoded as well

A piece is whole once its attributes have its mark, which names the encoding that it is of. They are
written after all its chunks. The description follows when all pieces are whole; until then the
root says that the store is half written.

States of loops and trainings are files with a checksum. Nothing here knows Dask or clusters; zarr
is imported when a store is used.
"""

from dask_coded.storage.background import Background, Writer
from dask_coded.storage.checking import PieceCondition, StoreCondition, condition_of
from dask_coded.storage.description import (
    ArrayDescription,
    Description,
    check_dtype,
    read_description,
    write_description,
)
from dask_coded.storage.files import (
    is_sealed,
    read_file,
    remove_partials,
    unsealed,
    write_file,
)
from dask_coded.storage.generators import check_storable
from dask_coded.storage.location import Location, Storage, StoreError, local_path
from dask_coded.storage.pieces import DamagedError, marked, read_piece, write_piece
from dask_coded.storage.root import begin_store
from dask_coded.storage.states import StateStore, StateWriter, Stored

__all__ = [
    "ArrayDescription",
    "Background",
    "DamagedError",
    "Description",
    "Location",
    "PieceCondition",
    "StateStore",
    "StateWriter",
    "Storage",
    "StoreCondition",
    "StoreError",
    "Stored",
    "Writer",
    "begin_store",
    "check_dtype",
    "check_storable",
    "condition_of",
    "is_sealed",
    "local_path",
    "marked",
    "read_description",
    "read_file",
    "read_piece",
    "remove_partials",
    "unsealed",
    "write_description",
    "write_file",
    "write_piece",
]
