"""Predictors on prompts of linear regression: gradient descent, ridge, softmax kernels (he2025).

A prompt is L covariates `x` (..., L, d) with responses `y` (..., L), and a query `x_query` (...,
d); leading axes broadcast, and every predictor answers in shape (...). A prompt or setting with a
number that is not finite gives NaN; what is out of range, or does not fit in shape, raises
`mechicl.errors.InputError`.
"""

from math import prod

import numpy as np
from jaxtyping import Float

from mechicl.errors import InputError
from mechicl.theory._arguments import Heads, Scalars, leading, per_head, quiet, reals

_WELL = 1e-6  # of the extreme eigenvalues of XᵀX: from there on XᵀX loses too many digits

Covariates = Float[np.ndarray, "*#batch L d"]
Responses = Float[np.ndarray, "*#batch L"]
Query = Float[np.ndarray, "*#batch d"]
Prediction = Float[np.ndarray, "*#batch"]


@quiet
def vanilla_gd(
    x: Covariates, y: Responses, x_query: Query, *, learning_rate: Scalars
) -> Prediction:
    """Prediction after one step of gradient descent from zero on the squared loss of the context.

    ŷ = η/L · Σ_ℓ y_ℓ ⟨x_ℓ, x_q⟩: the step is taken on (2L)⁻¹ Σ_ℓ (βᵀx_ℓ − y_ℓ)².

    Parameters
    ----------
    x, y, x_query
        Prompts: (..., L, d), (..., L) and (..., d).
    learning_rate
        η, a number or (...).

    Returns
    -------
    np.ndarray
        (...). NaN where a prompt or η is not finite.

    Raises
    ------
    InputError
        What is not real numbers, or does not fit in shape.

    Notes
    -----
    Source: he2025, below (4.11).
    """
    rate = reals("learning_rate", learning_rate)
    x, y, x_query, finite = _prompts(x, y, x_query, {"learning_rate": rate})
    step = np.einsum("...l,...ld,...d->...", y, x, x_query) / x.shape[-2]
    return _where(finite, rate * step)


@quiet
def debiased_gd(
    x: Covariates, y: Responses, x_query: Query, *, learning_rate: Scalars
) -> Prediction:
    """Prediction after one step of gradient descent on covariates less their mean over the context.

    ŷ = η/L · Σ_ℓ y_ℓ ⟨x_ℓ − x̄, x_q⟩, x̄ = L⁻¹ Σ_ℓ x_ℓ. The query is not centred. It is what a
    pair of heads (ω, μ) = (±γ, ±η/2γ) computes as γ → 0.

    Parameters
    ----------
    x, y, x_query
        Prompts: (..., L, d), (..., L) and (..., d).
    learning_rate
        η, a number or (...).

    Returns
    -------
    np.ndarray
        (...), 0 for L = 1. NaN where a prompt or η is not finite.

    Raises
    ------
    InputError
        What is not real numbers, or does not fit in shape.

    Notes
    -----
    Source: he2025 (4.11).
    """
    rate = reals("learning_rate", learning_rate)
    x, y, x_query, finite = _prompts(x, y, x_query, {"learning_rate": rate})
    centred = x - x.mean(-2, keepdims=True)
    step = np.einsum("...l,...ld,...d->...", y, centred, x_query) / x.shape[-2]
    return _where(finite, rate * step)


@quiet
def preconditioned_gd(
    x: Covariates,
    y: Responses,
    x_query: Query,
    *,
    preconditioner: Float[np.ndarray, "*#batch d d"],
    debiased: bool,
) -> Prediction:
    """Prediction after one preconditioned step of gradient descent from zero.

    ŷ = L⁻¹ Σ_ℓ y_ℓ x_ℓᵀ Ω x_q, with x_ℓ − x̄ in place of x_ℓ where it is `debiased`.

    Parameters
    ----------
    x, y, x_query
        Prompts: (..., L, d), (..., L) and (..., d).
    preconditioner
        Ω, (..., d, d), the step size included; key axis first, as in KQ.
    debiased
        Whether the covariates of a context are taken less their mean.

    Returns
    -------
    np.ndarray
        (...). NaN where a prompt or Ω is not finite.

    Raises
    ------
    InputError
        What is not real numbers, or does not fit in shape.

    Notes
    -----
    Source: he2025 (5.5), (5.6).
    """
    omega = reals("preconditioner", preconditioner)
    refusal = f"preconditioner has shape {omega.shape}; accepted: (..., d, d)"
    if omega.ndim < 2:
        raise InputError(refusal)
    x, y, x_query, finite = _prompts(x, y, x_query, {"preconditioner": omega}, axes=2)
    d = x.shape[-1]
    if omega.shape[-2:] != (d, d):
        raise InputError(f"{refusal} with d = {d}")
    omega = np.where(np.isfinite(omega), omega, 0.0)
    taken = x - x.mean(-2, keepdims=True) if debiased else x
    step = np.einsum("...l,...ld,...de,...e->...", y, taken, omega, x_query, optimize=True)
    return _where(finite, step / x.shape[-2])


