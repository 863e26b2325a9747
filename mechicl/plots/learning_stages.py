"""When each block is entered, seed by seed, and the curves behind it."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mechicl.plots import style

_COLUMNS = 3
_COMPETITIVE = 1  # the flag of `phase`
_MIDDLE: dict[str, Any] = {"ls": "none", "marker": "D", "ms": 4, "mec": "black"}
_COMPETE: dict[str, Any] = {"color": "black", "lw": 2.0}


def draw(result: xr.Dataset) -> Figure:
    """Draw a bar for each block from its entry to the end, and loss, overlap and attention.

    Above, every seed has a bar a block, with a line back to the step evaluated before; none where
    the block is not entered. A black line is the competitive phase, which lasts to the end where
    heads do not part and blocks are left. Below, diamonds on the loss are the middles of its
    transitions; then the least overlap of two heads, and for each block the largest mass of a head.
    """
    n_seeds, n_blocks = result.sizes["seed"], result.sizes["block"]
    rows = -(-(2 + n_blocks) // _COLUMNS)
    upper = 0.8 + 0.34 * n_seeds
    figure = style.figure(1, _COLUMNS, width=3.8, height=2.8 * rows + upper)
    grid = figure.add_gridspec(rows + 1, _COLUMNS, height_ratios=[upper, *[2.8] * rows])
    timeline = figure.add_subplot(grid[0, :])
    panels = [
        figure.add_subplot(grid[1 + number // _COLUMNS, number % _COLUMNS])
        for number in range(2 + n_blocks)
    ]
    competed = _timeline(timeline, result)
    loss, overlap = panels[:2]
    style.lines(loss, result["loss"])
    loss.set_ylabel("loss [nat]")
    style.note(loss, style.absent(result["loss"], result.get("undefined")))
    marked = _middles(loss, result)
    style.lines(overlap, result["overlap"])
    overlap.set_ylabel("least overlap of heads")
    least = style.parameter(result, "least_overlap")
    if least is not None:
        style.guide(overlap, least, f"compete from {least:g}")
    strongest = result["mass"].max(("layer", "head"))
    for number, axes in enumerate(panels[2:]):
        style.lines(axes, strongest.isel(block=number))
        axes.set_ylabel(f"largest mass on block {int(result['block'][number])}")
        axes.set_ylim(-0.02, 1.02)
    overlap.set_ylim(-0.02, 1.02)
    handles = [
        Patch(facecolor=_paint(number), label=f"block {int(name)} entered")
        for number, name in enumerate(result["block"].values)
    ]
    if competed:
        handles += [Line2D([], [], label="heads compete", **_COMPETE)]
    if marked:
        handles += [Line2D([], [], color=style.GUIDE, label="half of a transition", **_MIDDLE)]
    style.legend(figure, loss, overlap, handles=handles)
    style.title(figure, style.verdicts(result))
    return figure


def _paint(number: int) -> str:
    return style.REFERENCE_COLOURS[number % len(style.REFERENCE_COLOURS)]


def _timeline(axes: Axes, result: xr.Dataset) -> bool:
    """Draw bars and phases; return whether there is a competitive phase."""
    steps = result["step"].values.astype(float)
    # One step alone still has a bar to see.
    end = steps[-1] if len(steps) > 1 else steps[-1] + 0.5
    n_blocks, drawn, competed = result.sizes["block"], False, False
    height = 0.8 / (n_blocks + 1)
    for row in range(result.sizes["seed"]):
        mine = result.isel(seed=row)
        entered = mine["entered"].values
        for block, (first, error) in enumerate(
            zip(entered, mine["entered_error"].values, strict=True)
        ):
            if np.isfinite(first):
                middle = row - 0.4 + (block + 1.5) * height
                look: dict[str, Any] = {"color": _paint(block)}
                axes.barh(middle, end - first, left=first, height=0.85 * height, **look)
                axes.plot([first - error, first], [middle, middle], lw=1, **look)
                axes.plot(first, middle, marker="o", ms=4, **look)  # also where it is the end
                drawn = True
        together = steps[mine["phase"].values == _COMPETITIVE]
        if together.size:
            middle = row - 0.4 + 0.5 * height
            axes.plot(together[[0, -1]], [middle, middle], marker="|", **_COMPETE)
            competed = True
    style.seed_rows(axes, result)
    if not drawn:
        style.nothing(axes, "no block is entered for good")
    return competed


def _middles(axes: Axes, result: xr.Dataset) -> bool:
    """Mark the transitions of the loss, the first of the curves; return whether there are any."""
    steps, marked = result["step"].values.astype(float), False
    for number in range(result.sizes["seed"]):
        mine = result.isel(seed=number)
        at = mine["transition_step"].isel(curve=0).values
        at = at[np.isfinite(at)]
        heights = np.interp(at, steps, mine["loss"].values)
        axes.plot(at, heights, color=style.colour(number), **_MIDDLE)
        marked = marked or at.size > 0
    return marked
