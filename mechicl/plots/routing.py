"""Where on the tree each layer looks, and how much of that the leaf and the last sign decide."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mechicl.plots import style

_MOST_SEEDS = 4
_FEW = 10


def draw(result: xr.Dataset) -> Figure:
    """Draw `on_path` of the first seeds, and what varies and why of all, at the last step.

    A row of a map is a measurement: a layer, or a channel of it. Numbers in it are `on_path` and,
    below, `level`.
    """
    last = result.isel(step=-1)
    defined = np.isfinite(last["on_path"].values).all((1, 2, 3))
    shown = np.flatnonzero(defined)[:_MOST_SEEDS]
    columns = max(2, len(shown))
    figure = style.figure(2, columns, width=3.3, height=3.0)
    panels = figure.subplots(2, columns, squeeze=False)
    rows = [_row(layer, channel, last) for layer, channel in _measurements(last)]
    for axes, seed in zip(panels[0], shown, strict=False):
        _map(axes, last.isel(seed=seed), rows)
    for axes in panels[0][len(shown) :]:
        if shown.size:
            axes.set_axis_off()
        else:
            style.undefined(axes)
    _over_measurements(panels[1][0], last, rows, "variation")
    _over_measurements(panels[1][1], last, rows, "sign_effect")
    for axes in panels[1][2:]:
        axes.set_axis_off()
    varies = Line2D([], [], color=style.GUIDE, lw=1.4, label="variation of w")
    explained = Line2D([], [], color=style.GUIDE, lw=1, ls="--", label="explained by the leaf")
    style.legend(figure, panels[1][0], handles=(varies, explained))
    codes = result["undefined"].isel(step=[-1]) if "undefined" in result else None
    absent = style.absent(
        result["on_path"].isel(step=[-1], layer=0, channel=0, node_depth=0), codes
    )
    heading = f"where each layer measures at step {int(last['step']):,}: on_path over level"
    style.title(figure, heading, style.verdicts(result), absent)
    return figure


def _measurements(last: xr.Dataset) -> list[tuple[int, int]]:
    return list(np.ndindex(last.sizes["layer"], last.sizes["channel"]))


def _row(layer: int, channel: int, last: xr.Dataset) -> str:
    return str(layer) if last.sizes["channel"] == 1 else f"{layer}.{channel}"


def _map(axes: Axes, one: xr.Dataset, rows: list[str]) -> None:
    on_path, level = (
        one[name].transpose("layer", "channel", "node_depth").values.reshape(len(rows), -1)
        for name in ("on_path", "level")
    )
    axes.imshow(on_path, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    depths = one["node_depth"].values
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths], fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xlabel("depth of the node")
    axes.set_ylabel("layer" if "." not in rows[0] else "layer.channel")
    axes.set_title(f"seed {int(one['seed'])}", fontsize=9)
    if max(on_path.shape) <= _FEW:
        for (row, column), value in np.ndenumerate(on_path):
            ink = "white" if value > 0.6 else "black"
            text = f"{value:.2f}\n{level[row, column]:.2f}"
            axes.text(column, row, text, fontsize=5.5, color=ink, ha="center", va="center")


def _over_measurements(axes: Axes, last: xr.Dataset, rows: list[str], name: str) -> None:
    """Draw a line a seed over measurements; of `variation` also what the leaf explains."""
    table = last[name].transpose("seed", "layer", "channel").values.reshape(-1, len(rows))
    leaf = last["explained"].isel(node_depth=-1).transpose("seed", "layer", "channel").values
    for number, seed in enumerate(last["seed"].values):
        paint = {"color": style.colour(number), "marker": "o", "ms": 3}
        axes.plot(table[number], ls=style.dash(number), lw=1.4, label=f"seed {seed}", **paint)
        if name == "variation":
            axes.plot(leaf.reshape(-1, len(rows))[number], ls="--", lw=1, mfc="white", **paint)
    axes.set_xticks(range(len(rows)), rows, fontsize=7)
    axes.set_xlabel("layer" if "." not in rows[0] else "layer.channel")
    axes.set_ylabel("share of |w|²" if name == "variation" else "effect of the sign read before")
    highest = 1.0 if name == "variation" else 2.0
    axes.set_ylim(-0.05 * highest, 1.05 * highest)
    axes.grid(visible=True, color="0.9", lw=0.6)
    if not np.isfinite(table).any():
        style.undefined(axes)