@quiet
def condition_number(x: Covariates, *, penalty: Scalars) -> Float[np.ndarray, "*#batch"]:
    """Condition number of the system that `ridge` solves, XᵀX + λI.

    Parameters
    ----------
    x
        Covariates of contexts, (..., L, d).
    penalty
        λ, a number or (...), at least 0.

    Returns
    -------
    np.ndarray
        (...), at least 1; infinite where the system is singular, as with L < d and λ = 0. NaN where
        a prompt or λ is not finite.

    Raises
    ------
    InputError
        λ negative, or shapes that do not fit.

    Notes
    -----
    Source: standard; the ratio of the extreme eigenvalues, by the singular values of X.
    """
    penalty = reals("penalty", penalty, minimum=0)
    x = reals("x", x)
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise InputError(f"x has shape {x.shape}; accepted: (..., L, d) with L and d at least 1")
    leading({"x": x, "penalty": penalty}, [x.shape[:-2], penalty.shape])
    finite = np.isfinite(x).all((-2, -1)) & np.isfinite(penalty)
    values = np.linalg.svd(np.where(np.isfinite(x), x, 0.0), compute_uv=False)
    largest = values[..., 0] ** 2 + penalty
    cutoff = np.finfo(float).eps * max(x.shape[-2:]) * values[..., 0]
    least = np.where(values[..., -1] > cutoff, values[..., -1], 0.0)
    if x.shape[-2] < x.shape[-1]:
        least = np.zeros_like(least)
    smallest = least**2 + penalty
    ratio = np.divide(
        largest,
        smallest,
        out=np.full(np.broadcast(largest, smallest).shape, np.inf),
        where=smallest > 0,
    )
    return _where(finite, ratio)


@quiet
def ridge(x: Covariates, y: Responses, x_query: Query, *, penalty: Scalars) -> Prediction:
    """Prediction of ridge regression.

    ŷ = x_qᵀ (XᵀX + λI)⁻¹ Xᵀy. At λ = dσ² it is the posterior mean for β ~ N(0, I/d) and noise σ²,
    the best predictor there is; at λ = 0 the least squares of least norm. Contexts may be
    rank-deficient, or have L < d. Those of a condition number up to 1000 are solved by XᵀX, the
    others by the singular values of X, which is slower and loses no digits.

    Parameters
    ----------
    x, y, x_query
        Prompts: (..., L, d), (..., L) and (..., d).
    penalty
        λ, a number or (...), at least 0. Several penalties for the same prompts, along a leading
        axis of their own, cost hardly more than one.

    Returns
    -------
    np.ndarray
        (...). NaN where a prompt or λ is not finite.

    Raises
    ------
    InputError
        λ negative, or shapes that do not fit.

    Notes
    -----
    Source: he2025, Bayes estimator of section 4.3.
    """
    penalty = reals("penalty", penalty, minimum=0)
    x, y, x_query, finite = _prompts(x, y, x_query, {"penalty": penalty})
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-1], x_query.shape[:-1])
    flat = [
        np.broadcast_to(part, (*batch, *part.shape[-axes:])).reshape(
            prod(batch), *part.shape[-axes:]
        )
        for part, axes in ((x, 2), (y, 1), (x_query, 1))
    ]
    values, along = (part.reshape(*batch, part.shape[-1]) for part in _spectrum(*flat))
    kept = values > 0
    safe = np.where(kept, values, 1.0)
    # s/(s² + λ), in a form that does not overflow.
    shrunk = np.where(kept, 1 / (safe + penalty[..., None] / safe), 0.0)
    return _where(finite, (shrunk * along).sum(-1))


