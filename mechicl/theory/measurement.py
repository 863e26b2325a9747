"""What a linear measurement of θ leaves unknown: the losses of raj2026, exact or simulated.

A measurement W, (channel, covariate), of which no row need be normal to another, reads Φ = W(θ + ξ)
with ξ ~ N(0, τ²I). A query x ~ N(0, I) then costs Tr C_{θ|Φ} at least: all losses here are that
trace, the excess over the noise of the response, from 0 to Tr C₀. Only the span of the rows counts:
rows that depend on others add nothing. No row at all leaves the prior.

`tau` is the noise τ that the measurement meets. In a context of N tokens that is more than the τ of
the task: see `context_noise`. What is out of range, or does not fit in shape, raises
`mechicl.errors.InputError`.
"""

import numpy as np
from jaxtyping import Float, Int

from mechicl.errors import InputError, integer
from mechicl.theory._arguments import Number, constant, finite, measurement_noise
from mechicl.theory.priors import Covariance

Rows = Float[np.ndarray, "channel covariate"]

_FULL_RANK = 1e-10
"""Rows whose singular value is below this share of the largest depend on the others."""


def context_noise(tau: Number, n_context: int, *, power: Number = 1.0) -> float:
    """Return √(τ² + ⟨|θ|²⟩/N), the noise that second moments of N tokens have along an axis.

    Given θ, the noise of (1/N) Σ y x is (τ² + |θ|²/N) I + θθᵀ/N, τ² = σ²/N. What is left out is
    θθᵀ/N, noise along θ alone: of the same order, but in one direction of many. `gauss_pc_loss` has
    it.

    Parameters
    ----------
    tau
        τ of the task, at least 0.
    n_context
        N, from 1.
    power
        ⟨|θ|²⟩ = Tr C₀, at least 0; 1 on the tree.

    Returns
    -------
    float
        At least τ.

    Raises
    ------
    InputError
        What is out of range.

    Notes
    -----
    Source: derived from the Wishart law of second moments; raj2026 has N → ∞.
    """
    given = measurement_noise(tau)
    of_theta = constant("power", power, minimum=0) / integer("n_context", n_context, 1)
    return float(np.sqrt(given**2 + of_theta))


def posterior_covariance(
    covariance: Covariance, measurement: Float[np.ndarray, "*batch channel covariate"], tau: Number
) -> Float[np.ndarray, "*batch covariate covariate"]:
    """Covariance of θ ~ N(0, C₀) given Φ = A(θ + ξ): C₀ − C₀Aᵀ[A(C₀ + τ²I)Aᵀ]⁺AC₀.

    It does not depend on Φ, which is why a Gaussian prior leaves nothing to adapt to. For another
    prior of this covariance it is the error of the best linear estimate.

    Parameters
    ----------
    covariance
        C₀, (covariate, covariate), symmetric, no eigenvalue below 0.
    measurement
        A, (..., channel, covariate).
    tau
        τ, at least 0.

    Returns
    -------
    np.ndarray
        (..., covariate, covariate), symmetric; its trace is the loss.

    Raises
    ------
    InputError
        What is no covariance or no measurement of its covariates, or τ out of range.

    Notes
    -----
    Source: raj2026 (12) to (15).
    """
    prior, noise = covariance_of(covariance), measurement_noise(tau)
    rows, _ = row_basis(measured(measurement, len(prior)))
    crossed = rows @ prior
    seen = crossed @ rows.mT + noise**2 * rows @ rows.mT
    found = prior - crossed.mT @ np.linalg.pinv(seen, hermitian=True) @ crossed
    return (found + found.mT) / 2


def principal_axes(covariance: Covariance, n_channels: int) -> Rows:
    """Return the eigenvectors of the M largest eigenvalues of C₀, as a measurement.

    Parameters
    ----------
    covariance
        C₀, (covariate, covariate).
    n_channels
        M, from 0 to the number of covariates.

    Returns
    -------
    np.ndarray
        (channel, covariate), orthonormal rows, largest first. Of a diagonal C₀, such as a tree's,
        the coordinates themselves, equals in their order: the first M nodes, breadth first.

    Raises
    ------
    InputError
        What is no covariance, or M out of range.

    Notes
    -----
    Source: raj2026 section II, the strategy that is best for a Gaussian prior.
    """
    prior = covariance_of(covariance)
    count = channels(n_channels, len(prior), "covariates")
    variances = np.diag(prior)
    if not (prior - np.diag(variances)).any():
        return np.eye(len(prior))[np.argsort(-variances, kind="stable")[:count]]
    return np.linalg.eigh(prior)[1].T[::-1][:count].copy()


def greedy_axes(covariance: Covariance, n_channels: int, tau: Number) -> Rows:
    """Return M axes chosen one after the other, each the largest of what the last ones left.

    Row m + 1 is the first eigenvector of `posterior_covariance` given rows 1 … m, among directions
    normal to these: their noise is in Φ already, and to read one again says nothing. It is what a
    strategy that adapts takes for a Gaussian prior; its loss is that of `principal_axes`.

    Parameters
    ----------
    covariance
        C₀, (covariate, covariate).
    n_channels
        M, from 0 to the number of covariates.
    tau
        τ, at least 0.

    Returns
    -------
    np.ndarray
        (channel, covariate), orthonormal rows.

    Raises
    ------
    InputError
        What is no covariance, M or τ out of range.

    Notes
    -----
    Source: raj2026 section II.
    """
    prior = covariance_of(covariance)
    width = len(prior)
    rows = np.zeros((0, width))
    for _ in range(channels(n_channels, width, "covariates")):
        unread = np.eye(width) - rows.T @ rows
        # Read directions are put below any other: eigenvalues are 0 at least.
        left = unread @ posterior_covariance(prior, rows, tau) @ unread - rows.T @ rows
        rows = np.vstack([rows, np.linalg.eigh((left + left.T) / 2)[1][:, -1]])
    return rows


