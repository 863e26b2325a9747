"""The value map of every head against every feature matrix, over training."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style

_MOST_SEEDS = 4


def draw(result: xr.Dataset) -> Figure:
    """Draw the cosine of each head with each feature, and the projections summed over heads.

    A row is a seed and a layer, a panel a head, a line a feature matrix. At most 4 seeds are drawn.
    """
    shown = result.isel(seed=slice(_MOST_SEEDS))
    seeds, layers, heads = (shown.sizes[dim] for dim in ("seed", "layer", "head"))
    figure = style.figure(seeds * layers, heads + 1, width=2.9, height=2.3)
    panels = figure.subplots(seeds * layers, heads + 1, squeeze=False)
    for row, (seed, layer) in enumerate(np.ndindex(seeds, layers)):
        one = shown.isel(seed=seed, layer=layer)
        of_layer = f", layer {layer}" * (layers > 1)
        for head, axes in enumerate(panels[row, :heads]):
            _features(axes, one["cosine"].isel(head=head))
            axes.set_ylim(-1.05, 1.05)
            axes.set_title(f"head {head}", fontsize=9)
            axes.set_ylabel("cosine")
        panels[row, 0].set_ylabel(f"seed {one['seed'].item()}{of_layer}\ncosine")
        _features(panels[row, heads], one["total_projection"])
        style.guide(panels[row, heads], 1.0, "learnt")
        panels[row, heads].set_title("all heads", fontsize=9)
        panels[row, heads].set_ylabel("total projection")
    style.legend(figure, panels[0, heads])
    drawn = f", first {seeds} of {result.sizes['seed']} seeds" * (seeds < result.sizes["seed"])
    style.title(figure, f"value maps and features{drawn}", style.verdicts(result))
    return figure


def _features(axes: Axes, variable: xr.DataArray) -> None:
    """Draw a line a feature matrix."""
    named = variable.assign_coords(block=[f"A*{number}" for number in variable["block"].values])
    style.lines(axes, named, along="block")
    for line in axes.lines:
        line.set_label(str(line.get_label()).removeprefix("block "))
