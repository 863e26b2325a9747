"""How far the OV scales are from cancelling, over training."""

import xarray as xr
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(result: xr.Dataset) -> Figure:
    """Draw `ov_imbalance` over steps, a line a seed, with the tolerance."""
    figure = style.figure(1, 1, width=5.6, height=3.2)
    axes = figure.subplots()
    style.lines(axes, result["ov_imbalance"])
    tolerance = style.parameter(result, "tolerance")
    if tolerance is not None:
        style.guide(axes, tolerance, f"tolerance {tolerance:g}")
    axes.set_ylim(-0.05, 1.05)
    axes.set_ylabel("|Σμ| / Σ|μ|")
    style.note(axes, style.absent(result["ov_imbalance"], result.get("undefined")))
    style.legend(figure, axes)
    style.title(figure, style.verdicts(result))
    return figure
