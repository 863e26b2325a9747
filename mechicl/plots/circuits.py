"""Heat maps of KQ and of OV's last row, as in Fig. 1a of he2025."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style

_MOST_SEEDS = 8
_SYMBOLS = {"KQ": ("omega", "ω"), "OV": ("mu", "μ")}


def draw(result: xr.Dataset, *, step: int | None = None) -> Figure:
    """Draw the circuits of every seed (downwards) and head, at the last step or at `step`.

    Each head has KQ and, as a column, the last row of OV, which alone writes the prediction. The
    last column of KQ does not reach it either, and the rest is framed. Colours are symmetric about
    0, on one scale for all KQ and one for all OV. At most 8 seeds are drawn.
    """
    last = result.isel(step=-1) if step is None else result.sel(step=step)
    last = last.isel(layer=0, seed=slice(_MOST_SEEDS))
    shown = {"KQ": last["KQ"], "OV": last["OV"].isel(d_out=[-1])}
    seeds, heads = last.sizes["seed"], last.sizes["head"]
    figure = style.figure(seeds, heads, width=3.3, height=2.5 + 1.4 / seeds)
    grid = figure.subplots(seeds, 2 * heads, squeeze=False, width_ratios=[4, 1.4] * heads)
    bars: dict[str, Any] = {"shrink": 0.5, "fraction": 0.12 / seeds, "pad": 0.02, "aspect": 30}
    for offset, name in enumerate(_SYMBOLS):
        panels = grid[:, offset::2]
        _draw_circuit(panels, name, shown[name], last)
        limit = _limit(shown[name])
        bar = figure.colorbar(
            style.colours(limit), ax=grid.ravel().tolist(), location="bottom", **bars
        )
        bar.set_label(name, fontsize=8)
        bar.ax.tick_params(labelsize=7)
    drawn = (
        f", first {seeds} of {result.sizes['seed']} seeds" if seeds < result.sizes["seed"] else ""
    )
    heading = f"circuits at step {int(last['step']):,}{drawn}"
    style.title(figure, heading, style.verdicts(result))
    return figure


def _draw_circuit(panels: np.ndarray, name: str, shown: xr.DataArray, last: xr.Dataset) -> None:
    """Draw one circuit of every seed and head."""
    scale, symbol = _SYMBOLS[name]
    limit = _limit(shown)
    for (seed, head), axes in np.ndenumerate(panels):
        matrix = shown.isel(seed=seed, head=head).values
        style.heatmap(axes, matrix if name == "KQ" else matrix.T, limit)
        value = float(last[scale].isel(seed=seed, head=head))
        written = f"{value:.3g}" if np.isfinite(value) else "–"
        axes.set_title(f"{name} {head}\n{symbol} = {written}", fontsize=8)
        if name == "KQ":
            axes.set_xlabel("query entry", fontsize=8)
            axes.set_ylabel("key entry", fontsize=8)
            _frame(axes, len(matrix))
        else:
            axes.set_xticks([])
            axes.set_ylabel("in entry", fontsize=8)
    if name == "KQ":
        for axes, seed in zip(panels[:, 0], last["seed"].values, strict=True):
            axes.set_ylabel(f"seed {seed}\nkey entry", fontsize=8)


def _limit(variable: xr.DataArray) -> float:
    """Return the largest size of an entry, 1 where there is none."""
    sizes = np.abs(variable.values[np.isfinite(variable.values)])
    return float(sizes.max()) if sizes.size and sizes.max() > 0 else 1.0


def _frame(axes: Axes, width: int) -> None:
    """Frame all but the last column."""
    right, bottom = width - 1.5, width - 0.5
    axes.plot([-0.5, right, right, -0.5, -0.5], [-0.5, -0.5, bottom, bottom, -0.5], "k", lw=1.2)
