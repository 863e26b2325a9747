"""Preconditioned gradient descent under any covariance of the covariates (he2025, section 5.3).

Covariates are x ~ N(0, Σ); β ~ N(0, I/d), ε ~ N(0, σ²) and L are as in
`mechicl.theory.linear_regression`. The predictor is ŷ = L⁻¹ Σ_ℓ y_ℓ x_ℓᵀ Ω x_q, or with x_ℓ − x̄ in
place of x_ℓ where it is debiased, as softmax attention is. Matrices are (..., d, d) and leading
axes broadcast. What is out of range, or does not fit in shape, raises
`mechicl.errors.InputError`; NaN goes in as "undefined" and comes out as such.
"""

import numpy as np
from jaxtyping import Float

from mechicl.errors import InputError
from mechicl.theory._arguments import Number, constant, leading, quiet, reals

Matrix = Float[np.ndarray, "*#batch d d"]

_ROUNDING = 1e-12  # times d and the largest entry: how far below 0 rounding leaves an eigenvalue


def kac_murdock_szego(d: Number, rho: Number) -> Float[np.ndarray, "d d"]:
    """Kac-Murdock-Szegő matrix: Σ_ij = ρ^|i−j|, the covariance of a stationary chain.

    Parameters
    ----------
    d
        Size, a whole number from 1.
    rho
        Correlation of neighbours, between −1 and 1, both excluded.

    Returns
    -------
    np.ndarray
        (d, d), positive definite; its inverse is tridiagonal.

    Raises
    ------
    InputError
        What is out of range.

    Notes
    -----
    Source: he2025 section 5.3, at ρ = 0.5.
    """
    size = int(constant("d", d, minimum=1, whole=True))
    correlation = constant("rho", rho, minimum=-1)
    if not -1 < correlation < 1:
        raise InputError(f"rho = {rho!r}; accepted: between -1 and 1, both excluded")
    index = np.arange(size)
    return correlation ** np.abs(index[:, None] - index)


@quiet
def optimal_preconditioner(
    covariance: Matrix, *, n_context: Number, noise_variance: Number, debiased: bool
) -> Matrix:
    """Matrix Ω at which `preconditioned_gd_risk` is least.

    Plain: Ω = [(1 + 1/L) Σ + (tr Σ + dσ²)/L · I]⁻¹, the Σ̃⁻¹ of (5.6). Debiased: Ω = [Σ + (tr Σ +
    dσ²)/L · I]⁻¹, without the 1/L, which is what the limit of softmax attention is held against.

    Parameters
    ----------
    covariance
        Σ, (..., d, d), symmetric and positive semidefinite.
    n_context, noise_variance
        L ≥ 1 and σ² ≥ 0.
    debiased
        Whether covariates are taken less their mean over the context.

    Returns
    -------
    np.ndarray
        (..., d, d). NaN where Σ is not finite, and where Σ and σ² are 0: every Ω is as good there.

    Raises
    ------
    InputError
        Constants out of range, or Σ that is not square, not symmetric or not positive
        semidefinite.

    Notes
    -----
    Source: he2025 (5.6); the debiased one is derived, the paper does not state it.
    """
    sigma, length, variance = _setting(covariance, n_context, noise_variance)
    d = sigma.shape[-1]
    own = 1.0 if debiased else 1 + 1 / length
    ridge = (_trace(sigma) + d * variance) / length
    system = own * sigma + ridge[..., None, None] * np.eye(d)
    defined = (np.isfinite(system).all((-2, -1)) & (ridge > 0))[..., None, None]
    inverse = np.linalg.inv(np.where(defined, system, np.eye(d)))  # LAPACK may not see NaN
    return np.where(defined, inverse, np.nan)


@quiet
def preconditioned_gd_risk(
    preconditioner: Matrix,
    covariance: Matrix,
    *,
    n_context: Number,
    noise_variance: Number,
    debiased: bool,
) -> Float[np.ndarray, "*#batch"]:
    """Return the expected squared error, noise included, of one preconditioned step.

    R(Ω) = σ² + [tr Σ − 2κ tr(ΣΩΣ) + κ(1+δ) tr(ΣAΣ) + κ/L · tr(AΣ)(tr Σ + dσ²)]/d with A = ΩΣΩᵀ,
    κ = 1 and δ = 1/L; where it is debiased, κ = (L−1)/L and δ = 0. Exact for Gaussian covariates.

    Parameters
    ----------
    preconditioner
        Ω, (..., d, d), not necessarily symmetric; key axis first, as in KQ.
    covariance
        Σ, (..., d, d), symmetric and positive semidefinite.
    n_context, noise_variance
        L ≥ 1 and σ² ≥ 0. A model that divides by its trained length L₀ where L' examples are shown
        has Ω·L'/L₀.
    debiased
        Whether covariates are taken less their mean over the context.

    Returns
    -------
    np.ndarray
        (...), at least σ²; NaN where a matrix is not finite.

    Raises
    ------
    InputError
        Constants out of range, matrices that do not fit, or Σ that is not positive semidefinite.

    Notes
    -----
    Source: derived from the moments of a Wishart matrix; the paper does not state it.
    """
    sigma, length, variance = _setting(covariance, n_context, noise_variance)
    omega = reals("preconditioner", preconditioner)
    _require_square("preconditioner", omega)
    if omega.shape[-1] != sigma.shape[-1]:
        raise InputError(
            f"preconditioner has shape {omega.shape}, covariance {sigma.shape}; accepted: one size"
        )
    leading({"preconditioner": omega, "covariance": sigma}, [omega.shape[:-2], sigma.shape[:-2]])
    d = sigma.shape[-1]
    kept, own = ((length - 1) / length, 1.0) if debiased else (1.0, 1 + 1 / length)
    spread = omega @ sigma @ np.swapaxes(omega, -1, -2)
    signal = (
        _trace(sigma)
        - 2 * kept * _trace(sigma @ omega @ sigma)
        + kept * own * _trace(sigma @ spread @ sigma)
        + kept / length * _trace(spread @ sigma) * (_trace(sigma) + d * variance)
    )
    return np.asarray(variance + signal / d)


