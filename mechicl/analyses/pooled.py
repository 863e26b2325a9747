"""What probes of pooling models share: constants, prompts within memory, keys, which runs apply."""

from collections.abc import Iterator, Mapping

import numpy as np
import xarray as xr
from jaxtyping import Float

from mechicl.analyses.evaluation import PART
from mechicl.analyses.probe import Forward
from mechicl.errors import InputError
from mechicl.schema import Var

LATENT_REGRESSION = {
    "n_context": Var((), "1", "examples in a context, N", 1),
    "tau": Var((), "1", "noise of a measurement, sigma/sqrt(N)", 0),
    "alpha": Var((), "1", "ratio of variances along the prior", 0, 1),
}
"""Constants of the task, whatever the prior."""

TREE = {"depth": Var((), "1", "depth of the tree prior, h", 1)}
"""Constants of the tree prior."""

GAUSSIAN = {
    "prior_covariance": Var(("covariate", "covariate_other"), "1", "covariance of theta, C_0")
}
"""Constants of the Gaussian prior."""

POOLED = {
    "W_V": Var(("seed", "step", "layer", "channel", "d_model"), "1", "values, V"),
    "n_measurements": Var((), "1", "measurements, layers times channels, M", 1),
    "feedforward": Var((), "1", "1 where MLPs make the keys", 0, 1),
}
"""A parameter of every pooling model, and constants of the model."""

_NUMBERS = 2**24
"""In the inputs that are held at once."""


def tree_prior(trajectory: xr.Dataset) -> str | None:
    """Apply where θ comes from the tree prior."""
    if "depth" not in trajectory.variables:
        return "it is about the leaves of a tree prior, and this run has another prior"
    return None


def samples(forward: Forward, n: int, seed: int) -> Iterator[xr.Dataset]:
    """Draw `n` prompts with their latents (`Forward.sample`), in parts that memory holds."""
    if forward.sample is None:
        raise InputError(
            "this probe reads latents of the task, and its Forward has no `sample`; "
            "mechicl.analyses.forward_of(task, model) makes one that has"
        )
    each = forward.sample(1, seed)["inputs"].size
    most = max(1, min(PART, _NUMBERS // each))
    for part, start in enumerate(range(0, n, most)):
        yield forward.sample(min(most, n - start), seed, part=part)


def dynamic_keys(
    forward: Forward,
    weights: Mapping[str, Float[np.ndarray, "layer ..."]],
    inputs: Float[np.ndarray, "batch pos d_model"],
) -> Float[np.ndarray, "batch layer channel d_model"]:
    """Return the keys that a model of (6) makes for each context, in float64.

    Those of layer 0 are the same for all contexts: it finds ε everywhere in the workspace.

    Parameters
    ----------
    weights
        Of one checkpoint, by name; the model computes in their dtype.
    inputs
        Prompts.
    """
    import torch

    from mechicl.models.evaluate import one_thread_an_operation

    if forward.hooked is None or forward.reads is None:
        raise InputError(
            "this probe hooks into the model, and its Forward has no `hooked`; "
            "mechicl.analyses.forward_of(task, model) makes one that has"
        )
    model = forward.hooked(weights)
    names = [f"blocks.{layer}.attn.hook_dynamic_key" for layer in range(len(weights["W_V"]))]
    with torch.no_grad(), one_thread_an_operation():
        read = forward.reads(inputs, weights["W_V"].dtype)
        _, cache = model.run_with_cache(read, names_filter=names)
    keys = np.stack([cache[name].numpy().astype(float) for name in names], 1)
    keys[:, 0] = keys[:1, 0]
    return keys
