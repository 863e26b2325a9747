"""Population loss of sums of kernel regressors by simulation, far sharper than brute force.

The setting is that of `mechicl.theory.linear_regression`. β, ε and the d − 1 directions orthogonal
to the query are integrated out exactly, and what is left is corrected by the known means of the
terms that small ω leave. Where the approximate loss (4.1) is wrong, this is what it is wrong
against.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from mechicl.errors import InputError
from mechicl.theory._arguments import (
    Heads,
    Number,
    constant,
    per_head,
    quiet,
    reals,
    require_generator,
)

Activation = Callable[[np.ndarray], np.ndarray]
"""f of weights f(s_ℓ)/Σ_k f(s_k), entry by entry."""

_FOLDS = 5
_CHUNK = 2**15
"""Scores of one head that are held at a time."""


@quiet
def true_loss(
    omega: Heads,
    mu: Heads,
    *,
    d: Number,
    n_context: Number,
    noise_variance: Number,
    n_samples: Number,
    rng: np.random.Generator,
    activation: Activation | None = None,
) -> tuple[Float[np.ndarray, "*#batch"], Float[np.ndarray, "*#batch"]]:
    """Return the expected squared error of H heads, noise included, and its standard error.

    The loss is quadratic in μ: L = 1 + σ² − 2μᵀb + μᵀMμ with b_h = E[r p_h·z]/d and M_hk =
    E[(p_h·z)(p_k·z)/d + ((d−1)/d + σ²) p_h·p_k], where r² ~ χ²_d is the squared length of the
    query, z ~ N(0, I_L) are the components of the covariates along it, and p_h = f(ω_h r z) over
    its sum. These are averaged over draws of (r, z), after regression on polynomials of r, the mean
    of z and its variance, whose means are known.

    All models see the same draws, so that differences between them are sharper than their standard
    errors; and a grid that is (n, 1, H) in ω and (m, H) in μ costs n models, not n·m.

    Parameters
    ----------
    omega, mu
        KQ and OV scales, (..., H).
    d, n_context, noise_variance
        Constants of the task.
    n_samples
        Draws, a whole number from 1000.
    rng
        Where they are drawn from.
    activation
        f, entry by entry; None is exp (softmax).

    Returns
    -------
    loss, standard_error
        Each (...). NaN where a head is not finite. For f that are not positive the loss may be
        infinite, and no standard error shows it: for f = 1 + Cs it is, at every ω but 0. Rounding
        shows in the standard error where |μ| is beyond 1000.

    Raises
    ------
    InputError
        Constants out of range, shapes that do not fit, or an `activation` that changes the shape.

    Notes
    -----
    Source: he2025 (2.5) for the predictor (3.2), and section 5.2 for other f; the integrals are
    derived.
    """
    require_generator(rng)
    dimension = constant("d", d, minimum=1, whole=True)
    length = int(constant("n_context", n_context, minimum=1, whole=True))
    variance = constant("noise_variance", noise_variance, minimum=0)
    draws = int(constant("n_samples", n_samples, minimum=1000, whole=True))
    models, ov = per_head(omega=omega, mu=mu)
    # The ω as given, not repeated for every μ that it meets.
    own = np.atleast_1d(reals("omega", omega))
    weigh = _softmax if activation is None else _normalised(activation)

    heads = models.shape[-1]
    flat = own.reshape(-1, heads)
    defined = np.asarray(np.isfinite(flat).all(-1))
    size = heads + heads**2
    moments = [_Moments(size) for _ in flat]
    chunk = max(1, _CHUNK // length)  # whatever H is, so that a seed gives the same draws
    for fold in range(_FOLDS):
        left = draws // _FOLDS + (fold < draws % _FOLDS)
        while left:
            n = min(chunk, left)
            left -= n
            squared = rng.chisquare(dimension, n)
            z = rng.standard_normal((n, length))
            controls = _controls(squared, z, dimension)
            for scales, known, found in zip(flat, defined, moments, strict=True):
                if known:
                    features = _features(weigh, scales, np.sqrt(squared), z, dimension, variance)
                    found.add(fold, features, controls)
    mean = np.full((len(flat), size), np.nan)
    spread = np.full((len(flat), size, size), np.nan)
    for row in np.flatnonzero(defined):
        mean[row], spread[row] = moments[row].controlled()
    mean = mean.reshape(*own.shape[:-1], size)
    spread = spread.reshape(*own.shape[:-1], size, size)

    products = (ov[..., :, None] * ov[..., None, :]).reshape(*ov.shape[:-1], heads**2)
    weights = np.concatenate([-2 * ov, products], -1)
    loss = 1 + variance + (weights * mean).sum(-1)
    squared_error = np.einsum("...f,...fg,...g->...", weights, spread, weights, optimize=True)
    error = np.sqrt(np.maximum(squared_error, 0.0))  # rounding may fall below 0
    finite = np.isfinite(loss) & np.isfinite(models).all(-1) & np.isfinite(ov).all(-1)
    return np.where(finite, loss, np.nan), np.where(finite, error, np.nan)


class _Moments:
    """Sums over draws of features and of controls, whose mean is 0, fold by fold."""

    def __init__(self, n_features: int) -> None:
        self.n = n_features
        self.shift: np.ndarray | None = None

    def add(self, fold: int, features: np.ndarray, controls: np.ndarray) -> None:
        rows = np.concatenate([features, controls])
        if self.shift is None:
            # Squares of features are summed about the mean of some: no cancellation.
            self.shift = np.concatenate([features.mean(-1), np.zeros(len(controls))])
            self.count = np.zeros(_FOLDS)
            self.total = np.zeros((_FOLDS, len(rows)))
            self.square = np.zeros((_FOLDS, len(rows), len(rows)))
        about = rows - self.shift[:, None]
        self.count[fold] += rows.shape[-1]
        self.total[fold] += about.sum(-1)
        self.square[fold] += about @ about.T

    def controlled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean of the features less their regression on the controls; its covariance.

        The slopes of a fold are those of the other folds. Slopes fitted to the draws that they
        correct would make the spread too small: the controls have heavy tails.
        """
        n = self.n
        mean, spread = np.zeros(n), np.zeros((n, n))
        if self.shift is None or not np.isfinite(self.square).all():
            return mean * np.nan, spread * np.nan
        for fold, count in enumerate(self.count):
            kept = np.arange(_FOLDS) != fold
            _, covariance = _statistics(*(s[kept].sum(0) for s in self._sums()))
            scale = np.sqrt(np.diag(covariance)[n:])
            scale = np.where(scale > 0, scale, 1.0)
            among = covariance[n:, n:] / np.outer(scale, scale)
            across = covariance[n:, :n] / scale[:, None]
            slope = np.linalg.pinv(among, rcond=1e-12, hermitian=True) @ across / scale[:, None]
            less = np.concatenate([np.eye(n), -slope.T], -1)
            own, covariance = _statistics(*(s[fold] for s in self._sums()))
            mean += count * (less @ own)
            spread += count * (less @ covariance @ less.T)
        total = self.count.sum()
        return mean / total + self.shift[:n], spread / total**2

    def _sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.count, self.total, self.square


