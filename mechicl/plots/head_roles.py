"""The role of every head over training."""

import numpy as np
import xarray as xr
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mechicl.plots import style
from mechicl.schema import flag_names

_COLOURS = {-1: style.PALETTE[0], 0: "#DDDDDD", 1: style.PALETTE[1]}
_UNDEFINED = "white"


def draw(result: xr.Dataset) -> Figure:
    """Draw a strip a head, coloured by role, a panel a seed; a blank is undefined."""
    role = result["role"].transpose("seed", "head", "step")
    seeds, heads, _ = role.shape
    figure = style.figure(seeds, 1, width=6.4, height=0.9 + 0.22 * heads)
    panels = figure.subplots(seeds, 1, squeeze=False, sharex=True)[:, 0]
    edges = _edges(role["step"].values.astype(float))
    for number, axes in enumerate(panels):
        axes.pcolormesh(
            edges,
            np.arange(heads + 1) - 0.5,
            np.ma.masked_invalid(role.values[number]),
            cmap=ListedColormap([_COLOURS[-1], _COLOURS[0], _COLOURS[1]]),
            vmin=-1.5,
            vmax=1.5,
            edgecolors="none",
        )
        style.step_axis(axes, edges)
        axes.set_yticks(range(heads))
        axes.set_ylim(heads - 0.5, -0.5)
        axes.set_ylabel(f"seed {role['seed'].values[number]}\nhead", fontsize=9)
        axes.hlines(np.arange(heads - 1) + 0.5, edges[0], edges[-1], color="white", lw=1.5)
        axes.label_outer()
        if not np.isfinite(role.values[number]).any():
            style.undefined(axes)
    patches = [
        Patch(facecolor=_COLOURS[code], edgecolor="0.5", label=name)
        for code, name in sorted(flag_names(result["role"]).items(), reverse=True)
    ]
    patches.append(Patch(facecolor=_UNDEFINED, edgecolor="0.5", label="undefined"))
    figure.legend(handles=patches, loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(style.verdicts(result), fontsize=9)
    return figure


def _edges(steps: np.ndarray) -> np.ndarray:
    """Return the edges of cells: a step holds until the next, the last as long as the former."""
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1.0
    return np.append(steps, steps[-1] + width)
