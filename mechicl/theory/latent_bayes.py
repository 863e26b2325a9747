"""Exact predictors of a regression whose coefficients have one of raj2026's priors.

What a context says of θ is in the moments of its tokens z = (x, y), G = ⟨z zᵀ⟩ over its N examples:
the likelihood is exp(−N (G_yy − 2 θᵀG_xy + θᵀG_xx θ)/2σ²), whatever the tokens are. So each of
these takes (*batch, K + 1, K + 1) moments and returns the mean of θ, (*batch, covariate): NaN for
moments that are not finite.

What is out of range raises `mechicl.errors.InputError`.
"""

import numpy as np
from jaxtyping import Bool, Float

from mechicl.errors import InputError, integer
from mechicl.theory._arguments import Number, constant, finite, reals
from mechicl.theory.measurement import covariance_of

Moments = Float[np.ndarray, "*batch entry entry"]
Means = Float[np.ndarray, "*batch covariate"]

_TIED = 1e-9  # of ⟨y²⟩: residuals that differ by less are the same up to rounding


def tree_mean(
    moments: Moments,
    leaves: Float[np.ndarray, "leaf covariate"],
    *,
    n_context: int,
    noise_variance: Number,
) -> Means:
    """Return E[θ | context] for θ uniform over `leaves`.

    The weights are softmax(−N r(θ)/2σ²) of the residuals r(θ) = ⟨(y − θᵀx)²⟩. Without noise they
    are equal over the leaves of least residual.

    Parameters
    ----------
    moments
        ⟨z zᵀ⟩ of each context, (*batch, K + 1, K + 1).
    leaves
        θ of each leaf, (leaf, K).
    n_context
        N, from 1.
    noise_variance
        σ², at least 0.

    Notes
    -----
    Source: Bayes' rule for raj2026's task; (18) is its limit of large N for one measurement.
    """
    given, known = _moments(moments)
    theta = finite("leaves", leaves)
    if theta.ndim != 2 or len(theta) == 0:
        raise InputError(f"leaves have shape {theta.shape}; accepted: (leaf, K), one at least")
    _same_width(given, theta.shape[-1], "leaves")
    n, variance = _constants(n_context, noise_variance)
    quadratic = np.einsum(
        "lk,...lk->...l", theta, np.einsum("lk,...kj->...lj", theta, given[..., :-1, :-1])
    )
    squares = given[..., -1, -1, None]
    residuals = squares - 2 * given[..., :-1, -1] @ theta.T + quadratic
    below = residuals - residuals.min(-1, keepdims=True)
    if variance == 0:
        weights = (below <= _TIED * squares).astype(float)
    else:
        weights = np.exp(-below * (n / (2 * variance)))
    return np.where(known, weights / weights.sum(-1, keepdims=True) @ theta, np.nan)


def gaussian_mean(
    moments: Moments,
    covariance: Float[np.ndarray, "covariate covariate"],
    *,
    n_context: int,
    noise_variance: Number,
) -> Means:
    """Return E[θ | context] for θ ~ N(0, C₀): ridge regression with penalty σ²C₀⁻¹.

    With R = C₀^{1/2} it is R (R G_xx R + σ²/N)⁺ R G_xy; without noise the pseudo-inverse leaves the
    prior where the context says nothing.

    Parameters
    ----------
    moments, n_context, noise_variance
        As of `tree_mean`.
    covariance
        C₀, (K, K), symmetric and positive semidefinite.

    Notes
    -----
    Source: Bayes' rule for raj2026's task.
    """
    given, known = _moments(moments)
    prior = covariance_of(covariance)
    _same_width(given, len(prior), "covariance")
    n, variance = _constants(n_context, noise_variance)
    values, vectors = np.linalg.eigh(prior)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    inner, seen = root @ given[..., :-1, :-1] @ root, given[..., :-1, -1] @ root
    if variance == 0:
        solved = (np.linalg.pinv(inner, hermitian=True) @ seen[..., None])[..., 0]
    else:
        penalty = variance / n * np.eye(len(prior))
        solved = np.linalg.solve(inner + penalty, seen[..., None])[..., 0]
    return np.where(known, solved @ root, np.nan)


def _moments(moments: Moments) -> tuple[Moments, Bool[np.ndarray, "*batch 1"]]:
    """Return moments, 0 where they are not finite, and which contexts have finite ones."""
    given = reals("moments", moments)
    if given.ndim < 2 or given.shape[-1] != given.shape[-2] or given.shape[-1] < 2:
        raise InputError(
            f"moments have shape {given.shape}; accepted: (..., K + 1, K + 1) with K from 1"
        )
    known = np.asarray(np.isfinite(given).all((-1, -2)))
    return np.where(known[..., None, None], given, 0.0), known[..., None]


def _same_width(moments: Moments, width: int, name: str) -> None:
    if width != moments.shape[-1] - 1:
        raise InputError(
            f"{name} are of {width} covariates, moments of {moments.shape[-1] - 1}; accepted: "
            "the same, along the last axis"
        )


def _constants(n_context: int, noise_variance: Number) -> tuple[int, float]:
    return (
        integer("n_context", n_context, 1),
        constant("noise_variance", noise_variance, minimum=0),
    )
