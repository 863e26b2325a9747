"""Write a trajectory so that a reader, and whoever continues it, finds whole checkpoints alone.

A commit writes chunks, then the optimiser state, then the number of whole checkpoints. Whatever
stops it, that number counts what is complete.
"""

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import yaml
from jaxtyping import Float32, Float64, Shaped

from mechicl.checkpoints.claim import (
    RunLock,
    explained,
    remove_replaced,
    require_free,
    set_aside,
)
from mechicl.checkpoints.files import DurableStore, load_arrays, save_arrays, write_file
from mechicl.checkpoints.layout import (
    CONFIG,
    RESERVED,
    TRAJECTORY,
    Plan,
    allocate,
    is_constant,
    resume_files,
    resume_name,
)
from mechicl.checkpoints.reader import (
    is_url,
    open_group,
    read_array,
    read_diverged,
    read_n_saved,
    require_run,
)
from mechicl.errors import InputError, MechiclError

if TYPE_CHECKING:
    import zarr

Resume = Mapping[str, Shaped[np.ndarray, "..."]]


@dataclass(frozen=True)
class Checkpoint:
    """What is saved of a training at one step.

    Parameters
    ----------
    parameters
        Float32, each ``(seed, ...)``, finite, or NaN where a seed has overflowed.
    loss
        Training loss of each update since the previous checkpoint, float32; infinities and NaN are
        kept as they are.
    diverged_at
        Step at which the loss of a seed became non-finite, before this step; NaN: it has not.
    resume
        State of the optimiser and of all else that continuing needs, beside the parameters: arrays,
        or a function that gives them, called if this checkpoint is the last of a commit.
    """

    parameters: Mapping[str, Float32[np.ndarray, "seed ..."]]
    loss: Float32[np.ndarray, "seed log_step"]
    diverged_at: Float64[np.ndarray, " seed"]
    resume: Resume | Callable[[], Resume] = field(default_factory=dict)


@dataclass(frozen=True)
class _Latest:
    """What the last checkpoint added, replaced in one go, so that no interrupt can split it."""

    n_added: int
    diverged_at: np.ndarray
    resume: Resume | Callable[[], Resume]


