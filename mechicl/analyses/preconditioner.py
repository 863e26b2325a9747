"""The matrix with which a model preconditions its gradient step: section 5.3 of he2025."""

import numpy as np
import xarray as xr
from jaxtyping import Float

from mechicl.analyses.heads import (
    ATTENTION,
    NONFINITE,
    REGRESSION,
    finite,
    kq_circuit,
    nonfinite,
    one_layer,
    ov_circuit,
    ov_scale,
)
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.schema import Var
from mechicl.theory import preconditioned

_MODEL = ("seed", "step")
_MATRIX = ("covariate", "covariate_other")
_REFERENCES = {
    "inverse_covariance": "inverse of Sigma",
    "plain_optimum": "best matrix of a plain step, inverse of Sigma tilde of (5.6)",
    "debiased_optimum": "best matrix of a debiased step",
}
_NEAREST = dict(enumerate(("identity", *_REFERENCES)))
_SAME = "references_are_the_same"
_SAME_WITHIN = 1e-9


@probe(
    needs=ATTENTION
    | {name: REGRESSION[name] for name in ("n_context", "noise_variance")}
    | {
        "covariance": Var(_MATRIX, "1", "covariance of the covariates, Sigma"),
        "slope": Var((), "1", "first-order coefficient of attention weights in scores, C_f"),
    },
    gives={
        "preconditioner": Var((*_MODEL, *_MATRIX), "1", "C_f times sum of mu KQ over heads, P"),
        **{name: Var(_MATRIX, "1", what) for name, what in _REFERENCES.items()},
        **{
            f"distance_{name}": Var(
                _MODEL, "1", f"distance of P from the {name.replace('_', ' ')} up to scale", 0, 1
            )
            for name in _NEAREST.values()
        },
        **{
            f"error_{name}": Var(
                _MODEL, "1", f"relative distance of P from the {name.replace('_', ' ')}", 0
            )
            for name in _REFERENCES
        },
        "nearest": Var(_MODEL, "1", "what P is nearest to up to scale", 0, 3, flags=_NEAREST),
        "eta": Var(_MODEL, "1", "best factor on the debiased optimum to give P"),
    },
    statement="the preconditioner is nearer to (5.6) than to the inverse covariance",
    undefined=(NONFINITE, "zero_preconditioner", _SAME),
    headline=("distance_inverse_covariance", "distance_plain_optimum", "distance_debiased_optimum"),
    applies=one_layer,
    references=("he2025 (5.3), (5.5), (5.6), Figs 12 and 15",),
)
def preconditioner(trajectory: xr.Dataset) -> xr.Dataset:
    """Measure the matrix Ω that a model's heads make together, and which optimum it is nearest to.

    To first order in scores ŷ = Σ_h μ_h · ȳ + L⁻¹ Σ_ℓ y_ℓ (x_ℓ − x̄)ᵀ P x_q with
    P = C_f Σ_h μ_h KQ₁₁^(h), for attention weights f(s)/Σf(s), f ∝ 1 + C_f s; in linear attention
    C_f = 1, x̄ and ȳ fall away, and there is no other order. All is without units.

    - `preconditioner` = P, (seed, step, covariate, covariate_other): key rows, query columns. Of
      two heads (5.3) it is 2γμ_γ·Ω.
    - `inverse_covariance` = Σ⁻¹; `plain_optimum` = Σ̃⁻¹ = [(1 + 1/L)Σ + (tr Σ + dσ²)/L·I]⁻¹, the
      best of a plain step (5.6); `debiased_optimum` = [Σ + (tr Σ + dσ²)/L·I]⁻¹, the best of a
      debiased step, which a normalised activation takes: (covariate, covariate_other).
    - `distance_identity`, `distance_inverse_covariance`, `distance_plain_optimum`,
      `distance_debiased_optimum`, (seed, step): √(1 − ⟨P, M⟩²/(‖P‖²‖M‖²)) (Frobenius), in [0, 1],
      0 for a multiple of M.
    - `error_inverse_covariance`, `error_plain_optimum`, `error_debiased_optimum`, (seed, step):
      ‖P − M‖/‖M‖, from 0; 1 for P = 0.
    - `nearest` (seed, step): which of the four distances is least.
    - `eta` = ⟨P, M⟩/‖M‖² with M the debiased optimum, (seed, step): the c at which c·M is nearest
      to P; 1 is ideal, negative descends backwards. With Σ = I it is η/η*.
    - `holds`: `distance_plain_optimum` is below `distance_inverse_covariance`.

    When it misleads: both optima are Σ⁻¹ drawn towards I, so a model that knows nothing of Σ, P ∝
    I, holds as well; see that `nearest` is not `identity`. A distance up to scale is blind to sign:
    see `eta`. P is of first order, and a single softmax head, whose KQ is large, is far beyond. P
    leaves out what keys read from responses and values from covariates (`circuits` measures both).
    The two optima differ by the order of 1/L, which may be less than what training leaves.

    Undefined: weights that are not finite; P = 0, which has no direction; Σ a multiple of I, where
    all references are multiples of each other (`nearest` and `holds` are NaN, distances stand).

    References
    ----------
    he2025, (5.3), (5.5), (5.6), Figs 12 and 15. The debiased optimum is derived in
    `mechicl.theory.preconditioned`; the paper does not state it.
    """
    layer = trajectory.isel(layer=0, drop=True)
    matrix = _first_order(layer)
    broken = nonfinite(trajectory) | ~finite(matrix).all(_MATRIX)
    matrix = matrix.where(~broken)
    rows = matrix.transpose(*_MODEL, *_MATRIX).values
    sigma = trajectory["covariance"].transpose(*_MATRIX).values.astype(float)
    at = {
        "n_context": int(trajectory["n_context"]),
        "noise_variance": float(trajectory["noise_variance"]),
    }
    known = {
        "inverse_covariance": np.linalg.inv(sigma),
        "plain_optimum": preconditioned.optimal_preconditioner(sigma, debiased=False, **at),
        "debiased_optimum": preconditioned.optimal_preconditioner(sigma, debiased=True, **at),
    }

    def models(values: np.ndarray) -> xr.DataArray:
        return broken.transpose(*_MODEL).copy(data=values)

    everything = {"identity": np.eye(len(sigma)), **known}
    distances = {name: models(_distance(rows, other)) for name, other in everything.items()}
    errors = {name: models(_norm(rows - m) / _norm(m)) for name, m in known.items()}
    best = known["debiased_optimum"]
    same = _distance(known["inverse_covariance"], known["plain_optimum"]) <= _SAME_WITHIN
    reasons = {
        NONFINITE: broken,
        "zero_preconditioner": (matrix == 0).all(_MATRIX),
        _SAME: xr.full_like(broken, bool(same), dtype=bool),
    }
    nearest = _least(distances).where(~reasons[_SAME])
    condition = distances["plain_optimum"] < distances["inverse_covariance"]
    return xr.Dataset(
        {
            "preconditioner": matrix,
            **{name: (_MATRIX, values) for name, values in known.items()},
            **{f"distance_{name}": value for name, value in distances.items()},
            **{f"error_{name}": value for name, value in errors.items()},
            "nearest": nearest,
            "eta": models(_factor(rows, best)),
            "holds": verdict(condition, *reasons.values()),
            "undefined": undefined_codes(reasons),
        }
    )


