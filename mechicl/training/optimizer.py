"""Update rules as pure functions over models stacked on a leading axis."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.training.recipe import OptimizerConfig

Stacked = dict[str, Tensor]
"""Tensors by parameter name, each (seed, ...)."""


def initial_state(config: OptimizerConfig, parameters: Mapping[str, Tensor]) -> dict[str, Stacked]:
    """Return the zero moments of Adam and AdamW, or nothing for SGD."""
    moments = () if config.name == "sgd" else ("mean", "square")
    return {
        moment: {name: torch.zeros_like(value) for name, value in parameters.items()}
        for moment in moments
    }


def gradient_norm(gradients: Mapping[str, Tensor]) -> Float[Tensor, " seed"]:
    """Return the Euclidean norm of each model's whole gradient."""
    squares = [each.reshape(len(each), -1).square().sum(1) for each in gradients.values()]
    return torch.stack(squares).sum(0).sqrt()


def learning_rate(
    config: OptimizerConfig, step: Float[Tensor, ""], n_steps: int
) -> Float[Tensor, ""] | float:
    """Return the rate of update `step`, the first being 1, of `n_steps`."""
    rate = config.learning_rate
    if config.schedule == "cosine":
        rate = rate * 0.5 * (1 + torch.cos((step - 1) * (math.pi / n_steps)))
    if config.warmup_steps:
        rate = rate * (step / config.warmup_steps).clamp(max=1)
    return rate


def update(
    config: OptimizerConfig,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    state: Mapping[str, Stacked],
    step: Float[Tensor, ""],
    n_steps: int,
) -> tuple[Stacked, dict[str, Stacked]]:
    """Return new parameters and optimiser state.

    Parameters
    ----------
    step
        Number of this update, 1 for the first, as the bias corrections count it.
    n_steps
        Updates of the whole run, over which a schedule is laid out.
    """
    rate, decay = learning_rate(config, step, n_steps), config.weight_decay
    if config.clip_norm is not None:
        factor = (config.clip_norm / (gradient_norm(gradients) + 1e-6)).clamp(max=1)
        gradients = {name: _per_model(factor, g) * g for name, g in gradients.items()}
    if decay and config.name != "adamw":
        gradients = {name: g + decay * parameters[name] for name, g in gradients.items()}
    if config.name == "sgd":
        return {name: p - rate * gradients[name] for name, p in parameters.items()}, {}
    beta_mean, beta_square = config.betas
    correction_mean, correction_square = 1 - beta_mean**step, 1 - beta_square**step
    shrink = 1 - rate * decay if config.name == "adamw" else 1.0
    new, means, squares = {}, {}, {}
    for name, p in parameters.items():
        means[name] = torch.lerp(state["mean"][name], gradients[name], 1 - beta_mean)
        squares[name] = torch.lerp(state["square"][name], gradients[name].square(), 1 - beta_square)
        size = (squares[name] / correction_square).sqrt() + config.eps
        new[name] = shrink * p - rate * (means[name] / correction_mean) / size
    return new, {"mean": means, "square": squares}


def _per_model(values: Float[Tensor, " seed"], like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))
