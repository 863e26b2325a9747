"""The vectorised training step and the loop around it."""

from mechicl.checkpoints.layout import settings_digest
from mechicl.training.experiment import MOST_STEPS, Experiment, ImportedRecipe
from mechicl.training.recipe import (
    Recipe,
    load_recipe,
    recipe_names,
    recipe_scales,
    stored_recipe,
)

__all__ = [
    "MOST_STEPS",
    "Experiment",
    "ImportedRecipe",
    "Recipe",
    "load_recipe",
    "recipe_names",
    "recipe_scales",
    "settings_digest",
    "stored_recipe",
]
