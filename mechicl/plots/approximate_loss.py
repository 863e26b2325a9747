"""The approximate loss beside the measured one, and the gap between them, over training."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names


def draw(result: xr.Dataset) -> Figure:
    """Draw measured and approximate loss with the references, and the gap between the two.

    Bars are two standard errors on either side.
    """
    figure = style.figure(1, 2, width=4.8, height=3.4)
    loss, gap = figure.subplots(1, 2)
    steps = result["step"].values
    few: dict[str, Any] = {"marker": "o", "ms": 3.5} if len(steps) <= 12 else {}
    _references(loss, result)
    loss.plot([], [], color="black", lw=1.3, label="measured, ±2 s.e.")
    loss.plot([], [], color="black", lw=1.2, ls="--", label="L̃ of (4.1)")
    for number, seed in enumerate(result["seed"].values):
        one = result.isel(seed=number)
        paint: dict[str, Any] = {"color": style.colour(number)}
        bars = few | {"yerr": 2 * one["measured_error"].values, "lw": 1.3, "elinewidth": 0.8}
        loss.errorbar(steps, one["measured_loss"], label=f"seed {seed}", **bars, **paint)
        loss.plot(steps, one["approximate_loss"], ls="--", lw=1.2, mfc="white", **few, **paint)
        gap.errorbar(steps, one["gap"], **bars, **paint)
    gap.axhline(0.0, color=style.GUIDE, lw=1)
    gap.set_ylabel("measured loss − L̃")
    loss.set_ylabel("mean squared error")
    measured = result["measured_loss"].values
    finite = measured[np.isfinite(measured)]
    for axes, name in ((loss, "measured_loss"), (gap, "gap")):
        style.step_axis(axes, steps)
        axes.grid(visible=True, color="0.9", lw=0.6)
        style.note(axes, style.absent(result[name], result.get("undefined")))
        if not np.isfinite(result[name].values).any():
            style.undefined(axes)
    if finite.size:
        _zoom(loss, np.append(finite, result["reference_loss"].values))
        _zoom(gap, result["gap"].values, finite.max())
    style.legend(figure, loss)
    n_prompts = style.parameter(result, "n_prompts")
    prompts = "" if n_prompts is None else f" on {n_prompts:,} prompts"
    style.title(figure, f"loss measured{prompts}, and the approximate loss L̃ of (4.1)")
    return figure


def _references(axes: Axes, result: xr.Dataset) -> None:
    """Draw a line a reference; those of nearly one height alternate, and markers stand apart."""
    names = flag_names(result["reference"])
    losses = result["reference_loss"].values
    rank = np.argsort(np.argsort(losses))
    for number, code in enumerate(result["reference"].values):
        look = number % len(style.REFERENCE_COLOURS)
        axes.plot(
            [0, 0.05 + 0.07 * (number % 12), 1],
            [losses[number]] * 3,
            transform=axes.get_yaxis_transform(),
            color=style.REFERENCE_COLOURS[look],
            lw=1.2,
            ls=(4 * int(rank[number] % 2), (4, 4)),
            marker=style.REFERENCE_MARKERS[look],
            markevery=[1],
            ms=5,
            zorder=1,
            label=f"{names[int(code)]}, {losses[number]:.3f}",
        )


def _zoom(axes: Axes, values: np.ndarray, most: float = np.inf) -> None:
    """Limit y to the `values` within ±`most`: L̃ explodes with |ω| and would flatten the rest."""
    shown = values[np.isfinite(values) & (np.abs(values) <= most)]
    if shown.size:
        room = 0.08 * (shown.max() - shown.min()) + 0.01
        axes.set_ylim(shown.min() - room, shown.max() + room)
