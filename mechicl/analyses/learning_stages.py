"""When a model of a Markov chain learns which block, and how its heads share them: yuksel2026."""

from itertools import combinations
from typing import Annotated

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float

from mechicl.analyses.context_kl import (
    CHAIN,
    NONFINITE_PREDICTIONS,
    arrow,
    divergences,
    in_order,
)
from mechicl.analyses.evaluation import spread_steps
from mechicl.analyses.heads import NONFINITE, nonfinite
from mechicl.analyses.probe import Forward, probe, undefined_codes, verdict
from mechicl.analyses.spans import BLOCK, NONFINITE_PATTERNS, measured_spans
from mechicl.analyses.stages import (
    RISE,
    Transition,
    count_stages,
    stage_entries,
    transitions,
)
from mechicl.schema import Var
from mechicl.theory import divergence

_MODEL = ("seed", "step")
_RUN = ("seed",)
_BY_BLOCK = ("seed", "block")
_CHANGE = ("seed", "curve", "transition")
_TRANSITION = Var(("transition",), "1", "number of a transition of a curve", 1)
_PHASES = {
    0: "before_any_block",
    1: "competitive",
    2: "cooperative",
    3: "all_blocks_entered",
}
_LATER = "undefined_at_another_step"
_SINGLE = "single_step"


