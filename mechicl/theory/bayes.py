"""Limiting risks of in-context linear regression in high dimension (he2025, Theorem 4.2 (iii)).

L → ∞ with d/L → ξ, for x ~ N(0, I_d), β ~ N(0, I_d/d) and noise of variance σ². All risks are
expected squared errors of the response, so they include σ²: with it in both, the bound of the
theorem holds; for excess risks it does not. It is a statement on the limit: at d = 5, L = 40, σ² =
0.1 the ratio is 2.122 and the bound 2.085.

Every function takes ξ > 0 and, by keyword, `noise_variance` = σ² ≥ 0, both of any shape; they
broadcast. What is out of range, or does not fit in shape, raises `mechicl.errors.InputError`; NaN
goes in as "undefined" and comes out as such.
"""

import numpy as np
from jaxtyping import Bool, Float

from mechicl.errors import InputError
from mechicl.theory._arguments import Scalars, leading, quiet, reals


@quiet
def limiting_bayes_risk(xi: Scalars, *, noise_variance: Scalars) -> Float[np.ndarray, "*#batch"]:
    """Limit of the least risk of any predictor, that of ridge regression at penalty dσ².

    σ² + {−a + √(a² + 4ξ²σ²)}/(2ξ) with a = 1 − ξ + ξσ².

    Parameters
    ----------
    xi
        Limit of d/L, above 0.
    noise_variance
        σ².

    Returns
    -------
    np.ndarray
        (...), from σ² to 1 + σ². At σ² = 0 it is max(0, 1 − 1/ξ).

    Raises
    ------
    InputError
        What is out of range, or does not fit in shape.

    Notes
    -----
    Source: he2025, BayesRisk of Theorem 4.2 (iii); the Stieltjes transform of the Marchenko-Pastur
    law at −ξσ², times ξσ².
    """
    xi, variance = _arguments(xi, noise_variance)
    a = 1 - xi + xi * variance
    root = np.hypot(a, 2 * xi * np.sqrt(variance))
    # The two forms are one number; each is used where it adds and does not subtract.
    added = a > 0
    excess = np.where(
        added, 2 * xi * variance / np.where(added, a + root, 1), (root - a) / (2 * xi)
    )
    return np.asarray(variance + excess)


@quiet
def limiting_gd_risk(xi: Scalars, *, noise_variance: Scalars) -> Float[np.ndarray, "*#batch"]:
    """Limit of the risk of debiased gradient descent at its best learning rate η*.

    σ² + (1+σ²)ξ/(1 + (1+σ²)ξ), the limit of `debiased_gd_risk` and of `vanilla_gd_risk`.

    Parameters
    ----------
    xi
        Limit of d/L, above 0.
    noise_variance
        σ².

    Returns
    -------
    np.ndarray
        (...), from σ² to 1 + σ².

    Raises
    ------
    InputError
        What is out of range, or does not fit in shape.

    Notes
    -----
    Source: he2025, Theorem 4.2 (iii); derived from the exact risk.
    """
    xi, variance = _arguments(xi, noise_variance)
    share = (1 + variance) * xi
    return np.asarray(variance + share / (1 + share))


@quiet
def limiting_risk_ratio(xi: Scalars, *, noise_variance: Scalars) -> Float[np.ndarray, "*#batch"]:
    """Return `limiting_gd_risk` over `limiting_bayes_risk`: what one gradient step costs.

    Parameters
    ----------
    xi
        Limit of d/L, above 0.
    noise_variance
        σ².

    Returns
    -------
    np.ndarray
        (...), at least 1. Infinite where the Bayes risk is 0: without noise, at ξ ≤ 1.

    Raises
    ------
    InputError
        What is out of range, or does not fit in shape.

    Notes
    -----
    Source: he2025, left side of Theorem 4.2 (iii).
    """
    gd = limiting_gd_risk(xi, noise_variance=noise_variance)
    return np.asarray(gd / limiting_bayes_risk(xi, noise_variance=noise_variance))


@quiet
def risk_ratio_bound(xi: Scalars, *, noise_variance: Scalars) -> Float[np.ndarray, "*#batch"]:
    """Bound on `limiting_risk_ratio`: 1 + σ⁻² · {(1 + ξσ²)(1 + σ² + ξ⁻¹)}⁻¹.

    Parameters
    ----------
    xi
        Limit of d/L, above 0.
    noise_variance
        σ².

    Returns
    -------
    np.ndarray
        (...), above 1. Infinite at σ² = 0, of which the theorem does not speak. It is given
        whether or not `bound_applies`.

    Raises
    ------
    InputError
        What is out of range, or does not fit in shape.

    Notes
    -----
    Source: he2025, right side of Theorem 4.2 (iii).
    """
    xi, variance = _arguments(xi, noise_variance)
    return np.asarray(1 + 1 / (variance * (1 + xi * variance) * (1 + variance + 1 / xi)))


@quiet
def bound_applies(xi: Scalars, *, noise_variance: Scalars) -> Bool[np.ndarray, "*#batch"]:
    """Tell where Theorem 4.2 (iii) states its bound: σ² > 0 and σ² + 1/ξ > 1.

    Parameters
    ----------
    xi
        Limit of d/L, above 0.
    noise_variance
        σ².

    Returns
    -------
    np.ndarray
        (...), bool; False where an argument is NaN.

    Raises
    ------
    InputError
        What is out of range, or does not fit in shape.

    Notes
    -----
    Source: he2025, premise of Theorem 4.2 (iii). It is sufficient; no violation is known outside.
    """
    xi, variance = _arguments(xi, noise_variance)
    return np.asarray((variance > 0) & (variance + 1 / xi > 1))


def _arguments(xi: object, noise_variance: object) -> tuple[np.ndarray, np.ndarray]:
    ratio = reals("xi", xi)
    variance = reals("noise_variance", noise_variance, minimum=0)
    if (ratio <= 0).any():
        raise InputError(f"xi reaches down to {ratio[ratio <= 0].min()}; accepted: above 0")
    leading({"xi": ratio, "noise_variance": variance}, [ratio.shape, variance.shape])
    return ratio, variance
