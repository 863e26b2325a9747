"""How predictions follow a transplanted workspace, by layer, and the losses that they then have."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mechicl.plots import style


def draw(result: xr.Dataset) -> Figure:
    """Draw `follows` and both losses at the last step by layer, and `follows` over training.

    Bars are two standard errors on either side. Lines across are the losses without a transplant.
    """
    last = result.isel(step=-1)
    figure = style.figure(1, 3, width=3.6, height=3.2)
    follows, losses, training = figure.subplots(1, 3)
    layers = np.arange(last.sizes["layer"])
    for number, seed in enumerate(last["seed"].values):
        one = last.isel(seed=number)
        look: dict[str, Any] = {"color": style.colour(number), "lw": 1.4, "ms": 3.5}
        bars: dict[str, Any] = look | {"ls": style.dash(number), "marker": "o"}
        moved, spread = one["follows"].values, 2 * one["follows_error"].values
        follows.errorbar(layers, moved, spread, label=f"seed {seed}", **bars)
        for name, error, face in (
            ("donor_loss", "donor_loss_error", look["color"]),
            ("own_loss", "own_loss_error", "white"),
        ):
            losses.errorbar(layers, one[name].values, 2 * one[error].values, mfc=face, **bars)
        for name, dashes in (("clean_loss", ":"), ("foreign_loss", "-.")):
            losses.axhline(float(one[name]), color=look["color"], lw=0.8, ls=dashes)
    _over_training(training, result)
    for axes, text in ((follows, "follows the donor"), (losses, "mean squared error")):
        axes.set_xticks(layers)
        axes.set_xlabel("workspace transplanted after layer")
        axes.set_ylabel(text)
        axes.grid(visible=True, color="0.9", lw=0.6)
    for axes, name in ((follows, "follows"), (losses, "donor_loss")):
        if not np.isfinite(last[name].values).any():
            style.undefined(axes)
    for axes in (follows, training):
        axes.axhline(1.0, color=style.GUIDE, lw=0.8, ls="--")
    grey: dict[str, Any] = {"color": style.GUIDE, "marker": "o", "ms": 3.5}
    handles = [
        Line2D([], [], label="for the donor's θ", **grey),
        Line2D([], [], label="for the own θ", mfc="white", **grey),
        Line2D([], [], label="own θ, no transplant", color=style.GUIDE, lw=0.8, ls=":"),
        Line2D([], [], label="donor's θ, no transplant", color=style.GUIDE, lw=0.8, ls="-."),
    ]
    style.legend(figure, follows, handles=handles)
    codes = result["undefined"].isel(step=[-1]) if "undefined" in result else None
    absent = style.absent(result["last_follows"].isel(step=[-1]), codes)
    where = f"transplanted workspaces at step {int(last['step']):,}"
    style.title(figure, where, absent, style.verdicts(result))
    return figure


def _over_training(axes: Axes, result: xr.Dataset) -> None:
    """Draw `follows` of every layer but the last, where it is 1, over steps; a shade a layer."""
    steps, n_layers = result["step"].values, result.sizes["layer"]
    before = result["follows"].isel(layer=slice(None, max(n_layers - 1, 1)))
    for number, layer in np.ndindex(result.sizes["seed"], before.sizes["layer"]):
        curve = before.isel(seed=number, layer=layer).values
        shade = 0.3 + 0.7 * (layer + 1) / before.sizes["layer"]
        look: dict[str, Any] = {"color": style.colour(number), "ls": style.dash(number)}
        axes.plot(steps, curve, alpha=shade, lw=1.2, marker="o", ms=3, **look)
    style.step_axis(axes, steps)
    axes.set_ylabel("follows, darker for later layers" if n_layers > 2 else "follows the donor")
    axes.grid(visible=True, color="0.9", lw=0.6)
    if not np.isfinite(before.values).any():
        style.undefined(axes)
