"""The divergence from each predictor of restricted context, over training."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mechicl.plots import style
from mechicl.schema import flag_names

_COLUMNS = 3
_DIP: dict[str, Any] = {"ls": "none", "marker": "v", "ms": 7, "mec": "black"}
_FALL: dict[str, Any] = {"ls": "none", "marker": "d", "ms": 6, "mfc": "white"}


def draw(result: xr.Dataset) -> Figure:
    """Draw a panel a reference, with its dips and falls, and the loss over its floor.

    Bars are two standard errors on either side. The panels of references share their range.
    """
    names = flag_names(result["reference"])
    count = result.sizes["reference"] + 1
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    figure = style.figure(rows, columns, width=3.4, height=2.9)
    panels = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    limits = _limits(result["kl"].values)
    for number, code in enumerate(result["reference"].values):
        axes, one = panels[number], result.isel(reference=number)
        _over_training(axes, one["kl"], one["kl_error"])
        _places(axes, one)
        axes.set_ylim(limits)
        axes.set_yscale("log")
        axes.set_title(names[int(code)], fontsize=9)
        axes.set_ylabel("KL [nat]")
    excess = panels[count - 1]
    _over_training(excess, result["excess"], result["excess_error"])
    excess.axhline(0.0, color=style.GUIDE, lw=1)
    excess.set_title("loss over the entropy of the chain", fontsize=9)
    excess.set_ylabel("excess [nat]")
    for axes in panels[count:]:
        axes.set_axis_off()
    marks = (
        Line2D([], [], color=style.GUIDE, mfc=style.GUIDE, label="dip", **_DIP),
        Line2D([], [], color=style.GUIDE, label="half of the fall", **_FALL),
    )
    style.legend(figure, panels[0], handles=marks)
    n_prompts = style.parameter(result, "n_prompts")
    prompts = "" if n_prompts is None else f", {n_prompts:,} prompts"
    absent = style.absent(result["loss"], result.get("undefined"))
    style.title(figure, f"divergence from predictors of restricted context{prompts}", absent)
    return figure


def _limits(values: np.ndarray) -> tuple[float, float]:
    """Return the range that the panels of references share."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return 0.1, 2.0
    return max(positive.min(), 1e-4 * positive.max()) / 1.5, positive.max() * 1.5


def _over_training(axes: Axes, values: xr.DataArray, errors: xr.DataArray) -> None:
    steps = values["step"].values
    few: dict[str, Any] = {"marker": "o", "ms": 3} if len(steps) <= 12 else {}
    for number, seed in enumerate(values["seed"].values):
        axes.errorbar(
            steps,
            values.isel(seed=number).values,
            2 * errors.isel(seed=number).values,
            label=f"seed {seed}",
            color=style.colour(number),
            ls=style.dash(number),
            lw=1.4,
            elinewidth=0.8,
            **few,
        )
    style.step_axis(axes, steps)
    axes.grid(visible=True, color="0.9", lw=0.6)
    if not np.isfinite(values.values).any():
        style.undefined(axes)


def _places(axes: Axes, one: xr.Dataset) -> None:
    """Mark the dip of each seed, or the half of its fall."""
    for number in range(one.sizes["seed"]):
        mine = one.isel(seed=number)
        for name, shape in (("dip", _DIP | {"mfc": style.colour(number)}), ("fall", _FALL)):
            step, look = float(mine[name]), {"color": style.colour(number), "zorder": 3} | shape
            # A result may be shown at some of its steps.
            if step in mine["step"].values:
                height = float(mine["kl"].sel(step=step))
                axes.plot(step, height, **look)
