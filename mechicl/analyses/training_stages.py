"""When the patterns of he2025 set in, and how |ω| and μ move: Observation 4 and section 4.2."""

import numpy as np
import xarray as xr

from mechicl.analyses.heads import (
    ATTENTION,
    DUMMY_THRESHOLD,
    HOMOGENEITY_TOLERANCE,
    NO_LIVE_HEAD,
    NONFINITE,
    REGRESSION,
    SOFTMAX,
    ZERO_SUM_TOLERANCE,
    Threshold,
    Tolerance,
    constants,
    head_scales,
    isotropic_softmax,
    kq_spread,
    live_heads,
    nonfinite,
    ov_imbalance,
    quotient,
    sign_agreement,
)
from mechicl.analyses.probe import probe, since, undefined_codes, verdict
from mechicl.schema import Var
from mechicl.theory import linear_regression

_MODEL = ("seed", "step")
_RUN = ("seed",)
_FEW = "fewer_than_two_live_heads"
_STAGES = {
    "sign_matching": "omega and mu of every live head have one sign",
    "zero_sum": "mu sums to zero",
    "optimality": "the local optimality condition (4.3) is met",
    "homogeneity": "live heads have one |omega|",
}
_ORDERS = {
    0: "homogeneity_before_signs_or_sum",
    1: "homogeneity_at_the_same_checkpoint",
    2: "homogeneity_after_signs_and_sum",
}


@probe(
    needs=ATTENTION | REGRESSION | SOFTMAX,
    gives={
        "optimality_ratio": Var(_MODEL, "1", "first-order step size over the best, eq. (4.3)"),
        "gamma": Var(_MODEL, "1", "KQ scale, |mu|-weighted mean of |omega|", 0),
        "positive_ov": Var(_MODEL, "1", "sum of mu over heads of positive omega"),
        "sign_agreement": Var(
            _MODEL, "1", "fraction of live heads with sign(omega) = sign(mu)", 0, 1
        ),
        "ov_imbalance": Var(_MODEL, "1", "|sum of mu| over sum of |mu|", 0, 1),
        "kq_spread": Var(_MODEL, "1", "range of |omega| over its mean, live heads", 0),
        **{
            f"since_{stage}": Var(_RUN, "step", f"first step from which {what} to the last", 0)
            for stage, what in _STAGES.items()
        },
        "order": Var(_RUN, "1", "when homogeneity sets in", 0, 2, flags=_ORDERS),
        "peak_step": Var(_RUN, "step", "step at which gamma is largest", 0),
        "peak_gamma": Var(_RUN, "1", "largest gamma", 0),
        "initial_to_peak": Var(_RUN, "1", "gamma at the first checkpoint over peak_gamma", 0, 1),
        "final_to_peak": Var(_RUN, "1", "gamma at the last checkpoint over peak_gamma", 0, 1),
        "largest_drawdown": Var(
            _RUN, "1", "largest fall of positive_ov from an earlier value, over its maximum", 0
        ),
    },
    statement="signs match, mu sums to zero, (4.3) is met and the live heads have one |omega|",
    undefined=(NONFINITE, NO_LIVE_HEAD, "single_head", "zero_ov", _FEW, "zero_kq"),
    headline=("optimality_ratio", "positive_ov"),
    applies=isotropic_softmax,
    by_step=False,  # peaks and falls are of the whole run
    references=("he2025 (4.2), (4.3), (4.4), Observation 4",),
)
def training_stages(
    trajectory: xr.Dataset,
    *,
    zero_sum_tolerance: Tolerance = ZERO_SUM_TOLERANCE,
    optimality_tolerance: Tolerance = 0.05,
    homogeneity_tolerance: Tolerance = HOMOGENEITY_TOLERANCE,
    dummy_threshold: Threshold = DUMMY_THRESHOLD,
) -> xr.Dataset:
    """Measure when each pattern sets in for good, and the rise and fall of |ω| and growth of μ.

    At each step, (seed, step), without units:

    - `sign_agreement`, `ov_imbalance`, `kq_spread`: as the probes `sign_matching`, `zero_sum_ov`
      and `homogeneous_kq` define them.
    - `optimality_ratio` = (1 + (1+σ²)d/L)·Σ_h ω_h μ_h, which is 1 where (4.3) is met; negative
      where heads descend backwards.
    - `gamma` = Σ|μ||ω| / Σ|μ|; `positive_ov` = Σ μ_h over the heads with ω_h > 0 at that step, 0
      where there is none.
    - `holds`: signs match on all live heads, and `ov_imbalance`, |`optimality_ratio` − 1| and
      `kq_spread` are within their tolerances.

    Of each seed over the whole run, whichever steps are looked at:

    - `since_sign_matching`, `since_zero_sum`, `since_optimality`, `since_homogeneity`, in steps:
      the first checkpoint from which the condition holds at every later one. NaN: not at the last.
    - `order`: whether homogeneity (stage II) sets in after both signs and zero sum (stage I) have,
      at the checkpoint of the later of them, or before it. NaN where one of the three never does.
    - `peak_gamma`, and `peak_step`, the first step at which γ has it; `initial_to_peak` and
      `final_to_peak`, γ at the ends over the peak, in [0, 1]: both below 1 where |ω| rises, then
      falls.
    - `largest_drawdown` = max_t (max_{s≤t} S(s) − S(t)) / max_t S(t) with S = `positive_ov`; 0
      where it never falls. It is relative, so what happens among small initial weights counts
      little.

    When it misleads: a time is only as fine as the checkpoints, and depends on the tolerance: on
    gradient descent on L̃ from a small start, two heads come within 15 % of one |ω| before μ sums to
    zero within 5 %, and (4.3) comes last, while four heads differ longest in |ω|. A pattern that is
    left for one checkpoint begins anew. Two heads of one sign match in sign and |ω| and stay at
    0.828 in the ratio. While a head changes the sign of ω, `positive_ov` jumps.

    Undefined: weights that are not finite (a seed that diverged has no values over the whole run);
    no head but zeros; a single head; all μ exactly 0; fewer than two live heads; every live head
    with ω = 0. Then `holds` and what the reason takes away are NaN, and no condition counts as met.

    Parameters
    ----------
    zero_sum_tolerance
        Largest |Σμ|/Σ|μ|, as in `zero_sum_ov`.
    optimality_tolerance
        Largest |ratio − 1|. From step 5,000 of the published setting Adam leaves it below 0.03; two
        heads of one sign on L̃ have 0.17.
    homogeneity_tolerance
        Largest spread of |ω|, as in `homogeneous_kq`.
    dummy_threshold
        A head is a dummy, and is not counted in signs and spread, where |ω| and |μ| are both at
        most this fraction of the model's largest.

    References
    ----------
    he2025, (4.2), (4.3), (4.4), section 4.2 and Observation 4.
    """
    omega, mu = head_scales(trajectory)
    broken = nonfinite(trajectory)
    live = live_heads(omega, mu, dummy_threshold)
    single = mu.sizes["head"] == 1
    reasons = {
        NONFINITE: broken,
        NO_LIVE_HEAD: ~live.any("head"),
        "single_head": xr.full_like(broken, single, dtype=bool),
        "zero_ov": (mu == 0).all("head"),
        _FEW: live.sum("head") < 2,
        "zero_kq": abs(omega).where(live).max("head") == 0,
    }
    eta_star = linear_regression.optimal_learning_rate(**constants(trajectory))
    product = (omega * mu).where(~broken)
    curves = {
        "optimality_ratio": product.sum("head", skipna=False) / eta_star,
        "gamma": quotient(abs(product).sum("head", skipna=False), abs(mu).sum("head")),
        "positive_ov": mu.where(omega > 0, 0.0).sum("head").where(~broken),
        "sign_agreement": sign_agreement(omega, mu, live).where(~broken),
        "ov_imbalance": ov_imbalance(mu).where(~broken & ~reasons["single_head"]),
        "kq_spread": kq_spread(omega, live).where(~broken & ~reasons[_FEW]),
    }
    met = {
        "sign_matching": curves["sign_agreement"] == 1,
        "zero_sum": curves["ov_imbalance"] <= zero_sum_tolerance,
        "optimality": abs(curves["optimality_ratio"] - 1) <= optimality_tolerance,
        "homogeneity": curves["kq_spread"] <= homogeneity_tolerance,
    }
    starts = {f"since_{stage}": since(condition) for stage, condition in met.items()}
    together = met["sign_matching"] & met["zero_sum"] & met["optimality"] & met["homogeneity"]
    return xr.Dataset(
        {
            **curves,
            **starts,
            "order": _order(starts),
            **_rise_and_fall(curves["gamma"].where(~broken.any("step"))),
            "largest_drawdown": _drawdown(curves["positive_ov"].where(~broken.any("step"))),
            "holds": verdict(together, *reasons.values()),
            "undefined": undefined_codes(reasons),
        }
    )


