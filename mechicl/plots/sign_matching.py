"""The fraction of heads whose signs match, over training."""

import xarray as xr
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(result: xr.Dataset) -> Figure:
    """Draw `sign_agreement` over steps, a strip a seed: lines at 0 or 1 would hide each other."""
    agreement = result["sign_agreement"].transpose("seed", "step")
    seeds = agreement.sizes["seed"]
    figure = style.figure(1, 1, width=6.4, height=1.8 + 0.24 * seeds)
    axes = figure.subplots()
    mesh = style.strips(
        axes, agreement["step"].values, agreement.values, colormaps["viridis"], Normalize(0, 1)
    )
    axes.set_yticks(range(seeds), [f"seed {name}" for name in agreement["seed"].values], fontsize=8)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label("fraction of live heads\nwith sign(ω) = sign(μ)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    if agreement.isnull().any():
        style.legend(figure, handles=[style.hatched()])
    style.title(figure, style.verdicts(result))
    return figure
