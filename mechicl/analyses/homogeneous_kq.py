"""Whether all live heads have one KQ scale up to sign: Observation 2 (i) of he2025."""

import xarray as xr

from mechicl.analyses.heads import (
    ATTENTION,
    DUMMY_THRESHOLD,
    HOMOGENEITY_TOLERANCE,
    NONFINITE,
    Threshold,
    Tolerance,
    head_scales,
    kq_spread,
    live_heads,
    nonfinite,
    one_layer,
)
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.schema import Var

_FEW = "fewer_than_two_live_heads"


@probe(
    needs=ATTENTION,
    gives={
        "kq_spread": Var(("seed", "step"), "1", "range of |omega| over its mean, live heads", 0),
    },
    statement="the live heads have one |omega|",
    undefined=(NONFINITE, _FEW, "zero_kq"),
    headline=("kq_spread",),
    applies=one_layer,
    references=("he2025 (4.4), Observation 2",),
)
def homogeneous_kq(
    trajectory: xr.Dataset,
    *,
    tolerance: Tolerance = HOMOGENEITY_TOLERANCE,
    dummy_threshold: Threshold = DUMMY_THRESHOLD,
) -> xr.Dataset:
    """Measure how unequal |ω| is over the live heads.

    - `kq_spread` = (max_h |ω_h| − min_h |ω_h|) / mean_h |ω_h| over live heads, (seed, step),
      without units; 0 where all have one scale, at most the number of live heads.
    - `holds`: it is at most `tolerance`.

    When it misleads: heads of one sign that share a scale pass too (the absorbing state of two
    heads of one sign does); the range grows with the number of heads under the same noise.

    Undefined: weights that are not finite; fewer than two live heads, which are equal whatever was
    learnt; every live head with ω = 0.

    Parameters
    ----------
    tolerance
        Largest spread that counts as one scale. From step 5,000 of the published setting Adam
        leaves two heads below 0.05 and four below 0.1; heads that still differ have 0.2 to 1.
    dummy_threshold
        A head is a dummy, and is not counted, where |ω| and |μ| are both at most this fraction of
        the model's largest.

    References
    ----------
    he2025, (4.4) and Observation 2 (i).
    """
    omega, mu = head_scales(trajectory)
    live = live_heads(omega, mu, dummy_threshold)
    reasons = {
        NONFINITE: nonfinite(trajectory),
        _FEW: live.sum("head") < 2,
        "zero_kq": abs(omega).where(live).max("head") == 0,
    }
    spread = kq_spread(omega, live).where(~reasons[NONFINITE] & ~reasons[_FEW])
    return xr.Dataset(
        {
            "kq_spread": spread,
            "holds": verdict(spread <= tolerance, *reasons.values()),
            "undefined": undefined_codes(reasons),
        }
    )
