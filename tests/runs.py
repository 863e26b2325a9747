"""Small runs on disk, written as training writes them and not trained."""

from pathlib import Path
from typing import Any

import numpy as np

from mechicl.checkpoints import Checkpoint, TrajectoryWriter
from mechicl.training import Recipe, load_recipe
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
    """Write a run of two-head attention that ends at the scales ω and μ, from zero, linearly.

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
    plan = _plan(recipe)
    shape = (len(plan.seeds), recipe.model.n_heads)
    ends = [np.broadcast_to(np.asarray(value, dtype=float), shape) for value in (omega, mu)]
    progress = (plan.steps + 1.0)[None, :, None] / (plan.n_steps + 1.0)
    scales = [value[:, None] * progress for value in ends]
    scale = float(recipe.model.constants()["score_scale"][1])
    made = trajectories.from_scales(*scales, d=recipe.task.d, score_scale=scale)
    config = {"recipe": recipe.settings(), "device": "cpu", "groups": [], "versions": {}}
    with TrajectoryWriter.create(path, plan, config, commit_seconds=3600) as writer:
        for index, step in enumerate(plan.steps[:stop]):
            before = plan.steps[index - 1] if index else 0
            writer.add(
                Checkpoint(
                    parameters={
                        name: made[name].values[:, index].astype(np.float32)
                        for name in plan.parameters
                    },
                    loss=np.full((len(plan.seeds), step - before), 0.3, np.float32),
                    diverged_at=np.full(len(plan.seeds), np.nan),
                )
            )
    return path


def recipe_of(**settings: object) -> Recipe:
    """Return the recipe of `write`."""
    return load_recipe("he2025-two-head-quick", DEFAULTS | settings)


def _plan(recipe: Recipe) -> Any:
    from mechicl.training.loop import plan_run

    return plan_run(recipe)
