"""Files that are there whole or not at all, also after a kill or a power cut."""

import asyncio
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save
from zarr.storage import LocalStore

from mechicl.errors import DamagedRunError

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer

PARTIAL = ".partial"


def write_file(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush them to the disk, then put them in its place."""
    aside = path.with_name(path.name + PARTIAL)
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DurableStore(LocalStore):
    """Zarr's local store, with each write flushed to the disk before it replaces what was there.

    Zarr renames without flushing, so that a power cut can leave an empty file where a whole chunk
    was.
    """

    async def set(self, key: str, value: "Buffer") -> None:  # noqa: D102
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(write_file, path, value.to_bytes())


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as safetensors, with the checksum that this format lacks."""
    write_file(path, save(dict(arrays), metadata={"crc32": str(_checksum(arrays))}))


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return what `save_arrays` wrote; DamagedRunError where the file is lost or altered."""
    try:
        with safe_open(path, framework="numpy") as file:
            stored = (file.metadata() or {}).get("crc32")
        arrays = load_file(path)
    except FileNotFoundError:
        raise DamagedRunError(
            f"{path} is missing: without the optimiser state of the last commit this run cannot be "
            "continued; its checkpoints can still be read"
        ) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedRunError(f"{path} cannot be read: {error}") from error
    if stored != str(_checksum(arrays)):
        raise DamagedRunError(
            f"{path} has a wrong checksum: it is not what was written; restore it from a copy"
        )
    return arrays


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    checksum = 0
    for name, array in sorted(arrays.items()):
        head = f"{name} {array.dtype} {array.shape}".encode()
        checksum = zlib.crc32(array.tobytes(), zlib.crc32(head, checksum))
    return checksum
