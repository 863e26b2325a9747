"""The distance of the predictions from those of each reference, over training."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mechicl.plots import style
from mechicl.schema import flag_names

_COLUMNS = 3
_FEW_SEEDS = 8


def draw(result: xr.Dataset) -> Figure:
    """Draw a panel a reference: distance, with two standard errors, and scaled distance; and seeds.

    Where there are several seeds, a last panel has the distances between them.
    """
    names, several = flag_names(result["reference"]), result.sizes["seed_other"] > 1
    count = result.sizes["reference"] + several
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    figure = style.figure(rows, columns, width=3.4, height=2.9)
    panels = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    limits = _limits(result)
    for number, code in enumerate(result["reference"].values):
        one = result.isel(reference=number)
        _over_training(panels[number], one)
        panels[number].set_ylim(limits)
        panels[number].set_yscale("log")
        panels[number].set_title(names[int(code)], fontsize=9)
        panels[number].set_ylabel("relative distance")
    if several:
        _seeds(panels[count - 1], result["seed_distance"], figure)
    for axes in panels[count:]:
        axes.set_axis_off()
    scaled = Line2D([], [], color=style.GUIDE, lw=1, ls="--", label="after the best factor")
    style.legend(figure, panels[0], handles=(scaled,))
    absent = style.absent(result["nearest_distance"], result.get("undefined"))
    n_prompts = style.parameter(result, "n_prompts")
    prompts = "" if n_prompts is None else f", {n_prompts:,} prompts"
    style.title(figure, f"distance of predictions from each reference{prompts}", absent)
    return figure


def _limits(result: xr.Dataset) -> tuple[float, float]:
    """Return the range that all panels share."""
    values = np.concatenate(
        [result[name].values.ravel() for name in ("distance", "scaled_distance")]
    )
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return 0.1, 2.0
    return max(positive.min(), 1e-4 * positive.max()) / 1.5, max(positive.max(), 1.0) * 1.5


def _over_training(axes: Axes, one: xr.Dataset) -> None:
    steps = one["step"].values
    few: dict[str, Any] = {"marker": "o", "ms": 3} if len(steps) <= 12 else {}
    for number, seed in enumerate(one["seed"].values):
        mine = one.isel(seed=number)
        paint: dict[str, Any] = {"color": style.colour(number)}
        bars = 2 * mine["distance_error"].values
        look = few | paint | {"ls": style.dash(number), "lw": 1.4, "elinewidth": 0.8}
        axes.errorbar(steps, mine["distance"], bars, label=f"seed {seed}", **look)
        axes.plot(steps, mine["scaled_distance"], ls="--", lw=1, mfc="white", **few, **paint)
    style.step_axis(axes, steps)
    axes.grid(visible=True, color="0.9", lw=0.6)
    if not np.isfinite(one["distance"].values).any():
        style.undefined(axes)


def _seeds(axes: Axes, between: xr.DataArray, figure: Figure) -> None:
    """Draw the distances between seeds as a matrix, with numbers where they are few."""
    values = between.transpose("seed", "seed_other").values
    most = np.nanmax(values, initial=0.0) or 1.0
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=most, aspect="auto")
    figure.colorbar(image, ax=axes, label="relative distance, last step")
    axes.set_title("between seeds", fontsize=9)
    axes.set_xlabel("seed")
    axes.set_ylabel("seed")
    few = max(values.shape) <= _FEW_SEEDS
    for place, labels in (
        (axes.set_xticks, between["seed_other"]),
        (axes.set_yticks, between["seed"]),
    ):
        every = 1 if few else -(-labels.size // _FEW_SEEDS)
        chosen = range(0, labels.size, every)
        place(list(chosen), [str(labels.values[index]) for index in chosen], fontsize=7)
    if not np.isfinite(values).any():
        style.undefined(axes)
    elif few:
        for (row, column), value in np.ndenumerate(values):
            ink = "white" if value > 0.6 * most else "black"
            text = "–" if np.isnan(value) else f"{value:.2g}"
            axes.text(column, row, text, fontsize=6, color=ink, ha="center", va="center")
