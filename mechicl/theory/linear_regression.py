"""Approximate loss and solution manifold of in-context linear regression (he2025).

The task has covariates x ~ N(0, I_d), responses y = βᵀx + ε with β ~ N(0, I_d/d) and ε ~ N(0, σ²),
and L examples a context. Functions take these constants by keyword: `d` ≥ 1 and `n_context` =
L ≥ 1, whole numbers, and `noise_variance` = σ² ≥ 0. A model is H heads of KQ scale ω and OV scale
μ (3.1), arrays (..., H) whose leading axes broadcast. What is out of range, or does not fit in
shape, raises `mechicl.errors.InputError`; NaN goes in as "undefined" and comes out as such.
"""

import numpy as np
from jaxtyping import Float, Int, Real

from mechicl.errors import InputError
from mechicl.theory._arguments import (
    Heads,
    Number,
    Scalars,
    constant,
    leading,
    per_head,
    quiet,
    reals,
    task_constants,
)

_LARGEST_EXPONENT = float(np.log(np.finfo(float).max))


@quiet
def approximate_loss(
    omega: Heads, mu: Heads, *, d: Number, n_context: Number, noise_variance: Number
) -> Float[np.ndarray, "*#batch"]:
    """Approximate population loss of a sum of softmax kernel regressors, without a factor ½.

    L̃(ω, μ) = 1 + σ² − 2μᵀω + μᵀ(ωωᵀ + (1+σ²)/L · exp(d ωωᵀ))μ, with the exponential taken entry
    by entry.

    It leaves out terms of order 1/L: for a pair of small ω the true loss exceeds it by η*/L, which
    is 9 % at d = 5, L = 40. Beyond |ω| ≈ 1/√d it is far too high.

    Parameters
    ----------
    omega, mu
        KQ and OV scales, (..., H).
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    np.ndarray
        (...), at least σ². NaN where a head is NaN and where exp(dω²) is beyond float64.

    Raises
    ------
    InputError
        Constants out of range, or shapes that do not fit.

    Notes
    -----
    Source: he2025 (4.1).
    """
    d, length, variance = task_constants(d, n_context, noise_variance)
    omega, mu = per_head(omega=omega, mu=mu)
    spread = np.einsum("...h,...hk,...k->...", mu, _kernel(omega, d), mu)
    # 1 + σ² − 2s + s² as σ² + (1 − s)²: no cancellation near the optimum.
    return np.asarray(
        variance + (1 - _inner(mu, omega)) ** 2 + (1 + variance) / length * spread, dtype=float
    )


@quiet
def approximate_loss_gradient(
    omega: Heads, mu: Heads, *, d: Number, n_context: Number, noise_variance: Number
) -> tuple[Float[np.ndarray, "*#batch H"], Float[np.ndarray, "*#batch H"]]:
    """Gradient of `approximate_loss` in ω and in μ.

    With c = (1+σ²)/L and E = exp(d ωωᵀ): ∇_ω = −2(1 − ⟨μ,ω⟩)μ + 2cd · μ ⊙ E(μ⊙ω) and
    ∇_μ = −2(1 − ⟨μ,ω⟩)ω + 2c · Eμ.

    Parameters
    ----------
    omega, mu
        KQ and OV scales, (..., H).
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    grad_omega, grad_mu
        Each (..., H). NaN where a head is NaN and where exp(dω²) is beyond float64.

    Raises
    ------
    InputError
        Constants out of range, or shapes that do not fit.

    Notes
    -----
    Source: derivatives of he2025 (4.1); the updates of section 4.2 are their Taylor series.
    """
    d, length, variance = task_constants(d, n_context, noise_variance)
    omega, mu = per_head(omega=omega, mu=mu)
    c = (1 + variance) / length
    kernel = _kernel(omega, d)
    missing = 1 - _inner(mu, omega)[..., None]
    grad_omega = -2 * missing * mu + 2 * c * d * mu * _apply(kernel, mu * omega)
    grad_mu = -2 * missing * omega + 2 * c * _apply(kernel, mu)
    return grad_omega, grad_mu


