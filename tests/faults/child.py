"""What runs in the processes that tests kill, starve and disturb.

Each is forked from a server that has imported everything and started no thread, so that a hundred
of them cost a hundred short trainings and not a hundred imports of torch.
"""

import ctypes
import functools
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

from mechicl.checkpoints import layout
from mechicl.checkpoints.writer import TrajectoryWriter

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(  # torch imports _dynamo at the first gradient
    ["torch._dynamo", "mechicl.training.loop", "mechicl.run", "mechicl.cli.progress"]
)

TRAINING, BEGINNING, COMMITTING = 0, 1, 2

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_FILLER = "filler"


class Child:
    """A process that runs `function(*arguments)`, and what it said and did.

    Attributes
    ----------
    output
        Where what it prints goes.
    phase
        What it is doing, or was when it was killed: `TRAINING`, `BEGINNING` or `COMMITTING`.
    """

    def __init__(
        self, folder: Path, function: Callable[..., object], *arguments: object, **options: object
    ) -> None:
        self.output = folder / f"output-{os.urandom(8).hex()}.txt"
        self._phase = CONTEXT.RawValue(ctypes.c_int, TRAINING)
        call = functools.partial(function, *arguments, **options)
        self.process = CONTEXT.Process(target=_run, args=(call, self.output, self._phase))
        self.process.start()

    @property
    def phase(self) -> int:
        return self._phase.value

    def wait(self, timeout: float = 120) -> int:
        """Return the exit code, negative if a signal ended it."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running: {self.said()}"
        return self.process.exitcode

    def kill(self) -> int:
        self.process.kill()
        return self.wait()

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


def _run(call: Callable[[], object], output: Path, phase: ctypes.c_int) -> None:
    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    _tell_phase(phase)
    call()


def _tell_phase(phase: ctypes.c_int) -> None:
    def telling(number: int, method: Callable) -> Callable:
        @functools.wraps(method)
        def wrapped(*arguments: object, **options: object) -> object:
            phase.value = number
            try:
                return method(*arguments, **options)
            finally:
                phase.value = TRAINING

        return wrapped

    TrajectoryWriter._write = telling(COMMITTING, TrajectoryWriter._write)
    TrajectoryWriter.create = classmethod(telling(BEGINNING, TrajectoryWriter.create.__func__))


def command(
    arguments: Sequence[str],
    *,
    commit_seconds: float = 10.0,
    chunk_steps: int = layout.MAX_CHUNK_STEPS,
    before: Callable[[], None] | None = None,
) -> None:
    """Run the shell command `python -m mechicl ARGUMENTS`, with other limits of the store."""
    from mechicl.cli import main

    layout.MAX_CHUNK_STEPS = chunk_steps
    for begin in (TrajectoryWriter.create.__func__.__wrapped__, TrajectoryWriter.resume.__func__):
        begin.__kwdefaults__["commit_seconds"] = commit_seconds
    sys.argv = ["mechicl", *arguments]
    if before is not None:
        before()
    main()


def kill_at_operation(run: Path, number: int, trace: Path) -> None:
    """Have this process killed just before its `number`-th change of a file or folder in `run`.

    Just before one operation is just after the one before it. Each is noted in `trace`.
    """
    noted = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    place, seen = str(run), 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & _WRITES:
                return
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            path = arguments[0]
            made = event != "os.mkdir" or (not Path(path).is_dir() and Path(path).parent.is_dir())
            if not made:
                return  # Zarr tries folders that are there, and those above them are not
        else:
            return
        # Deleting a tree names its files relative to a descriptor.
        relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1
        if not relative and not str(path).startswith(place):
            return
        target = arguments[1] if event == "os.rename" else path
        name = target if relative else os.path.relpath(target, place)
        os.write(noted, f"{event} {name}\n".encode())
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def limit_file_size(limit: int, *, kill: bool = False) -> None:
    """Let no file grow beyond `limit` bytes: writing more fails, or kills, half written."""
    if kill:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def before_commit(number: int, do: Callable[[], None]) -> None:
    """Have `do` called before the `number`-th commit of this process begins."""
    write, seen = TrajectoryWriter._write, 0

    def counted(self: TrajectoryWriter) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            do()
        write(self)

    TrajectoryWriter._write = counted


def before_beginning(do: Callable[[], None]) -> None:
    """Have `do` called after all checks, when the store of a run is about to be made."""
    begin = TrajectoryWriter.create.__func__

    def later(*arguments: object, **options: object) -> object:
        do()
        return begin(*arguments, **options)

    TrajectoryWriter.create = classmethod(later)


def fill_space(disk: Path, pages: int) -> None:
    """Fill `disk` up, but for some pages of 4 kB."""
    with suppress(OSError), (disk / _FILLER).open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with (disk / _FILLER).open("r+b") as file:
        file.truncate(max(0, (disk / _FILLER).stat().st_size - 4096 * pages))


def fill_inodes(disk: Path, left: int) -> None:
    """Make files on `disk` until it knows no more of them, but for some that are `left`."""
    (disk / _FILLER).mkdir()
    made = 0
    with suppress(OSError):
        while True:
            (disk / _FILLER / str(made)).touch()
            made += 1
    for index in range(max(0, made - left), made):
        (disk / _FILLER / str(index)).unlink()


def empty(disk: Path) -> None:
    """Undo `fill_space` and `fill_inodes`."""
    filler = disk / _FILLER
    rmtree(filler) if filler.is_dir() else filler.unlink()