@probe(
    needs=CHAIN,
    gives={
        **BLOCK,
        "reference": Var(("reference",), "1", "divergence, reference and model in its order"),
        "curve": Var(("curve",), "1", "quantity that is followed over training"),
        "transition": _TRANSITION,
        "loss": Var(_MODEL, "nat", "cross-entropy of the model", 0),
        "kl": Var((*_MODEL, "reference"), "nat", "mean divergence", 0),
        "mass": Var((*_MODEL, "layer", "head", "block"), "1", "attention on a block", 0, 1),
        "overlap": Var(_MODEL, "1", "least overlap of the attention of two heads", 0, 1),
        "phase": Var(_MODEL, "1", "phase of learning", 0, 3, flags=_PHASES),
        "entered": Var(_BY_BLOCK, "step", "step from which a block is attended to for good", 0),
        "entered_error": Var(_BY_BLOCK, "step", "distance of the step evaluated before", 0),
        "n_stages": Var(_RUN, "1", "entries at different times", 0),
        "in_order": Var(_RUN, "1", "1 where all blocks are entered, first to last", 0, 1),
        "competitive_until": Var(_RUN, "step", "last step at which all heads overlap", 0),
        "transition_step": Var(_CHANGE, "step", "step at which half of a transition is made"),
        "transition_low": Var(_CHANGE, "step", "least step at which it may be"),
        "transition_high": Var(_CHANGE, "step", "largest step at which it may be"),
        "change": Var(_CHANGE, "1", "change of a curve, as it is followed, in a transition"),
    },
    statement="all blocks are entered, first to last",
    undefined=(
        NONFINITE,
        NONFINITE_PREDICTIONS,
        NONFINITE_PATTERNS,
        _LATER,
        _SINGLE,
        "single_head",
    ),
    headline=("loss", "phase"),
    references=("yuksel2026 sections 2.2 and 3, Figs. 1 to 5",),
    forward=True,
)
def learning_stages(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    rise: Annotated[float, pydantic.Field(gt=0, lt=1)] = RISE,
    simultaneous: Annotated[float, pydantic.Field(ge=0)] = 0.2,
    least_overlap: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.5,
    least_change: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.1,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 250,
    n_pattern_prompts: Annotated[int, pydantic.Field(ge=2)] = 50,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 100,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Find when each block of lags is entered, the plateaus between, and what the heads do there.

    At each step:

    - `loss` (seed, step), in nat, and `kl` (seed, step, reference), KL(blocks_j ‖ model) for each
      j, the last of which is the generator: as the probe `context_kl` has them.
    - `mass` (seed, step, layer, head, block): attention on the lags of a block, averaged over
      predicted positions and prompts, from 0 to 1: as `attention_spans` has it.
    - `overlap` (seed, step) = min over pairs of heads h, g of one layer of 2 Σ min(m_h, m_g) /
      Σ (m_h + m_g), over the blocks and what is on none; 1 for heads that look alike, 0 for heads
      that share no block.
    - `phase` (seed, step): before any block is entered; competitive, from the first entry on, while
      `overlap` is at `least_overlap` or comes back to it later; cooperative, once a head has left
      the others for good; all blocks entered.
    - `holds`: all blocks are entered by this step, in their order, two at one step included.

    Of each seed over the steps that are evaluated:

    - `entered` (seed, block), in steps, `block` counted from 1. The definition, in one function, is
      `mechicl.analyses.stages.stage_entries`: the first step from which a head's mass on the block
      stays above its first value + `rise` to the end, provided that KL(blocks_i ‖ model), for one i
      from this block on, falls below half of what the blocks before this one leave,
      KL(blocks_i ‖ blocks_{j−1}). NaN: never. `entered_error`: the entry is after the step that was
      evaluated before it, this far back.
    - `n_stages`: entries at different times. One that is at most (1 + `simultaneous`) times the one
      before is of the same stage. `in_order`: 1 where all blocks are entered, first to last.
    - `competitive_until`, in steps: the last one of the competitive phase; NaN where heads do not
      part, or have before the first entry.
    - `transition_step` (seed, curve, transition): where half of a change between two plateaus is
      made, in steps, with the steps between which it may be, `transition_low` and
      `transition_high`, and its `change`: see `mechicl.analyses.stages.transitions`, which finds
      change points over log(1 + step) by `ruptures.Pelt`. The axes `curve` and `reference` are
      numbers that `mechicl.schema.flag_names` reads. `loss` is followed as √KL(generator ‖ model),
      the root of the loss over its floor without the noise of targets, and `KL(blocks_j||model)` as
      its root: near its target a model's KL is as the square of its distance in logits.
      `mass(block_j)` is the largest mass of any head. `change` is in the unit of these.
      `transition` counts from 1; NaN beyond those that a curve has.

    When it misleads: times are as fine as the steps evaluated, and what was entered before the
    first of them does not count. A head that attends to a block without using it counts once the
    model fits by other heads, and heads that cannot be told apart by blocks, such as two on parts
    of one, overlap; a head whose values are 0 is a head. A model whose context ends with block 1
    has all of its mass there from the start, and enters nothing. In deeper layers the residual
    stream at a lag holds more than its token. A run that is cut before the last plateau has no
    transition there, and may have entered what it would have left.

    Undefined: weights that are not finite; predictions that are not finite; a step after which
    either comes (stages are of whole runs: such a seed has none, and `holds` and `phase` are NaN at
    all of its steps); a single step, to which nothing has changed (stages, `holds` and `phase`
    likewise); a single head, of which `overlap` and `phase` say nothing.

    Parameters
    ----------
    rise
        Mass that a head has to add on a block.
    simultaneous
        Relative distance of entries that count as one stage.
    least_overlap
        Least overlap of heads that compete.
    least_change
        Least transition, as a part of the range of the fitted curve.
    n_prompts
        Size of the evaluation set.
    n_pattern_prompts
        How many of them patterns are averaged over; those of scores of positions need one.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first), first
        and last in; 1 takes the last.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    yuksel2026, section 2.2 and Figs. 1 to 5 (stages), section 3 (competition, cooperation).
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    result = divergences(
        chosen,
        forward,
        lambda inputs: in_order(forward.references(inputs)),
        n_prompts=n_prompts,
        evaluation_seed=evaluation_seed,
    )[["loss", "kl"]]
    spans = measured_spans(
        chosen, forward, n_prompts=n_pattern_prompts, evaluation_seed=evaluation_seed
    )
    mass, overlap = spans["mass"], _overlap(spans)
    steps, n_blocks = result["step"].values.astype(float), mass.sizes["block"]
    without = _without(forward, n_prompts, evaluation_seed)
    heads = mass.stack(any_head=("layer", "head")).transpose(*_MODEL, "any_head", "block").values
    unseen = mass.isnull().any(("layer", "head", "block"))
    broken = {
        NONFINITE: nonfinite(chosen),
        NONFINITE_PREDICTIONS: result["loss"].isnull(),
        NONFINITE_PATTERNS: unseen,
    }
    finite = ~(result["loss"].isnull() | unseen).any("step")
    whole = finite & (len(steps) > 1)  # what is entered has changed since the first step
    entered = np.full((result.sizes["seed"], n_blocks), np.nan)
    curves = [
        "loss",
        *(arrow(f"blocks_{j}", "reference_to_model") for j in range(1, n_blocks)),
        *(f"mass(block_{j})" for j in range(1, n_blocks + 1)),
    ]
    changes: list[list[list[Transition]]] = [[[] for _ in curves] for _ in entered]
    for seed in np.flatnonzero(whole.values):
        kl = result["kl"].isel(seed=seed).transpose("step", "reference").values
        entered[seed] = stage_entries(steps, heads[seed], kl, without, rise=rise)
        followed = np.sqrt(kl)
        columns = [followed[:, -1], *followed[:, :-1].T, *heads[seed].max(1).T]
        changes[seed] = [transitions(steps, each, least_change=least_change) for each in columns]
    by_block = xr.DataArray(entered, dims=_BY_BLOCK, coords={"seed": result["seed"]})
    ordered = (np.diff(entered, axis=1) >= 0).all(1) & np.isfinite(entered).all(1)
    right = whole.copy(data=ordered)
    every = right & (result["step"] >= by_block.max("block", skipna=False))
    phase, until = _phases(by_block, overlap.where(whole), least_overlap)
    counted = [float(count_stages(each, simultaneous=simultaneous)) for each in entered]
    single = xr.full_like(unseen, mass.sizes["head"] == 1)
    reasons = {
        **broken,
        _LATER: ~finite & xr.ones_like(unseen),
        _SINGLE: xr.full_like(unseen, len(steps) == 1),
        "single_head": single,
    }
    result = result.assign(_table(changes, curves))
    return result.assign(
        mass=mass,
        overlap=overlap,
        phase=phase,
        entered=by_block,
        entered_error=by_block - _step_before(steps, entered),
        n_stages=whole.copy(data=counted).where(whole),
        in_order=right.astype(float).where(whole),
        competitive_until=until,
        holds=verdict(every, *broken.values(), ~whole),
        undefined=undefined_codes(reasons),
    )


