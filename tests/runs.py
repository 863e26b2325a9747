"""Small runs on disk, written as training writes them and not trained."""

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from mechicl.checkpoints import Checkpoint, Plan, TrajectoryWriter
from mechicl.stored import StoredRun
from mechicl.training import Recipe, load_recipe
from mechicl.training.loop import plan_run
from tests import trajectories

DEFAULTS: dict[str, Any] = {
    "d": 5,
    "n_context": 40,
    "n_steps": 100,
    "seeds": [0],
    "checkpoints": {"every": 20, "per_decade": 0},
}


def write(
    path: Path,
    *,
    omega: object = (0.18, -0.18),
    mu: object = (2.44, -2.44),
    stop: int | None = None,
    **settings: object,
) -> Path:
    """Write a run of one-layer attention that ends at the scales ω and μ, from near 0, linearly.

    Parameters
    ----------
    omega, mu
        (head,), or (seed, head).
    stop
        Checkpoints to write; None writes all.
    **settings
        Of the recipe, by key, over `DEFAULTS`.
    """
    recipe = recipe_of(**settings)
    plan = plan_run(recipe)
    made = _parameters(recipe, plan, omega, mu)
    config = {"recipe": recipe.settings(), "device": "cpu", "groups": [], "versions": {}}
    with TrajectoryWriter.create(path, plan, config, commit_seconds=3600) as writer:
        for index in range(len(plan.steps[:stop])):
            writer.add(_checkpoint(plan, made, index))
    return path


def checkpoint(
    path: Path, index: int, omega: object = (0.18, -0.18), mu: object = (2.44, -2.44)
) -> Checkpoint:
    """Return a checkpoint of the run at `path`, to go on with."""
    recipe = StoredRun(path).recipe
    plan = plan_run(recipe)
    return _checkpoint(plan, _parameters(recipe, plan, omega, mu), index)


def recipe_of(**settings: object) -> Recipe:
    """Return the recipe of `write`."""
    return load_recipe("he2025-two-head-quick", DEFAULTS | settings)


def _parameters(recipe: Recipe, plan: Plan, omega: object, mu: object) -> xr.Dataset:
    shape = (len(plan.seeds), recipe.model.n_heads)
    ends = [np.broadcast_to(np.asarray(value, dtype=float), shape) for value in (omega, mu)]
    progress = (plan.steps + 1.0)[None, :, None] / (plan.n_steps + 1.0)
    scales = [value[:, None] * progress for value in ends]
    scale = float(recipe.model.constants()["score_scale"][1])
    return trajectories.from_scales(*scales, d=recipe.task.d, score_scale=scale)


def _checkpoint(plan: Plan, made: xr.Dataset, index: int) -> Checkpoint:
    before = plan.steps[index - 1] if index else 0
    n_seeds = len(plan.seeds)
    return Checkpoint(
        parameters={
            name: made[name].values[:, index].astype(np.float32) for name in plan.parameters
        },
        loss=np.full((n_seeds, plan.steps[index] - before), 0.3, np.float32),
        diverged_at=np.full(n_seeds, np.nan),
    )
