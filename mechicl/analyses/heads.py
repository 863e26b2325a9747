"""What the probes of he2025 read from the parameters: circuits, head scales, and which heads are live."""

from typing import Annotated

import numpy as np
import pydantic
import xarray as xr

from mechicl.schema import Var

_WEIGHT = ("seed", "step", "layer", "head")
ATTENTION = {
    "W_Q": Var((*_WEIGHT, "d_model", "d_head"), "1", "query projection"),
    "W_K": Var((*_WEIGHT, "d_model", "d_head"), "1", "key projection"),
    "W_V": Var((*_WEIGHT, "d_model", "d_head"), "1", "value projection"),
    "W_O": Var((*_WEIGHT, "d_head", "d_model"), "1", "output projection"),
    "score_scale": Var((), "1", "factor on attention scores"),
}
"""Parameters and constants from which circuits are made."""

REGRESSION = {
    "d": Var((), "1", "dimension of the covariates", 1),
    "n_context": Var((), "1", "examples in a context, L", 1),
    "noise_variance": Var((), "1", "variance of the noise, sigma squared", 0),
    "isotropic": Var((), "1", "1 where covariates have identity covariance", 0, 1),
}
"""Constants of the regression task."""

NONFINITE = "nonfinite_parameters"
NO_LIVE_HEAD = "no_live_head"

Threshold = Annotated[float, pydantic.Field(ge=0, lt=1)]
Tolerance = Annotated[float, pydantic.Field(gt=0)]


def one_layer(trajectory: xr.Dataset) -> str | None:
    """Apply to one-layer models: ω and μ of eq. (3.1) describe a whole model only there."""
    layers = trajectory.sizes["layer"]
    return None if layers == 1 else f"it reads one-layer models, and this one has {layers} layers"


def kq_circuit(trajectory: xr.Dataset) -> xr.DataArray:
    """KQ = KᵀQ of every head, score scale included, in float64.

    In TransformerLens's row-vector layout this is W_K W_Qᵀ: the score of key z_i and query z_j is z_iᵀ KQ z_j.

    Returns
    -------
    xr.DataArray
        (seed, step, layer, head, d_key, d_query). Source: he2025, below eq. (2.3).
    """
    keys = trajectory["W_K"].astype(float).rename(d_model="d_key")
    queries = trajectory["W_Q"].astype(float).rename(d_model="d_query")
    return xr.dot(keys, queries, dim="d_head") * trajectory["score_scale"].astype(float)


def ov_circuit(trajectory: xr.Dataset) -> xr.DataArray:
    """OV of every head, acting on columns, in float64.

    In TransformerLens's row-vector layout this is (W_V W_O)ᵀ: an attended token z adds OV z to the output.

    Returns
    -------
    xr.DataArray
        (seed, step, layer, head, d_out, d_in). Source: he2025, below eq. (2.3).
    """
    values = trajectory["W_V"].astype(float).rename(d_model="d_in")
    outputs = trajectory["W_O"].astype(float).rename(d_model="d_out")
    return xr.dot(outputs, values, dim="d_head")


def kq_scale(kq: xr.DataArray) -> xr.DataArray:
    """ω: mean of the diagonal of KQ's leading d×d block, d = d_model − 1. Source: he2025 (3.1)."""
    d = kq.sizes["d_key"] - 1
    diagonal = xr.DataArray(np.arange(d), dims="diagonal")
    return kq.isel(d_key=diagonal, d_query=diagonal).mean("diagonal", skipna=False)


def ov_scale(ov: xr.DataArray) -> xr.DataArray:
    """μ: last entry of OV's last row. Source: he2025 (3.1)."""
    return ov.isel(d_out=-1, d_in=-1)


def head_scales(trajectory: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Return (ω, μ) of the heads of a one-layer model, each (seed, step, head)."""
    layer = trajectory.isel(layer=0)
    return kq_scale(kq_circuit(layer)), ov_scale(ov_circuit(layer))


def live_heads(omega: xr.DataArray, mu: xr.DataArray, threshold: float) -> xr.DataArray:
    """Return which heads are not dummies.

    A head is a dummy where |ω| and |μ| are both at most `threshold` times the largest of the same model (seed and
    step), so the same rule serves runs of every size. A model without any nonzero head has dummies alone.
    Non-finite heads are not live.

    Returns
    -------
    xr.DataArray
        Boolean, dims of `omega`. Source: he2025 Observation 1, which says ≈ 0 without a number.
    """
    strong_kq = np.abs(omega) > threshold * np.abs(omega).max("head")
    strong_ov = np.abs(mu) > threshold * np.abs(mu).max("head")
    return (strong_kq | strong_ov) & np.isfinite(omega) & np.isfinite(mu)


def nonfinite(omega: xr.DataArray, mu: xr.DataArray) -> xr.DataArray:
    """Return where a model has a head whose ω or μ is not finite: (seed, step)."""
    return ~(np.isfinite(omega) & np.isfinite(mu)).all("head")
