"""Tiny trajectories made by hand, whose circuits are known."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from mechicl.models import Model
from mechicl.tasks import Task

WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")
WEIGHT_DIMS = {
    name: (
        "seed",
        "step",
        "layer",
        "head",
        *(("d_head", "d_model") if name == "W_O" else ("d_model", "d_head")),
    )
    for name in WEIGHTS
}


def of(
    task: Task, model: Model, parameters: Mapping[str, np.ndarray], steps: object = None
) -> xr.Dataset:
    """Return parameters, (seed, step, ...), as a run of this task and model stores them."""
    declared = model.parameters(task)
    n_seeds, n_steps = next(iter(parameters.values())).shape[:2]
    steps = 10 * np.arange(n_steps) if steps is None else np.asarray(steps)
    data = {
        name: (var.dims, np.array(parameters[name], dtype=float), var.attrs)
        for name, var in declared.items()
    }
    constants = task.constants() | model.constants()
    data |= {
        name: (var.dims, np.array(value), var.attrs) for name, (var, value) in constants.items()
    }
    coords = {
        "seed": ("seed", np.arange(n_seeds), {"long_name": "seed"}),
        "step": ("step", steps, {"units": "step", "long_name": "training step"}),
    }
    attrs = {"run_digest": "made-by-hand", "stray": "no"}
    return xr.Dataset(data, coords=coords, attrs=attrs)


def from_circuits(kq: np.ndarray, ov: np.ndarray, **settings: object) -> xr.Dataset:
    """Return a trajectory with circuits `kq`, `ov`, (seed, step, head, d + 1, d + 1).

    d_head = d_model, so W_K = KQ / score_scale and W_V = OVᵀ would do; a random orthogonal change
    of basis inside each head, which leaves circuits alone, makes every weight dense.
    """
    kq, ov = np.asarray(kq, dtype=float), np.asarray(ov, dtype=float)
    scale = float(settings.get("score_scale", 1.0))
    rng = np.random.default_rng(int(settings.get("basis_seed", 0)))
    first, second = (np.linalg.qr(rng.normal(size=kq.shape))[0] for _ in range(2))
    weights = {
        "W_Q": first,
        "W_K": kq @ first / scale,
        "W_V": np.swapaxes(ov, -1, -2) @ second,
        "W_O": np.swapaxes(second, -1, -2),
    }
    return from_weights(weights, **settings)


def from_weights(weights: Mapping[str, np.ndarray], **settings: object) -> xr.Dataset:
    """Return a trajectory of one layer with weights (seed, step, head, ...).

    Settings: d, n_context, noise_variance, isotropic, covariance, score_scale, softmax, slope,
    steps.
    """
    n_seeds, n_steps, _, width, _ = weights["W_Q"].shape
    attrs = {"units": "1", "long_name": "made by hand", "stray": "must not leak"}
    data = {
        name: (WEIGHT_DIMS[name], values[:, :, None], attrs) for name, values in weights.items()
    }
    constants = {
        "d": settings.get("d", width - 1),
        "n_context": settings.get("n_context", 40),
        "noise_variance": settings.get("noise_variance", 0.1),
        "isotropic": settings.get("isotropic", 1),
        "score_scale": settings.get("score_scale", 1.0),
        "softmax": settings.get("softmax", 1),
        "slope": settings.get("slope", 1.0),
    }
    data |= {name: ((), value, attrs) for name, value in constants.items()}
    sigma = np.asarray(settings.get("covariance", np.eye(int(constants["d"]))), dtype=float)
    data["covariance"] = (("covariate", "covariate_other"), sigma, attrs)
    steps = settings.get("steps", 10 * np.arange(n_steps))
    coords = {
        "seed": ("seed", np.arange(n_seeds), {"long_name": "seed"}),
        "step": ("step", np.asarray(steps), {"units": "step", "long_name": "training step"}),
    }
    return xr.Dataset(data, coords=coords, attrs={"run_digest": "made-by-hand", "stray": "no"})


def ideal_circuits(omega: np.ndarray, mu: np.ndarray, d: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Return circuits of the pattern (3.1) at ω and μ, (seed, step, head), free entries drawn."""
    omega, mu = np.asarray(omega, dtype=float), np.asarray(mu, dtype=float)
    rng = np.random.default_rng(1)
    kq, ov = rng.normal(size=(2, *omega.shape, d + 1, d + 1))
    kq[..., :, :d] = 0.0
    kq[..., range(d), range(d)] = omega[..., None]
    ov[..., d, :d] = 0.0
    ov[..., d, d] = mu
    # A scale of exactly 0 stays so under a change of basis only if nothing is there to be rounded.
    kq[omega == 0], ov[mu == 0] = 0.0, 0.0
    return kq, ov


def from_scales(omega: object, mu: object, **settings: object) -> xr.Dataset:
    """Return a trajectory of the pattern (3.1); ω and μ are (seed, step, head), or last axes."""
    omega, mu = (np.array(value, dtype=float, ndmin=3) for value in (omega, mu))
    return from_circuits(*ideal_circuits(omega, mu, int(settings.get("d", 5))), **settings)


def learning(n_seeds: int = 2, n_steps: int = 6, n_heads: int = 2) -> xr.Dataset:
    """Return a run like a trained one: scattered heads end near the solution manifold."""
    rng = np.random.default_rng(7)
    progress = np.linspace(0, 1, n_steps)[None, :, None]
    signs = np.where(np.arange(n_heads) % 2, -1.0, 1.0)
    positive = (n_heads + 1) // 2
    share = np.where(signs > 0, 1 / positive, 1 / max(n_heads - positive, 1))
    start_omega, start_mu = 0.1 * rng.normal(size=(2, n_seeds, 1, n_heads))
    gamma, mu_gamma = 0.18, 2.4400
    omega = (1 - progress) * start_omega + progress * gamma * signs
    mu = (1 - progress) * start_mu + progress * mu_gamma * signs * share
    kq, ov = ideal_circuits(omega, mu)
    kq += 0.003 * rng.normal(size=kq.shape)
    ov += 0.03 * rng.normal(size=ov.shape)
    steps = np.unique(np.append(0, np.geomspace(10, 10_000, n_steps - 1).astype(int)))
    return from_circuits(kq, ov, steps=steps)


def poison(
    trajectory: xr.Dataset, *, seed: int, from_index: int, value: float = np.nan
) -> xr.Dataset:
    """Return a copy in which one seed's weights are not finite from a checkpoint on."""
    out = trajectory.copy(deep=True)
    for name in WEIGHTS:
        out[name].values[seed, from_index:] = value
    return out


def permuted(trajectory: xr.Dataset, dim: str, order: list[int]) -> xr.Dataset:
    """Return a copy with one axis in another order, its labels left in place."""
    out = trajectory.isel({dim: order})
    return out.assign_coords({dim: trajectory[dim]}) if dim in trajectory.coords else out
