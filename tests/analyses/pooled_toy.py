"""Small pooling models on the priors of raj2026, drawn at random or made by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import xarray as xr

from mechicl.analyses import Forward, forward_of
from mechicl.analyses.heads import head_scales, nonfinite
from mechicl.models.pooled_attention import PooledAttention
from mechicl.tasks.latent_regression import LatentRegression
from mechicl.tasks.latents import GaussianPrior, TreePrior
from mechicl.tasks.streams import generator
from tests import trajectories

DEPTH = 3
TAU = 0.02
"""Noise at which the first spins are read without an error."""
SHARP = 16.0
"""Slope of the hidden units of `path_reader`, in units of a normalised entry."""


@dataclass(frozen=True)
class Toy:
    """A task, a model of it, and a trajectory of parameters that were not trained."""

    task: LatentRegression
    model: PooledAttention
    trajectory: xr.Dataset

    def forward(self) -> Forward:
        """Return what a run of this task and model gives its forward probes."""
        return forward_of(self.task, self.model)


def tree(**settings: object) -> LatentRegression:
    """Return regression on a tree of depth 3 with four queries; settings are the task's."""
    chosen = {"prior": TreePrior(depth=DEPTH), "n_context": 512, "n_queries": 4, "tau": 0.1}
    return LatentRegression(**(chosen | settings))


def gaussian(**settings: object) -> LatentRegression:
    """Return regression on a Gaussian of d = 4 with four queries; settings are the task's."""
    chosen = {"prior": GaussianPrior(d=4), "n_context": 512, "n_queries": 4, "tau": 0.1}
    return LatentRegression(**(chosen | settings))


def model(kind: str, n_measurements: int = DEPTH, **settings: object) -> PooledAttention:
    """Return the paper's model A, B or C at this budget; settings are the model's."""
    sizes: dict[str, object] = {
        "A": {"n_layers": n_measurements},
        "B": {"n_channels": n_measurements},
        "C": {"n_channels": n_measurements, "feedforward": False},
    }[kind]
    return PooledAttention(**(sizes | settings))


def random(
    task: LatentRegression,
    model: PooledAttention,
    *,
    n_seeds: int = 2,
    n_steps: int = 1,
    scale: float = 1.5,
) -> Toy:
    """Return models as training begins with them, times `scale`, so that keys differ by context."""
    drawn = [
        [model.initial(task, generator("toy", seed, step)) for step in range(n_steps)]
        for seed in range(n_seeds)
    ]
    return toy(
        task,
        model,
        {
            name: scale * np.stack([np.stack([one[name].numpy() for one in row]) for row in drawn])
            for name in model.parameters(task)
        },
    )


def toy(
    task: LatentRegression,
    model: PooledAttention,
    parameters: Mapping[str, np.ndarray],
    steps: object = None,
) -> Toy:
    """Return these parameters, (seed, step, ...), as a run of this task and model stores them."""
    return Toy(task, model, trajectories.of(task, model, parameters, steps))


def path_reader(task: LatentRegression) -> dict[str, np.ndarray]:
    """Return parameters (layer, ...) of a model A that follows the tree, as the heuristic does.

    Layer m reads the coordinate of the node that the signs of the layers before lead to. Keys are
    normalised, so that what is left of e_v is e_v − 1/(K + 1) on K covariates. An entry m of the
    workspace keeps φ_m in units of the spin's size; the last one stays ε, and opens the gates. Of
    layer m's hidden units one a node fires: that of which all signs agree. Queries predict 0.
    """
    prior = task.prior
    assert isinstance(prior, TreePrior)
    depth, width = prior.depth, task.d_model
    made = model("A", depth)
    weights = {
        name: np.zeros(tuple(made.sizes(task)[dim] for dim in var.dims[2:]))
        for name, var in made.parameters(task).items()
    }
    steps = abs(prior.leaves[0])[abs(prior.leaves[0]) > 0]  # κ α^{m/2}
    # ... of a key e_v that is made to have mean 0 and variance 1.
    gain = np.sqrt(width**2 / (width - 1))
    for m in range(depth):
        weights["W_V"][m, 0, -1] = 1.0
        weights["W_Q"][m, 0, -1] = 1 / made.epsilon
        weights["W_O"][m, m, 0] = 1 / (gain * steps[m])
        for bits in range(2**m):
            node = 2**m - 1 + bits
            for level in range(m):
                sign = 1.0 if (bits >> (m - 1 - level)) & 1 else -1.0
                weights["W_in"][m, level, bits] += SHARP * sign
                weights["W_in"][m, -1, bits] -= SHARP * sign
            # Two of three signs of size 2 that agree do not do.
            weights["b_in"][m, bits] = -2 * SHARP * (m - 1) if m else 1.0
            weights["W_out"][m, bits, 0, node] = 1.0
    return weights


