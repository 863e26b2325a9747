"""The preconditioner of a few seeds beside what it is held against, as Fig. 12 of he2025."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style

_MOST_SEEDS = 2
_MATRICES = {
    "inverse_covariance": "Σ⁻¹",
    "plain_optimum": "Σ̃⁻¹ of (5.6)",
    "debiased_optimum": "debiased optimum",
}
_HELD_AGAINST = {"identity": "I", **_MATRICES}


def draw(result: xr.Dataset) -> Figure:
    """Draw the references, P of the first seeds at the last step, and distances over training.

    Matrices share one scale of colours, symmetric about 0. The distances are up to scale and share
    their axis; the last panel has the scale. At most 2 seeds have their matrix drawn.
    """
    last = result.isel(step=-1, seed=slice(_MOST_SEEDS))
    seeds = last.sizes["seed"]
    columns = len(_HELD_AGAINST) + 1
    figure = style.figure(2, columns, width=3.0, height=2.9)
    grid = figure.add_gridspec(2, columns)
    _matrices(figure, [figure.add_subplot(grid[0, i]) for i in range(len(_MATRICES) + seeds)], last)
    *distances, size = (figure.add_subplot(grid[1, i]) for i in range(columns))
    for axes, (name, title) in zip(distances, _HELD_AGAINST.items(), strict=True):
        style.lines(axes, result[f"distance_{name}"])
        axes.set_ylabel(f"distance from {title}".replace(" debiased", "\ndebiased"))
    _share_limits(distances, result)
    style.lines(size, result["eta"])
    style.guide(size, 1.0, "debiased optimum")
    size.set_ylabel("P over the\ndebiased optimum")
    style.legend(figure, size)
    drawn = f", first {seeds} of {result.sizes['seed']} seeds" * (seeds < result.sizes["seed"])
    heading = f"P = C_f Σ μ KQ at step {int(last['step']):,}{drawn}"
    missing = style.absent(result["distance_debiased_optimum"], result.get("undefined"))
    style.title(figure, heading, style.verdicts(result), missing)
    return figure


def _matrices(figure: Figure, panels: list[Axes], last: xr.Dataset) -> None:
    known = {title: last[name].values for name, title in _MATRICES.items()}
    learnt = {
        f"P, seed {seed}": last["preconditioner"].isel(seed=number).values
        for number, seed in enumerate(last["seed"].values)
    }
    shown = known | learnt
    sizes = np.abs(np.concatenate([matrix.ravel() for matrix in shown.values()]))
    limit = float(np.nanmax(sizes))
    for axes, (title, matrix) in zip(panels, shown.items(), strict=True):
        style.heatmap(axes, matrix, limit)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("query entry", fontsize=8)
        axes.set_ylabel("key entry", fontsize=8)
    bar = figure.colorbar(style.colours(limit), ax=panels, fraction=0.03, pad=0.01)
    bar.set_label("entry", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _share_limits(panels: list[Axes], result: xr.Dataset) -> None:
    values = np.concatenate([result[f"distance_{name}"].values.ravel() for name in _HELD_AGAINST])
    values = values[np.isfinite(values)]
    for axes in panels:
        axes.set_ylim(0, 1.05 * values.max() if values.size and values.max() > 0 else 1.0)
