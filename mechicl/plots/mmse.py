"""The loss of a model over training, and how far it ends from each strategy of the same budget."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mechicl.plots import style
from mechicl.schema import flag_names

_LARGE = 3


def draw(result: xr.Dataset) -> Figure:
    """Draw the loss, strategies as lines, and its ratio to each of them at the last step.

    Bars are two standard errors on either side.
    """
    figure = style.figure(1, 2, width=4.6, height=3.6)
    loss, ratio = figure.subplots(1, 2)
    _loss(loss, result)
    _ratio(ratio, result.isel(step=-1))
    strategies = [
        Line2D([], [], color=_colour(number), ls=_dashes(number), lw=1.2, label=name)
        for number, name in enumerate(flag_names(result["strategy"]).values())
    ]
    style.legend(figure, loss, handles=strategies)
    absent = style.absent(result["loss"], result.get("undefined"))
    heading = f"loss at M = {int(result['n_measurements'])} measurements, and of strategies"
    style.title(figure, heading, style.verdicts(result), absent)
    for axes in (loss, ratio):
        style.log_ticks(axes)
    return figure


def _colour(number: int) -> str:
    return style.REFERENCE_COLOURS[number % len(style.REFERENCE_COLOURS)]


def _dashes(number: int) -> tuple[int, tuple[int, ...]]:
    return 0, ((6, 2), (2, 2), (6, 2, 2, 2))[number % 3]


def _loss(axes: Axes, result: xr.Dataset) -> None:
    style.lines(axes, result["loss"])
    steps = result["step"].values
    for number in range(result.sizes["seed"]):
        mine = result.isel(seed=number)
        bars = 2 * mine["loss_error"].values
        axes.errorbar(steps, mine["loss"], bars, ls="none", color=style.colour(number), lw=0.8)
    for number, height in enumerate(result["strategy_loss"].values):
        if np.isfinite(height):
            axes.axhline(height, color=_colour(number), ls=_dashes(number), lw=1.2, zorder=1)
    shown = np.concatenate([result["loss"].values.ravel(), result["strategy_loss"].values])
    positive = shown[shown > 0]
    if positive.size and positive.max() > _LARGE * positive.min():
        axes.set_yscale("log")
    axes.set_ylabel("mean squared error")


def _ratio(axes: Axes, last: xr.Dataset) -> None:
    names = list(flag_names(last["strategy"]).values())
    ratios = 1 + last["relative_excess"].transpose("seed", "strategy").values
    errors = last["relative_excess_error"].transpose("seed", "strategy").values
    n_seeds = len(ratios)
    for seed in range(n_seeds):
        place = np.arange(len(names)) + 0.3 * (seed - (n_seeds - 1) / 2) / max(n_seeds - 1, 1)
        look = {"color": style.colour(seed), "ls": "none", "marker": "o", "ms": 4}
        axes.errorbar(place, ratios[seed], 2 * errors[seed], elinewidth=0.8, **look)
    axes.axhline(1.0, color=style.GUIDE, lw=1)
    positive = ratios[ratios > 0]
    if positive.size and positive.max() > _LARGE * positive.min():
        axes.set_yscale("log")
    texts = [name.replace("_", "\n") for name in names]
    axes.set_xticks(range(len(names)), texts, fontsize=6)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xlabel("strategy")
    axes.set_ylabel("loss over that of the strategy")
    axes.set_title(f"step {int(last['step']):,}", fontsize=9)
    axes.grid(visible=True, axis="y", color="0.9", lw=0.6)
    if not np.isfinite(ratios).any():
        style.undefined(axes)
