"""The exact posterior over the leaves of raj2026's tree, and the loss of a measurement under it.

A measurement W, (channel, covariate), reads Φ = W(θ(σ) + ξ), ξ ~ N(0, τ²I); only the span of its
rows counts. No row at all leaves the prior. What is out of range, or does not fit in shape, raises
`mechicl.errors.InputError`.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int
from scipy.special import softmax

from mechicl.errors import InputError, integer
from mechicl.theory import priors
from mechicl.theory._arguments import Number, finite, measurement_noise, require_generator
from mechicl.theory.measurement import Rows, measured, row_basis
from mechicl.theory.priors import Leaves

Read = Float[np.ndarray, "channel leaf"]
Steps = Float[np.ndarray, " depth"]

_BLOCK = 2**17
"""Likelihoods that are held at a time: 1 MiB, within a core's cache."""

_SAME = 1e-10
"""Without noise, leaves whose squared distances differ by less are as near."""


def leaf_posterior(
    leaves: Leaves,
    measurement: Rows,
    phi: Float[np.ndarray, "*batch channel"],
    tau: Number,
) -> Float[np.ndarray, "*batch leaf"]:
    """Return ρ(σ | Φ) ∝ exp(−|Φ − Wθ(σ)|²/2τ²), rows of W orthonormal; exact for any W.

    Other rows are made orthonormal first, Φ with them.

    Parameters
    ----------
    leaves
        θ(σ), (leaf, covariate), alike in prior probability.
    measurement
        W, (channel, covariate).
    phi
        Φ, (..., channel). Where rows of W depend on one another it is taken to agree.
    tau
        τ, at least 0. At τ = 0, the limit: all leaves that are nearest to Φ, alike.

    Returns
    -------
    np.ndarray
        (..., leaf), sums to 1.

    Raises
    ------
    InputError
        What does not fit in shape, or τ out of range.

    Notes
    -----
    Source: raj2026 (18).
    """
    table, noise = _leaves(leaves), measurement_noise(tau)
    rows, coordinates = row_basis(measured(measurement, table.shape[1], batched=False))
    seen = finite("phi", phi)
    if seen.ndim == 0 or seen.shape[-1] != coordinates.shape[1]:
        raise InputError(
            f"phi has shape {seen.shape}; accepted: (..., {coordinates.shape[1]}), a number for "
            "every row of the measurement"
        )
    read = table @ rows.T
    closeness = (seen @ coordinates.T) @ read.T - (read**2).sum(1) / 2
    if noise > 0:
        return softmax(closeness / noise**2, axis=-1)
    scale = 1 + (read**2).sum(1).max()
    nearest = closeness >= closeness.max(-1, keepdims=True) - _SAME * scale
    return nearest / nearest.sum(-1, keepdims=True)


def leaf_moments(
    leaves: Leaves, weights: Float[np.ndarray, "*batch leaf"]
) -> tuple[Float[np.ndarray, "*batch covariate"], Float[np.ndarray, "*batch"]]:
    """Return the mean θ̄ = Σ_σ θ(σ) ρ(σ) and the trace of the covariance, Σ_σ |θ(σ) − θ̄|² ρ(σ).

    Parameters
    ----------
    leaves
        θ(σ), (leaf, covariate).
    weights
        ρ, (..., leaf), such as `leaf_posterior` returns.

    Returns
    -------
    mean, trace
        (..., covariate) and (...), at least 0.

    Raises
    ------
    InputError
        What does not fit in shape.

    Notes
    -----
    Source: raj2026 (19), (20).
    """
    table, rho = _leaves(leaves), finite("weights", weights)
    if rho.ndim == 0 or rho.shape[-1] != len(table):
        raise InputError(f"weights have shape {rho.shape}; accepted: (..., {len(table)})")
    mean = rho @ table
    spread = rho @ (table**2).sum(1) - (mean**2).sum(-1)
    return mean, np.maximum(spread, 0)


