"""Curves over one axis, such as a paper draws: loss against length, a distance against a scale."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(result: xr.Dataset) -> Figure:
    """Draw `y` (curve, x) with `y_error` where there is one.

    Attributes of `result`: `title`, `x_label`, `y_label`; `x_scale` and `y_scale`, as matplotlib
    names them; `x_mark` and `x_mark_label`, a vertical line; `dashed`, the names of curves that are
    drawn dashed (references beside models). Values that are not finite are gaps.
    """
    attrs = result.attrs
    figure = style.figure(1, 1, width=6.0, height=4.0)
    axes = figure.subplots()
    x = result["x"].values
    dashed = attrs.get("dashed", ())
    for number, name in enumerate(result["curve"].values):
        y = result["y"].values[number]
        error = result["y_error"].values[number] if "y_error" in result else None
        axes.errorbar(
            x,
            np.where(np.isfinite(y), y, np.nan),
            yerr=error,
            color=style.colour(number),
            ls="--" if name in dashed else "-",
            marker="" if name in dashed or x.size > 40 else "o",
            ms=3.5,
            lw=1.3,
            capsize=2,
            label=str(name),
        )
    axes.set_xscale(attrs.get("x_scale", "linear"))
    axes.set_yscale(attrs.get("y_scale", "linear"))
    style.log_ticks(axes)
    if "x_mark" in attrs:
        axes.axvline(
            attrs["x_mark"], color=style.GUIDE, lw=1.0, ls=":", label=attrs["x_mark_label"]
        )
    axes.set_xlabel(attrs["x_label"])
    axes.set_ylabel(attrs["y_label"])
    axes.grid(visible=True, color="0.9", lw=0.6)
    style.legend(figure, axes)
    style.title(figure, attrs["title"])
    return figure
