"""Look a whole run over for what is lost, altered, or left behind by a writer that was killed.

Nothing is locked and nothing written. A writer may be at work: what is judged is the prefix that
was whole when the look began, which does not change any more.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zarr

from mechicl.checkpoints.chunks import Chunk, ChunkError, chunk_at, read_chunk
from mechicl.checkpoints.claim import is_written
from mechicl.checkpoints.files import PARTIAL, load_arrays
from mechicl.checkpoints.findings import Finding
from mechicl.checkpoints.inspection import ALWAYS, Inspection, fault_of
from mechicl.checkpoints.layout import REPLACED, TRAJECTORY, is_constant, resume_name, resume_step
from mechicl.checkpoints.reader import require_run
from mechicl.errors import DamagedRunError, InputError

JUMP = 100.0
"""How many times faster than around it a parameter changes where that is a jump."""

_NEIGHBOURS = 4  # checkpoints on either side that a change is held against
_FEWEST_NEIGHBOURS = 3


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


class _Verification(Inspection):
    """The findings on one run, in the order of its files."""

    def __init__(self, run: Path) -> None:
        was_written = is_written(run)
        super().__init__(run)
        self._parameters()
        self._loss()
        self._constants()
        if not self.imported:
            self._resume()
        if not (was_written or is_written(run)):
            self._leftovers()

    def _parameters(self) -> None:
        """Find chunks of parameters that are damaged, and values that cannot be right."""
        names = [
            name for name, a in self.fitting.items() if name not in ALWAYS and not is_constant(a)
        ]
        pairs = max(0, self.n_saved - 1)
        repeated = np.full((self.seeds.size, pairs), bool(names))
        for name in names:
            same, change = self._parameter(name, self.fitting[name])
            repeated &= same
            self._jumps(name, self.fitting[name], change)
        for seeds, steps in _grouped(repeated, self.seeds, self.steps[1 : self.n_saved]):
            text = "all parameters are bit for bit those of the checkpoint before"
            self.find("duplicate", TRAJECTORY, text, None, seeds, steps, severity="remark")

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
                block = self.read(name, chunk, seeds, steps)
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
            self.find("not_finite", chunk.file, text, name, seeds, at)
        for seeds, at in _grouped(finite.any(-1) & gone, self.seeds[rows], steps):
            text = "has numbers where diverged_at says that the seed had diverged"
            self.find("disagrees", chunk.file, text, name, seeds, at)

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
                self.find("jump", file, text, name, seeds, at, severity="remark")

    def _loss(self) -> None:
        array = self.fitting.get("loss")
        if array is None:
            return
        for row in range(math.ceil(self.last / array.chunks[1])):
            for first in range(math.ceil(array.shape[0] / array.chunks[0])):
                chunk = chunk_at("loss", array, (first, row))
                rows, columns = chunk.region
                steps = np.arange(columns.start, min(columns.stop, self.last))
                block = self.read("loss", chunk, self.seeds[rows], steps)
                if block is None or self.diverged_at is None:
                    continue
                known = block[:, : steps.size]
                bad = np.isinf(known) if self.imported else ~np.isfinite(known)
                bad &= ~(steps[None] >= self.diverged_at[rows, None])
                for seeds, at in _grouped(bad, self.seeds[rows], steps):
                    text = "is not finite before the seed diverged, if it did"
                    self.find("not_finite", chunk.file, text, "loss", seeds, at)

    def _constants(self) -> None:
        for name, array in self.fitting.items():
            if name not in ALWAYS and is_constant(array):
                self.whole(name)

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
                what, why = fault_of(path)
                done = self.n_saved == self.steps.size
                text = str(error).removeprefix(f"{path} ")
                if what == "unreadable":  # safetensors takes it for missing
                    text = f"cannot be read: {why}"
                if done:
                    text = f"{text.partition(':')[0].partition(';')[0]}; the run is complete"
                severity = "remark" if done else "damage"
                self.find(what, path.name, text, severity=severity)
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
            self.find("leftover", path.name, text, severity="remark")
        for path in sorted((self.run / TRAJECTORY).rglob(f"*{PARTIAL}")):
            name = path.relative_to(self.run / TRAJECTORY).parts[0]
            array = name if name in self.arrays else None
            text = "was never finished: its writer was killed; delete it"
            file = path.relative_to(self.run).as_posix()
            self.find("leftover", file, text, array, severity="remark")


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
