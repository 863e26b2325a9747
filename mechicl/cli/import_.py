"""`mechicl import`."""

import shlex
import sys
from typing import Annotated

import typer

from mechicl.cli.options import Overwrite, RecipeSettings, Scale


def import_(
    checkpoints: Annotated[
        str | None,
        typer.Argument(help="Folder with a file a step, or a folder a seed (seed0, ...)."),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe whose task and model it is: a name, or a YAML file.")
    ] = "",
    mapping: Annotated[
        str, typer.Option(help="From their names to ours: a name, or a YAML file.")
    ] = "",
    out: Annotated[str, typer.Option(help="Run directory.")] = "",
    seed: Annotated[
        list[str] | None,
        typer.Option(metavar="N=DIR", help="Folder of one seed; may be repeated."),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="inputs and outputs of their model, to compare ours with; may be repeated.",
        ),
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Go without; the run will say so.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference, over the standard deviation of outputs.")
    ] = 1e-4,
    losses: Annotated[
        str | None, typer.Option(metavar="CSV", help="Training losses: step, loss (and seed).")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="A.B", help="Where in a file the weights are.", show_default="found"),
    ] = None,
    step_pattern: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Finds the step in a name, as its group.")
    ] = None,
    step_field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field of a file that has the step.")
    ] = None,
    set: RecipeSettings = None,
    scale: Scale = None,
    overwrite: Overwrite = False,
) -> int:
    """Make a run of checkpoints that others trained, checked by a forward pass."""
    from mechicl.cli import settings
    from mechicl.errors import InputError
    from mechicl.run import import_run

    wanted = {"--recipe": recipe, "--mapping": mapping, "--out": out}
    lacking = [name for name, given in wanted.items() if not given]
    if lacking:
        raise InputError(
            f"{', '.join(lacking)} must be given; mechicl import --help says what each is"
        )
    run = import_run(
        _folders(checkpoints, seed or []),
        out,
        recipe=recipe,
        mapping=mapping,
        overrides=settings.parse(set or []),
        scale=scale,
        outputs=outputs or [],
        unchecked=unchecked,
        tolerance=tolerance,
        losses=losses,
        key=key,
        step_pattern=step_pattern,
        step_field=step_field,
        overwrite=overwrite,
        notify=lambda text: print(text, file=sys.stderr),
    )
    steps = f"{run.steps[0]:,} to {run.steps[-1]:,}"
    print(f"{len(run.steps)} checkpoints of {len(run.seeds)} seeds, {steps}, in {run.path}")
    checked = run.config["origin"]["check"]
    for each in checked["checkpoints"] if checked else []:
        print(
            f"checked: seed {each['seed']} at step {each['step']:,}, {each['prompts']} prompts, "
            f"largest difference {each['error']:.1e} of the standard deviation"
        )
    if not checked:
        print("not checked: no outputs of theirs were compared")
    print(f"next: mechicl analyze {shlex.quote(str(run.path))}")
    return 1 if run.diverged() else 0


def _folders(checkpoints: str | None, seeds: list[str]) -> "str | dict[int, str]":
    from mechicl.errors import InputError

    if (checkpoints is None) == (not seeds):
        raise InputError("give one folder of checkpoints, or --seed N=DIR for each")
    if checkpoints is not None:
        return checkpoints
    folders: dict[int, str] = {}
    for text in seeds:
        number, equals, folder = text.partition("=")
        if not equals or not folder.strip() or not number.strip().isdecimal():
            raise InputError(f"--seed takes N=DIR, as in --seed 0=runs/first; given {text!r}")
        if int(number) in folders:
            raise InputError(f"--seed gives {int(number)} twice")
        folders[int(number)] = folder
    return folders