class TrajectoryWriter:
    """The one writer of a run: ``with TrajectoryWriter.create(...) as writer: writer.add(...)``.

    Leaving the block commits what was added, also when an exception leaves it, and releases the
    run.

    Attributes
    ----------
    run_dir
        The directory of the run.
    steps
        Steps of all planned checkpoints, ``(step,)`` int64.
    n_saved
        Number of checkpoints that are committed; ``steps[n_saved]`` is the next to add after
        `create` or `resume`.
    resume_state
        Arrays of `Checkpoint.resume` as last committed when the run was opened.
    """

    @classmethod
    def create(
        cls,
        run_dir: Path | str,
        plan: Plan,
        config: Mapping[str, object],
        *,
        overwrite: bool = False,
        commit_seconds: float = 10.0,
    ) -> Self:
        """Begin a run in `run_dir`, a new or empty directory.

        Parameters
        ----------
        run_dir, plan, config
            Where, what, and the resolved recipe, plain YAML types.
        overwrite
            Replace the run that is in `run_dir`: its files, and no others that lie there. They are
            set aside until the new run has begun.
        commit_seconds
            Longest time between commits.

        Raises
        ------
        InputError
            `run_dir` holds something (with `overwrite`: something that is not a run), or `config`
            is not plain YAML.
        RunLockedError
            Another process is writing this run.
        MechiclError
            The machine refused: no space, no permission.
        """
        if is_url(run_dir):
            raise InputError(f"{run_dir} is not local; train into a local directory, then copy it")
        run = Path(run_dir)
        text = _yaml(config)
        require_free(run, overwrite=overwrite)
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MechiclError(f"cannot make the directory {run}: {error.strerror}") from error
        lock = RunLock(run)
        try:
            # Looked at again: another process may have begun a run here in between.
            require_free(run, overwrite=overwrite)
            with explained(f"cannot begin a run in {run}"):
                if overwrite:
                    set_aside(run)
                write_file(run / CONFIG, text.encode())
                allocate(run, plan)
                remove_replaced(run)
            return cls(run, lock, commit_seconds)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(cls, run_dir: Path | str, *, commit_seconds: float = 10.0) -> Self:
        """Continue the run in `run_dir` after its last commit; what lies beyond is overwritten.

        Raises
        ------
        InputError, NothingToAnalyseError
            `run_dir` is not a run that has begun, see `require_run`; or a later mechicl wrote it.
        DamagedRunError
            What continuing needs is missing or altered.
        RunLockedError
            Another process is writing this run.
        """
        run = require_run(run_dir)
        if not isinstance(run, Path):
            raise InputError(f"{run} can be read but not continued; copy it to a local directory")
        lock = RunLock(run)
        try:
            writer = cls(run, lock, commit_seconds)
            with explained(f"cannot remove what a kill has left in {run}"):
                writer._remove_old_states()
                remove_replaced(run)
            return writer
        except BaseException:
            lock.release()
            raise

    def __init__(self, run: Path, lock: RunLock, commit_seconds: float) -> None:
        self.run_dir = run
        self._lock = lock
        self._commit_seconds = commit_seconds
        self._group = group = open_group(run, DurableStore(run / TRAJECTORY), "r+")
        self.n_saved = read_n_saved(run, group)
        self.steps = read_array(run, group, "step")

        # Chunks are written even if all NaN, so that a lost one can be told from an empty one.
        self._arrays: dict[str, zarr.Array] = {
            name: array.with_config({"write_empty_chunks": True})
            for name, array in sorted(group.arrays())
        }
        self._parameters = [
            name
            for name, array in self._arrays.items()
            if name not in RESERVED and not is_constant(array)
        ]
        self._chunk_steps = self._arrays[self._parameters[0]].chunks[1]
        self._chunk_log_steps = self._arrays["loss"].chunks[1]
        self._refill()

        last = self._step(self.n_saved)
        self.resume_state: dict[str, np.ndarray] = {}
        if self.n_saved:
            self.resume_state = load_arrays(run / resume_name(last))
        diverged_at = read_diverged(run, group, last)
        self._latest = _Latest(self.n_saved, diverged_at, self.resume_state)
        self._error: BaseException | None = None
        self._writing = ""
        self._last_commit = time.monotonic()
        # A commit runs in a thread, so that an interrupt of the main one cannot cut it short.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mechicl-commit")

    def _step(self, n: int) -> int:
        """Return the step of the last of the first `n` checkpoints."""
        return int(self.steps[n - 1]) if n else 0

    def _refill(self) -> None:
        """Fill the buffers with the part of the current chunks that is committed.

        Chunks are always rewritten whole, so what is not in the buffers would be lost.
        """
        steps, length, chunk = self.steps, self._chunk_steps, self._chunk_log_steps
        self._start = self.n_saved // length * length
        self._blocks: dict[str, np.ndarray] = {}
        committed = (slice(None), slice(self._start, self.n_saved))
        for name in self._parameters:
            shape = self._arrays[name].shape
            block = np.full((shape[0], length, *shape[2:]), np.nan, dtype=np.float32)
            if self._start < self.n_saved:
                block[:, : self.n_saved - self._start] = self._read(name, committed)
            self._blocks[name] = block

        last = self._step(self.n_saved)
        self._log_start = last // chunk * chunk
        starts = np.arange(0, len(steps), length)
        ends = np.minimum(starts + length, len(steps)) - 1
        longest = int((steps[ends] - np.where(starts > 0, steps[starts - 1], 0)).max())
        capacity = (math.ceil(longest / chunk) + 1) * chunk
        n_seeds = self._arrays["seed"].shape[0]
        self._loss = np.full((n_seeds, capacity), np.nan, dtype=np.float32)
        if self._log_start < last:
            known = self._read("loss", (slice(None), slice(self._log_start, last)))
            self._loss[:, : last - self._log_start] = known

    def _read(self, name: str, where: object) -> np.ndarray:
        return read_array(self.run_dir, self._group, name, where)

    @property
    def diverged_at(self) -> Float64[np.ndarray, " seed"]:
        """Step at which each seed diverged, as last added or, after `resume`, committed."""
        return self._latest.diverged_at.copy()

    def last_parameters(self) -> dict[str, Float32[np.ndarray, "seed ..."]]:
        """Return the parameters of the last committed checkpoint, none if there is none.

        Raises
        ------
        DamagedRunError
            A chunk of them is not what was written.
        """
        if self.n_saved == 0:
            return {}
        where = (slice(None), self.n_saved - 1)
        return {name: self._read(name, where) for name in self._parameters}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # What could not be written a moment ago is not tried again.
            if error is None or error is not self._error:
                self.commit()
        finally:
            self._pool.shutdown()
            self._lock.release()

    def add(self, checkpoint: Checkpoint) -> None:
        """Take the next checkpoint, copied; commit when a chunk is full or the time has come.

        Raises
        ------
        InputError
            All planned checkpoints have been added, or this one has not what the plan says.
        MechiclError
            It could not be written.
        """
        if self._latest.n_added == self._start + self._chunk_steps:
            self.commit()  # the chunk is full still: an earlier commit failed
        n_added = self._latest.n_added
        if n_added == len(self.steps):
            raise InputError(f"all {n_added} planned checkpoints of {self.run_dir} are written")
        self._check(checkpoint)
        for name, block in self._blocks.items():
            block[:, n_added - self._start] = checkpoint.parameters[name]
        since, until = self._step(n_added) - self._log_start, self.steps[n_added] - self._log_start
        self._loss[:, since:until] = checkpoint.loss
        resume = checkpoint.resume
        if not callable(resume):
            resume = {name: np.array(array, order="C") for name, array in resume.items()}
        self._latest = _Latest(n_added + 1, np.array(checkpoint.diverged_at), resume)
        if n_added + 1 == self._start + self._chunk_steps:
            self.commit()
        else:
            self.commit_if_due()

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raise one InputError that lists what of `checkpoint` is not as planned."""
        step = int(self.steps[self._latest.n_added])
        n_seeds = self._arrays["seed"].shape[0]
        given = checkpoint.parameters
        problems = [f"{name} is missing" for name in self._parameters if name not in given]
        problems += [f"{name} is not planned" for name in given if name not in self._blocks]
        n_losses = step - self._step(self._latest.n_added)
        expected: dict[str, tuple[object, type, tuple[int, ...]]] = {
            name: (given[name], np.float32, (n_seeds, *self._arrays[name].shape[2:]))
            for name in self._parameters
            if name in given
        }
        expected["loss"] = (checkpoint.loss, np.float32, (n_seeds, n_losses))
        expected["diverged_at"] = (checkpoint.diverged_at, np.float64, (n_seeds,))
        for name, (array, dtype, shape) in expected.items():
            found = (getattr(array, "dtype", type(array)), getattr(array, "shape", ()))
            if found != (dtype, shape):
                problems.append(f"{name} is {found[0]} {found[1]}, not {np.dtype(dtype)} {shape}")
            elif name in given and np.isinf(given[name]).any():
                problems.append(f"{name} is infinite; give NaN for a seed that has overflowed")
        diverged = np.asarray(checkpoint.diverged_at)
        if not problems and ((diverged < 0) | (diverged >= step)).any():
            problems.append(f"diverged_at is {diverged}, not before step {step}")
        problems += [
            f"resume array {name} is {np.asarray(array).dtype}, not numbers"
            for name, array in ({} if callable(checkpoint.resume) else checkpoint.resume).items()
            if np.asarray(array).dtype.kind not in "biuf"
        ]
        if problems:
            raise InputError(f"checkpoint at step {step}: " + "; ".join(problems))

    def commit_if_due(self) -> None:
        """Commit if the last commit is `commit_seconds` old; cheap, for every turn of a loop."""
        if time.monotonic() - self._last_commit >= self._commit_seconds:
            self.commit()

    def commit(self) -> None:
        """Write what has been added since the last commit, if anything.

        Raises
        ------
        MechiclError
            It could not be written; what was committed before is as it was.
        """
        if self._latest.n_added == self.n_saved:
            return
        future = self._pool.submit(self._write)
        try:
            future.result()
        except BaseException as error:
            # This waits: a commit that has begun is finished before an interrupt goes on.
            if error is future.exception():
                self._error = error
            raise
        self._last_commit = time.monotonic()

    def _write(self) -> None:
        latest = self._latest
        last = self._step(latest.n_added)
        self._lock.require()
        try:
            self._write_arrays(latest, last)
            self._writing = resume_name(last)
            resume = latest.resume() if callable(latest.resume) else latest.resume
            save_arrays(self.run_dir / self._writing, resume)
            self._lock.require()
            self._writing = "n_saved"
            self._arrays["n_saved"][...] = latest.n_added
            self._advance(latest.n_added, last)
            self._writing = "the removal of old optimiser states"
            self._remove_old_states()
        except OSError as error:
            safe = (
                f"checkpoints up to step {self._step(self.n_saved)} ({self.n_saved} of "
                f"{len(self.steps)}) are safe"
                if self.n_saved
                else "there is no checkpoint yet"
            )
            raise MechiclError(
                f"cannot write {self._writing} of {self.run_dir}: {error.strerror or error}; "
                f"{safe}; mend this, then continue with --resume"
            ) from error

    def _remove_old_states(self) -> None:
        for path in resume_files(self.run_dir):
            if path.name != resume_name(self._step(self.n_saved)):
                path.unlink()

    def _write_arrays(self, latest: _Latest, last: int) -> None:
        stop = min(self._start + self._chunk_steps, len(self.steps))
        for name, block in self._blocks.items():
            self._writing = name
            self._arrays[name][:, self._start : stop] = block[:, : stop - self._start]
        self._writing = "loss"
        loss, chunk = self._arrays["loss"], self._chunk_log_steps
        stop = min(math.ceil(last / chunk) * chunk, loss.shape[1])
        if stop > self._log_start:
            loss[:, self._log_start : stop] = self._loss[:, : stop - self._log_start]
        self._writing = "diverged_at"
        self._arrays["diverged_at"][...] = latest.diverged_at

    def _advance(self, n_saved: int, last: int) -> None:
        """Move the buffers on to the chunks in which the next checkpoint goes."""
        self.n_saved = n_saved
        if n_saved == self._start + self._chunk_steps:
            self._start = n_saved
            for block in self._blocks.values():
                block.fill(np.nan)
        log_start = last // self._chunk_log_steps * self._chunk_log_steps
        if log_start > self._log_start:
            rest = self._loss[:, log_start - self._log_start : last - self._log_start].copy()
            self._loss.fill(np.nan)
            self._loss[:, : rest.shape[1]] = rest
            self._log_start = log_start


def _yaml(config: Mapping[str, object]) -> str:
    try:
        return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise InputError(f"the configuration is not plain YAML: {error}") from error
