"""The role of every head over training."""

import xarray as xr
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mechicl.plots import style
from mechicl.schema import flag_names

_COLOURS = {-1: style.PALETTE[0], 0: "#DDDDDD", 1: style.PALETTE[1]}


def draw(result: xr.Dataset) -> Figure:
    """Draw a strip a head, coloured by role, a panel a seed; hatched where undefined."""
    role = result["role"].transpose("seed", "head", "step")
    seeds, heads, _ = role.shape
    figure = style.figure(seeds, 1, width=6.4, height=0.9 + 0.22 * heads)
    panels = figure.subplots(seeds, 1, squeeze=False, sharex=True)[:, 0]
    colours = ListedColormap([_COLOURS[-1], _COLOURS[0], _COLOURS[1]])
    for number, axes in enumerate(panels):
        rows = role.values[number]
        style.strips(axes, role["step"].values, rows, colours, Normalize(-1.5, 1.5))
        axes.set_yticks(range(heads), [str(name) for name in role["head"].values])
        axes.set_ylabel(f"seed {role['seed'].values[number]}\nhead", fontsize=9)
        axes.label_outer()
    patches = [
        Patch(facecolor=_COLOURS[code], edgecolor="0.5", label=name)
        for code, name in sorted(flag_names(result["role"]).items(), reverse=True)
    ]
    style.legend(figure, handles=[*patches, style.hatched()])
    style.title(figure, style.verdicts(result))
    return figure
