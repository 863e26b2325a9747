"""Where a model stands to the solution manifold of he2025, and the step size it implements."""

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from mechicl.analyses.heads import (
    ATTENTION,
    DUMMY_THRESHOLD,
    NONFINITE,
    REGRESSION,
    SOFTMAX,
    Threshold,
    Tolerance,
    apply_where,
    constants,
    head_scales,
    isotropic_softmax,
    live_heads,
    nonfinite,
    quotient,
    sign,
)
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.schema import Var
from mechicl.theory import linear_regression

_MODEL = ("seed", "step")
_SMALLEST_OV = 1e-100  # far smaller ones square to zero


@probe(
    needs=ATTENTION | REGRESSION | SOFTMAX,
    gives={
        "gamma": Var(_MODEL, "1", "KQ scale, |mu|-weighted mean of |omega|", 0),
        "mu_gamma": Var(_MODEL, "1", "OV scale of each sign as measured, half the sum of |mu|", 0),
        "mu_gamma_predicted": Var(_MODEL, "1", "OV scale of each sign by eq. (4.6) at gamma", 0),
        "eta": Var(_MODEL, "1", "step size as measured, sum of |omega||mu|", 0),
        "eta_predicted": Var(_MODEL, "1", "step size of the manifold's point at gamma", 0),
        "eta_star": Var((), "1", "optimal step size", 0),
        "eta_error": Var(_MODEL, "1", "relative excess of eta over eta_star", -1),
        "eta_predicted_error": Var(_MODEL, "1", "relative excess of eta over eta_predicted", -1),
        "distance": Var(_MODEL, "1", "relative distance of (omega, mu) from the manifold", 0),
    },
    statement="the model is on the solution manifold with the optimal step size",
    undefined=(NONFINITE, "zero_step_size", "kq_too_large", "one_sign_only"),
    headline=("gamma", "eta", "eta_error", "distance"),
    applies=isotropic_softmax,
    references=("he2025 (4.6), (4.7), (4.8), Theorem 4.2",),
)
def solution_manifold(
    trajectory: xr.Dataset,
    *,
    eta_tolerance: Tolerance = 0.05,
    distance_tolerance: Tolerance = 0.1,
    dummy_threshold: Threshold = DUMMY_THRESHOLD,
) -> xr.Dataset:
    """Measure the step size of the descent that the heads implement, and the distance to S_γ.

    On S_γ every live head has |ω| = γ, and μ sums to μ_γ over positive and to −μ_γ over negative
    heads.

    - `gamma` = γ̂ = Σ|μ||ω| / Σ|μ| over all heads: the mean of |ω| in which a head counts as much
      as it writes. It is the one estimate for which γ̂·Σ|μ| = Σ|ω||μ|, the step size to first
      order, and it needs no decision on dummies.
    - `mu_gamma` = Σ|μ| / 2 as measured; `mu_gamma_predicted` = μ_γ(γ̂) of (4.6).
    - `eta` = γ̂·Σ|μ| from the measured μ; `eta_predicted` = 2 γ̂ μ_γ(γ̂);
      `eta_star` = η* = 1/(1 + (1+σ²) d/L), 0.8791 at the published size.
    - `eta_error` = η/η* − 1, `eta_predicted_error` = η/η_predicted − 1, from −1; 0 is ideal.
    - `distance` = √(‖ω − ω°‖²/‖ω°‖² + ‖μ − μ°‖²/‖μ°‖²), (ω°, μ°) the nearest point of S_γ̂ with the
      same roles of heads (dummies at 0); from 0, on the manifold, upwards.
    - `holds`: a live head of each sign, sign(ω) = sign(μ) on all live heads, |η/η* − 1| at most
      `eta_tolerance`, distance at most `distance_tolerance`.

    All but `eta_star` are (seed, step), and none has units.

    When it misleads: 2γμ_γ(γ) is within 2 % of η* for every γ up to 0.4, so `eta_predicted` near
    `eta_star` says nothing of what was learnt; `eta`, from the measured μ, does. Where signs do not
    match, Σ|ω||μ| exceeds the true first-order step Σωμ (`holds` asks for matching signs). (4.6) is
    of softmax attention; other normalised activations settle elsewhere (Table 1).

    Undefined: weights that are not finite; Σ|ω||μ| = 0; γ̂ so large that sinh(dγ²) overflows; heads
    of one sign only, from which no point of S_γ has the same roles (`distance` alone is NaN, and
    `holds` is 0).

    Parameters
    ----------
    eta_tolerance
        Largest |η/η* − 1|. From step 5,000 of the published setting Adam leaves it below 0.03; two
        heads stuck on one sign have 0.06 to 0.15, and μ moved by a tenth has 0.1.
    distance_tolerance
        Largest distance. At the same steps Adam leaves it below 0.04, and mostly below 0.1 beside a
        dummy, whose ω is noise; four heads that still differ in |ω| have 0.2 to 0.5.
    dummy_threshold
        A head is a dummy where |ω| and |μ| are both at most this fraction of the model's largest.

    References
    ----------
    he2025, (4.6), (4.7), (4.8) and Theorem 4.2 (ii).
    """
    setting = constants(trajectory)
    omega, mu = head_scales(trajectory)
    live = live_heads(omega, mu, dummy_threshold)
    reasons = {
        NONFINITE: nonfinite(trajectory),
        "zero_step_size": abs(omega * mu).sum("head", skipna=False) == 0,
    }
    measured = _measure(omega, mu, setting, reasons)
    role = sign(omega).where(live, 0.0)
    both = (role == 1).any("head") & (role == -1).any("head")
    defined = ~reasons[NONFINITE] & ~reasons["zero_step_size"] & ~reasons["kq_too_large"]

    def relative_distance(*rows: np.ndarray) -> np.ndarray:
        return _distance(*rows, setting=setting)

    distance = apply_where(defined & both, relative_distance, omega, mu, measured["gamma"], role)
    matched = ((sign(omega) == sign(mu)) | ~live).all("head")
    condition = (
        both
        & matched
        & (abs(measured["eta_error"]) <= eta_tolerance)
        & (distance <= distance_tolerance)
    )
    holds = verdict(condition, *reasons.values())
    reasons["one_sign_only"] = ~both
    return xr.Dataset(
        {
            **measured,
            "distance": distance,
            "holds": holds,
            "undefined": undefined_codes(reasons),
        }
    )