@quiet
def optimal_ov(
    omega: Heads, *, d: Number, n_context: Number, noise_variance: Number
) -> tuple[Float[np.ndarray, "*#batch H"], Int[np.ndarray, "*#batch"]]:
    """OV scales that minimise `approximate_loss` at given KQ scales, and the rank of their system.

    Solves (ωωᵀ + (1+σ²)/L · exp(d ωωᵀ)) μ = ω. Heads of one ω count as one, so the system is then
    singular, and the solution of least norm is returned, which shares μ evenly among them.

    Parameters
    ----------
    omega
        KQ scales, (..., H).
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    mu
        (..., H). NaN where a ω of the same model is NaN or infinite, or exp(dω²) is beyond
        float64.
    rank
        (...): rank of the system in float64, 1 to H, and 0 where `mu` is NaN. Where it is below H,
        other μ do as well. Nearby ω lose rank too, once float64 cannot tell them apart.

    Raises
    ------
    InputError
        Constants out of range.

    Notes
    -----
    Source: he2025 (4.1), stationary in μ.
    """
    d, length, variance = task_constants(d, n_context, noise_variance)
    (omega,) = per_head(omega=omega)
    system = omega[..., :, None] * omega[..., None, :] + (1 + variance) / length * _kernel(omega, d)
    defined = np.asarray(np.isfinite(system).all((-2, -1)))
    # LAPACK may end the process on NaN: it sees the identity instead.
    values, vectors = np.linalg.eigh(
        np.where(defined[..., None, None], system, np.eye(omega.shape[-1]))
    )
    cutoff = np.finfo(float).eps * omega.shape[-1] * values[..., -1:]
    kept = values > cutoff
    inverse = np.where(kept, 1 / np.where(kept, values, 1.0), 0.0)
    mu = _apply(vectors, inverse * _apply(np.swapaxes(vectors, -1, -2), omega))
    rank = np.where(defined, kept.sum(-1), 0)
    return np.where(defined[..., None], mu, np.nan), np.asarray(rank)


@quiet
def manifold_ov(
    gamma: Scalars, *, d: Number, n_context: Number, noise_variance: Number
) -> Float[np.ndarray, "*#batch"]:
    """OV scale of each sign on the solution manifold, μ_γ: half of the best ‖μ‖₁ at KQ scale γ.

    μ_γ = ½ γ / (γ² + (1+σ²)/L · sinh(dγ²)).

    Parameters
    ----------
    gamma
        Common |ω| of the live heads, any shape, at least 0.
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    np.ndarray
        Shape of `gamma`, positive. It grows like η*/(2γ) as γ → 0. NaN at γ = 0: there all heads
        weigh the context evenly and cancel, so every ‖μ‖₁ has the same loss and none is best.

    Raises
    ------
    InputError
        γ negative, or constants out of range.

    Notes
    -----
    Source: he2025 (4.6).
    """
    constants = task_constants(d, n_context, noise_variance)
    gamma = reals("gamma", gamma, minimum=0)
    scale = np.where(gamma > 0, gamma, np.nan)
    return np.asarray(1 / (2 * scale * (1 + _excess(gamma, *constants))))


@quiet
def manifold_loss(
    gamma: Scalars, *, d: Number, n_context: Number, noise_variance: Number
) -> Float[np.ndarray, "*#batch"]:
    """Approximate loss on the solution manifold at KQ scale γ.

    L̃(γ) = 1 + σ² − γ² / (γ² + (1+σ²)/L · sinh(dγ²)), the least of
    σ² + (1 − γ‖μ‖₁)² + (1+σ²)/L · sinh(dγ²) · ‖μ‖₁² over ‖μ‖₁.

    Parameters
    ----------
    gamma
        Common |ω| of the live heads, any shape, at least 0.
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    np.ndarray
        Shape of `gamma`. Increases from 1 + σ² − η* at γ = 0, a limit that no model attains,
        towards 1 + σ².

    Raises
    ------
    InputError
        γ negative, or constants out of range.

    Notes
    -----
    Source: he2025, text before (4.6), whose last norm lacks its square.
    """
    constants = task_constants(d, n_context, noise_variance)
    gamma = reals("gamma", gamma, minimum=0)
    return np.asarray(1 + constants[-1] - 1 / (1 + _excess(gamma, *constants)))


@quiet
def nearest_on_manifold(
    omega: Heads,
    mu: Heads,
    gamma: Scalars,
    role: Real[np.ndarray, "*#batch H"] | Number,
    *,
    d: Number,
    n_context: Number,
    noise_variance: Number,
) -> tuple[Float[np.ndarray, "*#batch H"], Float[np.ndarray, "*#batch H"]]:
    """Nearest point, in Euclidean distance over (ω, μ), of the solution manifold at KQ scale γ.

    The role of a head says on which side it is: ω = γ·role, and μ moves by one amount within each
    sign, so that positive heads sum to μ_γ and negative ones to −μ_γ. Dummies get zeros. A head of
    small μ can be moved across zero: the sums of (4.7) are imposed, the sign of each single μ is
    not.

    Parameters
    ----------
    omega, mu
        KQ and OV scales, (..., H).
    gamma
        KQ scale of the manifold, (...), at least 0.
    role
        +1 positive, −1 negative, 0 dummy head, (..., H).
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    omega_near, mu_near
        Each (..., H). NaN where no head is positive or none is negative, for then no point has
        these roles; where γ is 0, for then μ_γ is undefined; and where a head or γ is not finite.

    Raises
    ------
    InputError
        γ negative, roles that are none of −1, 0, 1, constants out of range, or shapes that do not
        fit.

    Notes
    -----
    Source: he2025 (4.7); both signs are needed by (4.13), read with ≥ 1 in place of > 1.
    """
    target = manifold_ov(gamma, d=d, n_context=n_context, noise_variance=noise_variance)
    omega, mu, role = per_head(omega=omega, mu=mu, role=role)
    if not np.isin(role, (-1, 0, 1)).all():
        raise InputError(f"role has values {np.unique(role)}; accepted: -1, 0 and 1")
    gamma = reals("gamma", gamma)
    batch = leading({"gamma": gamma, "omega": omega}, [gamma.shape, omega.shape[:-1]])
    omega, mu, role = (
        np.broadcast_to(array, (*batch, role.shape[-1])) for array in (omega, mu, role)
    )
    omega_near = np.asarray(gamma)[..., None] * role
    mu_near = np.zeros(mu.shape)
    for sign in (1, -1):
        group = role == sign
        short = sign * target - np.sum(mu, axis=-1, where=group)
        # A group without heads divides by zero and is NaN in the end.
        shift = short / group.sum(-1)
        mu_near = np.where(group, mu + shift[..., None], mu_near)
    defined = (
        (role > 0).any(-1)
        & (role < 0).any(-1)
        & np.isfinite(omega).all(-1)
        & np.isfinite(mu).all(-1)
        & np.isfinite(target)
        & np.isfinite(gamma)
    )[..., None]
    return np.where(defined, omega_near, np.nan), np.where(defined, mu_near, np.nan)