def following(task: LatentRegression, *, n_seeds: int = 1, n_steps: int = 1) -> Toy:
    """Return `path_reader` as a run."""
    shape = (n_seeds, n_steps)
    return toy(
        task,
        model("A", task.prior.depth),
        {
            name: np.broadcast_to(value, (*shape, *value.shape))
            for name, value in path_reader(task).items()
        },
    )


def of_regression(trajectory: xr.Dataset) -> xr.Dataset:
    """Return a run of model A on `contract_task()` that mirrors a regression run.

    Its seeds and steps are the same. The nearer Σ|ω||μ| comes to the step size of a model that has
    learnt, the nearer the parameters come from random ones to those that follow the tree, and
    `b_U`, which `forward` adds to each prediction, to 0. What is not finite stays so.
    """
    task = contract_task()
    broken = nonfinite(trajectory).transpose("seed", "step").values
    omega, mu = (
        np.where(broken[..., None], np.nan, each.transpose("seed", "step", "head").values)
        for each in head_scales(trajectory.copy())
    )
    # Rounded: what is the same but for rounding is the same.
    learnt = np.round(np.clip(abs(omega * mu).sum(-1) / 0.85, 0, 1), 6)
    made = model("A")
    drawn = made.initial(task, generator("toy", 0))
    parameters = {}
    for name, goal in path_reader(task).items():
        share = learnt.reshape(*learnt.shape, *[1] * goal.ndim)
        parameters[name] = share * goal + (1 - share) * drawn[name].numpy()
    parameters["b_U"] = 1 - learnt
    found = toy(task, made, parameters).trajectory
    return found.assign_coords(seed=trajectory["seed"], step=trajectory["step"])


def of_one_measurement(trajectory: xr.Dataset) -> xr.Dataset:
    """Return `of_regression` with a budget of one: no fixed measurement is then near `forward64`.

    With as many as levels they do, at the noise of `contract_task`.
    """
    made = of_regression(trajectory)
    return made.assign(n_measurements=made["n_measurements"].copy(data=1))


def contract_task() -> LatentRegression:
    """Return the task of `of_regression`: a tree whose spins are read without an error."""
    return tree(tau=TAU)


def forward64() -> Forward:
    """Return a Forward for `of_regression`: predictions are the posterior mean plus `b_U`.

    The rest is that of a model. The readout of queries is what nothing is made for by hand.
    """
    task = contract_task()

    def predict(parameters: Mapping[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
        best = task.references(inputs)["posterior_mean"]
        return best + np.asarray(parameters["b_U"], dtype=float)[..., None, None]

    return replace(forward_of(task, model("A")), predict=predict)


def weights_at(trajectory: xr.Dataset, seed: int = 0, step: int = 0) -> dict[str, torch.Tensor]:
    """Return the parameters of one checkpoint."""
    one = trajectory.isel(seed=seed, step=step)
    names = [name for name, value in trajectory.items() if {"seed", "step"} <= {*value.dims}]
    return {str(name): torch.from_numpy(one[name].values.copy()) for name in names}


def poison(
    trajectory: xr.Dataset, *, seed: int, from_index: int, value: float = np.nan
) -> xr.Dataset:
    """Return a copy in which one seed's parameters are not finite from a checkpoint on."""
    out = trajectory.copy(deep=True)
    for values in out.data_vars.values():
        if values.dims[:2] == ("seed", "step"):
            values.values[seed, from_index:] = value
    return out
