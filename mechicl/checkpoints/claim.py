"""Whose a directory is: free for a new run, held by a writer, or with an earlier run in it."""

import json
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from filelock import FileLock, Timeout

from mechicl.checkpoints.files import PARTIAL, sync_directory, write_file
from mechicl.checkpoints.layout import (
    ANALYSES,
    CONFIG,
    FIGURES,
    LOCK,
    LOCK_HOLDER,
    REPLACED,
    STRAY,
    TRAJECTORY,
    resume_files,
)
from mechicl.errors import InputError, MechiclError, RunLockedError

_OF_NO_RUN = {LOCK, LOCK_HOLDER, LOCK_HOLDER + PARTIAL, CONFIG + PARTIAL}
"""What a kill may leave before there is anything of a run."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise what the machine refuses as a MechiclError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise MechiclError(f"{what}: {error.strerror or error}") from error


def require_free(run: Path, *, overwrite: bool, resumable: bool = True) -> None:
    """Raise InputError unless a run may begin in `run`.

    Parameters
    ----------
    resumable
        Whether what would be written there could go on from what is: training can, an import not.
    """
    if not run.is_dir():
        if run.exists() or run.is_symlink():
            raise InputError(f"{run} is not a directory; give another place for the run")
        return
    with explained(f"cannot read {run}"):
        names = {path.name for path in run.iterdir()} - _OF_NO_RUN - STRAY
    is_run = names & {CONFIG, TRAJECTORY} or any(name.startswith(REPLACED) for name in names)
    if names and not is_run:
        raise InputError(
            f"{run} holds files that are not a run ({', '.join(sorted(names)[:3])}), which "
            "mechicl does not replace; give another directory"
        )
    if names and not overwrite:
        resume = "continue it with --resume, " if resumable else ""
        raise InputError(
            f"there is a run in {run}; {resume}replace it with --overwrite, or give another "
            "directory"
        )


def set_aside(run: Path) -> None:
    """Move the files of a run into a folder beside them, to be deleted once the new run has begun.

    The trajectory goes first, so that no half of a run can pass for a run. The directory itself
    stays, and in it the lock. What a replacing that was cut short has set aside is joined by the
    rest, so that a run is always in one place.
    """
    names = [TRAJECTORY, *(path.name for path in resume_files(run)), ANALYSES, FIGURES, CONFIG]
    if (run / TRAJECTORY).exists():
        remove_replaced(run)
    earlier = [path for path in run.glob(REPLACED + "*") if (path / TRAJECTORY).exists()]
    aside = earlier[0] if earlier else Path(tempfile.mkdtemp(prefix=REPLACED, dir=run))
    for name in names:
        is_here = (run / name).exists() or (run / name).is_symlink()
        if is_here and not (aside / name).exists():
            (run / name).rename(aside / name)


def remove_replaced(run: Path) -> None:
    """Delete what was replaced by the run that is here, which has begun."""
    for replaced in run.glob(REPLACED + "*"):
        rmtree(replaced)


@contextmanager
def staged(run: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a new directory to write a run into, which takes the place of `run` if all goes well.

    Until then `run`, locked, keeps what is in it. Whatever is raised leaves it so, and removes the
    new directory, which lies beside it.

    Raises
    ------
    InputError, RunLockedError, MechiclError
        As `require_free` and `RunLock`, before anything is yielded.
    """
    run = run.resolve()
    require_free(run, overwrite=overwrite, resumable=False)
    is_new = not run.exists()
    with explained(f"cannot make the directory {run}"):
        run.mkdir(parents=True, exist_ok=True)
    lock, done = RunLock(run), False
    prefix = f".{run.name}.new-"
    aside = run.with_name(prefix + uuid.uuid4().hex)
    try:
        require_free(run, overwrite=overwrite, resumable=False)
        for path in run.parent.iterdir():
            if path.name.startswith(prefix):  # of a process that was killed: it had this lock
                rmtree(path, ignore_errors=True)
        yield aside
        lock.require()
        with explained(f"cannot put the run in its place, {run}"):
            if (run / CONFIG).exists() or (run / TRAJECTORY).exists():
                set_aside(run)
            for name in (CONFIG, TRAJECTORY):
                (aside / name).rename(run / name)
            sync_directory(run)
            remove_replaced(run)
        done = True
    finally:
        rmtree(aside, ignore_errors=True)
        if is_new and not done:
            rmtree(run, ignore_errors=True)
        lock.release()


class RunLock:
    """The lock of a run, acquired, with its holder written beside it.

    It is of a file. A directory that takes the place of this one has a lock of its own, which
    another process may hold; `require` tells.

    Raises
    ------
    RunLockedError
        Another process has it, or this one.
    MechiclError
        The machine refused.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = FileLock(run / LOCK, thread_local=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise RunLockedError(
                f"{_holder(run)} is writing {run}; wait until it is done, or stop it"
            ) from None
        except OSError as error:
            raise MechiclError(f"cannot lock {run}: {error.strerror or error}") from error
        try:
            with explained(f"cannot lock {run}"):
                holder = {"pid": os.getpid(), "host": socket.gethostname()}
                write_file(run / LOCK_HOLDER, json.dumps(holder).encode())
        except BaseException:
            self._lock.release()
            raise
        self._file = _identity(run / LOCK)

    def require(self) -> None:
        """Raise MechiclError if what lies where the run was is not what was locked.

        What is written there would be lost, or be mixed into the run of another writer.
        """
        if _identity(self._run / LOCK) != self._file:
            raise MechiclError(
                f"{self._run} or the {LOCK} in it was moved, replaced or deleted while this "
                "process was writing it, so nothing more is written; what was committed is where "
                "the run is now: continue it there with --resume"
            )

    def release(self) -> None:
        """Let others write the run."""
        try:
            if _identity(self._run / LOCK) == self._file:  # else it is of another writer
                (self._run / LOCK_HOLDER).unlink(missing_ok=True)
        finally:
            self._lock.release()


def _identity(file: Path) -> tuple[int, int] | None:
    """Return which file that is: no other one as long as a process has it open."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _holder(run: Path) -> str:
    try:
        holder = json.loads((run / LOCK_HOLDER).read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def is_written(run: Path) -> bool:
    """Return whether a writer is at work, as far as can be told without its lock."""
    try:
        holder = json.loads((run / LOCK_HOLDER).read_bytes())
        pid, host = int(holder["pid"]), holder["host"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
    if host != socket.gethostname() or os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True