def gauss_pc_loss(
    covariance: Covariance | Float[np.ndarray, " covariate"],
    n_channels: int | Int[np.ndarray, "*batch"],
    tau: Number,
    *,
    n_context: int | None = None,
) -> Float[np.ndarray, "*batch"]:
    """Least loss of a linear estimate from M channels: Tr C₀ − Σ_{i≤M} λ_i²/(λ_i + τ²).

    λ_i are the eigenvalues of C₀, largest first. For N tokens τ² becomes τ² + (Tr C₀ + λ_i)/N. It
    is the optimum of one layer of linear attention without MLPs, for any prior of this covariance;
    for a Gaussian prior no other strategy does better.

    Parameters
    ----------
    covariance
        C₀, (covariate, covariate); or (covariate,), the variances of a diagonal one.
    n_channels
        M, integers of any shape, from 0 to the number of covariates.
    tau
        τ, at least 0.
    n_context
        N, from 1; None is N → ∞.

    Returns
    -------
    np.ndarray
        (...), from 0 to Tr C₀.

    Raises
    ------
    InputError
        What is no covariance, or M, τ, N out of range.

    Notes
    -----
    Source: raj2026 (34); the term of finite N is derived from the Wishart law of second moments.
    """
    given = np.asarray(covariance)
    variances = finite("covariance", given) if given.ndim == 1 else None
    if variances is None:
        variances = np.linalg.eigvalsh(covariance_of(covariance))
    elif variances.size == 0 or variances.min() < 0:
        raise InputError("covariance has no variances, or some below 0; accepted: from 0 on")
    # Rounding leaves an eigenvalue of 0 a little below it.
    spectrum = np.maximum(np.sort(variances)[::-1], 0)
    total = spectrum.sum()
    noise = np.full(spectrum.shape, measurement_noise(tau) ** 2)
    if n_context is not None:
        noise += (total + spectrum) / integer("n_context", n_context, 1)
    counts = np.asarray(n_channels)
    if counts.dtype.kind not in "iu" or (
        counts.size and not 0 <= counts.min() <= counts.max() <= len(spectrum)
    ):
        raise InputError(
            f"n_channels = {n_channels!r}; accepted: integers from 0 to {len(spectrum)}, the "
            "number of covariates"
        )
    with np.errstate(invalid="ignore"):  # nothing to learn of a variance of 0
        left = np.where(spectrum > 0, spectrum * noise / (spectrum + noise), 0)
    return np.asarray(np.append(0, left.cumsum())[counts] + _tail(spectrum)[counts])


def _tail(spectrum: Float[np.ndarray, " covariate"]) -> Float[np.ndarray, " count"]:
    """Return the sum of what is left after the first 0, 1, … numbers."""
    return np.append(spectrum[::-1].cumsum()[::-1], 0)


def covariance_of(covariance: object) -> Covariance:
    """Return C₀ in float64; raise InputError for what is no covariance."""
    matrix = finite("covariance", covariance)
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] and matrix.size > 0
    if not square or abs(matrix - matrix.T).max() > 1e-10 * abs(matrix).max():
        raise InputError(
            f"covariance has shape {matrix.shape}; accepted: (covariate, covariate), symmetric"
        )
    variances = np.diag(matrix)
    lowest = variances.min()
    if (matrix - np.diag(variances)).any():
        lowest = np.linalg.eigvalsh(matrix)[0]
    if lowest < -1e-10 * abs(matrix).max():
        raise InputError(f"covariance has an eigenvalue of {lowest:g}; accepted: none below 0")
    return matrix


def measured(
    measurement: object, width: int, *, batched: bool = True
) -> Float[np.ndarray, "*batch channel covariate"]:
    """Return a measurement in float64; raise InputError for what is none of `width` covariates."""
    rows = finite("measurement", measurement)
    if rows.ndim < 2 or rows.shape[-1] != width or (rows.ndim > 2 and not batched):
        lead = "..., " if batched else ""
        raise InputError(
            f"measurement has shape {rows.shape}; accepted: ({lead}channel, {width}), a column for "
            "every covariate"
        )
    return rows


def channels(n_channels: object, most: int, of: str) -> int:
    """Return M; raise InputError for what is no integer from 0 to `most`, the number `of` them."""
    count = integer("n_channels", n_channels, 0)
    if count > most:
        raise InputError(f"n_channels = {count}; accepted: at most {most}, the number of {of}")
    return count


def row_basis(
    rows: Float[np.ndarray, "*batch channel covariate"],
) -> tuple[Float[np.ndarray, "*batch rank covariate"], Float[np.ndarray, "*batch rank channel"]]:
    """Return orthonormal rows of the same span, and what makes coordinates in them of Wx.

    A batch keeps rows of 0 where rows depend on others; one measurement has as many as its rank.
    """
    u, s, v = np.linalg.svd(rows, full_matrices=False)
    largest = s.max(-1, keepdims=True, initial=0)
    full = (s > _FULL_RANK * largest)[..., None]
    found = np.where(full, v, 0), np.where(full, u.mT / np.where(s > 0, s, 1)[..., None], 0)
    if rows.ndim > 2:
        return found
    return found[0][full[:, 0]], found[1][full[:, 0]]
