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
    for number, seed in enumerate(result["seed"].values):
        one = result.isel(seed=number)
        paint: dict[str, Any] = {"color": style.colour(number)}
        bars = 2 * one["measured_error"].values
        loss.errorbar(steps, one["measured_loss"], bars, label=f"seed {seed}", lw=1.3, **paint)
        loss.plot(steps, one["approximate_loss"], ls="--", lw=1.2, **paint)
        gap.errorbar(steps, one["gap"], bars, lw=1.3, **paint)
    loss.plot([], [], color="black", lw=1.3, label="measured, ±2 s.e.")
    loss.plot([], [], color="black", lw=1.2, ls="--", label="L̃ of (4.1)")
    names = flag_names(result["reference"])
    for number, code in enumerate(result["reference"].values):
        value = float(result["reference_loss"].values[number])
        paint = {"color": "0.35", "lw": 1, "ls": (0, (1 + 2 * number, 1 + number))}
        loss.axhline(value, zorder=1, label=f"{names[int(code)]}, {value:.3f}", **paint)
    gap.axhline(0.0, color=style.GUIDE, lw=1)
    gap.set_ylabel("measured loss − L̃")
    loss.set_ylabel("mean squared error")
    finite = result["measured_loss"].values[np.isfinite(result["measured_loss"].values)]
    for axes in (loss, gap):
        style.step_axis(axes, steps)
        axes.grid(visible=True, color="0.9", lw=0.6)
        if not finite.size:
            style.undefined(axes)
    if finite.size:
        _zoom(loss, np.append(finite, result["reference_loss"].values))
        _zoom(gap, result["gap"].values, finite.max())
    style.legend(figure, loss)
    return figure


def _zoom(axes: Axes, values: np.ndarray, most: float = np.inf) -> None:
    """Limit y to the `values` within ±`most`: L̃ explodes with |ω| and would flatten the rest."""
    shown = values[np.isfinite(values) & (np.abs(values) <= most)]
    if shown.size:
        room = 0.08 * (shown.max() - shown.min()) + 0.01
        axes.set_ylim(shown.min() - room, shown.max() + room)
