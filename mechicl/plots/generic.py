"""The figure of a probe that has none of its own: every measurement over steps, a line a seed."""

import textwrap
from collections.abc import Iterator
from itertools import islice

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from mechicl.plots import style

_COLUMNS = 3
_MOST_PANELS = 24
_TITLE_WIDTH = 44


def draw(result: xr.Dataset) -> Figure:
    """Draw every variable over (seed, step), or over these and one more axis, a panel each.

    A variable with a third axis gets a panel for each of its entries; at most 24 are drawn.
    """
    panels = list(islice(_panels(result), _MOST_PANELS))
    if not panels:
        figure = style.figure(1, 1)
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no variable over seed and step", ha="center", va="center")
        return figure
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = style.figure(rows, columns)
    grid = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes, (title, variable) in zip(grid, panels, strict=False):
        style.lines(axes, variable)
        missing = style.absent(variable, result.get("undefined"))
        written = [textwrap.fill(text, _TITLE_WIDTH) for text in (style.greek(title), missing)]
        axes.set_title("\n".join(filter(None, written)), fontsize=9)
        axes.set_ylabel(style.label(variable))
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    style.legend(figure, grid[0])
    style.title(figure, str(result.attrs.get("probe") or "result"), style.verdicts(result))
    return figure


def _panels(result: xr.Dataset) -> Iterator[tuple[str, xr.DataArray]]:
    for name, variable in result.data_vars.items():
        if name == "undefined" or not {"seed", "step"} <= set(variable.dims):
            continue
        rest = [dim for dim in variable.dims if dim not in ("seed", "step")]
        if not rest:
            yield variable.attrs.get("long_name", str(name)), variable
        elif len(rest) == 1:
            for index in range(variable.sizes[rest[0]]):
                yield f"{name}, {rest[0]} {index}", variable.isel({rest[0]: index}, drop=True)
