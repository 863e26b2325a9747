"""The vectorised training step and the loop around it."""

from mechicl.training.recipe import Recipe, load_recipe, recipe_names

__all__ = ["Recipe", "load_recipe", "recipe_names"]
