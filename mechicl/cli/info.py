"""`mechicl info`."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mechicl.config import Config


def info(
    run_dir: Annotated[str, typer.Argument(metavar="RUN", help="Run directory.")],
) -> None:
    """Say what a run is, how far it got, and which probes apply to it."""
    from mechicl import analyses
    from mechicl.checkpoints import load
    from mechicl.cli.tables import show
    from mechicl.run import open_run

    run = open_run(run_dir)
    recipe = run.recipe
    attrs = run.trajectory.attrs
    state = "complete" if run.complete else "unfinished (or still training)"
    late = run.metrics[["loss"]].isel(log_step=slice(-100, None))
    losses = load(late, where=run.path)["loss"].mean("log_step").values
    diverged = run.diverged()
    seeds = [
        f"{seed}: diverged at step {diverged[seed]}" if seed in diverged else f"{seed}: {loss:.4f}"
        for seed, loss in zip(run.seeds.tolist(), losses, strict=True)
    ]
    versions = run.config.get("versions")
    written_by = versions.get("mechicl") if isinstance(versions, dict) else None
    rows = [
        ["recipe", f"{recipe.name}: {recipe.description}"],
        ["task", _words(recipe.task)],
        ["model", _words(recipe.model)],
        ["optimizer", _words(recipe.optimizer)],
        ["batch size", str(recipe.batch_size)],
        ["checkpoints", f"{attrs['n_saved']} of {attrs['n_planned']}, {state}"],
        ["steps", f"{run.steps[0]} to {run.steps[-1]} of {recipe.n_steps}"],
        ["loss by seed", ", ".join(seeds)],
        ["trained on", f"{run.config.get('device')}, mechicl {written_by}"],
        ["digest", attrs["run_digest"]],
    ]
    show(str(run.path), ["", ""], rows)
    objections = {name: run.objection(name) for name in analyses.names()}
    rows = [[name, f"no: {why}" if why else "yes"] for name, why in objections.items()]
    show("probes", ["name", "applies"], rows)


def _words(config: "Config") -> str:
    """Name and settings of a part of the recipe, in a line."""
    settings = config.model_dump(exclude_none=True)
    name = settings.pop("name")
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in settings.items())
