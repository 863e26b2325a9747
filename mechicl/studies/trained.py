"""A run of a recipe, trained unless it is there already."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mechicl.checkpoints.layout import CONFIG, TRAJECTORY
from mechicl.errors import DamagedRunError, InputError, NothingToAnalyseError
from mechicl.paths import is_run
from mechicl.run import Run, open_run, train
from mechicl.training import Recipe

Watch = Callable[[Recipe], AbstractContextManager[Mapping[str, Any]]]
"""Makes, for a recipe about to be trained, the callbacks that training takes."""


@contextmanager
def unwatched(recipe: Recipe) -> Iterator[Mapping[str, Any]]:
    """Give training no callbacks."""
    del recipe
    yield {}


def trained(
    recipe: Recipe,
    path: Path,
    device: str,
    compile: bool,
    watch: Watch,
    notify: Callable[[str], None],
) -> Run:
    """Return the run of `recipe` in `path`: as it is, gone on with, or trained from the start.

    Raises DamagedRunError if `path` holds a run of another recipe, RunLockedError if another
    process trains it, and what training raises.
    """
    begun = (path / TRAJECTORY).exists()
    if begun:
        try:
            run = open_run(path)
        except NothingToAnalyseError:  # begun, and cut short before its first commit
            pass
        else:
            differences = recipe.differences(run.recipe)
            if differences:
                raise DamagedRunError(
                    f"{path} holds a run of another recipe ({'; '.join(differences)})"
                )
            if run.complete:
                return run
    # A directory without a trajectory was cut short before there was anything to go on from.
    cut_short = not begun and (path / CONFIG).exists()
    notify(f"{'going on with' if begun else 'training'} {path}")
    try:
        with watch(recipe) as callbacks:
            return train(
                recipe,
                path,
                resume=begun,
                overwrite=cut_short,
                device=device,
                compile=compile,
                **callbacks,
            )
    except InputError:
        if begun or cut_short or not is_run(path):
            raise
    # Another process began it since it was looked for: by now it is theirs, or done.
    return trained(recipe, path, device, compile, watch, notify)
