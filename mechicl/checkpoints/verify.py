"""Look a whole run over for what is lost, altered, or left behind by a writer that was killed.

Nothing is locked and nothing written. A writer may be at work: what is judged is the prefix that
was whole when the look began, which does not change any more.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import zarr
from zarr.storage import LocalStore, StorePath

from mechicl.checkpoints.chunks import Chunk, ChunkError, Fault, chunk_at, read_chunk
from mechicl.checkpoints.claim import is_written
from mechicl.checkpoints.files import PARTIAL, load_arrays
from mechicl.checkpoints.layout import (
    CONFIG,
    REPLACED,
    TRAJECTORY,
    is_constant,
    resume_name,
    resume_step,
    settings_digest,
)
from mechicl.checkpoints.reader import open_group, parse_config, require_run
from mechicl.checkpoints.schedule import Schedule
from mechicl.errors import DamagedRunError, InputError

Kind = Literal[Fault, "not_finite", "disagrees", "duplicate", "jump", "leftover"]
"""What a finding is about: a fault of a file, or values and files that do not go together."""

JUMP = 100.0
"""How many times faster than around it a parameter changes where that is a jump."""

_NEIGHBOURS = 4  # checkpoints on either side that a change is held against
_FEWEST_NEIGHBOURS = 3
_METADATA = "zarr.json"
_ALWAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "seed": (("seed",), "int64"),
    "step": (("step",), "int64"),
    "log_step": (("log_step",), "int64"),
    "loss": (("seed", "log_step"), "float32"),
    "diverged_at": (("seed",), "float64"),
    "n_saved": ((), "int64"),
}
"""Dims and type of what every trajectory has."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run.

    Attributes
    ----------
    what
        In a word.
    severity
        `damage` where data are lost or wrong, or the run cannot be continued; `remark` for what
        does no harm, or may be right.
    array, seeds, steps
        Which numbers it touches: seeds by label, steps of checkpoints (of `loss`: log steps); None
        and empty where it is not about one array, or about all of it.
    file
        Where, relative to the run.
    message
        What is wrong with it.
    """

    what: Kind
    severity: Literal["damage", "remark"]
    file: str
    message: str
    array: str | None = None
    seeds: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


def verify(run_dir: Path | str) -> list[Finding]:
    """Return all that is wrong with a run, from its metadata to every chunk of every checkpoint.

    Found are files that are missing, empty, cut short or altered; metadata, shapes and a
    configuration that do not go together; values that are not finite, but for a seed after it
    diverged; checkpoints equal to the one before, and changes `JUMP` times as fast as around them;
    and what a killed writer left behind. It reads chunk by chunk, in memory for a few of them.

    Raises
    ------
    InputError, NothingToAnalyseError
        As `require_run`, or for a schema that this version does not read, or for a URL.
    DamagedRunError
        There is something called `trajectory.zarr`, and it is no directory.
    """
    if not str(run_dir).strip():
        raise InputError("a path cannot be empty; give the directory of a run")
    run = Path(run_dir)
    try:
        required = require_run(run_dir)
    except DamagedRunError:
        if not (run / TRAJECTORY).is_dir():
            raise
    else:
        if not isinstance(required, Path):
            raise InputError(f"{run_dir} is not local; copy it to a local directory to verify it")
    return _Verification(run).findings


class _Verification:
    """The findings on one run, in the order of its files."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.findings: list[Finding] = []
        self.store = LocalStore(run / TRAJECTORY, read_only=True)
        was_written = is_written(run)

        attrs = self._metadata()
        recipe = self._config(attrs)
        self._coordinates(recipe)
        self._shapes()
        self._parameters()
        self._loss()
        self._constants()
        self._resume()
        if not (was_written or is_written(run)):
            self._leftovers()

    def _find(
        self,
        what: Kind,
        file: str,
        message: str,
        array: str | None = None,
        seeds: Sequence[int] | np.ndarray = (),
        steps: Sequence[int] | np.ndarray = (),
        *,
        severity: Literal["damage", "remark"] = "damage",
    ) -> None:
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
                self._find("altered", file, text)
        root = root or {}
        consolidated = _mapping(_mapping(root.get("consolidated_metadata")).get("metadata"))
        if usable and not consolidated:
            text = "has lost its consolidated metadata, and opens more slowly without them"
            self._find("missing", file, text, severity="remark")

        folders = [path.parent.name for path in (self.run / TRAJECTORY).glob(f"*/{_METADATA}")]
        self.arrays: dict[str, zarr.Array] = {}
        for name in sorted({*consolidated, *folders}):
            self._array_metadata(name, consolidated)
        for name in _ALWAYS:
            if name not in {*consolidated, *folders}:
                self._find("missing", f"{TRAJECTORY}/{name}/{_METADATA}", "is missing", name)
        return _mapping(root.get("attributes"))

    def _array_metadata(self, name: str, consolidated: dict[str, Any]) -> None:
        file = f"{TRAJECTORY}/{name}/{_METADATA}"
        own, theirs = self._json(file, name), consolidated.get(name)
        if own is not None and consolidated and own != theirs:
            keys = sorted(key for key in own if own[key] != _mapping(theirs).get(key))
            text = "is not in" if theirs is None else f"differs in {', '.join(keys)} from"
            text = f"{text} the consolidated metadata in {TRAJECTORY}/{_METADATA}"
            self._find("disagrees", file, text, name)
        for metadata in (theirs, own):  # the first is what readers go by
            if isinstance(metadata, dict):
                try:
                    array = zarr.Array.from_dict(StorePath(self.store, name), metadata)
                    dims = _dims(array)
                except Exception:  # whatever Zarr makes of metadata that were altered
                    continue
                expected = _ALWAYS.get(name, (dims, str(array.dtype)))
                if (dims, str(array.dtype)) == expected and len(dims) == array.ndim:
                    self.arrays[name] = array
                else:
                    found = f"{array.dtype} with {array.ndim} axes and the dims {dims}"
                    self._find("disagrees", file, f"is {found}; it was {expected}", name)
                return
        if own is not None:
            self._find("altered", file, "is not the metadata of an array", name)

    def _json(self, file: str, array: str | None = None) -> dict[str, Any] | None:
        """Return a file of metadata, or None, and say what is wrong with it."""
        path = self.run / file
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self._find("missing", file, "is missing", array)
        except OSError as error:
            self._find("unreadable", file, f"cannot be read: {error.strerror}", array)
        else:
            try:
                found = json.loads(data)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                return found
            what: Kind = "altered" if data else "empty"
            text = "is not what was written: no JSON of metadata" if data else "is empty"
            self._find(what, file, text, array)
        return None

    def _config(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Find what is wrong with the configuration; return the recipe in it, if there is one."""
        path = self.run / CONFIG
        try:
            recipe = parse_config(self.run).get("recipe")
        except DamagedRunError as error:
            text = str(error).removeprefix(f"{path} ").partition("\n")[0]
            self._find(_fault(path)[0], CONFIG, text)
            return {}
        if not isinstance(recipe, dict):
            self._find("altered", CONFIG, "has no recipe")
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
            self._find("disagrees", CONFIG, text)
        return recipe

    # Coordinates and shapes ---------------------------------------------------------------------

    def _coordinates(self, recipe: dict[str, Any]) -> None:
        """Read the labels, and how much of the run is whole; what is lost, the recipe may know."""
        n_saved, seeds, steps = (self._whole(name) for name in ("n_saved", "seed", "step"))

        planned = recipe.get("seeds")
        if seeds is not None and isinstance(planned, list) and planned != seeds.tolist():
            text = f"has the seeds {planned}, and the trajectory {seeds.tolist()}"
            self._find("disagrees", CONFIG, text, "seed")
        if seeds is not None and (len(set(seeds.tolist())) < seeds.size or (seeds < 0).any()):
            text = f"are not distinct numbers from 0 on: {seeds.tolist()}"
            self._find("disagrees", self._first_file("seed"), text, "seed")
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
            self._find("disagrees", CONFIG, text, "step")
        if steps is not None and steps.size and (steps[0] < 0 or (np.diff(steps) <= 0).any()):
            at = np.flatnonzero(np.diff(steps, prepend=-1) <= 0)
            text = "is no more than the step before it"
            self._find("disagrees", self._first_file("step"), text, "step", steps=steps[at])
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
            self._find("unreadable", TRAJECTORY, text)

        log_steps = self._whole("log_step")
        if log_steps is not None and not np.array_equal(log_steps, np.arange(log_steps.size)):
            text = "are not the numbers from 0 on"
            self._find("disagrees", self._first_file("log_step"), text, "log_step")
        diverged = self._whole("diverged_at", seeds=self.seeds)
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
            self._find("disagrees", self._first_file("n_saved"), text, "n_saved")
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

    def _whole(self, name: str, seeds: Sequence[int] | np.ndarray = ()) -> np.ndarray | None:
        """Return a small array; None where it is damaged, which is then a finding."""
        array = self.arrays.get(name)
        if array is None:
            return None
        out = np.empty(array.shape, array.dtype)
        grid = [range(math.ceil(n / c)) for n, c in zip(array.shape, array.chunks, strict=True)]
        for index in itertools.product(*grid):
            chunk = chunk_at(name, array, index)
            block = self._read(name, chunk, seeds)
            if block is None:
                return None
            out[chunk.region] = block
        return out

    def _read(
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
            self._find(fault.what, chunk.file, str(fault), name, seeds, steps)
            return None

    def _shapes(self) -> None:
        """Find arrays whose dims or sizes are not those of the others; they are not read."""
        known: dict[str, int] = {"seed": self.seeds.size, "step": self._size("step")}
        if self.steps.size:
            known["log_step"] = int(self.steps[-1])
        self.fitting: dict[str, zarr.Array] = {}
        for name, array in self.arrays.items():
            dims, problems = _dims(array), []
            parameter = name not in _ALWAYS and not is_constant(array)
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
                self._find("disagrees", file, "; ".join(problems), name)
            else:
                self.fitting[name] = array

    # Contents -----------------------------------------------------------------------------------

    def _parameters(self) -> None:
        """Find chunks of parameters that are damaged, and values that cannot be right."""
        names = [
            name for name, a in self.fitting.items() if name not in _ALWAYS and not is_constant(a)
        ]
        pairs = max(0, self.n_saved - 1)
        repeated = np.full((self.seeds.size, pairs), bool(names))
        for name in names:
            same, change = self._parameter(name, self.fitting[name])
            repeated &= same
            self._jumps(name, self.fitting[name], change)
        for seeds, steps in _grouped(repeated, self.seeds, self.steps[1 : self.n_saved]):
            text = "all parameters are bit for bit those of the checkpoint before"
            self._find("duplicate", TRAJECTORY, text, None, seeds, steps, severity="remark")

    def _parameter(self, name: str, array: zarr.Array) -> tuple[np.ndarray, np.ndarray]:
        """Read a parameter whole; return what each checkpoint differs in from the one before.

        Returns
        -------
        same, change
            Whether they are bit-identical, and the norm of the difference, (seed, step - 1); False
            and NaN where a value is not finite or was not read.
        """
        n = self.n_saved
        same = np.full((self.seeds.size, max(0, n - 1)), True)
        squares = np.zeros(same.shape)
        grid = [range(math.ceil(s / c)) for s, c in zip(array.shape, array.chunks, strict=True)]
        for first, *inner in itertools.product(grid[0], *grid[2:]):
            before: np.ndarray | None = None
            for row in range(math.ceil(n / array.chunks[1])):
                chunk = chunk_at(name, array, (first, row, *inner))
                rows, start = chunk.region[0], chunk.region[1].start
                stop = min(chunk.region[1].stop, n)
                seeds, steps = self.seeds[rows], self.steps[start:stop]
                block = self._read(name, chunk, seeds, steps)
                if block is None:
                    lost = slice(max(0, start - 1), stop)  # also the change to what follows
                    same[rows, lost], squares[rows, lost] = False, np.nan
                    before = None
                    continue
                block = block[:, : stop - start].reshape(len(seeds), stop - start, -1)
                self._finite(name, chunk, rows, steps, block)
                if before is not None:
                    block = np.concatenate([before, block], axis=1)
                    start -= 1
                before = block[:, -1:].copy()
                between = slice(start, stop - 1)
                with np.errstate(invalid="ignore", over="ignore"):
                    difference = np.diff(block, axis=1)
                    norm = np.einsum("stk,stk->st", difference, difference, dtype=np.float64)
                sound = np.asarray(np.isfinite(block).all(axis=-1))
                finite = sound[:, 1:] & sound[:, :-1]
                squares[rows, between] += np.where(finite, norm, np.nan)
                bits = block.view(f"u{block.dtype.itemsize}")
                same[rows, between] &= (bits[:, 1:] == bits[:, :-1]).all(-1) & finite
        return same, np.sqrt(squares)

    def _finite(
        self, name: str, chunk: Chunk, rows: slice, steps: np.ndarray, block: np.ndarray
    ) -> None:
        """Find values that are not finite before a seed diverged, and finite ones after."""
        if self.diverged_at is None:  # it is lost, and with it what may be NaN
            return
        finite = np.isfinite(block)
        gone = steps[None] > self.diverged_at[rows, None]
        for seeds, at in _grouped(~finite.all(-1) & ~gone, self.seeds[rows], steps):
            these = block[np.isin(self.seeds[rows], seeds)][:, np.isin(steps, at)]
            kinds = "NaN" if np.isnan(these).any() else "infinities"
            text = f"has {kinds} in checkpoints that are committed"
            self._find("not_finite", chunk.file, text, name, seeds, at)
        for seeds, at in _grouped(finite.any(-1) & gone, self.seeds[rows], steps):
            text = "has numbers where diverged_at says that the seed had diverged"
            self._find("disagrees", chunk.file, text, name, seeds, at)

    def _jumps(self, name: str, array: zarr.Array, change: np.ndarray) -> None:
        """Find steps at which a parameter changes out of all proportion to its neighbours."""
        steps = self.steps[: self.n_saved]
        if change.shape[1] <= _FEWEST_NEIGHBOURS:
            return
        rate = change / np.maximum(np.diff(steps), 1)
        usual = _around(rate)
        jumps = rate > JUMP * usual  # False where either is NaN
        parts = math.prod(array.shape[2:]) > math.prod(array.chunks[2:])
        length = array.chunks[1]
        for row in range(math.ceil(steps.size / length)):
            inside = slice(max(0, row * length - 1), (row + 1) * length - 1)
            index = (0, row, *(0 for _ in array.shape[2:]))
            file = f"{TRAJECTORY}/{name}" if parts else chunk_at(name, array, index).file
            for seeds, at in _grouped(jumps[:, inside], self.seeds, steps[1:][inside]):
                rows, columns = np.isin(self.seeds, seeds), np.isin(steps[1:], at)
                times = (rate[rows][:, columns] / usual[rows][:, columns]).max()
                text = f"changes {times:,.0f} times as fast as in the checkpoints around"
                self._find("jump", file, text, name, seeds, at, severity="remark")

    def _loss(self) -> None:
        array = self.fitting.get("loss")
        if array is None:
            return
        for row in range(math.ceil(self.last / array.chunks[1])):
            for first in range(math.ceil(array.shape[0] / array.chunks[0])):
                chunk = chunk_at("loss", array, (first, row))
                rows, columns = chunk.region
                steps = np.arange(columns.start, min(columns.stop, self.last))
                block = self._read("loss", chunk, self.seeds[rows], steps)
                if block is None or self.diverged_at is None:
                    continue
                bad = ~np.isfinite(block[:, : steps.size])
                bad &= ~(steps[None] >= self.diverged_at[rows, None])
                for seeds, at in _grouped(bad, self.seeds[rows], steps):
                    text = "is not finite before the seed diverged, if it did"
                    self._find("not_finite", chunk.file, text, "loss", seeds, at)

    def _constants(self) -> None:
        for name, array in self.fitting.items():
            if name not in _ALWAYS and is_constant(array):
                self._whole(name)

    # What a writer leaves -----------------------------------------------------------------------

    def _resume(self) -> None:
        """Find whether the optimiser state of the last commit is there, also beside a writer."""
        while self.n_saved:
            path = self.run / resume_name(self.last)
            try:
                load_arrays(path)
                return
            except DamagedRunError as error:
                now = self._committed()
                if self.n_saved < now <= self.steps.size:
                    self.n_saved = now  # a writer has gone on, and has done away with that file
                    continue
                what, why = _fault(path)
                done = self.n_saved == self.steps.size
                text = str(error).removeprefix(f"{path} ")
                if what == "unreadable":  # safetensors takes it for missing
                    text = f"cannot be read: {why}"
                if done:
                    text = f"{text.partition(':')[0].partition(';')[0]}; the run is complete"
                severity = "remark" if done else "damage"
                self._find(what, path.name, text, severity=severity)
                return

    def _committed(self) -> int:
        try:
            array = self.arrays["n_saved"]
            return int(read_chunk(self.run, array, chunk_at("n_saved", array, ())))
        except (KeyError, ChunkError):
            return 0

    def _leftovers(self) -> None:
        for path in sorted(self.run.iterdir()):
            step = resume_step(path.name)
            if path.name.startswith(REPLACED):
                text = "is an earlier run, set aside while it was replaced; delete it"
            elif step is not None and self.counted and (not self.n_saved or step != self.last):
                text = "is not of the last commit: a commit was cut short; --resume removes it"
            elif path.name.endswith(PARTIAL):
                text = "was never finished: its writer was killed; delete it"
            else:
                continue
            self._find("leftover", path.name, text, severity="remark")
        for path in sorted((self.run / TRAJECTORY).rglob(f"*{PARTIAL}")):
            name = path.relative_to(self.run / TRAJECTORY).parts[0]
            array = name if name in self.arrays else None
            text = "was never finished: its writer was killed; delete it"
            file = path.relative_to(self.run).as_posix()
            self._find("leftover", file, text, array, severity="remark")


def _dims(array: zarr.Array) -> tuple[str, ...]:
    return tuple(map(str, getattr(array.metadata, "dimension_names", None) or ()))


def _mapping(found: object) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _fault(path: Path) -> tuple[Fault, str]:
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
        schedule = Schedule.model_validate(recipe["checkpoints"])
        return schedule.steps(int(recipe["n_steps"]))
    except (KeyError, ValueError, TypeError, pydantic.ValidationError):
        return None


def _summary(steps: np.ndarray) -> str:
    return f"{steps.size:,} up to {steps[-1]:,}" if steps.size else "none"


def _grouped(
    mask: np.ndarray, seeds: np.ndarray, steps: np.ndarray
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the seeds and steps at which a mask is True, seeds with the same steps together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for seed, row in zip(seeds.tolist(), mask, strict=True):
        if row.any():
            groups.setdefault(tuple(steps[row].tolist()), []).append(seed)
    for at, those in groups.items():
        yield those, list(at)


def _around(rate: np.ndarray) -> np.ndarray:
    """Return the median of the rates around each, itself left out; NaN where there are too few.

    Rates of 0 do not count: a parameter that stands still for a while has none to compare with. Of
    an even number the lower middle counts, so that two large ones beside each other, of a wrong
    checkpoint, are both seen.
    """
    width = _NEIGHBOURS
    padded = np.pad(np.where(rate > 0, rate, np.nan), ((0, 0), (width, width)), "constant")
    padded[:, :width] = padded[:, padded.shape[1] - width :] = np.nan
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1, axis=1).copy()
    windows[:, :, width] = np.nan
    windows.sort(axis=-1)  # NaN last
    count = (~np.isnan(windows)).sum(-1)
    middle = np.maximum(count - 1, 0) // 2
    median = np.take_along_axis(windows, middle[..., None], axis=-1)[..., 0]
    return np.where(count >= _FEWEST_NEIGHBOURS, median, np.nan)
