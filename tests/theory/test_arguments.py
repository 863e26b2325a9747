"""What every function of theory refuses alike."""

import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from importlib import import_module

import numpy as np
import pytest

from mechicl import theory
from mechicl.errors import InputError
from mechicl.theory.features import haar_features
from mechicl.theory.strategies import adaptive_loss, optimised_measurement
from mechicl.theory.tree_posterior import tree_mmse
from mechicl.theory.true_loss import true_loss

DRAWING: dict[Callable, Callable] = {
    haar_features: partial(haar_features, 2, 3, ratio=1.5, base=2.0),
    adaptive_loss: partial(adaptive_loss, 3, 0.5, 2, 0.1, n_draws=4),
    optimised_measurement: partial(
        optimised_measurement, 2, 0.5, 1, 0.1, n_random=0, n_steps=1, n_polish=0, n_draws=2
    ),
    tree_mmse: partial(tree_mmse, 2, 0.5, np.eye(1, 3), 0.1, n_draws=2),
    true_loss: partial(
        true_loss, [0.1], [1.0], d=2, n_context=5, noise_variance=0.1, n_samples=1000
    ),
}


def test_every_function_that_draws_is_here() -> None:
    found = set()
    for module in pkgutil.iter_modules(theory.__path__):
        if module.name.startswith("_"):
            continue
        for name, function in vars(import_module(f"mechicl.theory.{module.name}")).items():
            public = inspect.isfunction(function) and function.__module__.endswith(module.name)
            public = public and not name.startswith("_")
            if public and "rng" in inspect.signature(function).parameters:
                found.add(function)
    assert found == set(DRAWING)


@pytest.mark.parametrize("function", DRAWING, ids=lambda function: function.__name__)
def test_a_seed_is_no_generator(function: Callable) -> None:
    for wrong in (None, 0, np.random.RandomState(0)):
        with pytest.raises(InputError, match=r"rng = .*default_rng"):
            DRAWING[function](rng=wrong)
    DRAWING[function](rng=np.random.default_rng(0))
