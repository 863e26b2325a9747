"""Which heads are positive, negative and dummies: section 3 of he2025."""

import xarray as xr

from mechicl.analyses.heads import (
    ATTENTION,
    DUMMY_THRESHOLD,
    NONFINITE,
    Threshold,
    head_scales,
    live_heads,
    nonfinite,
    one_layer,
    sign,
)
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.schema import Var

_ROLES = {-1: "negative", 0: "dummy", 1: "positive"}


@probe(
    needs=ATTENTION,
    gives={
        "role": Var(("seed", "step", "head"), "1", "role of the head", -1, 1, flags=_ROLES),
        **{
            f"n_{role}": Var(("seed", "step"), "1", f"number of {role} heads", 0)
            for role in _ROLES.values()
        },
    },
    statement="there is a positive and a negative head",
    undefined=(NONFINITE, "live_head_with_zero_kq"),
    headline=("role",),
    applies=one_layer,
    references=("he2025 section 3, Observation 1, (4.4)",),
)
def head_roles(
    trajectory: xr.Dataset, *, dummy_threshold: Threshold = DUMMY_THRESHOLD
) -> xr.Dataset:
    """Tell positive heads (ω > 0), negative heads (ω < 0) and dummies apart.

    - `role` (seed, step, head): 1 positive, −1 negative, 0 dummy, without units.
    - `n_positive`, `n_negative`, `n_dummy` (seed, step): how many heads have each role.
    - `holds`: at least one head is positive and at least one negative, as debiased gradient descent
      needs. With one head that is never so.

    When it misleads: roles go by ω alone, so before signs match (`sign_matching`) a positive head
    may write with a negative sign. A model of zeros has dummies alone.

    Undefined: weights that are not finite; a live head with ω exactly 0, which has no role (`role`
    is NaN for it alone, and the counts leave it out).

    Parameters
    ----------
    dummy_threshold
        A head is a dummy where |ω| and |μ| are both at most this fraction of the model's own
        largest. At 0.2 it adds at most 4 % of what the largest head adds to the step size Σ|ω||μ|,
        while on the solution manifold every other head has |ω| at the largest; Adam's noise leaves
        dummies at up to 0.12. A head whose μ has vanished before its ω is none yet.

    References
    ----------
    he2025, section 3 (H₊, H₋ and dummies) and (4.4).
    """
    omega, mu = head_scales(trajectory)
    live = live_heads(omega, mu, dummy_threshold)
    broken = nonfinite(trajectory)
    roleless = live & (omega == 0)
    role = sign(omega).where(live, 0.0).where(~roleless & ~broken)
    counts = {
        f"n_{name}": (role == value).sum("head").where(~broken) for value, name in _ROLES.items()
    }
    both = (counts["n_positive"] > 0) & (counts["n_negative"] > 0)
    return xr.Dataset(
        {
            "role": role,
            **counts,
            "holds": verdict(both, broken),
            "undefined": undefined_codes(
                {NONFINITE: broken, "live_head_with_zero_kq": roleless.any("head")}
            ),
        }
    )
