"""The loss against the length of a context, and how far it is from the references."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mechicl.plots import style
from mechicl.schema import flag_names

_LARGE = 10


def draw(result: xr.Dataset) -> Figure:
    """Draw the loss at the last step by length, and its excess over each reference, in per cent.

    Bars are two standard errors on either side, paired ones of the excess. What is beyond the
    trained length is shaded.
    """
    last = result.isel(step=-1)
    figure = style.figure(1, 2, width=4.8, height=3.6)
    loss, excess = figure.subplots(1, 2)
    _loss(loss, last)
    _excess(excess, last)
    codes = result["undefined"].isel(step=[-1]) if "undefined" in result else None
    style.note(loss, style.absent(result["trained_loss"].isel(step=[-1]), codes))
    lengths = last["length"].values
    for axes in (loss, excess):
        _trained(axes, lengths, float(last["n_context"]))
        axes.set_xlabel("examples in a context, L′")
        axes.grid(visible=True, color="0.9", lw=0.6)
    if not np.isfinite(last["loss"].values).any():
        style.undefined(loss)
    if not np.isfinite(last["relative_excess"].values).any():
        style.undefined(excess)
    shade = Patch(facecolor="0.93", label="beyond the trained length")
    seeds = Line2D([], [], color=style.GUIDE, marker="o", ms=3, label="models: filled, ±2 s.e.")
    style.legend(figure, loss, handles=(seeds, shade))
    n_prompts = style.parameter(result, "n_prompts")
    where = f"step {int(last['step']):,}"
    prompts = where if n_prompts is None else f"{where}, {n_prompts:,} prompts"
    style.title(figure, f"loss by length of the context ({prompts})", style.verdicts(result))
    return figure


def _look(number: int) -> dict[str, Any]:
    """Return colour and marker of a reference by its position."""
    look = number % len(style.REFERENCE_COLOURS)
    return {"color": style.REFERENCE_COLOURS[look], "marker": style.REFERENCE_MARKERS[look]}


def _loss(axes: Axes, last: xr.Dataset) -> None:
    lengths, names = last["length"].values, flag_names(last["reference"])
    for number, code in enumerate(last["reference"].values):
        axes.errorbar(
            lengths,
            last["reference_loss"].isel(reference=number),
            2 * last["reference_error"].isel(reference=number).values,
            label=names[int(code)],
            lw=1.1,
            ls=(4 * (number % 2), (4, 4)),
            ms=4.5,
            mfc="white",
            zorder=2,
            **_look(number),
        )
    for number, seed in enumerate(last["seed"].values):
        axes.errorbar(
            lengths,
            last["loss"].isel(seed=number),
            2 * last["loss_error"].isel(seed=number).values,
            label=f"seed {seed}",
            color=style.colour(number),
            ls=style.dash(number),
            lw=1.4,
            marker="o",
            ms=3,
            zorder=3,
        )
    axes.set_ylabel("mean squared error")
    shown = np.concatenate([last["loss"].values.ravel(), last["reference_loss"].values.ravel()])
    positive = shown[shown > 0]
    if positive.size and positive.max() > _LARGE * positive.min():
        axes.set_yscale("log")


def _excess(axes: Axes, last: xr.Dataset) -> None:
    """Draw a line a seed and reference, coloured by reference and marked as beside."""
    lengths = last["length"].values
    relative = 100 * last["relative_excess"]
    with np.errstate(divide="ignore", invalid="ignore"):
        bars = 200 * last["excess_error"] / last["reference_loss"]
    for number in range(last.sizes["reference"]):
        for seed in range(last.sizes["seed"]):
            axes.errorbar(
                lengths,
                relative.isel(reference=number, seed=seed),
                bars.isel(reference=number, seed=seed).values,
                lw=1.0,
                ls=style.dash(seed),
                ms=3.5,
                mfc="white",
                **_look(number),
            )
    axes.axhline(0.0, color=style.GUIDE, lw=1)
    if np.nanmax(np.abs(relative.values), initial=0.0) > _LARGE:
        axes.set_yscale("symlog", linthresh=_LARGE, linscale=1.5)
    axes.set_ylabel("excess over each reference [%]")


def _trained(axes: Axes, lengths: np.ndarray, n_context: float) -> None:
    """Mark the trained length, and shade what is beyond it."""
    room = 0.04 * (lengths[-1] - lengths[0]) or 0.5
    axes.set_xlim(lengths[0] - room, lengths[-1] + room)
    if n_context < lengths[-1]:
        axes.axvspan(n_context, lengths[-1] + room, color="0.93", zorder=0)
    axes.axvline(
        n_context, color=style.GUIDE, lw=1, ls=":", label=f"trained length {n_context:g}", zorder=1
    )
