"""Checks of raj2026 on trained models."""

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pydantic
import xarray as xr

from mechicl.errors import InputError
from mechicl.schema import flag_names
from mechicl.studies.checks.base import Measurement, Outcome, check, curves, require_labels
from mechicl.studies.checks.probes import labelled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mechicl.run import Run

_WINDOWS = 60
"""Points of a curve of training losses."""


@check
def losses_of_strategies(
    runs: "Mapping[str, Run]",
    *,
    against: tuple[tuple[str, str], ...] = (),
    below: tuple[tuple[str, str], ...] = (),
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 8192,
) -> Outcome:
    """Measure the losses of models at the end of training against strategies, and their order.

    By the probe `mmse`, at the noise that the models see. For a pair (LABEL, NAME), where NAME is
    another run or a strategy of the probe:

    - `against`: `LABEL over NAME`, the loss of each seed over that of the strategy, or over the
      mean of the other run.
    - `below`: `LABEL below NAME by the spread`, 1 where the difference of the means exceeds the
      root of the sum of their variances over seeds; a strategy has its Monte-Carlo error instead.
      `LABEL below NAME, in spreads` is that difference over that root.

    `LABEL loss` is the loss of each seed, and `largest over smallest mean` is of all runs.

    Parameters
    ----------
    against, below
        Pairs (LABEL, NAME).
    n_prompts
        Contexts on which each model is evaluated.
    """
    require_labels(runs, *(label for label, _ in (*against, *below)))
    results = {label: run.analyze("mmse", n_prompts=n_prompts) for label, run in runs.items()}
    losses = {label: result["loss"].isel(step=-1) for label, result in results.items()}
    measurements: list[Measurement] = []

    def level(label: str, name: str) -> tuple[float, float]:
        """Return the mean of a run or strategy, and its spread or error."""
        if name in losses:
            return float(losses[name].mean()), _spread(losses[name])
        codes = {known: code for code, known in flag_names(results[label]["strategy"]).items()}
        if name not in codes:
            raise InputError(f"{name!r} is no run and no strategy: {', '.join([*runs, *codes])}")
        one = results[label].sel(strategy=codes[name])
        return float(one["strategy_loss"]), float(one["strategy_error"])

    for label, name in against:
        mean, _ = level(label, name)
        errors = results[label]["loss_error"].isel(step=-1)
        measurements += [
            Measurement(f"{label} over {name}", float(loss) / mean, float(error) / mean, int(seed))
            for seed, loss, error in zip(losses[label]["seed"], losses[label], errors, strict=True)
        ]
    for label, name in below:
        mean, spread = level(label, name)
        by = mean - float(losses[label].mean())
        spreads = by / np.hypot(_spread(losses[label]), spread)
        measurements += [
            Measurement(f"{label} below {name} by the spread", _yes(spreads, spreads > 1)),
            Measurement(f"{label} below {name}, in spreads", spreads),
        ]
    for label, loss in losses.items():
        measurements += [
            Measurement(f"{label} loss", float(value), float(error), int(seed))
            for seed, value, error in zip(
                loss["seed"], loss, results[label]["loss_error"].isel(step=-1), strict=True
            )
        ]
    means = [float(loss.mean()) for loss in losses.values()]
    measurements.append(Measurement("largest over smallest mean", max(means) / min(means)))
    return Outcome(tuple(measurements), _training(runs, results))


def _spread(losses: xr.DataArray) -> float:
    """Return the standard deviation over seeds; NaN for one."""
    return float(losses.std(ddof=1)) if losses.size > 1 else np.nan


def _yes(of: float, answer: bool) -> float:
    return float(answer) if np.isfinite(of) else np.nan


