"""How unequal the KQ scales of the live heads are, over training."""

import xarray as xr
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(result: xr.Dataset) -> Figure:
    """Draw `kq_spread` over steps, a line a seed, with the tolerance."""
    figure = style.figure(1, 1, width=5.6, height=3.2)
    axes = figure.subplots()
    style.lines(axes, result["kq_spread"])
    tolerance = style.parameter(result, "tolerance")
    if tolerance is not None:
        style.guide(axes, tolerance, f"tolerance {tolerance:g}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("(max |ω| − min |ω|) / mean |ω|")
    style.note(axes, style.absent(result["kq_spread"], result.get("undefined")))
    style.legend(figure, axes)
    style.title(figure, style.verdicts(result))
    return figure
