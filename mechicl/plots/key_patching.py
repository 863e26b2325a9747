"""The loss under a donor's keys, by distance of its leaf and first layer: raj2026, Fig. 4d."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from mechicl.plots import style

_MOST_SEEDS = 4
_COLOURS = "viridis"


def draw(result: xr.Dataset) -> Figure:
    """Draw the loss at the last step, a panel a seed: rows are distances, columns first layers.

    The two controls are the last column, no patch, and the lowest row, donors of the same leaf.
    Cells have the loss and its standard error, where there is room. At most 4 seeds are drawn, in
    one scale of colours.
    """
    shown = result.isel(seed=slice(_MOST_SEEDS), step=-1)
    seeds, columns = shown.sizes["seed"], shown.sizes["patch_layer"]
    rows = shown.sizes["tree_distance"]
    size: dict[str, float] = {"width": max(1.4 + 0.5 * columns, 2.9), "height": 1.3 + 0.36 * rows}
    figure = style.figure(1, seeds, **size)
    panels = figure.subplots(1, seeds, squeeze=False)[0]
    finite = shown["loss"].values[np.isfinite(shown["loss"].values)]
    norm = Normalize(0.0, float(finite.max()) if finite.size else 1.0)
    for number, axes in enumerate(panels):
        one = shown.isel(seed=number)
        order = ("tree_distance", "patch_layer")
        loss, error = (one[name].transpose(*order).values for name in ("loss", "loss_error"))
        axes.imshow(loss, cmap=_COLOURS, norm=norm, aspect="auto", origin="lower")
        _cells(axes, loss, error, norm)
        _name(axes, one)
        axes.set_title(f"seed {one['seed'].item()}", fontsize=9)
        axes.set_ylabel("distance of the donor's leaf", fontsize=8)
    bar = figure.colorbar(ScalarMappable(norm, _COLOURS), ax=panels, fraction=0.05, pad=0.02)
    bar.set_label("mean squared error", fontsize=8)
    n_contexts = int(result["n_contexts"])
    drawn = f", first {seeds} of {result.sizes['seed']} seeds" * (seeds < result.sizes["seed"])
    where = (
        f"loss ± s.e. under a donor's keys at step {int(shown['step']):,}, {n_contexts:,} contexts"
    )
    absent = style.absent(result["clean_loss"].isel(step=[-1]), result.get("undefined"))
    style.title(figure, where + drawn, absent, style.verdicts(result))
    return figure


def _cells(axes: Axes, loss: np.ndarray, error: np.ndarray, norm: Normalize) -> None:
    """Write the values into the cells, and lines between the table and the controls."""
    columns = loss.shape[1]
    if not np.isfinite(loss).any():
        style.undefined(axes)
        return
    for (row, column), value in np.ndenumerate(loss):
        if not np.isfinite(value):
            continue
        ink = "black" if norm(value) > 0.6 else "white"
        place: dict[str, Any] = {"ha": "center", "va": "center", "in_layout": False}
        text = f"{value:.3f}\n±{error[row, column]:.3f}"
        axes.text(column, row, text, fontsize=5.5, color=ink, linespacing=1.1, **place)
    axes.axvline(columns - 1.5, color="white", lw=2.5)
    axes.axhline(0.5, color="white", lw=2.5)


def _name(axes: Axes, one: xr.Dataset) -> None:
    layers, distances = one["patch_layer"].values, one["tree_distance"].values
    names = [str(layer) for layer in layers[:-1]]
    axes.set_xticks(range(len(layers)), [*names, "none"], fontsize=7)
    axes.set_yticks(range(len(distances)), ["same", *map(str, distances[1:])], fontsize=7)
    axes.set_xlabel("first layer with the donor's keys, ℓ₀", fontsize=8)
