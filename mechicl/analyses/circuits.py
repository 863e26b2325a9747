"""Circuits of every head, and how far each is from the pattern of Observation 1 in he2025."""

import numpy as np
import xarray as xr

from mechicl.analyses.heads import (
    ATTENTION,
    DUMMY_THRESHOLD,
    NO_LIVE_HEAD,
    NONFINITE,
    Threshold,
    Tolerance,
    finite,
    kq_circuit,
    kq_scale,
    live_heads,
    nonfinite,
    one_layer,
    ov_circuit,
    ov_scale,
    quotient,
)
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.schema import Var

_HEAD = ("seed", "step", "head")
_DEVIATIONS = {
    "kq_off_diagonal": Var(_HEAD, "1", "rms off-diagonal entry of the KQ block over |omega|", 0),
    "kq_diagonal_spread": Var(_HEAD, "1", "standard deviation of KQ's diagonal over |omega|", 0),
    "kq_last_row": Var(_HEAD, "1", "rms of KQ's last row, its end left out, over |omega|", 0),
    "ov_other": Var(_HEAD, "1", "rms of OV's last row, its end left out, over |mu|", 0),
}


@probe(
    needs=ATTENTION,
    gives={
        "KQ": Var(("seed", "step", "layer", "head", "d_key", "d_query"), "1", "KQ circuit"),
        "OV": Var(("seed", "step", "layer", "head", "d_out", "d_in"), "1", "OV circuit"),
        "omega": Var(_HEAD, "1", "KQ scale"),
        "mu": Var(_HEAD, "1", "OV scale"),
        **_DEVIATIONS,
    },
    statement="every live head has the pattern of eq. (3.1)",
    undefined=(NONFINITE, NO_LIVE_HEAD, "one_covariate", "head_without_scale"),
    headline=("omega", "mu"),
    applies=one_layer,
    references=("he2025 (2.4), (3.1), Observation 1",),
)
def circuits(
    trajectory: xr.Dataset,
    *,
    tolerance: Tolerance = 0.1,
    dummy_threshold: Threshold = DUMMY_THRESHOLD,
) -> xr.Dataset:
    """Measure the KQ and OV circuits of every head and their distance from the pattern (3.1).

    The pattern is KQ = [ω·I_d, *; 0, *] and OV = [*, *; 0, μ]; entries marked * do not reach the
    prediction and are not judged. All is float64 and without units.

    - `KQ` = KᵀQ with the score scale, (seed, step, layer, head, d_key, d_query): key rows, query
      columns.
    - `OV`, (seed, step, layer, head, d_out, d_in): its last row writes the prediction.
    - `omega` = mean of the diagonal of KQ's leading d×d block; `mu` = OV[d, d]; (seed, step, head).
    - `kq_off_diagonal` = rms_{i≠j≤d} KQ_ij / |ω|, `kq_diagonal_spread` = std_{i≤d} KQ_ii / |ω|,
      `kq_last_row` = rms_{j≤d} KQ_{d+1,j} / |ω|, `ov_other` = rms_{j≤d} OV_{d+1,j} / |μ|;
      (seed, step, head), from 0, which is the pattern itself, upwards.
    - `holds`: all four are at most `tolerance` on every head that is no dummy.

    When it misleads: a deviation is relative, so a head on its way to being a dummy has large ones
    (`holds` leaves dummies out); KQ may be a multiple of another matrix than I, as under
    anisotropic covariates, where (3.1) is not what is learnt.

    Undefined: weights that are not finite; no head but zeros; d = 1, where KQ's block has no
    off-diagonal entry and no spread; a head with ω = 0 or μ = 0, whose own ratios are NaN (`holds`
    stands for the others, and is 0 if that head is live).

    Parameters
    ----------
    tolerance
        Largest deviation that counts as the pattern. From step 5,000 of the published setting Adam
        leaves two healthy heads below 0.04, and two heads stuck on one sign, whose KQ is no
        multiple of I, at 0.1 to 0.3. A weak head of four may have 0.2 for as long, relative to its
        own scale.
    dummy_threshold
        A head is a dummy where |ω| and |μ| are both at most this fraction of the model's largest.

    References
    ----------
    he2025, (2.4), (3.1) and Observation 1.
    """
    kq, ov = kq_circuit(trajectory), ov_circuit(trajectory)
    deviations, omega, mu = _deviations(kq.isel(layer=0, drop=True), ov.isel(layer=0, drop=True))
    live = live_heads(omega, mu, dummy_threshold)
    small = xr.concat(list(deviations.values()), "deviation").max("deviation", skipna=False)
    reasons = {
        NONFINITE: nonfinite(trajectory),
        NO_LIVE_HEAD: ~live.any("head"),
        "one_covariate": xr.full_like(live.any("head"), int(trajectory["d"]) == 1),
    }
    holds = verdict(((small <= tolerance) | ~live).all("head"), *reasons.values())
    reasons["head_without_scale"] = ((omega == 0) | (mu == 0)).any("head")
    return xr.Dataset(
        {
            "KQ": kq,
            "OV": ov,
            "omega": omega,
            "mu": mu,
            **deviations,
            "holds": holds,
            "undefined": undefined_codes(reasons),
        }
    )


def _deviations(
    kq: xr.DataArray, ov: xr.DataArray
) -> tuple[dict[str, xr.DataArray], xr.DataArray, xr.DataArray]:
    """Return the four relative deviations, ω and μ, each (seed, step, head)."""
    d = kq.sizes["d_key"] - 1
    omega, mu = kq_scale(kq), ov_scale(ov)
    block = kq.isel(d_key=slice(d), d_query=slice(d))
    outside = xr.DataArray(~np.eye(d, dtype=bool), dims=("d_key", "d_query"))
    entry = xr.DataArray(np.arange(d), dims="entry")
    spread = block.isel(d_key=entry, d_query=entry).std("entry", skipna=False)
    absolute = {
        "kq_off_diagonal": _rms(block.where(outside), ("d_key", "d_query")),
        "kq_diagonal_spread": spread if d > 1 else xr.full_like(spread, np.nan),
        "kq_last_row": _rms(kq.isel(d_key=-1, d_query=slice(d), drop=True), ("d_query",)),
        "ov_other": _rms(ov.isel(d_out=-1, d_in=slice(d), drop=True), ("d_in",)),
    }
    scales = {name: mu if name == "ov_other" else omega for name in absolute}
    relative = {name: quotient(size, abs(scales[name])) for name, size in absolute.items()}
    # A mean skips NaN, and a circuit with a hole in it has no deviation.
    whole = finite(kq).all(("d_key", "d_query")) & finite(ov).all(("d_out", "d_in"))
    return {name: value.where(whole) for name, value in relative.items()}, omega, mu


def _rms(entries: xr.DataArray, dims: tuple[str, ...]) -> xr.DataArray:
    return (entries**2).mean(dims) ** 0.5
