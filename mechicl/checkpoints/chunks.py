"""Chunks one by one: which file holds what of an array, and what is wrong with it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from zarr.abc.store import Store
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.storage import LocalStore, WrapperStore

from mechicl.checkpoints.layout import TRAJECTORY
from mechicl.errors import DamagedRunError, MechiclError

if TYPE_CHECKING:
    import zarr
    from zarr.core.buffer import Buffer, BufferPrototype

Fault = Literal["missing", "empty", "truncated", "altered", "unreadable"]
"""What can be wrong with a file."""

METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")

_CHECKSUM = 4
_MOST_LISTED = 4


class WholeStore(WrapperStore[Store]):
    """A store in which a chunk that is asked for and not there is an error.

    To Zarr it is a chunk of fill values; here all that is ever read was written. It is an error too
    where another local store has taken the place of the one that was opened: labels of the one
    would be given to numbers of the other.
    """

    def __init__(self, store: Store, where: str = "") -> None:
        super().__init__(store)
        self._where = where
        self._opened = _identity(store)

    def _with_store(self, store: Store) -> "WholeStore":
        return type(self)(store, self._where)

    async def get(  # noqa: D102
        self, key: str, prototype: "BufferPrototype | None" = None, byte_range: Any = None
    ) -> "Buffer | None":
        found = await super().get(key, prototype, byte_range)  # type: ignore[arg-type]
        if key.rpartition("/")[2] in METADATA:
            return found
        if _identity(self._store) not in (self._opened, None):
            raise MechiclError(f"{self._where} was replaced since it was opened; open it again")
        if found is None:
            raise DamagedRunError(f"{self._where}/{key} is missing")
        return found


def _identity(store: Store) -> tuple[int, int, int] | None:
    """Return which local store that is: its metadata are written once."""
    if not isinstance(store, LocalStore):
        return None
    try:
        found = (store.root / METADATA[0]).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


@dataclass(frozen=True)
class Chunk:
    """One chunk of an array: its file, relative to the run, and the part of the array in it."""

    file: str
    region: tuple[slice, ...]


class ChunkError(Exception):
    """A chunk is not what was written: `what` is wrong, and that in words."""

    def __init__(self, what: Fault, text: str) -> None:
        super().__init__(text)
        self.what: Fault = what


def chunk_at(name: str, array: "zarr.Array", index: Iterable[int]) -> Chunk:
    """Return the chunk of array `name` at `index` in its grid of chunks."""
    index = tuple(index)
    region = tuple(
        slice(i * size, min((i + 1) * size, whole))
        for i, size, whole in zip(index, array.chunks, array.shape, strict=True)
    )
    key = array.metadata.encode_chunk_key(index)  # type: ignore[union-attr]
    return Chunk(f"{TRAJECTORY}/{name}/{key}", region)


def read_chunk(run: Path | str, array: "zarr.Array", chunk: Chunk) -> np.ndarray:
    """Return what a chunk holds; raise ChunkError where it is not what was written."""
    try:
        if isinstance(run, Path) and not (run / chunk.file).is_file():
            raise FileNotFoundError
        return np.asarray(array[chunk.region])
    except Exception as error:  # whatever a codec makes of bytes that were altered
        raise _explained(run, array, chunk, error) from error


def _explained(run: Path | str, array: "zarr.Array", chunk: Chunk, error: Exception) -> ChunkError:
    if isinstance(error, FileNotFoundError | DamagedRunError):
        return ChunkError("missing", "is missing")
    if isinstance(error, OSError):
        return ChunkError("unreadable", f"cannot be read: {error.strerror or error}")
    if isinstance(run, Path):
        try:
            size, expected = (run / chunk.file).stat().st_size, _stored_size(array)
        except OSError as fault:
            return ChunkError("unreadable", f"cannot be read: {fault.strerror}")
        if size == 0:
            return ChunkError("empty", "is empty")
        if expected is not None and size < expected:
            return ChunkError("truncated", f"is cut short: {size:,} of {expected:,} bytes")
        if expected is not None and size > expected:
            return ChunkError("altered", f"is too long: {size:,} bytes, not {expected:,}")
    return ChunkError("altered", "is not what was written: its checksum is wrong")


def _stored_size(array: "zarr.Array") -> int | None:
    """Bytes of a chunk's file, where its codecs do not compress."""
    codecs = getattr(array.metadata, "codecs", ())
    if [type(codec) for codec in codecs] != [BytesCodec, Crc32cCodec]:
        return None
    return math.prod(array.chunks) * array.dtype.itemsize + _CHECKSUM


def listed(values: Iterable[int]) -> str:
    """Return some numbers in few words, such as `0, 5` or `0 to 95 (20)`."""
    values = list(values)
    if len(values) <= _MOST_LISTED:
        return ", ".join(f"{value:,}" for value in values)
    return f"{values[0]:,} to {values[-1]:,} ({len(values):,})"


def place(array: str, seeds: Iterable[int], steps: Iterable[int]) -> str:
    """Return where in a trajectory something is: array, seeds and steps."""
    seeds, steps = list(seeds), list(steps)
    parts = [array]
    if seeds:
        parts.append(f"seed{'s' * (len(seeds) > 1)} {listed(seeds)}")
    if steps:
        parts.append(f"step{'s' * (len(steps) > 1)} {listed(steps)}")
    return ", ".join(parts)