def _measure(
    omega: xr.DataArray,
    mu: xr.DataArray,
    setting: dict[str, Any],
    reasons: dict[str, xr.DataArray],
) -> dict[str, xr.DataArray]:
    """Return γ, μ_γ and η, measured and predicted; adds the reason why (4.6) has no value."""
    defined = ~reasons[NONFINITE] & ~reasons["zero_step_size"]
    total = abs(mu).sum("head", skipna=False).where(defined)
    eta = abs(omega * mu).sum("head", skipna=False).where(defined)
    gamma = eta / total

    def manifold_ov(scale: np.ndarray) -> np.ndarray:
        return linear_regression.manifold_ov(scale, **setting)

    predicted = apply_where(defined, manifold_ov, gamma)
    reasons["kq_too_large"] = defined & ~(predicted > _SMALLEST_OV)
    usable = ~reasons["kq_too_large"]
    eta_star = xr.DataArray(linear_regression.optimal_learning_rate(**setting))
    measured = {
        "gamma": gamma,
        "mu_gamma": total / 2,
        "mu_gamma_predicted": predicted,
        "eta": eta,
        "eta_predicted": 2 * gamma * predicted,
        "eta_error": eta / eta_star - 1,
        "eta_predicted_error": quotient(eta, 2 * gamma * predicted) - 1,
    }
    return {name: value.where(usable) for name, value in measured.items()} | {"eta_star": eta_star}


def _distance(
    omega: Float[np.ndarray, "n head"],
    mu: Float[np.ndarray, "n head"],
    gamma: Float[np.ndarray, " n"],
    role: Float[np.ndarray, "n head"],
    *,
    setting: dict[str, Any],
) -> Float[np.ndarray, " n"]:
    near_omega, near_mu = linear_regression.nearest_on_manifold(omega, mu, gamma, role, **setting)
    kq = np.linalg.norm(omega - near_omega, axis=-1) / np.linalg.norm(near_omega, axis=-1)
    ov = np.linalg.norm(mu - near_mu, axis=-1) / np.linalg.norm(near_mu, axis=-1)
    return np.hypot(kq, ov)
