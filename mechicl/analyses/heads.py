"""What the probes of he2025 read: circuits, head scales, which heads are live, which runs apply."""

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Annotated, Any

import numpy as np
import pydantic
import xarray as xr

from mechicl.schema import Var

_WEIGHT = ("seed", "step", "layer", "head")
WEIGHTS = {
    "W_Q": Var((*_WEIGHT, "d_model", "d_head"), "1", "query projection"),
    "W_K": Var((*_WEIGHT, "d_model", "d_head"), "1", "key projection"),
    "W_V": Var((*_WEIGHT, "d_model", "d_head"), "1", "value projection"),
    "W_O": Var((*_WEIGHT, "d_head", "d_model"), "1", "output projection"),
}
"""Parameters of an attention model, for probes that evaluate it and look no further."""

ATTENTION = WEIGHTS | {
    "score_scale": Var((), "1", "factor on attention scores"),
    "d": Var((), "1", "dimension of the covariates", 1),
}
"""Parameters from which circuits are made, and the constants that say where in them ω and μ are."""

REGRESSION = {
    "d": ATTENTION["d"],
    "n_context": Var((), "1", "examples in a context, L", 1),
    "noise_variance": Var((), "1", "variance of the noise, sigma squared", 0),
    "isotropic": Var((), "1", "1 where covariates have identity covariance", 0, 1),
}
"""Constants of the regression task."""

SOFTMAX = {"softmax": Var((), "1", "1 where attention is softmax", 0, 1)}
"""Constant of the model that closed forms of softmax ask for."""

NONFINITE = "nonfinite_parameters"
NO_LIVE_HEAD = "no_live_head"

DUMMY_THRESHOLD = 0.2
"""From step 5,000 of the published setting Adam's noise leaves dummies at up to 0.12 in |ω|.

A head at 0.2 in both |ω| and |μ| adds 4 % of what the largest adds to the step size Σ|ω||μ|, and on
the solution manifold every head that is no dummy has |ω| at the largest.
"""

ZERO_SUM_TOLERANCE = 0.05
"""From step 5,000 of the published setting Adam leaves |Σμ|/Σ|μ| below 0.02."""

HOMOGENEITY_TOLERANCE = 0.15
"""From step 5,000 of the published setting Adam leaves the spread of |ω| below 0.1."""

Threshold = Annotated[float, pydantic.Field(ge=0, lt=1)]
Tolerance = Annotated[float, pydantic.Field(gt=0)]


def one_layer(trajectory: xr.Dataset) -> str | None:
    """Apply to one layer over d covariates and one response: there (3.1) is a whole model."""
    layers = trajectory.sizes.get("layer", 1)
    if layers != 1:
        return f"it reads one-layer models, and this one has {layers} layers"
    width, d = trajectory.sizes.get("d_model"), int(trajectory["d"])
    if width is not None and width != d + 1:
        return (
            f"it reads one response, tokens of d + 1 = {d + 1} entries, and here d_model is {width}"
        )
    return None


def isotropic_one_layer(trajectory: xr.Dataset) -> str | None:
    """Apply where `one_layer` does and the covariates are isotropic, as (4.1) and (4.6) assume."""
    reason = one_layer(trajectory)
    if reason is None and not bool(trajectory["isotropic"]):
        return "its closed forms assume isotropic covariates, and these have another covariance"
    return reason


def isotropic_softmax(trajectory: xr.Dataset) -> str | None:
    """Apply where `isotropic_one_layer` does and attention is softmax."""
    reason = isotropic_one_layer(trajectory)
    if reason is None and not bool(trajectory["softmax"]):
        return "its closed forms are of softmax attention, and this is another one"
    return reason


def kq_circuit(trajectory: xr.Dataset) -> xr.DataArray:
    """KQ = KᵀQ of every head, score scale included, in float64.

    In TransformerLens's row-vector layout this is W_K W_Qᵀ: the score of key z_i and query z_j is
    z_iᵀ KQ z_j.

    Returns
    -------
    xr.DataArray
        (seed, step, layer, head, d_key, d_query); NaN where not finite. Source: he2025, below eq.
        (2.3).
    """
    keys = trajectory["W_K"].astype(float).rename(d_model="d_key")
    queries = trajectory["W_Q"].astype(float).rename(d_model="d_query")
    with np.errstate(invalid="ignore"):
        scores = xr.dot(keys, queries, dim="d_head") * trajectory["score_scale"].astype(float)
    return scores.where(finite(scores))


def ov_circuit(trajectory: xr.Dataset) -> xr.DataArray:
    """OV of every head, acting on columns, in float64.

    In TransformerLens's row-vector layout this is (W_V W_O)ᵀ: an attended token z adds OV z to the
    output.

    Returns
    -------
    xr.DataArray
        (seed, step, layer, head, d_out, d_in); NaN where not finite. Source: he2025, below eq.
        (2.3).
    """
    values = trajectory["W_V"].astype(float).rename(d_model="d_in")
    outputs = trajectory["W_O"].astype(float).rename(d_model="d_out")
    with np.errstate(invalid="ignore"):
        written = xr.dot(outputs, values, dim="d_head")
    return written.where(finite(written))