def _without(
    forward: Forward, n_prompts: int, evaluation_seed: int
) -> Float[np.ndarray, "block block"]:
    """Return KL(blocks_i ‖ blocks_{j−1}), (i, j), with blocks_0 the uniform law."""
    inputs, _ = forward.prompts(n_prompts, evaluation_seed)
    laws = [*in_order(forward.references(inputs)).values()]
    uniform = np.full_like(laws[0], -np.log(laws[0].shape[-1]))
    before = [uniform, *laws[:-1]]
    return np.array([[divergence.kl(law, other).mean() for other in before] for law in laws])


def _overlap(spans: xr.Dataset) -> xr.DataArray:
    """Return the least overlap of two heads of one layer, (seed, step); NaN for a single head."""
    parts = [spans["mass"], spans["elsewhere"].expand_dims(block=[0])]
    mass = xr.concat(parts, "block", coords="minimal", compat="override", join="outer")
    mass = mass.transpose("head", *_MODEL, "layer", "block").values
    pairs = [
        2 * np.minimum(one, other).sum(-1) / (one + other).sum(-1)
        for one, other in combinations(mass, 2)
    ]
    least = np.min(pairs, axis=(0, -1)) if pairs else np.full(mass.shape[1:3], np.nan)
    # Rounding may leave heads that are alike an ulp above 1.
    clipped = np.minimum(least, 1.0)
    return xr.DataArray(clipped, {dim: spans[dim] for dim in _MODEL}, _MODEL)


def _phases(
    entered: xr.DataArray, overlap: xr.DataArray, least: float
) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the phase, (seed, step), and the last step of the competitive one, (seed,)."""
    step = overlap["step"].astype(float)
    # The last step at which heads overlap, be it after a time in which they did not.
    until = step.where(overlap >= least).max("step")
    first, last = entered.min("block"), entered.max("block", skipna=False)
    parted = (until < step[-1]) & (until >= first)
    phase = xr.where(step <= until, 1.0, 2.0).where(step >= first, 0.0)
    phase = phase.where(~(step >= last), 3.0).where(overlap.notnull())
    return phase.transpose(*_MODEL), until.where(parted)


def _step_before(
    steps: Float[np.ndarray, " step"], entered: Float[np.ndarray, "seed block"]
) -> Float[np.ndarray, "seed block"]:
    """Return the step that was evaluated before each entry, which is never at the first."""
    index = np.searchsorted(steps, np.nan_to_num(entered, nan=steps[-1]))
    return np.where(np.isfinite(entered), steps[np.maximum(index - 1, 0)], np.nan)


def _table(changes: list[list[list[Transition]]], curves: list[str]) -> dict[str, xr.DataArray]:
    """Return transitions of every seed and curve, NaN beyond those that there are."""
    most = max((len(each) for of_seed in changes for each in of_seed), default=0)
    table = np.full((len(changes), len(changes[0]), max(most, 1), len(Transition._fields)), np.nan)
    for (seed, curve), _ in np.ndenumerate(table[..., 0, 0]):
        for number, each in enumerate(changes[seed][curve]):
            table[seed, curve, number] = each
    names = ("transition_step", "transition_low", "transition_high", "change")
    coords = {
        "curve": _curve_axis(curves),
        "transition": ("transition", np.arange(1, table.shape[2] + 1), _TRANSITION.attrs),
    }
    return {
        name: xr.DataArray(table[..., number], coords, _CHANGE) for number, name in enumerate(names)
    }


def _curve_axis(names: list[str]) -> xr.DataArray:
    """Return the axis of curves: numbers, with names as CF flags, as `reference_axis` has them."""
    flags = dict(enumerate(names))
    attrs = Var(("curve",), "1", "quantity that is followed over training", flags=flags).attrs
    return xr.DataArray(np.arange(len(flags)), dims="curve", attrs=attrs)