def _first_order(layer: xr.Dataset) -> xr.DataArray:
    """P = C_f Σ_h μ_h KQ₁₁^(h): (seed, step, covariate, covariate_other)."""
    d = int(layer["d"])
    block = kq_circuit(layer).isel(d_key=slice(d), d_query=slice(d))
    terms = ov_scale(ov_circuit(layer)) * block
    total = layer["slope"].astype(float) * terms.sum("head", skipna=False)
    return total.rename(d_key="covariate", d_query="covariate_other")


def _least(distances: dict[str, xr.DataArray]) -> xr.DataArray:
    """Return the number of the least distance, NaN where a distance is."""
    stack = xr.concat(list(distances.values()), "choice")
    whole = stack.notnull().all("choice")
    return stack.fillna(np.inf).argmin("choice").astype(float).where(whole)


def _distance(
    matrix: Float[np.ndarray, "*models d d"], other: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "*models"]:
    """Distance up to scale, at most 1 in spite of rounding; NaN where the matrix is 0."""
    unit = matrix / np.where(_largest(matrix) > 0, _largest(matrix), np.nan)
    return np.clip(preconditioned.scale_free_distance(unit, other), 0, 1)


def _factor(
    matrix: Float[np.ndarray, "*models d d"], other: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "*models"]:
    """⟨matrix, other⟩/‖other‖², without squares out of range."""
    scale = float(_largest(other).item())
    unit = other / scale
    return (matrix * unit).sum((-2, -1)) / (unit**2).sum() / scale


def _norm(matrix: Float[np.ndarray, "*models d d"]) -> Float[np.ndarray, "*models"]:
    """Frobenius norm, without squares out of range."""
    scale = np.where(_largest(matrix) > 0, _largest(matrix), 1.0)
    return scale[..., 0, 0] * np.linalg.norm(matrix / scale, axis=(-2, -1))


def _largest(matrix: Float[np.ndarray, "*models d d"]) -> Float[np.ndarray, "*models 1 1"]:
    return np.abs(matrix).max((-2, -1), keepdims=True)