def optimal_learning_rate(*, d: Number, n_context: Number, noise_variance: Number) -> float:
    """Learning rate η* of the debiased gradient step that the best pair of heads takes.

    η* = 1 / (1 + (1+σ²)·d/L). It minimises `debiased_gd_risk` exactly.

    Parameters
    ----------
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    float
        In (0, 1).

    Raises
    ------
    InputError
        Constants out of range.

    Notes
    -----
    Source: he2025, Theorem 4.2 (ii).
    """
    d, length, variance = task_constants(d, n_context, noise_variance)
    return 1 / (1 + (1 + variance) * d / length)


def single_head_optimum(
    *, d: Number, n_context: Number, noise_variance: Number
) -> tuple[float, float]:
    """Minimiser of `approximate_loss` for one head, the positive one of two mirror images.

    ω* = 1/√d and μ* = √d / (1 + e(1+σ²)·d/L). Training minimises the true loss instead, and finds
    a larger ω (0.52, not 0.45, at d = 5, L = 40, σ² = 0.1).

    Parameters
    ----------
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    omega, mu
        Both positive.

    Raises
    ------
    InputError
        Constants out of range.

    Notes
    -----
    Source: he2025, below (4.12).
    """
    d, length, variance = task_constants(d, n_context, noise_variance)
    root = float(np.sqrt(d))
    return 1 / root, root / (1 + np.e * (1 + variance) * d / length)


@quiet
def effective_learning_rate(
    omega: Heads, mu: Heads, *, slope: Number
) -> Float[np.ndarray, "*#batch"]:
    """Learning rate of the gradient step that heads of small ω come close to.

    η_eff = C_f · Σ_h |ω_h||μ_h|, for a pair 2C_f|ω||μ|. For heads matched in sign, whose μ sum to
    0, it is the η of `debiased_gd` that the model tends to as ω → 0 at constant ⟨μ,ω⟩.

    Parameters
    ----------
    omega, mu
        KQ and OV scales, (..., H).
    slope
        C_f: to first order in its score, a key has weight (1 + C_f·score)/L. 1 for softmax and
        1 + tanh, C for 1 + Cs, 2C for (1 + Cs)².

    Returns
    -------
    np.ndarray
        (...), at least 0. NaN where a head is NaN.

    Raises
    ------
    InputError
        `slope` negative or not finite, or shapes that do not fit.

    Notes
    -----
    Source: he2025 section 5.2, Table 1.
    """
    coefficient = constant("slope", slope, minimum=0)
    omega, mu = per_head(omega=omega, mu=mu)
    return np.asarray(coefficient * np.abs(omega * mu).sum(-1))


def _kernel(omega: Float[np.ndarray, "*batch H"], d: float) -> Float[np.ndarray, "*batch H H"]:
    """exp(d ωωᵀ), NaN where float64 has no such number: inf would meet −inf or 0 later."""
    exponent = d * omega[..., :, None] * omega[..., None, :]
    return np.exp(np.where(exponent < _LARGEST_EXPONENT, exponent, np.nan))


def _excess(gamma: np.ndarray, d: float, length: float, variance: float) -> np.ndarray:
    """(1+σ²)/L · sinh(dγ²)/γ², with its limit (1+σ²)d/L at γ = 0."""
    # From 700 on sinh is as good as infinite, and below it does not overflow.
    exponent = np.minimum(d * gamma * gamma, 700.0)
    ratio = np.divide(np.sinh(exponent), exponent, out=np.ones_like(exponent), where=exponent != 0)
    return (1 + variance) / length * d * ratio


def _inner(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.asarray((left * right).sum(-1))


def _apply(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    return np.einsum("...hk,...k->...h", matrix, vector)