def _training(runs: "Mapping[str, Run]", results: "Mapping[str, xr.Dataset]") -> xr.Dataset:
    """Return curves of the training losses, mean over seeds, beside the strategies' losses."""
    n_steps = max(run.metrics.sizes["log_step"] for run in runs.values())
    edges = np.unique(np.geomspace(1, n_steps, _WINDOWS + 1).astype(int))
    found = {}
    for label, run in runs.items():
        loss = run.metrics["loss"].mean("seed").values
        found[label] = np.array(
            [
                loss[first:last].mean() if first < len(loss) else np.nan
                for first, last in pairwise(edges)
            ]
        )
    first = next(iter(results.values()))
    names = flag_names(first["strategy"])
    strategies = {
        names[int(code)].replace("_", " "): np.full(len(edges) - 1, float(loss))
        for code, loss in zip(first["strategy"].values, first["strategy_loss"], strict=True)
        if np.isfinite(loss) and loss > 0
    }
    figure = curves(
        found | strategies,
        np.sqrt(edges[:-1] * edges[1:]),
        "Loss over training, mean over seeds, and of strategies (dashed)",
        "step",
        "mean squared error",
        x_scale="log",
        y_scale="log",
    )
    return figure.assign_attrs(dashed=list(strategies))


@check
def keys_patched(
    runs: "Mapping[str, Run]",
    *,
    without: str | None = None,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 4096,
) -> Outcome:
    """Measure what keys of other leaves cost, by how far the leaf is and how early they enter.

    By the probe `key_patching`, under the label of each run, for each seed:

    - `LABEL: costs more the farther and the earlier`: 1 where the probe's statement holds.
    - `LABEL: farthest leaf over no patch`: the loss with all keys of a leaf at the largest
      distance, over the loss without a patch.
    - `LABEL: same leaf`: the largest increase by keys of another context of the same leaf, over
      that of the farthest one.

    and of the run `without` adaptivity, the control, for each seed `LABEL: largest change`, the
    largest change of the loss at any distance and layer; 0 exactly where keys do not depend on the
    context.

    Parameters
    ----------
    without
        Label of the control.
    n_prompts
        Size of the pool of contexts.
    """
    require_labels(runs, without)
    measurements: list[Measurement] = []
    shown = None
    for label, run in runs.items():
        result = run.analyze("key_patching", n_prompts=n_prompts)
        last = result.isel(step=-1)
        if label == without:
            largest = abs(last["increase"]).max(("patch_layer", "tree_distance"))
            found = {"largest change": largest}
        else:
            shown = labelled(result, label, runs) if shown is None else shown
            found = {
                "costs more the farther and the earlier": last["holds"],
                "farthest leaf over no patch": 1 + last["effect"] / last["clean_loss"],
                "same leaf": last["same_leaf"] / last["effect"],
            }
        measurements += [
            Measurement(f"{label}: {name}", float(value), seed=int(seed))
            for name, values in found.items()
            for seed, value in zip(values["seed"].values, values.values, strict=True)
        ]
    return Outcome(tuple(measurements), shown)


@check
def workspace_transplanted(
    runs: "Mapping[str, Run]", *, n_prompts: Annotated[int, pydantic.Field(ge=2)] = 4096
) -> Outcome:
    """Measure whether predictions follow the workspace of another context.

    By the probe `function_vector`, under the label of each run where there are several, for each
    seed at the end of training:

    - `follows after the last layer`: how far predictions move to the donor's, 1 all the way.
    - `donor's loss over clean loss`: the loss for the donor's coefficients with its workspace, over
      that of the own ones without a transplant.
    - `donor's loss over foreign loss`: the same over the loss for another context's coefficients
      without a transplant.
    - `change by its own workspace`: the largest, of any layer.
    - `follows after layer L`: for the layers before the last.
    """
    measurements: list[Measurement] = []
    shown = None
    for label, run in runs.items():
        result = run.analyze("function_vector", n_prompts=n_prompts)
        shown = labelled(result, label, runs) if shown is None else shown
        last = result.isel(step=-1)
        donor = last["donor_loss"].isel(layer=-1)
        found = {
            "follows after the last layer": last["last_follows"],
            "donor's loss over clean loss": donor / last["clean_loss"],
            "donor's loss over foreign loss": donor / last["foreign_loss"],
            "change by its own workspace": last["self_change"].max("layer"),
            **{
                f"follows after layer {layer + 1}": last["follows"].isel(layer=layer)
                for layer in range(last.sizes["layer"] - 1)
            },
        }
        named = f"{label}: " if len(runs) > 1 else ""
        measurements += [
            Measurement(named + name, float(value), seed=int(seed))
            for name, values in found.items()
            for seed, value in zip(values["seed"].values, values.values, strict=True)
        ]
    return Outcome(tuple(measurements), shown)
