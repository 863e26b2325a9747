"""What all figures share: colours, the step axis, lines of seeds and heads, and the undefined."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D00")
"""Colours of Okabe and Ito, yellow darkened to read on white: they differ for every eye."""
DASHES = ("-", "--", ":", "-.")
DIVERGING = "RdBu_r"
GUIDE = "#555555"
_FEW = 8


def figure(rows: int, columns: int, *, width: float = 4.2, height: float = 3.0) -> Figure:
    """Return an empty figure for panels of `width` by `height` inches, with room for a legend."""
    size = (max(columns * width, 4.8), max(rows * height, 2.6))
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.02, hspace=0.02)
    return Figure(figsize=size, layout=layout)


def colour(number: int) -> str:
    """Return the colour of a seed or head by its position."""
    return PALETTE[number % len(PALETTE)]


def dash(number: int) -> str:
    """Return the line style that tells two seeds or heads of one colour apart."""
    return DASHES[number // len(PALETTE) % len(DASHES)]


def label(variable: xr.DataArray, name: str | None = None) -> str:
    """Return `name` with the unit of `variable` for an axis; numbers without unit have none."""
    units = variable.attrs.get("units", "1")
    text = str(variable.name if name is None else name)
    return text if units == "1" else f"{text} [{units}]"


def step_axis(axes: Axes, steps: Iterable[float]) -> None:
    """Make x the training step: logarithmic, but linear up to the first positive one, to show 0."""
    values = np.asarray(list(steps), dtype=float)
    axes.set_xlabel("training step")
    positive = values[values > 0]
    if positive.size == 0:
        axes.set_xlim(-0.5, 0.5)
        return
    low, high = values.min(), values.max()
    if high > 20 * positive.min():
        if low > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=positive.min(), linscale=0.5)
    if low < high:
        room = 0.0 if low > 0 else 0.1 * positive.min()
        axes.set_xlim(low - room, high * 1.05)


def lines(axes: Axes, variable: xr.DataArray, along: str = "seed") -> None:
    """Draw one line over steps for each entry of `along`; a panel without values says so."""
    steps = variable["step"].values
    table = variable.transpose(along, "step")
    for number, name in enumerate(table[along].values):
        style: dict[str, Any] = {"color": colour(number), "linestyle": dash(number)}
        values = table.values[number]
        marker = "o" if np.isfinite(values).sum() < 2 or len(steps) <= 12 else None
        axes.plot(
            steps, values, label=f"{along} {name}", marker=marker, markersize=3.5, lw=1.4, **style
        )
    step_axis(axes, steps)
    axes.grid(visible=True, color="0.9", lw=0.6)
    if not np.isfinite(variable.values).any():
        undefined(axes)


def guide(axes: Axes, height: float, text: str) -> None:
    """Draw a horizontal line at a value to compare with, named in the legend."""
    axes.axhline(height, color=GUIDE, lw=1.0, ls=(0, (6, 2)), label=text, zorder=2.5)


def undefined(axes: Axes, rotation: float = 0) -> None:
    """Say in the middle of a panel that nothing in it is defined."""
    place: dict[str, Any] = {
        "transform": axes.transAxes,
        "ha": "center",
        "va": "center",
        "rotation": rotation,
    }
    axes.text(0.5, 0.5, "undefined", color=GUIDE, **place)


def legend(figure: Figure, axes: Axes) -> None:
    """Put the legend of one panel beside the figure, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside right upper",
            frameon=False,
            fontsize=8,
            ncols=1 + len(handles) // 20,
        )


def colours(limit: float) -> ScalarMappable:
    """Return the map from values to colours that is symmetric about 0 and ends at ±`limit`."""
    return ScalarMappable(Normalize(-limit, limit), DIVERGING)


def heatmap(axes: Axes, matrix: np.ndarray, limit: float) -> None:
    """Draw a matrix as it is written, in `colours(limit)`, with its values where they are few."""
    axes.imshow(matrix, cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="equal")
    rows, columns = matrix.shape
    axes.set_xticks(range(columns), [str(i + 1) for i in range(columns)], fontsize=7)
    axes.set_yticks(range(rows), [str(i + 1) for i in range(rows)], fontsize=7)
    if not np.isfinite(matrix).any():
        undefined(axes, rotation=0 if columns > 1 else 90)
    elif max(rows, columns) <= _FEW:
        for (row, column), value in np.ndenumerate(matrix):
            ink = "white" if abs(value) > 0.6 * limit else "black"
            text = f"{value:.2f}".replace("-0.00", "0.00")
            place: dict[str, Any] = {"ha": "center", "va": "center", "in_layout": False}
            axes.text(column, row, text, fontsize=5.5, color=ink, **place)


def parameter(result: xr.Dataset, name: str) -> float | None:
    """Return a parameter that the probe was run with, or None."""
    return json.loads(result.attrs.get("parameters", "{}")).get(name)


def verdicts(result: xr.Dataset) -> str:
    """Return what the probe says yes or no to, and for how many seeds it ends with yes."""
    if "since" not in result:
        return ""
    n_yes = int(result["since"].notnull().sum())
    return f"{result.attrs.get('statement', 'holds')}: {n_yes} of {result.sizes['seed']} seeds"
