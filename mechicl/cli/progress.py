"""How far training is: a bar on a terminal, one line a minute elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mechicl.training import Recipe
    from mechicl.training.loop import Progress

_LINE_SECONDS = 60.0

Callbacks = tuple[Callable[["Progress"], None], Callable[[str], None]]


@contextmanager
def shown(n_steps: int) -> Iterator[Callbacks]:
    """Yield `(on_progress, notify)` for training; everything goes to standard error."""
    yield from _bar(n_steps) if sys.stderr.isatty() else _lines()


@contextmanager
def watch(recipe: "Recipe") -> "Iterator[Mapping[str, Any]]":
    """Give the training of one of several recipes what shows its progress."""
    with shown(recipe.n_steps) as (on_progress, notify):
        yield {"on_progress": on_progress, "notify": notify}


def say(text: str) -> None:
    """Print a remark to standard error at once."""
    print(text, file=sys.stderr, flush=True)


def _bar(n_steps: int) -> Iterator[Callbacks]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("compiling", total=n_steps, detail="")

        def on_progress(progress: "Progress") -> None:
            detail = f"{progress.rate:,.0f} seed-steps/s  loss {_losses(progress)}"
            bar.update(task, description="training", completed=progress.step, detail=detail)

        yield on_progress, bar.console.print


def _lines() -> Iterator[Callbacks]:
    printed = time.monotonic()

    def on_progress(progress: "Progress") -> None:
        nonlocal printed
        # Before the first update there is neither a loss nor a rate.
        if progress.rate > 0 and time.monotonic() - printed >= _LINE_SECONDS:
            printed = time.monotonic()
            left = (progress.n_steps - progress.step) * len(progress.loss) / progress.rate
            say(
                f"step {progress.step:,} of {progress.n_steps:,}, loss {_losses(progress)}, "
                f"{progress.rate:,.0f} seed-steps/s, {left:,.0f} s left"
            )

    yield on_progress, say


def _losses(progress: "Progress") -> str:
    shown = " ".join(f"{loss:.3f}" for loss in progress.loss[:4])
    return shown + (" ..." if len(progress.loss) > 4 else "")


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `(done, of) -> None`: a bar on a terminal, one line a minute elsewhere."""
    if not sys.stderr.isatty():
        printed = time.monotonic()

        def line(done: int, of: int) -> None:
            nonlocal printed
            if time.monotonic() - printed >= _LINE_SECONDS:
                printed = time.monotonic()
                say(f"{done:,} of {of:,} {what}")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
