"""The order of every seed's heads: what each attends to at the last step, in its place."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style

_MOST_SEEDS = 8


def draw(result: xr.Dataset) -> Figure:
    """Draw the attention of each head on each block, heads from above in the order found.

    A panel is a seed and a layer; the margin of its order is above it. Heads without an order are
    as they are numbered. At most 8 seeds are drawn.
    """
    shown = result.isel(seed=slice(_MOST_SEEDS), step=-1)
    seeds, layers = shown.sizes["seed"], shown.sizes["layer"]
    columns = min(seeds, 4)
    rows = -(-seeds // columns) * layers
    figure = style.figure(rows, columns, width=2.6, height=1.4 + 0.28 * shown.sizes["head"])
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.ravel():
        axes.set_axis_off()
    for seed, layer in np.ndindex(seeds, layers):
        axes = panels.tolist()[seed // columns * layers + layer][seed % columns]
        axes.set_axis_on()
        _heads(axes, shown.isel(seed=seed, layer=layer))
        of_layer = f", layer {layer}" * (layers > 1)
        axes.set_ylabel(f"seed {shown['seed'].values[seed]}{of_layer}\nhead", fontsize=8)
    bar = figure.colorbar(style.colours(1.0), ax=panels, fraction=0.03, pad=0.01)
    bar.set_label("attention", fontsize=8)
    bar.ax.set_ylim(0, 1)
    drawn = f", first {seeds} of {result.sizes['seed']} seeds" * (seeds < result.sizes["seed"])
    absent = style.absent(result["least_margin"], result.get("undefined"))
    style.title(figure, f"order of heads at step {int(shown['step']):,}{drawn}", absent)
    return figure


def _heads(axes: Axes, one: xr.Dataset) -> None:
    """Draw the masses of one seed and layer."""
    place = one["permutation"].values
    order = np.argsort(place) if np.isfinite(place).all() else np.arange(place.size)
    style.heatmap(axes, one["mass"].transpose("head", "block").values[order], 1.0)
    axes.set_aspect("auto")
    axes.set_yticks(range(order.size), [str(head) for head in order], fontsize=7)
    axes.set_xlabel("block", fontsize=8)
    margin = float(one["margin"])
    axes.set_title("" if np.isnan(margin) else f"margin {margin:.2g}", fontsize=9)
