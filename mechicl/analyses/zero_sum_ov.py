"""Whether the OV scales of all heads cancel: Observation 2 (ii) of he2025."""

import xarray as xr

from mechicl.analyses.heads import (
    ATTENTION,
    NONFINITE,
    ZERO_SUM_TOLERANCE,
    Tolerance,
    head_scales,
    nonfinite,
    one_layer,
    ov_imbalance,
)
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.schema import Var


@probe(
    needs=ATTENTION,
    gives={"ov_imbalance": Var(("seed", "step"), "1", "|sum of mu| over sum of |mu|", 0, 1)},
    statement="the OV scales sum to zero",
    undefined=(NONFINITE, "single_head", "zero_ov"),
    headline=("ov_imbalance",),
    applies=one_layer,
    references=("he2025 (4.2), Observation 2",),
)
def zero_sum_ov(trajectory: xr.Dataset, *, tolerance: Tolerance = ZERO_SUM_TOLERANCE) -> xr.Dataset:
    """Measure how far the OV scales are from cancelling.

    - `ov_imbalance` = |Σ_h μ_h| / Σ_h |μ_h| over all heads, (seed, step), without units, in [0, 1]:
      0 where positive and negative heads cancel, 1 where all have one sign.
    - `holds`: it is at most `tolerance`.

    When it misleads: it says nothing of ω, so two heads with (μ, −μ) and any KQ pass.

    Undefined: weights that are not finite; one head, for which it would be 1 whatever was learnt;
    all μ exactly 0.

    Parameters
    ----------
    tolerance
        Largest imbalance that counts as zero. From step 5,000 of the published setting Adam leaves
        it below 0.02; three equal heads of which one has the other sign have 1/3.

    References
    ----------
    he2025, (4.2) and Observation 2 (ii).
    """
    _, mu = head_scales(trajectory)
    total = abs(mu).sum("head", skipna=False)
    reasons = {
        NONFINITE: nonfinite(trajectory),
        "single_head": xr.full_like(total, mu.sizes["head"] == 1, dtype=bool),
        "zero_ov": total == 0,
    }
    imbalance = ov_imbalance(mu).where(~reasons[NONFINITE] & ~reasons["single_head"])
    return xr.Dataset(
        {
            "ov_imbalance": imbalance,
            "holds": verdict(imbalance <= tolerance, *reasons.values()),
            "undefined": undefined_codes(reasons),
        }
    )
