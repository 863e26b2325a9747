"""Whether KQ and OV of each head share their sign: Observation 1 of he2025."""

import xarray as xr

from mechicl.analyses.heads import (
    ATTENTION,
    DUMMY_THRESHOLD,
    NO_LIVE_HEAD,
    NONFINITE,
    Threshold,
    head_scales,
    live_heads,
    nonfinite,
    one_layer,
    sign_agreement,
)
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.schema import Var


@probe(
    needs=ATTENTION,
    gives={
        "sign_agreement": Var(
            ("seed", "step"), "1", "fraction of live heads with sign(omega) = sign(mu)", 0, 1
        )
    },
    statement="on every live head omega and mu have one sign",
    undefined=(NONFINITE, NO_LIVE_HEAD),
    headline=("sign_agreement",),
    applies=one_layer,
    references=("he2025 Observation 1",),
)
def sign_matching(
    trajectory: xr.Dataset, *, dummy_threshold: Threshold = DUMMY_THRESHOLD
) -> xr.Dataset:
    """Measure on which fraction of the live heads ω and μ have one sign.

    - `sign_agreement` = #{live h: sign(ω_h) = sign(μ_h)} / #{live h}, (seed, step), without units,
      in [0, 1]; 1 is sign matching.
    - `holds`: it is 1.

    When it misleads: each sign agrees by chance with probability 1/2, so a model with two live
    heads passes at initialisation one time in four; read `since`, not one step. A live head with ω
    = 0 or μ = 0 does not match.

    Undefined: weights that are not finite; no head but zeros.

    Parameters
    ----------
    dummy_threshold
        A head is a dummy, and is not counted, where |ω| and |μ| are both at most this fraction of
        the model's largest: the signs of a dummy are noise.

    References
    ----------
    he2025, Observation 1 and section 4.2.1 (ii).
    """
    omega, mu = head_scales(trajectory)
    live = live_heads(omega, mu, dummy_threshold)
    reasons = {NONFINITE: nonfinite(trajectory), NO_LIVE_HEAD: ~live.any("head")}
    agreement = sign_agreement(omega, mu, live).where(~reasons[NONFINITE])
    return xr.Dataset(
        {
            "sign_agreement": agreement,
            "holds": verdict(agreement == 1, *reasons.values()),
            "undefined": undefined_codes(reasons),
        }
    )