@quiet
def kernel_regression(
    x: Covariates, y: Responses, x_query: Query, *, omega: Heads, mu: Heads
) -> Prediction:
    """Prediction of attention heads of scales ω and μ: a sum of softmax kernel regressors.

    ŷ = Σ_h μ_h Σ_ℓ p_hℓ y_ℓ, p_h = softmax over ℓ of ω_h ⟨x_ℓ, x_q⟩. One head is a Nadaraya-Watson
    estimator.

    Parameters
    ----------
    x, y, x_query
        Prompts: (..., L, d), (..., L) and (..., d).
    omega, mu
        (H) or (..., H); a scalar is one head.

    Returns
    -------
    np.ndarray
        (...), within ‖μ‖₁ · max|y| of zero. NaN where a prompt or a head is not finite.

    Raises
    ------
    InputError
        What is not real numbers, or does not fit in shape.

    Notes
    -----
    Source: he2025 (3.2); (4.12) for one head.
    """
    omega, mu = per_head(omega=omega, mu=mu)
    x, y, x_query, finite = _prompts(x, y, x_query, {"omega": omega, "mu": mu}, axes=1)
    scores = omega[..., :, None] * np.einsum("...ld,...d->...l", x, x_query)[..., None, :]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    heads = np.einsum("...hl,...l->...h", weights, y) / weights.sum(-1)
    return _where(finite, (mu * heads).sum(-1))


def _spectrum(
    x: Float[np.ndarray, "n L d"], y: Float[np.ndarray, "n L"], x_query: Float[np.ndarray, "n d"]
) -> tuple[Float[np.ndarray, "n s"], Float[np.ndarray, "n s"]]:
    """Return singular values s of X = U S Vᵀ, 0 where they are rounding, and (Uᵀy)(Vᵀx_q)."""
    n, length, d = x.shape
    size = min(length, d)
    values, along = np.empty((n, size)), np.empty((n, size))
    well = np.zeros(n, dtype=bool)
    if length >= d:
        gram = np.swapaxes(x, -1, -2) @ x
        usable = np.asarray(np.isfinite(gram).all((-2, -1)))
        squares, vectors = np.linalg.eigh(np.where(usable[:, None, None], gram, np.eye(d)))
        well = usable & (squares[:, 0] > _WELL * squares[:, -1])
        root = np.sqrt(squares[well])
        toward = np.einsum("nds,nd->ns", vectors[well], np.einsum("nld,nl->nd", x[well], y[well]))
        values[well] = root
        along[well] = toward / root * np.einsum("nds,nd->ns", vectors[well], x_query[well])
    if not well.all():
        left, some, right = np.linalg.svd(x[~well], full_matrices=False)
        cutoff = np.finfo(float).eps * max(length, d) * some[:, :1]
        values[~well] = np.where(some > cutoff, some, 0.0)
        toward = np.einsum("nls,nl->ns", left, y[~well])
        along[~well] = toward * np.einsum("nsd,nd->ns", right, x_query[~well])
    return values, along


def _prompts(
    x: Covariates, y: Responses, x_query: Query, settings: dict[str, np.ndarray], *, axes: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return checked prompts, zero where they were not finite, and where all is finite.

    `axes` is the number of axes that the settings have besides those of the batch. LAPACK may end
    the process on NaN, so no predictor sees one.
    """
    x, y, x_query = reals("x", x), reals("y", y), reals("x_query", x_query)
    if x.shape[-2:] != (*y.shape[-1:], *x_query.shape[-1:]) or x.ndim < 2 or 0 in x.shape[-2:]:
        raise InputError(
            f"x has shape {x.shape}, y {y.shape}, x_query {x_query.shape}; accepted: (..., L, d), "
            "(..., L) and (..., d) with L and d at least 1"
        )
    parts = [(x, 2), (y, 1), (x_query, 1), *((array, axes) for array in settings.values())]
    leading(
        {"x": x, "y": y, "x_query": x_query, **settings},
        [array.shape[: array.ndim - own] for array, own in parts],
    )
    finite = np.asarray(True)
    for array, own in parts:
        finite = finite & np.isfinite(array).all(tuple(range(-own, 0)))
    x, y, x_query = (np.where(np.isfinite(array), array, 0.0) for array in (x, y, x_query))
    return x, y, x_query, np.asarray(finite)


def _where(defined: np.ndarray, prediction: np.ndarray) -> Prediction:
    return np.where(defined, prediction, np.nan)
