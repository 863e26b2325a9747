"""Exact risks of one step of gradient descent in context, at any step size (he2025).

Conventions on the task's constants are those of `mechicl.theory.linear_regression`. All risks
include the noise of the response, σ².
"""

import numpy as np
from jaxtyping import Float

from mechicl.theory._arguments import Number, Scalars, quiet, reals, task_constants


@quiet
def debiased_gd_risk(
    learning_rate: Scalars, *, d: Number, n_context: Number, noise_variance: Number
) -> Float[np.ndarray, "*#batch"]:
    """Return the expected squared error, noise included, of one step of debiased gradient descent.

    R(η) = 1 + σ² − 2η(L−1)/L + η²(L−1)(L + d(1+σ²))/L². It is exact, and the true loss of a pair
    of heads on the solution manifold as γ → 0.

    Parameters
    ----------
    learning_rate
        η, any shape.
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    np.ndarray
        Shape of `learning_rate`, at least σ²; least at `optimal_learning_rate`, where it
        is 1 + σ² − (1 − 1/L)η*.

    Raises
    ------
    InputError
        Constants out of range.

    Notes
    -----
    Source: derived for the predictor of he2025 (4.11); the paper does not state it.
    """
    d, length, variance = task_constants(d, n_context, noise_variance)
    rate = reals("learning_rate", learning_rate)
    kept = (length - 1) / length
    square = kept * (length + d * (1 + variance)) / length
    return np.asarray(1 + variance - 2 * rate * kept + rate**2 * square)


@quiet
def vanilla_gd_risk(
    learning_rate: Scalars, *, d: Number, n_context: Number, noise_variance: Number
) -> Float[np.ndarray, "*#batch"]:
    """Return the expected squared error, noise included, of one step of gradient descent.

    R(η) = 1 + σ² − 2η + η²(1 + (d + 1 + dσ²)/L), exact.

    Parameters
    ----------
    learning_rate
        η, any shape.
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    np.ndarray
        Shape of `learning_rate`, at least σ²; least at `optimal_vanilla_learning_rate`.

    Raises
    ------
    InputError
        Constants out of range.

    Notes
    -----
    Source: derived for he2025 (4.11) without the centring; the paper does not state it.
    """
    d, length, variance = task_constants(d, n_context, noise_variance)
    rate = reals("learning_rate", learning_rate)
    square = 1 + (d + 1 + d * variance) / length
    return np.asarray(1 + variance - 2 * rate + rate**2 * square)


def optimal_vanilla_learning_rate(*, d: Number, n_context: Number, noise_variance: Number) -> float:
    """Learning rate at which `vanilla_gd_risk` is least: 1 / (1 + (d + 1 + dσ²)/L).

    Parameters
    ----------
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    float
        In (0, 1), a little below `optimal_learning_rate`.

    Raises
    ------
    InputError
        Constants out of range.

    Notes
    -----
    Source: minimum of `vanilla_gd_risk`; the paper does not state it.
    """
    d, length, variance = task_constants(d, n_context, noise_variance)
    return 1 / (1 + (d + 1 + d * variance) / length)
