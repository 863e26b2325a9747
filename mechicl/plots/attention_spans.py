"""Where heads look over training, as Figs 1 and 2 of yuksel2026, and which block each serves."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mechicl.plots import style

_MOST_SEEDS = 8
_NONE = "#DDDDDD"


def draw(result: xr.Dataset) -> Figure:
    """Draw the mean mass of every place on every block, and a strip a head of what it serves.

    Above, a row a layer: the mean over the seeds whose heads have an order, with one standard
    deviation. Below, a panel a seed: heads as they are numbered, hatched where they are undefined.
    At most 8 seeds have strips.
    """
    shown = result.isel(seed=slice(_MOST_SEEDS))
    seeds, layers, heads = (shown.sizes[dim] for dim in ("seed", "layer", "head"))
    strip = 0.75 + 0.2 * layers * heads
    figure = style.figure(1, heads, width=3.2, height=2.6 * layers + strip * seeds)
    grid = figure.add_gridspec(
        layers + seeds, heads, height_ratios=[2.6] * layers + [strip] * seeds
    )
    means = [
        [figure.add_subplot(grid[layer, place]) for place in range(heads)]
        for layer in range(layers)
    ]
    for layer, row in enumerate(means):
        for place, axes in enumerate(row):
            _mean(axes, result.isel(layer=layer, place=place))
            of_layer = f", layer {layer}" * (layers > 1)
            axes.set_title(f"place {place}{of_layer}", fontsize=9)
    for number in range(seeds):
        axes = figure.add_subplot(grid[layers + number, :])
        _served(axes, shown.isel(seed=number))
    named = [
        Patch(facecolor=_colour(number), label=f"serves block {block}")
        for number, block in enumerate(result["block"].values)
    ]
    none = Patch(facecolor=_NONE, label="serves none")
    style.legend(figure, means[0][0], handles=[*named, none, style.hatched()])
    drawn = f"strips of the first {seeds} of {result.sizes['seed']} seeds"
    counts = " and ".join(f"{count:.0f}" for count in result["n_ordered"].values)
    style.title(
        figure,
        f"attention by block: mean of the {counts} of {result.sizes['seed']} seeds whose heads "
        "have an order",
        style.verdicts(result),
        drawn * (seeds < result.sizes["seed"]),
    )
    return figure


def _colour(block: int) -> str:
    return style.colour(block)


def _mean(axes: Axes, one: xr.Dataset) -> None:
    """Draw the mass of one place on every block."""
    steps = one["step"].values
    for number, block in enumerate(one["block"].values):
        mean = one["mean_mass"].isel(block=number).values
        spread = one["mass_deviation"].isel(block=number).values
        few = {"marker": "o", "ms": 3} if len(steps) <= 12 else {}
        axes.plot(steps, mean, color=_colour(number), lw=1.4, label=f"mass on block {block}", **few)
        axes.fill_between(
            steps, mean - spread, mean + spread, color=_colour(number), alpha=0.2, lw=0
        )
    style.step_axis(axes, steps)
    axes.set_ylim(0, 1)
    axes.set_ylabel("attention")
    axes.grid(visible=True, color="0.9", lw=0.6)
    if not np.isfinite(one["mean_mass"].values).any():
        style.undefined(axes)


def _served(axes: Axes, one: xr.Dataset) -> None:
    """Draw which block each head of a seed serves."""
    blocks = one.sizes["block"]
    # Nothing served is a result where there is a mass; only without one it is undefined.
    rows = one["serves"].fillna(0.0).where(one["elsewhere"].notnull())
    rows = rows.stack(row=("layer", "head")).transpose("row", "step")
    colours = [_NONE, *(_colour(number) for number in range(blocks))]
    norm = BoundaryNorm(np.arange(blocks + 2) - 0.5, blocks + 1)
    style.strips(axes, one["step"].values, rows.values, ListedColormap(colours), norm)
    several = one.sizes["layer"] > 1
    names = [f"{layer}.{head}" if several else str(head) for layer, head in rows["row"].values]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylabel(f"seed {one['seed'].item()}\n{'layer.head' if several else 'head'}", fontsize=8)
