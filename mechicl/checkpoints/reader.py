"""Open a run for reading: which paths are runs, and the prefix of its trajectory that is whole.

Nothing is locked and nothing written. A writer may be at work: the number of whole checkpoints is
read first, and what it counts does not change any more.
"""

import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import xarray as xr
import yaml
import zarr
from zarr.abc.store import Store
from zarr.storage import LocalStore

from mechicl.checkpoints.chunks import ChunkError, WholeStore, chunk_at, place, read_chunk
from mechicl.checkpoints.layout import (
    CONFIG,
    OLDEST_SCHEMA,
    REPLACED,
    SCHEMA_VERSION,
    STRAY,
    TRAJECTORY,
)
from mechicl.errors import DamagedRunError, InputError, MechiclError, NothingToAnalyseError

Location = Path | str
"""A run: a local directory, or an fsspec URL."""

_URL = re.compile(r"^[a-z][a-z0-9+.:-]*://")
_METADATA = "zarr.json"
_OLD_METADATA = (".zgroup", ".zmetadata", ".zattrs", ".zarray")
_COORDINATES = ("seed", "step", "log_step")
_YAML: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML was built with it, which takes a tenth of the time."""


def require_run(path: Location) -> Location:
    """Return `path`, a Path unless it is a URL, if it is a run whose trajectory has been allocated.

    Raises
    ------
    InputError
        There is nothing, or something else, or several runs.
    NothingToAnalyseError
        The directory is empty, or its training has not begun.
    DamagedRunError
        The directory is a run, but a part that it cannot be without is missing.
    """
    if is_url(path):
        return _require_remote(str(path))
    run = Path(path)
    try:
        _require_local(run)
    except OSError as error:
        raise InputError(f"{run} cannot be read: {error.strerror or error}") from error
    return run


def is_url(path: Location) -> bool:
    """Return whether `path` names something that is not on this machine."""
    return isinstance(path, str) and bool(_URL.match(path)) and not Path(path).exists()


def _require_local(run: Path) -> None:
    for part in (run.absolute(), *run.absolute().parents):
        if part.name == TRAJECTORY:
            raise InputError(f"{run} lies inside a run; give the run itself: {part.parent}")
    if not run.exists():
        if run.is_symlink():
            raise InputError(f"{run} is a link to {run.readlink()}, which is not there")
        raise InputError(f"there is no {run}; give the directory of a run")
    if not run.is_dir():
        hint = f": {run.parent}" if run.name == CONFIG else ""
        raise InputError(f"{run} is a file; give the directory of a run{hint}")

    names = {entry.name for entry in run.iterdir()} - STRAY
    if TRAJECTORY in names:
        if not (run / TRAJECTORY).is_dir():
            raise DamagedRunError(f"{run / TRAJECTORY} is not a directory that can be read")
        if CONFIG not in names:
            raise DamagedRunError(f"{run / CONFIG} is missing: restore it from a copy")
        return
    aside = sorted(name for name in names if name.startswith(REPLACED))
    if aside:
        raise NothingToAnalyseError(
            f"replacing the run in {run} was cut short; the earlier run is in {run / aside[0]}: "
            "move its contents back, or train again with --overwrite, which deletes it"
        )
    if CONFIG in names:
        raise NothingToAnalyseError(
            f"the run in {run} has no {TRAJECTORY}: its training has not begun; wait for it, or, "
            "if it was stopped, train again with --overwrite"
        )
    if not names:
        raise NothingToAnalyseError(f"{run} is empty; train a run into it first")
    inside = sorted(name for name in names if (run / name / CONFIG).is_file())
    if inside:
        some = ", ".join(str(run / name) for name in inside[:3])
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        raise InputError(f"{run} is a folder of runs; give one of them: {some}{more}")
    raise InputError(f"{run} is not a run: it has neither {CONFIG} nor {TRAJECTORY}")


def _require_remote(url: str) -> str:
    url = url.rstrip("/")
    if TRAJECTORY in url.split("/"):
        raise InputError(f"{url} lies inside a run; give the run itself")
    try:
        from fsspec.core import url_to_fs

        system, root = url_to_fs(url)
        found = system.exists(f"{root}/{TRAJECTORY}/{_METADATA}")
    except Exception as error:  # any of the many that storage services raise
        raise InputError(f"{url} cannot be read: {error}") from error
    if not found:
        raise InputError(f"there is no run at {url}: it has no {TRAJECTORY}/{_METADATA}")
    return url


def _read_bytes(run: Location, name: str) -> bytes:
    where = f"{run}/{name}"
    try:
        if isinstance(run, Path):
            return (run / name).read_bytes()
        import fsspec

        with fsspec.open(where, "rb") as file:
            return file.read()  # type: ignore[union-attr]
    except FileNotFoundError:
        raise DamagedRunError(f"{where} is missing: restore it from a copy") from None
    except OSError as error:
        raise DamagedRunError(f"{where} cannot be read: {error}") from error


def read_config(path: Location) -> dict[str, object]:
    """Return the configuration that the run at `path` was started with.

    Raises
    ------
    InputError, NothingToAnalyseError
        As `require_run`.
    DamagedRunError
        `config.yaml` is missing or is not YAML with a setting a key.
    """
    return parse_config(require_run(path))


def fingerprint(path: Location) -> str:
    """Return a short hash of which run is at `path` and how far it is committed; nothing is opened.

    It changes when a checkpoint is committed, when the run is replaced or its settings change. A
    path at which there is no run has one too.
    """
    run = path if is_url(path) else Path(path)
    known = sha256()
    for name in (CONFIG, f"{TRAJECTORY}/{_METADATA}", f"{TRAJECTORY}/n_saved/c"):
        # A URL may name a service that is not installed: whoever opens the run is told so.
        with suppress(DamagedRunError if isinstance(run, Path) else Exception):
            known.update(_read_bytes(run, name))
        known.update(name.encode())
    if isinstance(run, Path):
        with suppress(OSError):  # written once: another run of the same settings has another time
            known.update(str((run / TRAJECTORY / _METADATA).stat().st_mtime_ns).encode())
    return known.hexdigest()[:16]


def parse_config(run: Location) -> dict[str, object]:
    """Do what `read_config` does, for a path that `require_run` has returned."""
    try:
        config = yaml.load(_read_bytes(run, CONFIG).decode(), Loader=_YAML)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRunError(f"{run}/{CONFIG} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise DamagedRunError(f"{run}/{CONFIG} holds no settings")
    return config


def read_trajectory(path: Location) -> xr.Dataset:
    """Return the whole checkpoints of the run at `path`, read from disk where they are used.

    Returns
    -------
    Dataset
        Parameters ``(seed, step, ...)`` float32, `loss` ``(seed, log_step)`` up to the last whole
        checkpoint, `diverged_at` ``(seed,)``, and the constants. Its attributes say how many
        checkpoints there are (`n_saved`) of how many planned (`n_planned`), and whether that is
        all (`complete`, 0 or 1). `load` reads it into memory and names what is damaged.

    Raises
    ------
    InputError
        As `require_run`, or a later mechicl wrote this run.
    NothingToAnalyseError
        As `require_run`, or there is no checkpoint yet.
    DamagedRunError
        Metadata or coordinates are missing or altered. Other chunks are checked when they are read:
        one that is missing is an error then, as one that was altered is, and not NaN.
    """
    run = require_run(path)
    store = WholeStore(_open_store(run), f"{run}/{TRAJECTORY}")
    group = open_group(run, store)
    n_saved = read_n_saved(run, group)
    if n_saved == 0:
        raise NothingToAnalyseError(
            f"the run in {run} has no checkpoint yet; wait for it, or continue it with --resume"
        )
    try:
        consolidated = group.metadata.consolidated_metadata is not None
        dataset = xr.open_zarr(store, chunks=None, consolidated=consolidated)  # type: ignore[arg-type]
    except Exception as error:  # whatever xarray makes of metadata that were altered
        for name in _COORDINATES:
            read_array(run, group, name)
        if isinstance(error, MechiclError):
            raise
        raise DamagedRunError(
            f"the metadata in {run}/{TRAJECTORY} do not go together ({error}); `mechicl verify` "
            "says which"
        ) from error
    for name in _COORDINATES:
        if (dataset[name].values < 0).any():
            raise DamagedRunError(f"{run}/{TRAJECTORY}/{name} lacks its values")

    n_planned = dataset.sizes["step"]
    last = int(dataset["step"][n_saved - 1])
    prefix = {"step": n_saved, "log_step": last}
    dataset = dataset.drop_vars("n_saved").isel({dim: slice(n) for dim, n in prefix.items()})
    dataset["diverged_at"] = dataset["diverged_at"].copy(data=read_diverged(run, group, last))
    complete = int(n_saved == n_planned)
    return dataset.assign_attrs(n_saved=n_saved, n_planned=n_planned, complete=complete)


def load(
    dataset: xr.Dataset,
    *,
    where: Location,
    skip_damaged: bool = False,
    notify: Callable[[str], None] = warnings.warn,
) -> xr.Dataset:
    """Read a part of the trajectory of the run `where` into memory, in place, and return it.

    Parameters
    ----------
    dataset
        `read_trajectory`, or what a choice of its variables, steps and seeds leaves.
    where
        The run.
    skip_damaged
        Go on without chunks that cannot be read: NaN stands for what they held. Coordinates and
        constants cannot be done without.
    notify
        Called once for each chunk that is left out, with what it held and what is wrong with it.

    Raises
    ------
    DamagedRunError
        A chunk is not what was written; named are its file, the variable, seeds and steps.
    """
    for name, variable in dataset.variables.items():
        try:
            with _reading(f"{where}/{TRAJECTORY}/{name}"):
                variable.load()
        except DamagedRunError as error:
            values, lost = _load_chunks(dataset, str(name), where, error)
            if not lost:  # it was read this time
                variable.values = values.astype(variable.dtype)
            elif not skip_damaged or not {"step", "log_step"} & set(variable.dims):
                more = f"; so are {len(lost) - 1} more of its chunks" if len(lost) > 1 else ""
                raise DamagedRunError(
                    f"{where}/{lost[0]}{more}; `mechicl verify` lists all damage, and "
                    "--skip-damaged (in Python, skip_damaged=True) goes on without what is lost"
                ) from error
            else:
                for text in lost:
                    notify(f"left out as NaN: {text}")
                variable.values = values
    return dataset


def _load_chunks(
    dataset: xr.Dataset, name: str, where: Location, error: DamagedRunError
) -> tuple[np.ndarray, list[str]]:
    """Read a variable of `dataset` chunk by chunk; NaN, and a text each, for those damaged.

    Raises `error` where the variable is not the part of an array that its coordinates say.
    """
    run = where if is_url(where) else Path(where)
    group = open_group(run, _open_store(run))
    array = group[name]
    assert isinstance(array, zarr.Array)
    variable = dataset.variables[name]
    positions = _positions(dataset, name, run, group)
    if positions is None:
        raise error
    grid = [np.unique(at // size) for at, size in zip(positions, array.chunks, strict=True)]
    values = np.full(variable.shape, np.nan, dtype=np.result_type(array.dtype, np.float32))
    lost = []
    for index in itertools.product(*grid):
        chunk = chunk_at(name, array, index)
        chosen = [
            np.flatnonzero((at >= part.start) & (at < part.stop))
            for at, part in zip(positions, chunk.region, strict=True)
        ]
        try:
            block = read_chunk(run, array, chunk)
        except ChunkError as fault:
            lost.append(f"{chunk.file} {fault} ({_place(dataset, name, chosen)})")
            continue
        inside = [
            at[those] - part.start
            for at, those, part in zip(positions, chosen, chunk.region, strict=True)
        ]
        values[np.ix_(*chosen)] = block[np.ix_(*inside)]
    return values, lost


def _positions(
    dataset: xr.Dataset, name: str, run: Location, group: zarr.Group
) -> list[np.ndarray] | None:
    """Return where in its array each index of a variable lies, by dim; None where that is unclear.

    Readers choose seeds and steps, and nothing along other dims.
    """
    variable, array = dataset.variables[name], group[name]
    assert isinstance(array, zarr.Array)
    if tuple(array.metadata.dimension_names or ()) != variable.dims:  # type: ignore[union-attr]
        return None
    found = []
    for dim, size, whole in zip(variable.dims, variable.shape, array.shape, strict=True):
        if dim in _COORDINATES and dim != name and dim in dataset.variables:
            labels = {label: i for i, label in enumerate(read_array(run, group, dim).tolist())}
            at = [labels.get(label, -1) for label in dataset[dim].values.tolist()]
        elif size == whole:
            at = list(range(size))
        else:
            return None
        found.append(np.array(at, dtype=np.int64))
    return None if any((at < 0).any() for at in found) else found


def _place(dataset: xr.Dataset, name: str, chosen: list[np.ndarray]) -> str:
    labels: Mapping[object, list[int]] = {
        dim: dataset[dim].values[those].tolist()
        for dim, those in zip(dataset.variables[name].dims, chosen, strict=True)
        if dim in _COORDINATES and dim != name and dim in dataset.variables
    }
    steps = labels.get("step", labels.get("log_step", []))
    return place(name, labels.get("seed", []), steps)


def _open_store(run: Location) -> Store:
    # A store, not its path: xarray takes some characters of a path for a chain of URLs.
    if isinstance(run, Path):
        return LocalStore(run / TRAJECTORY, read_only=True)
    from zarr.storage import FsspecStore

    return FsspecStore.from_url(f"{run}/{TRAJECTORY}", read_only=True)


def open_group(run: Location, store: Store, mode: str = "r") -> zarr.Group:
    """Return the group of the trajectory of `run`, of a schema that this version reads.

    Raises
    ------
    InputError
        A later mechicl wrote it, or one too old; or it is not a trajectory of mechicl at all.
    DamagedRunError
        Its metadata are missing or are not what was written.
    """
    where = f"{run}/{TRAJECTORY}/{_METADATA}"
    if isinstance(run, Path) and not (run / TRAJECTORY / _METADATA).exists():
        old = [name for name in _OLD_METADATA if (run / TRAJECTORY / name).exists()]
        if old:
            raise InputError(
                f"{run / TRAJECTORY} is a Zarr v2 store (it has {old[0]}), and mechicl writes v3 "
                "from its first version on: it did not write this one"
            )
    data = _read_bytes(run, f"{TRAJECTORY}/{_METADATA}")
    try:
        attrs = json.loads(data)["attributes"]
        schema, writer = int(attrs["schema_version"]), attrs["mechicl_version"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedRunError(f"{where} is not what was written: {error!r}") from error
    if schema > SCHEMA_VERSION:
        raise InputError(
            f"mechicl {writer} wrote {run} with schema {schema}, and this version reads up to "
            f"{SCHEMA_VERSION}; install mechicl {writer} or later"
        )
    if schema < OLDEST_SCHEMA:
        raise InputError(
            f"mechicl {writer} wrote {run} with schema {schema}, and this version reads from "
            f"{OLDEST_SCHEMA} on; read it with mechicl {writer}"
        )
    if not isinstance(store, WholeStore):
        store = WholeStore(store, f"{run}/{TRAJECTORY}")
    try:
        group = zarr.open_group(store, mode=mode)  # type: ignore[arg-type]
        known = set(group.array_keys())
    except Exception as error:  # whatever Zarr makes of metadata that were altered
        raise DamagedRunError(f"{where} is not what was written: {error!r}") from error
    lacking = {*_COORDINATES, "loss", "diverged_at", "n_saved"} - known
    if lacking:
        raise DamagedRunError(f"{where} knows no {', '.join(sorted(lacking))}")
    return group


def read_n_saved(run: Location, group: zarr.Group) -> int:
    """Return the number of whole checkpoints; DamagedRunError where it cannot be one."""
    n_saved = int(read_array(run, group, "n_saved"))
    n_planned = group["step"].shape[0]  # type: ignore[union-attr]
    if not 0 <= n_saved <= n_planned:
        raise DamagedRunError(
            f"{run}/{TRAJECTORY}/n_saved is {n_saved}, of {n_planned} checkpoints planned"
        )
    return n_saved


def read_diverged(run: Location, group: zarr.Group, last: int) -> np.ndarray:
    """Return the step at which each seed diverged before step `last`, ``(seed,)``; else NaN.

    It is written before the checkpoint that it belongs to counts, so it may be ahead of it.
    """
    diverged = read_array(run, group, "diverged_at")
    return np.where(diverged < last, diverged, np.nan)


def read_array(run: Location, group: zarr.Group, name: str, where: object = ...) -> np.ndarray:
    """Return ``group[name][where]``; DamagedRunError, naming it, where a chunk is damaged."""
    with _reading(f"{run}/{TRAJECTORY}/{name}"):
        return np.asarray(group[name][where])  # type: ignore[index]


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise DamagedRunError(
            f"{what} cannot be read, a chunk of it is not what was written: {error}"
        ) from error