def _statistics(
    count: float, total: np.ndarray, square: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance from sums."""
    mean = total / count
    return mean, (square - count * np.outer(mean, mean)) / (count - 1)


def _features(
    weigh: Activation,
    omega: Float[np.ndarray, " H"],
    r: Float[np.ndarray, " n"],
    z: Float[np.ndarray, "n L"],
    d: float,
    variance: float,
) -> Float[np.ndarray, "feature n"]:
    """Return b and M of every draw: H and H² rows."""
    pattern = weigh(omega[:, None, None] * r[:, None] * z)
    along = (pattern * z).sum(-1)
    overlap = np.einsum("hnl,knl->hkn", pattern, pattern)
    form = along[:, None] * along / d + ((d - 1) / d + variance) * overlap
    return np.concatenate([r * along / d, form.reshape(-1, len(r))])


def _controls(
    squared: Float[np.ndarray, " n"], z: Float[np.ndarray, "n L"], d: float
) -> Float[np.ndarray, "control n"]:
    """Polynomials in r², z̄ and S = Σ(z − z̄)² less their means: what p·z is made of at small ω."""
    length = z.shape[-1]
    mean = z.mean(-1)
    spread = ((z - mean[:, None]) ** 2).sum(-1)
    first, second = length - 1, (length - 1) * (length + 1)
    fourth = squared**2
    return np.stack(
        [
            squared - d,
            spread - first,
            np.sqrt(squared) * mean,
            mean**2 - 1 / length,
            squared * mean**2 - d / length,
            squared * spread - d * first,
            squared * spread**2 - d * second,
            fourth - d * (d + 2),
            fourth * spread - d * (d + 2) * first,
            fourth * spread**2 - d * (d + 2) * second,
        ]
    )


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _normalised(activation: Activation) -> Activation:
    def weigh(scores: np.ndarray) -> np.ndarray:
        values = np.asarray(activation(scores))
        if values.shape != scores.shape:
            raise InputError(
                f"activation turns shape {scores.shape} into {values.shape}; accepted: a function "
                "entry by entry"
            )
        return values / values.sum(-1, keepdims=True)

    return weigh
