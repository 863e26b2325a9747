"""Metadata, labels and shapes of a run: what has to be right before its numbers can be read."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import zarr
from zarr.storage import LocalStore, StorePath

from mechicl.checkpoints.chunks import Chunk, ChunkError, Fault, chunk_at, read_chunk
from mechicl.checkpoints.findings import Finding, Kind, Severity
from mechicl.checkpoints.layout import (
    CONFIG,
    ORIGIN,
    TRAJECTORY,
    is_constant,
    resume_step,
    settings_digest,
)
from mechicl.checkpoints.reader import open_group, parse_config
from mechicl.checkpoints.schedule import Schedule
from mechicl.errors import DamagedRunError

_METADATA = "zarr.json"
ALWAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "seed": (("seed",), "int64"),
    "step": (("step",), "int64"),
    "log_step": (("log_step",), "int64"),
    "loss": (("seed", "log_step"), "float32"),
    "diverged_at": (("seed",), "float64"),
    "n_saved": ((), "int64"),
}
"""Dims and type of what every trajectory has."""


class Inspection:
    """A run as far as its metadata and labels go, and the findings on them.

    Attributes
    ----------
    findings
        What was found, in the order of the run's files; whoever reads its contents adds to them.
    arrays, fitting
        Every array that opens; those of them whose dims and sizes go together.
    seeds, steps, n_saved
        Labels, steps of checkpoints, and how many of these are whole; what is lost of them is taken
        from the recipe and from the optimiser state.
    counted
        Whether it is known how many checkpoints are whole.
    diverged_at
        Of each seed; None where that is lost.
    imported
        Whether mechicl imported the run: it has no optimiser state, and losses that are not known.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.findings: list[Finding] = []
        self.store = LocalStore(run / TRAJECTORY, read_only=True)
        self._coordinates(self._config(self._metadata()))
        self._shapes()

    def find(
        self,
        what: Kind,
        file: str,
        message: str,
        array: str | None = None,
        seeds: Sequence[int] | np.ndarray = (),
        steps: Sequence[int] | np.ndarray = (),
        *,
        severity: Severity = "damage",
    ) -> None:
        """Add a finding, with labels as plain integers."""
        labels = tuple(map(int, seeds)), tuple(map(int, steps))
        self.findings.append(Finding(what, severity, file, message, array, *labels))

    # Metadata -----------------------------------------------------------------------------------

    def _metadata(self) -> dict[str, Any]:
        """Find what is wrong with the metadata; open every array; return the attributes."""
        file = f"{TRAJECTORY}/{_METADATA}"
        root = self._json(file)
        try:
            open_group(self.run, self.store)
            usable = True
        except DamagedRunError as error:
            usable = False
            if root is not None:
                text = str(error).removeprefix(f"{self.run}/{file} ")
                self.find("altered", file, text)
        root = root or {}
        consolidated = _mapping(_mapping(root.get("consolidated_metadata")).get("metadata"))
        if usable and not consolidated:
            text = "has lost its consolidated metadata, and opens more slowly without them"
            self.find("missing", file, text, severity="remark")

        folders = [path.parent.name for path in (self.run / TRAJECTORY).glob(f"*/{_METADATA}")]
        self.arrays: dict[str, zarr.Array] = {}
        for name in sorted({*consolidated, *folders}):
            self._array_metadata(name, consolidated)
        for name in ALWAYS:
            if name not in {*consolidated, *folders}:
                self.find("missing", f"{TRAJECTORY}/{name}/{_METADATA}", "is missing", name)
        return _mapping(root.get("attributes"))

    def _array_metadata(self, name: str, consolidated: dict[str, Any]) -> None:
        file = f"{TRAJECTORY}/{name}/{_METADATA}"
        own, theirs = self._json(file, name), consolidated.get(name)
        if own is not None and consolidated and own != theirs:
            keys = sorted(key for key in own if own[key] != _mapping(theirs).get(key))
            text = "is not in" if theirs is None else f"differs in {', '.join(keys)} from"
            text = f"{text} the consolidated metadata in {TRAJECTORY}/{_METADATA}"
            self.find("disagrees", file, text, name)
        for metadata in (theirs, own):  # the first is what readers go by
            if isinstance(metadata, dict):
                try:
                    array = zarr.Array.from_dict(StorePath(self.store, name), metadata)
                    dims = _dims(array)
                except Exception:  # whatever Zarr makes of metadata that were altered
                    continue
                expected = ALWAYS.get(name, (dims, str(array.dtype)))
                if (dims, str(array.dtype)) == expected and len(dims) == array.ndim:
                    self.arrays[name] = array
                else:
                    found = f"{array.dtype} with {array.ndim} axes and the dims {dims}"
                    self.find("disagrees", file, f"is {found}; it was {expected}", name)
                return
        if own is not None:
            self.find("altered", file, "is not the metadata of an array", name)

    def _json(self, file: str, array: str | None = None) -> dict[str, Any] | None:
        """Return a file of metadata, or None, and say what is wrong with it."""
        path = self.run / file
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self.find("missing", file, "is missing", array)
        except OSError as error:
            self.find("unreadable", file, f"cannot be read: {error.strerror}", array)
        else:
            try:
                found = json.loads(data)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                return found
            what: Kind = "altered" if data else "empty"
            text = "is not what was written: no JSON of metadata" if data else "is empty"
            self.find(what, file, text, array)
        return None

    def _config(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Find what is wrong with the configuration; return the recipe in it, if there is one."""
        path = self.run / CONFIG
        self.imported = False
        try:
            config = parse_config(self.run)
            recipe, self.imported = config.get("recipe"), ORIGIN in config
        except DamagedRunError as error:
            text = str(error).removeprefix(f"{path} ").partition("\n")[0]
            self.find(fault_of(path)[0], CONFIG, text)
            return {}
        if not isinstance(recipe, dict):
            self.find("altered", CONFIG, "has no recipe")
            return {}
        try:
            digest = settings_digest(recipe)
        except TypeError:  # a date, say, which no recipe has
            digest = "of what is no recipe"
        if attrs and digest != attrs.get("run_digest"):
            text = (
                f"is not the one that the run was trained with: its digest is {digest}, that of "
                f"the trajectory {attrs.get('run_digest')}"
            )
            self.find("disagrees", CONFIG, text)
        return recipe

    # Coordinates and shapes ---------------------------------------------------------------------

    def _coordinates(self, recipe: dict[str, Any]) -> None:
        """Read the labels, and how much of the run is whole; what is lost, the recipe may know."""
        n_saved, seeds, steps = (self.whole(name) for name in ("n_saved", "seed", "step"))

        planned = recipe.get("seeds")
        if seeds is not None and isinstance(planned, list) and planned != seeds.tolist():
            text = f"has the seeds {planned}, and the trajectory {seeds.tolist()}"
            self.find("disagrees", CONFIG, text, "seed")
        if seeds is not None and (len(set(seeds.tolist())) < seeds.size or (seeds < 0).any()):
            text = f"are not distinct numbers from 0 on: {seeds.tolist()}"
            self.find("disagrees", self._first_file("seed"), text, "seed")
        if seeds is None:
            seeds = np.arange(self._size("seed"))
            if isinstance(planned, list) and [type(seed) for seed in planned] == [int] * seeds.size:
                seeds = np.array(planned)
        self.seeds = seeds

        scheduled = _scheduled(recipe)
        if steps is not None and scheduled is not None and not np.array_equal(steps, scheduled):
            text = (
                f"schedules {_summary(scheduled)}, and the trajectory has {_summary(steps)} "
                "(steps of checkpoints)"
            )
            self.find("disagrees", CONFIG, text, "step")
        if steps is not None and steps.size and (steps[0] < 0 or (np.diff(steps) <= 0).any()):
            at = np.flatnonzero(np.diff(steps, prepend=-1) <= 0)
            text = "is no more than the step before it"
            self.find("disagrees", self._first_file("step"), text, "step", steps=steps[at])
        if steps is None and scheduled is not None and scheduled.size == self._size("step"):
            steps = scheduled
        self.steps = np.array([], dtype=np.int64) if steps is None else steps
        self.n_saved = self._prefix(n_saved)
        stored = n_saved is not None and self.n_saved == n_saved
        self.counted = self.steps.size > 0 and (stored or self.n_saved > 0)
        if self._size("step") and not self.counted:
            lost = (
                "which steps were saved"
                if not self.steps.size
                else "how many checkpoints are whole"
            )
            text = f"cannot be checked any further: {lost} is lost"
            self.find("unreadable", TRAJECTORY, text)

        log_steps = self.whole("log_step")
        if log_steps is not None and not np.array_equal(log_steps, np.arange(log_steps.size)):
            text = "are not the numbers from 0 on"
            self.find("disagrees", self._first_file("log_step"), text, "log_step")
        diverged = self.whole("diverged_at", seeds=self.seeds)
        fits = diverged is not None and diverged.shape == self.seeds.shape
        self.diverged_at = diverged if fits else None

    def _prefix(self, stored: np.ndarray | None) -> int:
        """Return how many checkpoints are whole; where that is lost, what the resume file says."""
        if stored is not None:
            if 0 <= int(stored) <= self.steps.size:
                return int(stored)
            if not self.steps.size:  # the steps are lost, and so is what to count
                return 0
            text = f"is {int(stored)}, of {self.steps.size} checkpoints planned"
            self.find("disagrees", self._first_file("n_saved"), text, "n_saved")
        if self.imported:  # it came whole
            return self.steps.size
        committed = [
            step
            for path in self.run.iterdir()
            if (step := resume_step(path.name)) is not None and step in self.steps
        ]
        if not committed:
            return 0
        return int(np.searchsorted(self.steps, min(committed))) + 1

    @property
    def last(self) -> int:
        """Step of the last whole checkpoint."""
        return int(self.steps[self.n_saved - 1]) if self.n_saved else 0

    def _size(self, dim: str) -> int:
        """Return the size of a dim, 0 if no array has it; its coordinate knows best."""
        for name in (dim, *self.arrays):
            dims = _dims(self.arrays[name]) if name in self.arrays else ()
            if dim in dims:
                return self.arrays[name].shape[dims.index(dim)]
        return 0

    def _first_file(self, name: str) -> str:
        array = self.arrays[name]
        return chunk_at(name, array, (0,) * array.ndim).file

    def whole(self, name: str, seeds: Sequence[int] | np.ndarray = ()) -> np.ndarray | None:
        """Return a small array; None where it is damaged, which is then a finding."""
        array = self.arrays.get(name)
        if array is None:
            return None
        out = np.empty(array.shape, array.dtype)
        grid = [range(math.ceil(n / c)) for n, c in zip(array.shape, array.chunks, strict=True)]
        for index in itertools.product(*grid):
            chunk = chunk_at(name, array, index)
            block = self.read(name, chunk, seeds)
            if block is None:
                return None
            out[chunk.region] = block
        return out

    def read(
        self,
        name: str,
        chunk: Chunk,
        seeds: Sequence[int] | np.ndarray,
        steps: Sequence[int] | np.ndarray = (),
    ) -> np.ndarray | None:
        """Return a chunk; None where it is damaged, which is then a finding."""
        try:
            try:
                return read_chunk(self.run, self.arrays[name], chunk)
            except ChunkError:  # perhaps it was being replaced
                return read_chunk(self.run, self.arrays[name], chunk)
        except ChunkError as fault:
            self.find(fault.what, chunk.file, str(fault), name, seeds, steps)
            return None

    def _shapes(self) -> None:
        """Find arrays whose dims or sizes are not those of the others; they are not read."""
        known: dict[str, int] = {"seed": self.seeds.size, "step": self._size("step")}
        if self.steps.size:
            known["log_step"] = int(self.steps[-1])
        self.fitting: dict[str, zarr.Array] = {}
        for name, array in self.arrays.items():
            dims, problems = _dims(array), []
            parameter = name not in ALWAYS and not is_constant(array)
            if parameter and dims[:2] != ("seed", "step"):
                problems.append(
                    f"has the dims {', '.join(dims)}; those of a parameter begin with seed, step"
                )
            if parameter and array.dtype != np.float32:
                problems.append(f"is {array.dtype}, not float32")
            problems += [
                f"has {size} along {dim}, where the others have {known[dim]}"
                for dim, size in zip(dims, array.shape, strict=True)
                if known.setdefault(dim, size) != size
            ]
            if problems:
                file = f"{TRAJECTORY}/{name}/{_METADATA}"
                self.find("disagrees", file, "; ".join(problems), name)
            else:
                self.fitting[name] = array


def _dims(array: zarr.Array) -> tuple[str, ...]:
    return tuple(map(str, getattr(array.metadata, "dimension_names", None) or ()))


def _mapping(found: object) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def fault_of(path: Path) -> tuple[Fault, str]:
    """Return what is wrong with a file that could not be used, and why it cannot be read."""
    try:
        with path.open("rb") as file:
            return ("altered" if file.read(1) else "empty"), ""
    except FileNotFoundError:
        return "missing", ""
    except OSError as error:
        return "unreadable", error.strerror or str(error)


def _scheduled(recipe: dict[str, Any]) -> np.ndarray | None:
    """Return the steps that a recipe says are saved, None where it does not say."""
    try:
        if "steps" in recipe:  # as of a run that was imported
            return np.array([int(step) for step in recipe["steps"]], dtype=np.int64)
        schedule = Schedule.model_validate(recipe["checkpoints"])
        return schedule.steps(int(recipe["n_steps"]))
    except (KeyError, ValueError, TypeError, pydantic.ValidationError):
        return None


def _summary(steps: np.ndarray) -> str:
    return f"{steps.size:,} up to {steps[-1]:,}" if steps.size else "none"
