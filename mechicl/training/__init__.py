"""The vectorised training step and the loop around it."""

from mechicl.training.recipe import (
    Recipe,
    load_recipe,
    recipe_names,
    recipe_scales,
    settings_digest,
    stored_recipe,
)

__all__ = [
    "Recipe",
    "load_recipe",
    "recipe_names",
    "recipe_scales",
    "settings_digest",
    "stored_recipe",
]
