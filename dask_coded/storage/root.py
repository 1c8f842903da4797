"""The root of a store: it names the encoding that the store is of, before any piece is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dask_coded._version import __version__
from dask_coded.storage.arrays import strict_store
from dask_coded.storage.location import Location, Storage, StoreError, imported

#: The version of the format. A reader refuses others.
FORMAT = 1
NAME = "dask_coded"
# Zarr writes a local file beside its place, and then moves it there.
_PARTIAL = r"(\.[0-9a-f]+\.partial)?"
_ROOT = re.compile(rf"zarr(\.json)?{_PARTIAL}")
_OURS = re.compile(
    r"(?P<group>(matrix|transposed)-coded-[0-9a-f]+)/"
    r"((piece-\d+|exponents|typical|sizes|footprints)/((data|indices|indptr)/)?)?"
    rf"(zarr(\.json)?|c(/\d+)+){_PARTIAL}"
)


def begin_store(location: Location, tokens: Mapping[str, str]) -> None:
    """Note in an empty store that an encoding has begun, which may take hours to end.

    What an encoding has left half written is deleted. Nothing else is.

    Parameters
    ----------
    location : Location
    tokens : dict of str to str
        For each group, such as ``matrix``, the name of the encoding.

    Raises
    ------
    FileExistsError
        If the place holds anything else.
    """
    zarr, store = imported(), location.store()
    keys = _listed(store)
    begun = "zarr.json" in keys
    free = all(_ROOT.fullmatch(key) or (begun and _OURS.fullmatch(key)) for key in keys)
    if free and begun:
        try:
            found = zarr.open_group(store, mode="r", zarr_format=3).attrs.asdict()
            free = found[NAME]["complete"] is False
        except (ValueError, TypeError, LookupError):  # damaged, or of something else
            free = False
    if not free:
        raise FileExistsError(
            f"The store {location} is not empty: delete it, open it with `coded.open`, or pass "
            "another `storage`."
        )
    arrays = {group: {"token": token} for group, token in tokens.items()}
    said = {"complete": False, "format": FORMAT, "version": __version__, "arrays": arrays}
    # First the root, so that writers of the earlier encoding stop.
    if begun:
        zarr.open_group(store, mode="r+", zarr_format=3).update_attributes({NAME: said})
    else:
        zarr.create_group(store, zarr_format=3, attributes={NAME: said})
    for group in sorted({found["group"] for key in keys if (found := _OURS.fullmatch(key))}):
        _sync(store.delete_dir(group))
    for group, token in tokens.items():
        zarr.create_group(store, path=f"{group}-{token}", zarr_format=3)


def is_named(storage: Storage) -> bool:
    """Return whether the root of a store is there and names an encoding.

    Raises
    ------
    OSError
        If the store cannot be read.
    """
    try:
        return bool(_token(said(storage.location), storage.group) == storage.token)
    except FileNotFoundError:
        return False
    except (ValueError, TypeError, LookupError):  # damaged, or of something else
        return False


def check_begun(location: Location, tokens: Mapping[str, str]) -> None:
    """Check that an encoding may be declared complete.

    Raises
    ------
    StoreError
        If another one has begun at the same place.
    """
    content = said(location)
    if content["complete"] or {g: _token(content, g) for g in content["arrays"]} != dict(tokens):
        raise StoreError(
            f"Another encoding has begun in {location} meanwhile: encode the array again, to "
            "another place."
        )


def said(location: Location) -> dict[str, Any]:
    """Return what the root says: the description, or that it is not written yet.

    Raises
    ------
    FileNotFoundError
        If there is no root.
    ValueError, TypeError, LookupError
        If it is damaged, or that of something else.
    OSError
        If the store cannot be read.
    """
    root = imported().open_group(strict_store(location), mode="r", zarr_format=3)
    return dict(root.attrs.asdict()[NAME])


def _token(content: Mapping[str, Any], group: str) -> Any:
    return content["arrays"][group]["token"]


def _sync(coroutine: Any) -> Any:
    """Run a method of a store on the loop of zarr, to which connections belong."""
    from zarr.core.sync import sync

    return sync(coroutine)


def _listed(store: Any) -> set[str]:
    """Return the keys of a store; at the latest after the first one that is not ours."""
    if (files := getattr(store, "fs", None)) is not None:
        files.invalidate_cache()

    async def listed() -> set[str]:
        keys = set[str]()
        try:
            async for key in store.list():
                if key := key.lstrip("/"):
                    keys.add(key)
                    if not (_ROOT.fullmatch(key) or _OURS.fullmatch(key)):
                        break
        except FileNotFoundError:
            pass
        return keys

    found: set[str] = _sync(listed())
    return found
