"""What lies where in a run directory, and the empty trajectory that a run starts with.

``loss[t]`` is the training loss of the parameters after `t` updates, measured on the batch of
update `t + 1`; that is why `log_step` ends one before the last step.
"""

import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import zarr
from jaxtyping import Int64
from zarr.codecs import Crc32cCodec

from mechicl.checkpoints.files import PARTIAL, DurableStore, sync_directory
from mechicl.errors import InputError
from mechicl.schema import DIMS, Var
from mechicl.version import __version__

CONFIG = "config.yaml"
TRAJECTORY = "trajectory.zarr"
ANALYSES = "analyses"
FIGURES = "figures"
LOCK = ".lock"
LOCK_HOLDER = ".lock.json"
REPLACED = ".replaced-"
"""Prefix of the folder in which a run is kept until the one that replaces it has begun."""

SCHEMA_VERSION = 1
OLDEST_SCHEMA = 1
"""The oldest that this version reads."""
_RESUME = re.compile(r"resume-(\d+)\.safetensors")
STRAY = frozenset({".DS_Store", ".ipynb_checkpoints", "Thumbs.db", "desktop.ini"})
"""What file browsers and notebooks leave in any folder, also in an empty one."""

MAX_CHUNK_STEPS = 256
MAX_CHUNK_BYTES = 16 * 2**20
MAX_CHUNK_LOG_STEPS = 4096

VARYING = ("seed", "step", "log_step")
"""Dims of what differs between models; a constant has none of them."""

RESERVED = ("seed", "step", "log_step", "loss", "diverged_at", "n_saved")
RESERVED_ATTRS = ("schema_version", "mechicl_version", "n_saved", "n_planned", "complete")

ORIGIN = "origin"
"""Key of `config.yaml` that runs have which mechicl imported: where their checkpoints are from."""

INDECISIVE = frozenset({"name", "description"})
"""Settings of a recipe that decide no number."""

LATER = {
    "training_set": None,
    "dropout_on": "every_batch",
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
}
"""Settings that recipes had not from the first, with the values at which they change nothing."""

_FLOAT = 4
_CHECKSUM = 4


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Hash what decides the numbers, the same whether or not later settings are written down."""
    decisive = {
        key: _without_later(value, f"{key}.") if isinstance(value, Mapping) else value
        for key, value in _without_later(settings).items()
        if key not in INDECISIVE
    }
    return sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]


def _without_later(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        key: value
        for key, value in settings.items()
        if not (f"{prefix}{key}" in LATER and value == LATER[f"{prefix}{key}"])
    }


def is_constant(array: zarr.Array) -> bool:
    """Whether an array is a constant of the task or model, and no parameter."""
    dims = getattr(array.metadata, "dimension_names", None) or ()
    return array.dtype == np.float64 and not set(VARYING) & set(dims)


def resume_name(step: int) -> str:
    """Return the name of the file with the optimiser state after `step` updates."""
    return f"resume-{step}.safetensors"


def resume_step(name: str) -> int | None:
    """Return the step of a file with that name, None for any other, a copy of one among them."""
    found = _RESUME.fullmatch(name)
    return int(found[1]) if found else None


def resume_files(run_dir: Path) -> list[Path]:
    """Return the files of that kind, and what a kill leaves of one that is being written."""
    names = ((path, path.name.removesuffix(PARTIAL)) for path in run_dir.iterdir())
    return sorted(path for path, name in names if resume_step(name) is not None)


@dataclass(frozen=True)
class ArrayPlan:
    """One array of a trajectory: what it is, and how it is cut into chunks."""

    var: Var
    dtype: str
    fill: float
    shape: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def n_chunks(self) -> int:
        """Number of chunk files when all is written."""
        return math.prod(math.ceil(n / c) for n, c in zip(self.shape, self.chunks, strict=True))

    @property
    def n_folders(self) -> int:
        """Number of folders when all is written: one a level of a chunk's key, `c/0/3/0`."""
        counts = [math.ceil(n / c) for n, c in zip(self.shape, self.chunks, strict=True)]
        return 1 + sum(math.prod(counts[:level]) for level in range(len(counts)))

    @property
    def nbytes(self) -> int:
        """Bytes of its chunk files when all is written; chunks at the end are stored whole."""
        chunk = math.prod(self.chunks) * np.dtype(self.dtype).itemsize + _CHECKSUM
        return self.n_chunks * chunk


