"""The order of heads in which seeds can be averaged: by the blocks that they serve in the end."""

from typing import Annotated

import pydantic
import xarray as xr

from mechicl.analyses.heads import NONFINITE, Threshold, nonfinite
from mechicl.analyses.probe import Forward, probe, undefined_codes
from mechicl.analyses.spans import (
    BLOCK,
    LAG_WEIGHTS,
    NONFINITE_PATTERNS,
    TIE_TOLERANCE,
    head_orders,
    measured_spans,
)
from mechicl.schema import Var


@probe(
    needs=LAG_WEIGHTS,
    gives=BLOCK
    | {
        "permutation": Var(("seed", "layer", "head"), "1", "place of the head, from 0", 0),
        "margin": Var(("seed", "layer"), "1", "mass lost by the next best order", 0),
        "least_margin": Var(("seed", "step"), "1", "least margin of a layer", 0),
        "mass": Var(
            ("seed", "step", "layer", "head", "block"), "1", "attention on the block", 0, 1
        ),
    },
    undefined=(NONFINITE, NONFINITE_PATTERNS, "tied_heads", "single_head"),
    headline=("least_margin",),
    references=("yuksel2026 section 2.3 (permutation symmetry)",),
    forward=True,
)
def head_permutation(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 256,
    tie_tolerance: Threshold = TIE_TOLERANCE,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Find the order of each seed's heads, by the blocks that they serve at the last step.

    Which head serves which block is chance, so that a mean over seeds of "head 0" means nothing.
    The permutation undoes it; `mechicl.analyses.spans.aligned` applies it to any result or to
    parameters. The axis `step` has the last step alone.

    - `mass` (seed, step, layer, head, block): the attention of the head on the block, as in
      `attention_spans`, without units, in [0, 1]. `block` is numbered from 1.
    - `permutation` (seed, layer, head): the place of the head, from 0. Blocks get different heads
      so that the sum of their masses is the largest, and these heads come in the order of their
      blocks. Heads beyond the number of blocks follow, by the block on which they have most mass,
      and of one block by that mass, the largest first. With fewer heads than blocks, the blocks
      that get none are passed over, and one place may be of different blocks in two seeds.
    - `margin` (seed, layer): how much less that sum is under the next best assignment or, if that
      is less, how little the masses differ by which heads beyond the blocks are ordered. Without
      units, from 0, a tie; 2 where every block has all of its head's attention.
    - `least_margin` (seed, step): the least `margin` of a layer.

    When it misleads: heads that all look at one block (a run before its later stages, or with too
    few data) still have an order, decided by little: look at `margin`, and for models that read
    tokens compare it with the error of `mass`. A head's block at the last step need not be the one
    that it served before.

    Undefined: weights or patterns that are not finite; tied heads, with u = 0 for one (their
    `permutation`, and `least_margin`; `margin` says how close they are); a single head, which has
    place 0 and no margin.

    Parameters
    ----------
    n_prompts
        Size of the evaluation set.
    tie_tolerance
        Largest `margin` that is a tie. Patterns are float32; heads that are alike differ by less
        than 1e-6 in mass.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    yuksel2026, section 2.3: "the construction has a permutation symmetry".
    """
    chosen = forward.load(trajectory.isel(step=slice(-1, None)))
    broken = nonfinite(chosen)
    mass = measured_spans(chosen, forward, n_prompts=n_prompts, evaluation_seed=evaluation_seed)[
        "mass"
    ].where(~broken)
    orders = head_orders(mass.isel(step=0, drop=True), tie_tolerance=tie_tolerance)
    margin = orders["margin"].broadcast_like(broken)  # at the one step there is
    tied = (margin <= tie_tolerance).any("layer")
    return xr.Dataset(
        {
            **orders,
            "least_margin": margin.min("layer", skipna=False).where(~tied),
            "mass": mass,
            "undefined": undefined_codes(
                {
                    NONFINITE: broken,
                    NONFINITE_PATTERNS: mass.isnull().any(["layer", "head", "block"]),
                    "tied_heads": tied,
                    "single_head": xr.full_like(broken, mass.sizes["head"] == 1, dtype=bool),
                }
            ),
        }
    )
