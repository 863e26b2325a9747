"""`mechicl train`."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mechicl.cli.options import Compile, Device, Overwrite, RecipeSettings, Scale

if TYPE_CHECKING:
    from pathlib import Path


def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or path of a YAML file.")],
    out: Annotated[
        str | None, typer.Option(help="Run directory.", show_default="runs/RECIPE")
    ] = None,
    scale: Scale = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Train this many seeds: 0, 1, ...")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train for this many steps.")] = None,
    set: RecipeSettings = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last commit.")] = False,
    overwrite: Overwrite = False,
    compile: Compile = True,
) -> int:
    """Train a recipe, and store every checkpoint of its schedule."""
    from mechicl.cli import progress, settings
    from mechicl.errors import InputError
    from mechicl.training import load_recipe

    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other")
    overrides = settings.parse(set or [])
    for key, value in (("n_steps", steps), ("seeds", None if seeds is None else range(seeds))):
        if value is not None:
            if key in overrides:
                raise InputError(f"{key} is given twice, by an option and by --set")
            overrides[key] = list(value) if isinstance(value, range) else value
    chosen = load_recipe(recipe, overrides, scale=scale)

    from mechicl import run

    try:
        with progress.shown(chosen.n_steps) as (on_progress, notify):
            trained = run.train(
                chosen,
                out,
                device=device,
                resume=resume,
                overwrite=overwrite,
                compile=compile,
                on_progress=on_progress,
                notify=notify,
            )
    except (KeyboardInterrupt, SystemExit):
        _say_what_is_saved(run.run_directory(chosen, out))
        raise
    print(f"{len(trained.steps)} checkpoints of {len(trained.seeds)} seeds in {trained.path}")
    for seed, step in trained.diverged().items():
        print(f"seed {seed} diverged at step {step}; its later checkpoints are NaN")
    print(f"next: mechicl analyze {shlex.quote(str(trained.path))}")
    return 1 if trained.diverged() else 0


def _say_what_is_saved(run_dir: "Path") -> None:
    from mechicl.errors import MechiclError
    from mechicl.run import open_run

    try:
        attrs = open_run(run_dir).trajectory.attrs
        saved = f"{attrs['n_saved']} of {attrs['n_planned']} checkpoints are in {run_dir}"
    except MechiclError:
        saved = f"no checkpoint of {run_dir} was reached"
    print(f"{saved}; the same command with --resume goes on from there", file=sys.stderr)