@dataclass(frozen=True, eq=False)
class Plan:
    """All that is known of a trajectory before training.

    Parameters
    ----------
    parameters
        The parameters of the model, each with dims that start with ``("seed", "step")``.
    sizes
        Size of every other dim that they have.
    seeds
        Labels of the seeds, 0 or more, each once.
    steps
        Steps to save, increasing, ``(step,)``; training ends at the last.
    constants
        Constants of the task: a declaration without seed and step, and the value, a number or an
        array.
    attrs
        Attributes of the whole, JSON; `run_digest` among them.
    loss
        Declaration of the training loss, for its unit (`nat` for a cross-entropy).

    Raises
    ------
    InputError
        One that lists all that does not fit together.
    """

    parameters: Mapping[str, Var]
    sizes: Mapping[str, int]
    seeds: tuple[int, ...]
    steps: Int64[np.ndarray, " step"]
    constants: Mapping[str, tuple[Var, float | np.ndarray]]
    attrs: Mapping[str, object]
    loss: Var = field(default_factory=lambda: Var(("seed", "log_step"), "1", "training loss"))

    def __post_init__(self) -> None:
        problems = [*self._axis_problems(), *self._name_problems()]
        try:
            json.dumps(dict(self.attrs), allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.append(f"attrs are not JSON: {error}")
        if problems:
            raise InputError("cannot plan this trajectory: " + "; ".join(problems))
        object.__setattr__(self, "steps", np.array(self.steps, dtype=np.int64))

    def _axis_problems(self) -> list[str]:
        problems: list[str] = []
        steps, seeds = np.asarray(self.steps), self.seeds
        if steps.ndim != 1 or steps.dtype.kind not in "iu" or steps.size == 0:
            problems.append("steps are not a list of integers, one at least")
        elif steps[0] < 0 or (np.diff(steps.astype(np.int64)) <= 0).any():
            problems.append("steps do not increase from 0 or later")
        if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
            problems.append(f"seeds {seeds} are not distinct integers from 0 on, one at least")
        for name, var in self.parameters.items():
            if var.dims[:2] != ("seed", "step"):
                problems.append(f"dims of {name} are {var.dims}; they start with seed, step")
            lacking = [dim for dim in var.dims[2:] if self.sizes.get(dim, 0) < 1]
            if lacking:
                problems.append(f"no sizes from 1 on for {', '.join(lacking)} of {name}")
        if not self.parameters:
            problems.append("there are no parameters")
        if self.loss.dims != ("seed", "log_step"):
            problems.append(f"dims of loss are {self.loss.dims}, not seed, log_step")
        return problems

    def _name_problems(self) -> list[str]:
        problems: list[str] = []
        for name in (*self.parameters, *self.constants):
            if not name.isidentifier():
                problems.append(f"{name!r} cannot be the name of a variable")
            if name in RESERVED or name in DIMS:
                problems.append(f"{name!r} is the name of a dim or of a variable of every run")
        both = sorted(set(self.parameters) & set(self.constants))
        if both:
            problems.append(f"{', '.join(both)}: parameter and constant at once")
        for name, (var, value) in self.constants.items():
            varying = sorted(set(var.dims) & set(VARYING))
            if varying:
                problems.append(f"constant {name} has dims {', '.join(varying)}")
            if np.ndim(value) != len(var.dims):
                problems.append(f"constant {name} has {np.ndim(value)} axes and dims {var.dims}")
        taken = sorted(set(self.attrs) & set(RESERVED_ATTRS))
        if taken:
            problems.append(f"attrs {', '.join(taken)} are set by the store")
        return problems

    @property
    def n_steps(self) -> int:
        """Number of updates of the whole training."""
        return int(self.steps[-1])

    @property
    def chunk_steps(self) -> int:
        """Checkpoints a chunk, the same for all parameters, so that all chunks fill up together."""
        per_step = max(
            _FLOAT * len(self.seeds) * math.prod(self.sizes[dim] for dim in var.dims[2:])
            for var in self.parameters.values()
        )
        return _balanced(len(self.steps), min(MAX_CHUNK_STEPS, MAX_CHUNK_BYTES // per_step))

    def arrays(self) -> dict[str, ArrayPlan]:
        """Return every array of the trajectory, in the order in which they are made."""
        n_seeds, n_steps = len(self.seeds), self.n_steps
        n_saves = len(self.steps)
        plans = {
            name: self._coordinate(name, units, text, size)
            for name, units, text, size in (
                ("seed", "1", DIMS["seed"], n_seeds),
                ("step", "step", DIMS["step"], n_saves),
                ("log_step", "step", DIMS["log_step"], n_steps),
            )
        }
        for name, var in self.parameters.items():
            shape = (n_seeds, n_saves, *(self.sizes[dim] for dim in var.dims[2:]))
            chunks = _bounded((n_seeds, self.chunk_steps, *shape[2:]))
            plans[name] = ArrayPlan(var, "float32", math.nan, shape, chunks)
        chunks = (n_seeds, _balanced(n_steps, MAX_CHUNK_LOG_STEPS))
        plans["loss"] = ArrayPlan(self.loss, "float32", math.nan, (n_seeds, n_steps), chunks)
        diverged = Var(("seed",), "step", "step at which the loss became non-finite, NaN: at none")
        plans["diverged_at"] = ArrayPlan(diverged, "float64", math.nan, (n_seeds,), (n_seeds,))
        for name, (var, value) in self.constants.items():
            plans[name] = ArrayPlan(var, "float64", math.nan, np.shape(value), np.shape(value))
        saved = Var((), "1", "number of checkpoints that are written whole, from the first")
        plans["n_saved"] = ArrayPlan(saved, "int64", -1, (), ())
        return plans

    @staticmethod
    def _coordinate(name: str, units: str, text: str, size: int) -> ArrayPlan:
        # A coordinate whose chunk is lost must not read as zeros.
        return ArrayPlan(Var((name,), units, text), "int64", -1, (size,), (max(1, size),))

    @property
    def nbytes(self) -> int:
        """Bytes of the trajectory when all is written, without its metadata."""
        return sum(array.nbytes for array in self.arrays().values())

    @property
    def n_files(self) -> int:
        """Files of the trajectory when all is written, its metadata among them."""
        return 1 + sum(1 + array.n_chunks for array in self.arrays().values())

    @property
    def n_folders(self) -> int:
        """Folders of the trajectory when all is written, itself among them."""
        return 1 + sum(array.n_folders for array in self.arrays().values())


def _balanced(size: int, limit: int) -> int:
    """Return the chunk length, `limit` at most, that leaves the least of the last chunk unused."""
    limit = max(1, limit)
    return math.ceil(size / max(1, math.ceil(size / limit))) or 1


def _bounded(chunks: tuple[int, ...]) -> tuple[int, ...]:
    """Halve the longest axis until a chunk fits, for parameters of which one step is too large."""
    sizes = list(chunks)
    while math.prod(sizes) * _FLOAT > MAX_CHUNK_BYTES:
        longest = sizes.index(max(sizes))
        sizes[longest] = math.ceil(sizes[longest] / 2)
    return tuple(sizes)


def allocate(run_dir: Path, plan: Plan) -> None:
    """Create the trajectory of `plan` in `run_dir`: all arrays, no checkpoint yet.

    It appears under its name when it is complete. Parameters are filled with NaN, so that what is
    not written cannot pass for zeros. Chunks carry a crc32c and are not compressed: weights shrink
    by a quarter at best.

    Raises
    ------
    InputError
        There is a trajectory already.
    """
    target = run_dir / TRAJECTORY
    if target.exists():
        raise InputError(f"{target} is there already")
    aside = run_dir / (TRAJECTORY + PARTIAL)
    rmtree(aside, ignore_errors=True)

    store = DurableStore(aside)
    attrs = {"schema_version": SCHEMA_VERSION, "mechicl_version": __version__, **plan.attrs}
    group = zarr.create_group(store, zarr_format=3, attributes=attrs)
    values: dict[str, np.ndarray | float] = {
        name: value for name, (_, value) in plan.constants.items()
    }
    values |= {
        "seed": np.array(plan.seeds, dtype=np.int64),
        "step": plan.steps,
        "log_step": np.arange(plan.n_steps, dtype=np.int64),
        "diverged_at": np.full(len(plan.seeds), np.nan),
        "n_saved": 0,
    }
    for name, array in plan.arrays().items():
        made = group.create_array(
            name,
            shape=array.shape,
            chunks=array.chunks,
            dtype=array.dtype,
            fill_value=array.fill,
            compressors=[Crc32cCodec()],
            dimension_names=array.var.dims,
            attributes=array.var.attrs,  # type: ignore[arg-type]
            config={"write_empty_chunks": True},
        )
        if name in values:
            made[...] = values[name]
    with warnings.catch_warnings():
        # Not in the Zarr specification yet, but xarray warns where it is missing.
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(store)
    aside.rename(target)
    sync_directory(run_dir)
