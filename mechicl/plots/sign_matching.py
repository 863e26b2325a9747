"""The fraction of heads whose signs match, over training."""

import xarray as xr
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(result: xr.Dataset) -> Figure:
    """Draw `sign_agreement` over steps, a line a seed."""
    figure = style.figure(1, 1, width=5.6, height=3.2)
    axes = figure.subplots()
    style.lines(axes, result["sign_agreement"])
    axes.set_ylim(-0.05, 1.05)
    axes.set_ylabel("fraction of live heads with\nsign(ω) = sign(μ)")
    axes.set_title(style.verdicts(result), fontsize=9)
    style.legend(figure, axes)
    return figure
