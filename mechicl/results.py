"""Results on disk: where they go, what they are called, and that they are whole or absent."""

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import xarray as xr

from mechicl import plots
from mechicl.checkpoints.layout import ANALYSES, FIGURES
from mechicl.errors import InputError, MechiclError
from mechicl.paths import local_directory


def directory(path: str | Path) -> Path:
    """Return `path` as a place for results.

    Raises
    ------
    InputError
        If it is none: a URL, a file, or a folder of code.
    MechiclError
        If it may not be written to.
    """
    root = local_directory(path)
    if (root / ANALYSES / "__init__.py").exists():
        raise InputError(f"{root / ANALYSES} holds code; give another directory with --out")
    if root.is_dir() and not os.access(root, os.W_OK):
        raise MechiclError(f"{root} is read-only; --out DIR puts results elsewhere")
    return root


def save(
    result: xr.Dataset, root: Path, whole: Mapping[str, np.ndarray], *, figure: bool
) -> list[Path]:
    """Write a probe's result, and its figure, below `root`; return what was written.

    Parameters
    ----------
    whole
        The run's own steps and seeds, to tell a result of all of them from one of some.
    """
    name = _name(result, whole)
    written: list[Path] = []

    def put(folder: str, suffix: str, write: Callable[[Path], object]) -> None:
        target = root / folder / f"{name}{suffix}"
        try:
            write_aside(target, write)
        except OSError as error:
            raise MechiclError(
                f"cannot write {target} ({error.strerror or error}); --out DIR, or out= in "
                "Python, puts results elsewhere"
            ) from error
        written.append(target)

    put(ANALYSES, ".zarr", lambda path: _to_zarr(result, path))
    if figure:
        drawn = plots.draw(result)
        put(FIGURES, ".png", lambda path: drawn.savefig(path, dpi=120, format="png"))
    return written


def stored(root: Path, probe: str) -> Iterator[xr.Dataset]:
    """Yield the results of a probe that are stored below `root`, the newest first.

    What cannot be opened is left out.
    """
    found = [path for path in (root / ANALYSES).glob(f"{probe}-*.zarr") if path.is_dir()]
    for path in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, KeyError):
            yield xr.open_zarr(path, consolidated=True)  # as `save` writes it


def _name(result: xr.Dataset, whole: Mapping[str, np.ndarray]) -> str:
    """Name a result by probe, parameters, run, and the steps and seeds that it covers."""
    attrs = getattr(result, "attrs", {})
    if not {"probe", "parameters", "run_digest"} <= set(attrs):
        raise InputError("save takes a result of analyze, and this has no probe in its attrs")
    covered = {
        dim: None if np.array_equal(result[dim].values, known) else result[dim].values.tolist()
        for dim, known in whole.items()
        if dim in result.coords
    }
    known = [attrs["parameters"], attrs["run_digest"], covered]
    asked = json.dumps(known + [attrs[key] for key in ("against",) if key in attrs])
    return f"{attrs['probe']}-{sha256(asked.encode()).hexdigest()[:8]}"


def _to_zarr(result: xr.Dataset, path: Path) -> None:
    from zarr.storage import LocalStore

    with warnings.catch_warnings():
        # xarray warns on opening a store without consolidated metadata, zarr on writing one with.
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        result.to_zarr(LocalStore(path), mode="w", consolidated=True, zarr_format=3)


def write_aside(target: Path, write: Callable[[Path], object]) -> None:
    """Write beside `target` and rename, so that what stands there is whole or absent.

    Of a link it is what the link leads to that is replaced.
    """
    real = target.resolve()
    real.parent.mkdir(parents=True, exist_ok=True)
    aside = real.with_name(f".{real.name}.{uuid.uuid4().hex}")
    replaced = aside.with_name(f"{aside.name}.replaced")
    try:
        write(aside)
        if real.is_dir():  # removed once the new one is there: half of it would look like a whole
            real.rename(replaced)
        aside.replace(real)
    finally:
        if replaced.is_dir() and not real.exists():
            replaced.rename(real)
        for each in (aside, replaced):
            if each.is_dir():
                shutil.rmtree(each)
            else:
                each.unlink(missing_ok=True)