def tree_mmse(
    depth: int,
    alpha: Number,
    measurement: Rows,
    tau: Number,
    *,
    n_draws: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Loss of a measurement on the tree prior with the exact posterior, and its standard error.

    2^{−h} Σ_σ ⟨Tr C_{θ|W(θ(σ)+ξ)}⟩_ξ. Leaves are enumerated, as truth and in the posterior; ξ is
    drawn. The same generator and number of rows give the same draws: measurements are compared so.

    Parameters
    ----------
    depth, alpha
        h from 1 to 13 and α of the tree.
    measurement
        W, (channel, covariate), covariate = 2^h − 1. The first M nodes, `principal_axes`, are the
        principal components with the full posterior in place of the linear estimate.
    tau
        τ, at least 0.
    n_draws
        Draws of ξ for every leaf, from 2.
    rng
        Where they are drawn from.

    Returns
    -------
    loss, error
        The loss, from 0 to 1; its standard error over draws of ξ, 0 where nothing depends on them.

    Raises
    ------
    InputError
        What does not fit in shape, or is out of range.

    Notes
    -----
    Source: raj2026 (17) to (21).
    """
    require_generator(rng)
    leaves, steps = priors.tree_leaves(depth, alpha), priors.tree_steps(depth, alpha)
    noise, count = measurement_noise(tau), integer("n_draws", n_draws, 2)
    rows, _ = row_basis(measured(measurement, leaves.shape[1], batched=False))
    read = rows @ leaves.T
    # About the first draw, so that nothing is lost where they are alike.
    origin, total, squares = np.zeros((3, len(leaves)))
    for number, power in enumerate(_by_leaf(read, steps, noise, count, rng)):
        if number == 0:
            origin = power
        total += power - origin
        squares += (power - origin) ** 2
    mean = total / count
    variance = np.maximum(squares / count - mean**2, 0) / (count - 1)
    loss = max(1 - float((origin + mean).mean()), 0.0)
    return loss, float(np.sqrt(variance.sum()) / len(leaves))


def powers(
    read: Read,
    steps: Steps,
    noise: Number,
    truth: Int[np.ndarray, " n"],
    draws: Float[np.ndarray, "channel n"],
) -> Float[np.ndarray, " n"]:
    """Return |θ̄(Φ)|² for Φ = Wθ(σ) + τz; its mean is J of (24), and 1 − J the loss, as |θ| = 1.

    Parameters
    ----------
    read
        Wθ(σ), (channel, leaf), rows of W orthonormal.
    steps
        `mechicl.theory.priors.tree_steps` of the tree.
    noise
        τ, at least 0.
    truth, draws
        σ, (n,), and z, (channel, n), standard normal.

    Returns
    -------
    np.ndarray
        (n,), from 0 to 1.

    Notes
    -----
    Source: raj2026 (19), (24).
    """
    width = max(1, _BLOCK // read.shape[1])
    found = np.empty(truth.size)
    for at in range(0, truth.size, width):
        part = slice(at, at + width)
        weights = _likelihoods(read, noise, truth[part], draws[:, part])
        total, left = np.zeros(weights.shape[1]), weights
        for step in steps[::-1]:
            apart = left[1::2] - left[0::2]
            apart *= apart
            total += step**2 * apart.sum(0)
            left = left[0::2] + left[1::2]
        found[part] = total / left[0] ** 2
    return found


def power_gradient(
    read: Read,
    steps: Steps,
    noise: Number,
    truth: Int[np.ndarray, " n"],
    draws: Float[np.ndarray, "channel n"],
) -> Read:
    """Return the gradient of the mean of `powers` in `read`, the draws held.

    Parameters
    ----------
    read, steps, noise, truth, draws
        As in `powers`, τ above 0.

    Returns
    -------
    np.ndarray
        (channel, leaf).

    Notes
    -----
    Source: derived from raj2026 (18), (19), (24).
    """
    width = max(1, _BLOCK // read.shape[1])
    found = np.zeros(read.shape)
    for at in range(0, truth.size, width):
        part = slice(at, at + width)
        own, z = truth[part], draws[:, part]
        rho = _likelihoods(read, noise, own, z)
        rho /= rho.sum(0)
        left, levels = rho, []
        for step in steps[::-1]:
            levels.append(step**2 * (left[1::2] - left[0::2]))
            left = left[0::2] + left[1::2]
        overlap = np.zeros((1, own.size))  # θ̄·θ(σ), from the root to the leaves
        for apart in reversed(levels):
            overlap = np.stack([overlap - apart, overlap + apart], axis=1).reshape(-1, own.size)
        pull = rho * (overlap - (rho * overlap).sum(0))
        found += (read[:, own] + noise * z) @ pull.T - read * pull.sum(1)
        np.add.at(found.T, own, (read @ pull).T)
    return 2 * found / (noise**2 * truth.size)


def _by_leaf(
    read: Read, steps: Steps, noise: float, n_draws: int, rng: np.random.Generator
) -> Iterator[Float[np.ndarray, " leaf"]]:
    """Yield `powers` with every leaf as the truth, once for every draw of the noise."""
    n_channels, n_leaves = read.shape
    at_once = max(1, _BLOCK // n_leaves)
    for first in range(0, n_draws, at_once):
        held = min(at_once, n_draws - first)
        # By draw, then by channel: the numbers are the same however many are held.
        draws = rng.standard_normal((held, n_channels, n_leaves)).transpose(1, 0, 2)
        truth = np.tile(np.arange(n_leaves), held)
        found = powers(read, steps, noise, truth, draws.reshape(n_channels, truth.size))
        yield from found.reshape(held, n_leaves)


def _likelihoods(
    read: Read, noise: Number, truth: Int[np.ndarray, " n"], draws: Float[np.ndarray, "channel n"]
) -> Float[np.ndarray, "leaf n"]:
    """Return likelihoods of all leaves, over that of the truth: they cannot all underflow."""
    seen = read[:, truth] + noise * draws
    half = (read**2).sum(0) / 2
    own = (read[:, truth] * seen).sum(0) - half[truth]
    left = np.column_stack([read.T, -half, np.ones(len(half))])
    excess = left @ np.vstack([seen, np.ones(len(own)), -own])
    if noise > 0:
        return np.exp(np.divide(excess, noise**2, out=excess), out=excess)
    return (excess >= -_SAME * (1 + half.max())).astype(float)


def _leaves(leaves: object) -> Leaves:
    table = finite("leaves", leaves)
    if table.ndim != 2 or len(table) == 0:
        raise InputError(f"leaves have shape {table.shape}; accepted: (leaf, covariate)")
    return table
