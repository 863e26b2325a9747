"""`mechicl info`."""

from typing import Annotated

import typer


def info(
    run_dir: Annotated[str, typer.Argument(metavar="RUN", help="Run directory.")],
) -> None:
    """Say what a run is, how far it got, and which probes apply to it."""
    from mechicl import analyses
    from mechicl.cli.tables import show
    from mechicl.run import open_run

    run = open_run(run_dir)
    recipe = run.recipe
    attrs = run.trajectory.attrs
    state = "complete" if run.complete else "unfinished (or still training)"
    losses = run.metrics["loss"].isel(log_step=slice(-100, None)).mean("log_step").values
    diverged = run.metrics["diverged_at"].values
    seeds = [
        f"{seed}: diverged at step {at:.0f}" if at == at else f"{seed}: {loss:.4f}"
        for seed, loss, at in zip(run.seeds, losses, diverged, strict=True)
    ]
    rows = [
        ["recipe", f"{recipe.name}: {recipe.description}"],
        ["task", recipe.task.model_dump_json(exclude_none=True)],
        ["model", recipe.model.model_dump_json()],
        ["optimizer", recipe.optimizer.model_dump_json(exclude_none=True)],
        ["batch size", str(recipe.batch_size)],
        ["checkpoints", f"{attrs['n_saved']} of {attrs['n_planned']}, {state}"],
        ["steps", f"{run.steps[0]} to {run.steps[-1]} of {recipe.n_steps}"],
        ["loss by seed", ", ".join(seeds)],
        ["trained on", f"{run.config['device']}, mechicl {run.config['versions']['mechicl']}"],
        ["digest", attrs["run_digest"]],
    ]
    show(str(run.path), ["", ""], rows)
    objections = {name: run.objection(name) for name in analyses.names()}
    rows = [[name, f"no: {why}" if why else "yes"] for name, why in objections.items()]
    show("probes", ["name", "applies"], rows)
