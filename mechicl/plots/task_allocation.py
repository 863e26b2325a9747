"""What every head reads, writes and serves, as Figs 18 and 19 of he2025, and its tasks in time."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mechicl.plots import style
from mechicl.schema import flag_names

_MOST_SEEDS = 4
_MAPS = {
    "kq_diagonal": ("diagonal of KQ", "covariate", "covariate"),
    "mu": ("μ", "task", "response"),
    "share": ("share, sign of ω", "task", "response"),
}


def draw(result: xr.Dataset) -> Figure:
    """Draw each head's KQ diagonal, μ and share of every task at the last step, and its n_tasks.

    A row is a seed, and in it a row is a head. Shares have the sign of ω. Each quantity has one
    scale of colours, symmetric about 0. At most 4 seeds are drawn.
    """
    shown = result.isel(seed=slice(_MOST_SEEDS))
    last = shown.isel(step=-1)
    seeds, heads = shown.sizes["seed"], shown.sizes["head"]
    figure = style.figure(seeds, 4, width=3.2, height=1.5 + 0.25 * heads)
    widths = [max(last.sizes[dim], 1.2) for _, _, dim in _MAPS.values()]
    panels = figure.subplots(seeds, 4, squeeze=False, width_ratios=[*widths, 8])
    signed = last["share"] * np.sign(last["omega"])
    values = {"kq_diagonal": last["kq_diagonal"], "mu": last["mu"], "share": signed}
    for column, (name, (title, below, dim)) in enumerate(_MAPS.items()):
        table = values[name].transpose("seed", "head", dim).values
        limit = 1.0 if name == "share" else _limit(table)
        for axes, matrix in zip(panels[:, column], table, strict=True):
            style.heatmap(axes, matrix, limit)
            axes.set_aspect("auto")
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(below, fontsize=8)
            _name_heads(axes, heads)
    numbers = [str(seed) for seed in shown["seed"].values]
    regimes = flag_names(result["regime"])
    for number, axes in zip(numbers, panels[:, 0], strict=True):
        axes.set_ylabel(f"seed {number}\nhead", fontsize=8)
    handles = _tasks_in_time(panels[:, 3], shown)
    for axes, code in zip(panels[:, 3], last["regime"].values, strict=True):
        name = regimes.get(int(code), "") if np.isfinite(code) else "undefined"
        axes.set_title(name.replace("_", " "), fontsize=9)
    style.legend(figure, handles=handles)
    drawn = f", first {seeds} of {result.sizes['seed']} seeds" * (seeds < result.sizes["seed"])
    style.title(figure, f"heads at step {int(last['step']):,}{drawn}", style.verdicts(result))
    return figure


def _tasks_in_time(panels: np.ndarray, shown: xr.Dataset) -> list[Patch]:
    """Draw in how many tasks each head serves over training; return the legend's entries."""
    n_tasks = shown["n_tasks"].transpose("seed", "head", "step")
    most = shown.sizes["response"]
    colours = ["#DDDDDD", *(style.colour(number) for number in range(most))]
    norm = BoundaryNorm(np.arange(most + 2) - 0.5, most + 1)
    for axes, rows in zip(panels, n_tasks.values, strict=True):
        style.strips(axes, n_tasks["step"].values, rows, ListedColormap(colours), norm)
        _name_heads(axes, len(rows))
    named = [
        Patch(facecolor=colour, label=f"{count} task{'s' * (count != 1)}")
        for count, colour in enumerate(colours)
    ]
    return [*named, style.hatched()]


def _name_heads(axes: Axes, heads: int) -> None:
    axes.set_yticks(range(heads), [str(head) for head in range(heads)], fontsize=7)
    axes.set_ylabel("head", fontsize=8)


def _limit(values: np.ndarray) -> float:
    """Return the largest size of an entry, 1 where there is none."""
    sizes = np.abs(values[np.isfinite(values)])
    return float(sizes.max()) if sizes.size and sizes.max() > 0 else 1.0
