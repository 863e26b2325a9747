"""Measured beside published values: every seed a point, those that do not count hollow."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(result: xr.Dataset) -> Figure:
    """Draw `measured` (quantity, seed), filled where `counts`, and `published` (quantity)."""
    names = [str(name) for name in result["quantity"].values]
    longest = max(map(len, names), default=0)
    figure = style.figure(1, 1, width=4.5 + 0.09 * longest, height=0.32 * len(names) + 1.2)
    axes = figure.subplots()
    rows = np.arange(len(names))
    measured, counts = result["measured"].values, result["counts"].values > 0
    spread = np.linspace(-0.22, 0.22, measured.shape[1]) if measured.shape[1] > 1 else np.zeros(1)
    heights = rows[:, None] + spread
    for chosen, filled, text in ((counts, True, "measured"), (~counts, False, "does not count")):
        shown = chosen & np.isfinite(measured)
        if shown.any():
            axes.plot(
                measured[shown],
                heights[shown],
                "o",
                ms=4,
                color=style.colour(0),
                mfc=style.colour(0) if filled else "none",
                label=text,
            )
    published = result["published"].values
    axes.vlines(
        published, rows - 0.35, rows + 0.35, color=style.colour(1), lw=2.0, label="published"
    )
    axes.set_yticks(rows, names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=True, axis="x", color="0.9", lw=0.6)
    style.legend(figure, axes)
    style.title(figure, style.greek(str(result.attrs.get("title", ""))))
    return figure