def _order(starts: dict[str, xr.DataArray]) -> xr.DataArray:
    """Compare stage II with the later pattern of stage I; NaN where one is never reached."""
    first, second = starts["since_sign_matching"], starts["since_zero_sum"]
    stage_one, stage_two = first.where(first > second, second), starts["since_homogeneity"]
    code = 1.0 + (stage_two > stage_one) - (stage_two < stage_one)
    return code.where(first.notnull() & second.notnull() & stage_two.notnull())


def _rise_and_fall(gamma: xr.DataArray) -> dict[str, xr.DataArray]:
    """Return the peak of γ of each seed, its first step, and γ at the ends over it."""
    peak = gamma.max("step")
    at = gamma.where(gamma == peak).notnull().argmax("step")
    steps = gamma["step"].astype(float).isel(step=at).drop_vars("step")
    return {
        "peak_step": steps.where(peak.notnull()),
        "peak_gamma": peak,
        "initial_to_peak": quotient(gamma.isel(step=0, drop=True), peak),
        "final_to_peak": quotient(gamma.isel(step=-1, drop=True), peak),
    }


def _drawdown(curve: xr.DataArray) -> xr.DataArray:
    """Return the largest fall from an earlier value over the maximum; NaN where that is not > 0."""
    highest = curve.copy(data=np.maximum.accumulate(curve.values, axis=curve.get_axis_num("step")))
    top = curve.max("step")
    return (highest - curve).max("step") / top.where(top > 0)
