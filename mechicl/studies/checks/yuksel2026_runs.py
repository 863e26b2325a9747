"""Checks of yuksel2026 on trained models."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from mechicl.errors import InputError
from mechicl.schema import flag_names
from mechicl.studies.checks.base import Measurement, Outcome, check, require_labels
from mechicl.studies.checks.probes import labelled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mechicl.run import Run


@check
def attention_stages(
    runs: "Mapping[str, Run]", *, label_shown: str | None = None, n_steps: int = 100
) -> Outcome:
    """Measure in which order the heads of every run enter the blocks of lags (Figs. 1, 2, 4, 5).

    By the probe `learning_stages`, for each run, under its label where there are several, and for
    each seed:

    - `in order`: 1 where all blocks are entered, first to last.
    - `competes first`: 1 where all heads overlap when the first block is entered.
    - `stages`: how many entries at different times there are.
    - `loss transitions`: how many falls between plateaus the loss has.
    - `block J entered`: the step; NaN where it is not.

    Parameters
    ----------
    label_shown
        Run that the figure is of; None takes the first.
    n_steps
        How many checkpoints are evaluated.
    """
    require_labels(runs, label_shown)
    measurements: list[Measurement] = []
    shown = None
    for label, run in runs.items():
        result = run.analyze("learning_stages", n_steps=n_steps)
        if label == (label_shown or next(iter(runs))):
            shown = labelled(result, label, runs)
        named = f"{label}: " if len(runs) > 1 else ""
        first = result["entered"].isel(block=0)
        curves = {name: code for code, name in flag_names(result["curve"]).items()}
        loss = result["transition_step"].sel(curve=curves["loss"])
        falls = loss.notnull().sum("transition").where(result["n_stages"].notnull())
        for seed in result["seed"].values:
            one = result.sel(seed=seed)
            at = float(first.sel(seed=seed))
            overlapping = np.nan
            if np.isfinite(at):
                phases = flag_names(one["phase"])
                overlapping = phases[int(one["phase"].sel(step=at))] == "competitive"
            found = {
                "in order": one["in_order"],
                "competes first": overlapping,
                "stages": one["n_stages"],
                "loss transitions": falls.sel(seed=seed),
                **{
                    f"block {int(one['block'][index])} entered": one["entered"].isel(block=index)
                    for index in range(one.sizes["block"])
                },
            }
            measurements += [
                Measurement(named + name, float(value), seed=int(seed))
                for name, value in found.items()
            ]
    return Outcome(tuple(measurements), shown)


@check
def dips_in_order(
    runs: "Mapping[str, Run]", *, model: str, against: tuple[str, ...] = (), n_prompts: int = 1000
) -> Outcome:
    """Measure whether a run comes nearest to predictors of longer and longer contexts (Fig. 3).

    By the probe `context_kl`, KL(reference ‖ model): for each seed

    - `trained: dips in order`: 1 where the steps at which it is least increase along `against`.
    - `blocks: dips in order`: the same for the generator's first 1, 2, ... blocks.
    - `REFERENCE: nearest at`, `REFERENCE: nearest`: that step, and the divergence there, in nat.

    Parameters
    ----------
    model
        Label of the run that is followed.
    against
        Labels of the runs that it is held against, in the order claimed.
    n_prompts
        Size of the evaluation set.
    """
    require_labels(runs, model, *against)
    others = {label: runs[label] for label in against}
    result = runs[model].analyze("context_kl", against=others, n_prompts=n_prompts)
    names = {name: code for code, name in flag_names(result["reference"]).items()}

    def curve(reference: str) -> xr.DataArray:
        return result["kl"].sel(reference=names[f"KL({reference}||model)"])

    blocks = sorted(
        name[len("KL(") : -len("||model)")] for name in names if name.startswith("KL(blocks_")
    )
    kinds = {"blocks": [*blocks, "generator"]}
    if against:
        kinds = {"trained": [f"trained:{label}" for label in against], **kinds}
    measurements: list[Measurement] = []
    for seed in (int(each) for each in result["seed"].values):
        for kind, references in kinds.items():
            curves = [curve(reference).sel(seed=seed) for reference in references]
            defined = all(bool(np.isfinite(each).all()) for each in curves)
            at = [int(each["step"][int(each.argmin("step"))]) if defined else -1 for each in curves]
            ordered = float(all(np.diff(at) > 0)) if defined else np.nan
            measurements.append(Measurement(f"{kind}: dips in order", ordered, seed=seed))
            for reference, step, each in zip(references, at, curves, strict=True):
                least = float(each.min("step")) if defined else np.nan
                when = float(step) if defined else np.nan
                measurements += [
                    Measurement(f"{reference}: nearest at", when, seed=seed),
                    Measurement(f"{reference}: nearest", least, seed=seed),
                ]
    return Outcome(tuple(measurements), result)


@check
def stages_along(
    runs: "Mapping[str, Run]", *, rises: str, label_shown: str | None = None, n_steps: int = 100
) -> Outcome:
    """Measure how a time or a number of stages changes along runs, for seeds that all of them have.

    `rises along the runs` is 1 for a seed where the quantity never falls from one run to the next,
    in the order in which they are given, and is larger at the end than at the start; NaN where it
    is undefined. The quantities of `attention_stages` come with it.

    Parameters
    ----------
    rises
        A quantity of `attention_stages`, such as `stages` or `block 2 entered`; one that is not
        reached counts as later than all.
    label_shown, n_steps
        As of `attention_stages`.
    """
    if len(runs) < 2:
        raise InputError(f"stages_along compares runs, two at least; given {[*runs]}")
    outcome = attention_stages.compute(runs, label_shown=label_shown, n_steps=n_steps)
    found: dict[int, list[float]] = {}
    for label in runs:
        for each in outcome.measurements:
            if each.quantity == f"{label}: {rises}" and each.seed is not None:
                found.setdefault(each.seed, []).append(each.value)
    if not found:
        known = sorted({each.quantity.partition(": ")[2] for each in outcome.measurements})
        raise InputError(f"rises is one of {known}; given {rises!r}")
    compared = []
    for seed, values in found.items():
        if len(values) < len(runs):
            continue
        reached = np.nan_to_num(np.array(values), nan=np.inf)
        never_falls = bool((reached[1:] >= reached[:-1]).all())
        rose = never_falls and reached[-1] > reached[0]
        compared.append(Measurement("rises along the runs", float(rose), seed=seed))
    return Outcome((*compared, *outcome.measurements), outcome.shown)
