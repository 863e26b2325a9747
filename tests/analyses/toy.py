"""A Forward in plain NumPy, and the settings with which tests run each probe."""

from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr

from mechicl.analyses import Forward, forward_of, get
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.tasks.linear_regression import LinearRegression
from tests.analyses import markov_toy, pooled_toy, stages_toy, transplant_toy


def anisotropic(trajectory: xr.Dataset) -> xr.Dataset:
    """Give neighbouring covariates a correlation of a half."""
    index = np.arange(int(trajectory["d"]))
    sigma = trajectory["covariance"].copy(data=0.5 ** abs(index[:, None] - index))
    return trajectory.assign(covariance=sigma, isotropic=trajectory["isotropic"].copy(data=0))


def one_task(trajectory: xr.Dataset) -> xr.Dataset:
    """Say that there is one task, on all covariates."""
    every = (("response", "covariate"), np.ones((1, int(trajectory["d"]))), {"units": "1"})
    return trajectory.assign(supports=every)


STAGES = ("context_kl", "learning_stages")
"""Probes of the Markov chain that follow how it is learnt."""

MARKOV = ("attention_spans", "head_permutation", "value_alignment", *STAGES)
"""Probes of the Markov chain."""

TRANSPLANTS = ("function_vector", "key_patching")
"""Probes that put activations of one context into the run of another."""

POOLED = ("mmse", "routing", *TRANSPLANTS)
"""Probes of the models that pool."""

SUITED: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "preconditioner": anisotropic,
    "task_allocation": one_task,
    **dict.fromkeys(MARKOV, markov_toy.of_regression),
    **dict.fromkeys(STAGES, stages_toy.of_regression),
    **dict.fromkeys(POOLED, pooled_toy.of_regression),
    "mmse": pooled_toy.of_one_measurement,
}
"""What makes a run of isotropic regression one about which these probes have something to say."""


def suited(name: str, trajectory: xr.Dataset) -> xr.Dataset:
    """Return a run like `trajectory` that the probe `name` is meant for."""
    return SUITED.get(name, lambda run: run)(trajectory)


CHEAP: dict[str, dict[str, object]] = {
    "activation_patching": {"n_prompts": 20, "n_steps": 4},
    "approximate_loss": {"n_prompts": 300, "n_steps": 4},
    "attention_spans": {"n_prompts": 2},
    "context_kl": {"n_prompts": 100},
    "function_vector": {"n_prompts": 60, "n_steps": 4},
    "head_permutation": {"n_prompts": 2},
    "key_patching": {"n_prompts": 150, "n_steps": 4},
    "learning_stages": {"n_prompts": 50},
    "length_generalization": {"n_prompts": 400, "n_steps": 4, "lengths": (3, 40, 100)},
    "loss_landscape": {"n_prompts": 100, "n_steps": 4},
    "mmse": {"n_prompts": 64, "n_steps": 6, "n_paths": 100, "n_draws": 40, "spsa_steps": 2},
    "predictor_distance": {"n_prompts": 200, "n_steps": 4},
    "routing": {"n_prompts": 200, "n_steps": 6},
}


def forward_for(name: str) -> Forward | None:
    """Return what the probe `name` evaluates in a run that is `suited`, if it evaluates any."""
    if not get(name).forward:
        return None
    if name in TRANSPLANTS:
        return transplant_toy.forward64()
    if name in POOLED:
        return pooled_toy.forward64()
    if name == "activation_patching":  # it looks into the model itself
        return forward_of(LinearRegression(), SoftmaxAttention())
    return markov_toy.forward64() if name in MARKOV else forward()


def forward(d: int = 5, n_context: int = 40, noise_variance: float = 0.1) -> Forward:
    """Return softmax attention (2.3) at the query, on the isotropic task."""

    trained = n_context

    def prompts(
        n: int, seed: int, *, part: int = 0, n_context: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([seed, part])
        x = rng.normal(size=(n, (n_context or trained) + 1, d))
        beta = rng.normal(size=(n, d)) / d**0.5
        y = np.einsum("nld,nd->nl", x, beta)
        y += noise_variance**0.5 * rng.normal(size=y.shape)
        inputs = np.concatenate([x, y[..., None]], -1)
        inputs[:, -1, -1] = 0.0
        return inputs, y[:, -1]

    def predict(parameters: Mapping[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            return _predict(parameters, inputs)

    def references(inputs: np.ndarray) -> dict[str, np.ndarray]:
        x, y, query = inputs[:, :-1, :-1], inputs[:, :-1, -1], inputs[:, -1, :-1]
        step = np.einsum("nl,nld,nd->n", y, x, query) / y.shape[1]
        return {"zero": np.zeros(len(inputs)), "vanilla_gd": 0.86 * step}

    return Forward(predict, prompts, references)


def _predict(parameters: Mapping[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
    """Row vectors throughout, as in TransformerLens; leading axes (seed, layer)."""
    context, query = inputs[:, :-1], inputs[:, -1]
    w_q, w_k, w_v, w_o = (parameters[f"W_{name}"][:, 0] for name in "QKVO")
    queries = np.einsum("ni,shia->shna", query, w_q)
    keys = np.einsum("nli,shia->shnla", context, w_k)
    scores = np.einsum("shna,shnla->shnl", queries, keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    values = np.einsum("nli,shia->shnla", context, w_v)
    attended = np.einsum("shnl,shnla->shna", weights, values)
    return np.einsum("shna,sha->sn", attended, w_o[..., -1])