@quiet
def optimal_scalar_learning_rate(
    covariance: Matrix, *, n_context: Number, noise_variance: Number, debiased: bool
) -> Float[np.ndarray, "*#batch"]:
    """Learning rate η at which `preconditioned_gd_risk` of Ω = η·I is least.

    Parameters
    ----------
    covariance
        Σ, (..., d, d), symmetric and positive semidefinite.
    n_context, noise_variance
        L ≥ 1 and σ² ≥ 0.
    debiased
        Whether covariates are taken less their mean over the context.

    Returns
    -------
    np.ndarray
        (...), positive. At Σ = I it is `optimal_learning_rate` where it is debiased, and
        `optimal_vanilla_learning_rate` where it is not.

    Raises
    ------
    InputError
        Constants out of range, or Σ that is not square, not symmetric or not positive
        semidefinite.

    Notes
    -----
    Source: derived; the paper has the isotropic case alone.
    """
    sigma, length, variance = _setting(covariance, n_context, noise_variance)
    square = sigma @ sigma
    own = 1.0 if debiased else 1 + 1 / length
    total = _trace(sigma) + sigma.shape[-1] * variance
    return np.asarray(
        _trace(square) / (own * _trace(square @ sigma) + _trace(square) * total / length)
    )


@quiet
def scale_free_distance(matrix: Matrix, other: Matrix) -> Float[np.ndarray, "*#batch"]:
    """Relative distance of two matrices when each may be multiplied by a number.

    √(1 − ⟨A, B⟩²/(‖A‖²‖B‖²)), the sine of their angle in the Frobenius inner product: the least
    ‖A − cB‖/‖A‖ over c.

    Parameters
    ----------
    matrix, other
        (..., d, d).

    Returns
    -------
    np.ndarray
        (...), from 0 (multiples of each other, of either sign) to 1. NaN where a matrix is zero or
        not finite.

    Raises
    ------
    InputError
        Matrices that do not fit.

    Notes
    -----
    Source: he2025 section 5.3 compares up to scale, without a number.
    """
    one, two = reals("matrix", matrix), reals("other", other)
    _require_square("matrix", one)
    _require_square("other", two)
    if one.shape[-1] != two.shape[-1]:
        raise InputError(f"matrix has shape {one.shape}, other {two.shape}; accepted: one size")
    leading({"matrix": one, "other": two}, [one.shape[:-2], two.shape[:-2]])
    unit, second = (m / np.linalg.norm(m, axis=(-2, -1), keepdims=True) for m in (one, two))
    along = (unit * second).sum((-2, -1), keepdims=True)
    # As the norm of what is left over: 1 − cos² would lose half the digits near 0.
    return np.asarray(np.linalg.norm(unit - along * second, axis=(-2, -1)))


def _setting(
    covariance: object, n_context: object, noise_variance: object
) -> tuple[np.ndarray, float, float]:
    sigma = reals("covariance", covariance)
    _require_square("covariance", sigma)
    finite = np.where(np.isfinite(sigma), sigma, 0.0)
    if not np.allclose(finite, np.swapaxes(finite, -1, -2), rtol=1e-9, atol=0):
        raise InputError("covariance is not symmetric")
    whole = np.where(np.isfinite(sigma).all((-2, -1), keepdims=True), sigma, 0.0)
    scale = np.abs(whole).max((-2, -1), keepdims=True)
    least = np.linalg.eigvalsh(whole / np.where(scale > 0, scale, 1.0))[..., 0]
    if (least < -_ROUNDING * sigma.shape[-1]).any():
        raise InputError(
            "covariance has a negative eigenvalue; accepted: positive semidefinite matrices"
        )
    return (
        sigma,
        constant("n_context", n_context, minimum=1, whole=True),
        constant("noise_variance", noise_variance, minimum=0),
    )


def _require_square(name: str, matrix: np.ndarray) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise InputError(f"{name} has shape {matrix.shape}; accepted: (..., d, d)")


def _trace(matrix: np.ndarray) -> np.ndarray:
    return np.asarray(np.trace(matrix, axis1=-2, axis2=-1))
