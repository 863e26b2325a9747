"""When each pattern of he2025 sets in, seed by seed, and the curves behind it."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mechicl.plots import style

_STAGES = {
    "sign_matching": ("signs match", style.PALETTE[0]),
    "zero_sum": ("μ sums to zero", style.PALETTE[2]),
    "optimality": ("(4.3) is met", style.PALETTE[4]),
    "homogeneity": ("one |ω|", style.PALETTE[3]),
}
_PEAK: dict[str, Any] = {"ls": "none", "marker": "D", "ms": 5, "mec": "black", "mfc": "white"}


def draw(result: xr.Dataset) -> Figure:
    """Draw a bar for each pattern from where it sets in to the end, and three curves.

    Above, every seed has four bars; none is drawn where the pattern does not hold at the last step.
    Below are the ratio of (4.3), γ with its peak, and Σ₊μ.
    """
    seeds = result.sizes["seed"]
    upper = 0.8 + 0.34 * seeds
    figure = style.figure(1, 3, width=4.4, height=3.0 + upper)
    grid = figure.add_gridspec(2, 3, height_ratios=[upper, 3.0])
    timeline = figure.add_subplot(grid[0, :])
    ratio, gamma, positive = (figure.add_subplot(grid[1, column]) for column in range(3))
    _timeline(timeline, result)
    curves = {
        "optimality_ratio": (ratio, "(1 + (1+σ²)d/L) Σ ωμ"),
        "gamma": (gamma, "γ = Σ|μ||ω| / Σ|μ|"),
        "positive_ov": (positive, "Σ₊ μ"),
    }
    for name, (axes, text) in curves.items():
        style.lines(axes, result[name])
        axes.set_ylabel(text)
        style.note(axes, style.absent(result[name], result.get("undefined")))
    tolerance = style.parameter(result, "optimality_tolerance")
    style.guide(ratio, 1.0, "(4.3)" if tolerance is None else f"(4.3) ± {100 * tolerance:g} %")
    if tolerance is not None:
        ratio.axhspan(1 - tolerance, 1 + tolerance, color="0.92", zorder=0)
    _peaks(gamma, result)
    gamma.set_ylim(bottom=0)
    bars = [Patch(facecolor=colour, label=text) for text, colour in _STAGES.values()]
    style.legend(figure, ratio, gamma, handles=bars)
    style.title(figure, style.verdicts(result))
    return figure


def _timeline(axes: Axes, result: xr.Dataset) -> None:
    steps = result["step"].values.astype(float)
    # One checkpoint alone still has a bar to see.
    end = steps[-1] if len(steps) > 1 else steps[-1] + 0.5
    drawn = 0
    for place, (stage, (_, colour)) in enumerate(_STAGES.items()):
        for number, first in enumerate(result[f"since_{stage}"].values):
            if np.isfinite(first):
                middle = number - 0.3 + 0.2 * place
                axes.barh(middle, end - first, left=first, height=0.17, color=colour)
                axes.plot(first, middle, marker="o", ms=4, color=colour)  # also where it is the end
                drawn += 1
    style.seed_rows(axes, result)
    if not drawn:
        style.nothing(axes, "no pattern holds at the last step")


def _peaks(axes: Axes, result: xr.Dataset) -> None:
    at, top = result["peak_step"].values, result["peak_gamma"].values
    keep = np.isfinite(at) & np.isfinite(top)
    if keep.any():
        axes.plot(at[keep], top[keep], label="peak of γ", zorder=3, **_PEAK)
