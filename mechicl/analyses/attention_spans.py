"""Which block of lags every head attends to, over training: Figs 1 and 2 of yuksel2026."""

from typing import Annotated

import numpy as np
import pydantic
import xarray as xr

from mechicl.analyses.evaluation import spread_steps
from mechicl.analyses.heads import NONFINITE, Threshold, nonfinite
from mechicl.analyses.probe import Forward, probe, undefined_codes, verdict
from mechicl.analyses.spans import (
    BLOCK,
    LAG_WEIGHTS,
    NONFINITE_PATTERNS,
    TIE_TOLERANCE,
    aligned,
    head_orders,
    measured_spans,
)
from mechicl.schema import Var

_HEAD = ("seed", "step", "layer", "head")
_MEAN = ("step", "layer", "place", "block")


@probe(
    needs=LAG_WEIGHTS,
    gives=BLOCK
    | {
        "span_mass": Var((*_HEAD, "query_pos", "block"), "1", "attention on the block", 0, 1),
        "mass": Var((*_HEAD, "block"), "1", "attention on the block, mean over positions", 0, 1),
        "mass_error": Var((*_HEAD, "block"), "1", "standard error of mass", 0),
        "elsewhere": Var(_HEAD, "1", "attention on lags of no block", 0, 1),
        "entropy": Var(_HEAD, "nat", "entropy of the attention weights", 0),
        "serves": Var(_HEAD, "1", "number of the block that the head serves (NaN: none)", 1),
        "moved": Var(
            ("seed", "layer", "head"), "step", "last step at which serves changed (NaN: never)", 0
        ),
        "n_served": Var(("seed", "step"), "1", "number of blocks that a head serves", 0),
        "mean_mass": Var(_MEAN, "1", "mass of the head of a place, mean over seeds", 0, 1),
        "mass_deviation": Var(_MEAN, "1", "standard deviation of that mass over seeds", 0),
        "n_ordered": Var(("layer",), "1", "seeds in that mean: their heads have an order", 0),
    },
    statement="every block has a head that serves it",
    undefined=(NONFINITE, NONFINITE_PATTERNS, "head_without_block"),
    headline=("n_served",),
    references=("yuksel2026 sections 2.2 and 2.3, Figs 1 and 2",),
    forward=True,
)
def attention_spans(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 256,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 40,
    serve_threshold: Threshold = 0.5,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Measure how much every head attends to every block of lags, and which one it serves.

    a_i is the attention weight, of a head at a predicted position, on the token i before it; lag i
    is in block I(k) where α_i > 0. Averages are over a fixed evaluation set, but for models whose
    scores are of positions alone: their patterns are the same on every prompt, and one is enough.

    - `span_mass` (seed, step, layer, head, query_pos, block) = ⟨Σ_{i∈I(k)} a_i⟩, without units, in
      [0, 1]. A model that reads c tokens has no lags from c on: they have mass 0.
    - `mass` (seed, step, layer, head, block): its mean over predicted positions. `mass_error`: the
      Monte-Carlo standard error of that, exactly 0 where patterns do not depend on prompts.
    - `elsewhere` (seed, step, layer, head): the mean attention on lags of no block, in [0, 1].
    - `entropy` (seed, step, layer, head) = ⟨−Σ_i a_i log a_i⟩ in nat, mean over prompts and
      positions, from 0 to the logarithm of the positions read; log |I(k)| where a head is uniform
      on a block.
    - `serves` (seed, step, layer, head): the number of the block with the largest `mass`, 1 the
      most important, where that is above `serve_threshold`; NaN where none is.
    - `moved` (seed, layer, head), in steps: the last of the steps looked at where `serves` is not
      what it was at the one before, none counted as a value; NaN: never.
    - `n_served` (seed, step): blocks that some head, of whatever layer, serves. `holds`: all are.
    - `mean_mass`, `mass_deviation` (step, layer, place, block): mean, and standard deviation (over
      n, so 0 for one), of `mass` over seeds, heads in the order that `head_permutation` finds at
      the last step. `n_ordered` (layer): of how many seeds; those whose heads tie are not in it.

    `block` is numbered from 1; its coordinate is what `serves` says. Blocks may overlap and differ
    in size. Then masses may sum to more than 1, a lag of two blocks counts in both, a large block
    has more by chance, and of nested blocks the larger has at least the mass of the smaller: read
    `serves` with `value_alignment` beside it. Of equal masses the first block counts.

    When it misleads: attention says where a head looks, not what it makes of it (a head with a zero
    value map attends too). In layers after the first, what is attended to is no token but a mixture
    of those before it. A uniform head has about |I(k)| over the positions read, and serves a block
    of more than half of them. A `moved` is as fine as the steps looked at, and a head about the
    threshold may move for ever. `mean_mass` mixes seeds at different stages.

    Undefined: weights that are not finite (the seed's `moved`, of the whole run, is NaN too);
    patterns that are not finite; a head without block (`serves` alone).

    Parameters
    ----------
    n_prompts
        Size of the evaluation set.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first), first
        and last in; 1 takes the last.
    serve_threshold
        `mass` that a head has to exceed to serve a block. From a half on, of blocks that do not
        overlap at most one has it.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    yuksel2026, section 2.2 (Fig. 2) and the construction of section 2.3.
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    broken = nonfinite(chosen)
    spans = measured_spans(
        chosen, forward, n_prompts=n_prompts, evaluation_seed=evaluation_seed
    ).where(~broken)
    mass = spans["mass"]
    largest = mass.max("block")
    serves = mass["block"].isel(block=mass.fillna(0.0).argmax("block")).drop_vars("block")
    serves = serves.astype(float).where(largest > serve_threshold)
    served = (serves == mass["block"]).any(["layer", "head"]).sum("block").astype(float)
    unknown = mass.isnull().any(["layer", "head", "block"])
    order = head_orders(mass.isel(step=-1, drop=True), tie_tolerance=TIE_TOLERANCE)["permutation"]
    placed = aligned(mass.to_dataset(name="mass"), order)["mass"].rename(head="place")
    return spans.assign(
        serves=serves,
        moved=_last_change(serves).where(~unknown.any("step")),
        n_served=served.where(~unknown),
        mean_mass=placed.mean("seed").clip(max=1.0),
        mass_deviation=placed.std("seed"),
        n_ordered=order.notnull().all("head").sum("seed").astype(float),
        holds=verdict(served == mass.sizes["block"], unknown),
        undefined=undefined_codes(
            {
                NONFINITE: broken,
                NONFINITE_PATTERNS: unknown,
                "head_without_block": serves.isnull().any(["layer", "head"]),
            }
        ),
    )


def _last_change(serves: xr.DataArray) -> xr.DataArray:
    """Return the last step whose value is not that of the step before, NaN being one of them."""
    table = serves.fillna(0.0)
    changed = table.copy(data=np.zeros(table.shape, bool))
    later, earlier = ({"step": slice(1, None)}, {"step": slice(None, -1)})
    changed[later] = table[later].values != table[earlier].values
    return table["step"].astype(float).where(changed).max("step")