def kq_scale(kq: xr.DataArray) -> xr.DataArray:
    """ω: mean of the diagonal of KQ's leading d×d block, d = d_model − 1. Source: he2025 (3.1)."""
    d = kq.sizes["d_key"] - 1
    diagonal = xr.DataArray(np.arange(d), dims="diagonal")
    return kq.isel(d_key=diagonal, d_query=diagonal).mean("diagonal", skipna=False)


def ov_scale(ov: xr.DataArray) -> xr.DataArray:
    """μ: last entry of OV's last row. Source: he2025 (3.1)."""
    return ov.isel(d_out=-1, d_in=-1, drop=True)


def head_scales(trajectory: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Return (ω, μ) of the heads of a one-layer model, each (seed, step, head)."""
    layer = trajectory.isel(layer=0, drop=True)
    return kq_scale(kq_circuit(layer)), ov_scale(ov_circuit(layer))


def live_heads(omega: xr.DataArray, mu: xr.DataArray, threshold: float) -> xr.DataArray:
    """Return which heads are not dummies.

    A head is a dummy where |ω| and |μ| are both at most `threshold` times the largest of the same
    model (seed and step), so the same rule serves runs of every size. A model without any nonzero
    head has dummies alone. Non-finite heads are not live.

    Returns
    -------
    xr.DataArray
        Boolean, dims of `omega`. Source: he2025 Observation 1, which says ≈ 0 without a number.
    """
    strong_kq = abs(omega) > threshold * abs(omega).max("head")
    strong_ov = abs(mu) > threshold * abs(mu).max("head")
    return (strong_kq | strong_ov) & finite(omega) & finite(mu)


def sign_agreement(omega: xr.DataArray, mu: xr.DataArray, live: xr.DataArray) -> xr.DataArray:
    """#{live h: sign(ω_h) = sign(μ_h)} / #{live h}, NaN where no head is live.

    A live head with ω = 0 or μ = 0 does not match. Source: he2025 (4.2), Observation 1.
    """
    matched = live & (sign(omega) == sign(mu))
    return quotient(matched.sum("head"), live.sum("head"))


def ov_imbalance(mu: xr.DataArray) -> xr.DataArray:
    """|Σ_h μ_h| / Σ_h |μ_h|, NaN where all μ are 0. Source: he2025 (4.2), Observation 2 (ii)."""
    total = abs(mu).sum("head", skipna=False)
    # Rounding may leave a sum of one sign an ulp above the sum of its sizes.
    return quotient(abs(mu.sum("head", skipna=False)), total).clip(max=1.0)


def kq_spread(omega: xr.DataArray, live: xr.DataArray) -> xr.DataArray:
    """(max_h |ω_h| − min_h |ω_h|) / mean_h |ω_h| over live heads, NaN where that mean is 0 or void.

    Source: he2025 (4.4), Observation 2 (i).
    """
    scale = abs(omega).where(live)
    return quotient(scale.max("head") - scale.min("head"), scale.mean("head"))


def nonfinite(trajectory: xr.Dataset) -> xr.DataArray:
    """Return where a model has a parameter that is not finite: (seed, step)."""
    model = ("seed", "step")
    parameters = [value for value in trajectory.values() if {*model} <= {*value.dims}]
    whole = [finite(value).all([*{*value.dims} - {*model}]) for value in parameters]
    return ~reduce(and_, whole)


def finite(array: xr.DataArray) -> xr.DataArray:
    """Return where an array is finite."""
    return xr.apply_ufunc(np.isfinite, array)


def sign(array: xr.DataArray) -> xr.DataArray:
    """Return −1, 0 or 1."""
    return xr.apply_ufunc(np.sign, array)


def quotient(numerator: xr.DataArray, denominator: xr.DataArray) -> xr.DataArray:
    """Return the quotient, NaN where the denominator is 0."""
    return numerator / denominator.where(denominator != 0)


def apply_where(
    defined: xr.DataArray, function: Callable[..., np.ndarray], *arrays: xr.DataArray
) -> xr.DataArray:
    """Apply a function of rows to the models where `defined`; the others are NaN.

    Closed forms see models that have a value and no others, so they neither warn nor guess.

    Parameters
    ----------
    defined
        Boolean (seed, step).
    function
        Takes one bare array for each of `arrays`, `(n,)` or `(n, head)`, and returns `(n,)`.
    arrays
        Over (seed, step), or (seed, step, head).
    """
    defined = defined.transpose("seed", "step")
    mask = defined.values
    rows = [array.transpose("seed", "step", ...).values[mask] for array in arrays]
    out = np.full(mask.shape, np.nan)
    if mask.any():
        out[mask] = function(*rows)
    return defined.copy(data=out)


def constants(trajectory: xr.Dataset) -> dict[str, Any]:
    """Return d, n_context and noise_variance as the closed forms of `mechicl.theory` take them."""
    return {
        "d": int(trajectory["d"]),
        "n_context": int(trajectory["n_context"]),
        "noise_variance": float(trajectory["noise_variance"]),
    }
